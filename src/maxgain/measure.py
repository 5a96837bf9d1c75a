"""Every instance's gain in every layer, over a data set: as numbers, quantiles, a table and a box plot."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from . import _torch
from .checks import homogeneity_error, warn
from .distributed import full, gathered_parameters
from .errors import MaxGainError, MissingExtraError
from .functional import check_p, gain
from .layers import Globs, Layer, check_instance, find_layers, first_input
from .text import ITSELF, by_reason, listed, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Quantiles = tuple[float, float, float, float, float]


@dataclass(frozen=True, repr=False)
class GainReport:
    """The gains that ``measure_gains`` found, which ``print`` shows as a table.

    A gain is a lower bound of the layer's operator norm.
    """

    gains: dict[str, np.ndarray]
    """Every instance's gain, by layer."""
    p: float
    dropped: dict[str, int]
    """How many instances of a layer had a gain that is not finite; they are not among the above."""
    skipped: dict[str, str]
    """The layers that were not measured, and why."""

    def quantiles(self) -> dict[str, Quantiles]:
        """Return minimum, lower quartile, median, upper quartile and maximum of every layer."""
        known = {name: values.astype(np.float64) if len(values) else [np.nan] for name, values in self.gains.items()}
        return {name: tuple(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()) for name, values in known.items()}

    def boxplot(self, ax: Axes | None = None, *, bound: float | Mapping[str, float] | None = None) -> Figure:
        """Draw one box per layer, whiskers from minimum to maximum, as in the paper's Figures 1 and 2."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("boxplot() needs matplotlib: pip install matplotlib.") from error
        if ax is None:
            ax = Figure(figsize=(max(4.0, 1.5 + 0.4 * len(self.gains)), 4), layout="constrained").subplots()
        blue = {"color": "#1f4e79"}
        ax.boxplot([values.astype(np.float64) for values in self.gains.values()], whis=(0, 100), showfliers=False,
                   patch_artist=True, boxprops={"facecolor": "#9ec5e8", "edgecolor": "#1f4e79"},
                   medianprops={"color": "#b5371f"}, whiskerprops=blue, capprops=blue)  # fmt: skip
        if bound is not None:
            heights = [bound[name] if isinstance(bound, Mapping) else bound for name in self.gains]
            places = np.arange(1, len(heights) + 1)
            ax.hlines(heights, places - 0.5, places + 0.5, colors="#444444", linestyles="--", linewidth=1)
        names = [(name or ITSELF).replace("$", r"\$") for name in self.gains]  # matplotlib reads $ as a formula
        ax.set_xticks(range(1, len(names) + 1), names, rotation=60, ha="right", fontsize="small")
        ax.set_ylabel("gain")
        ax.set_ylim(bottom=0)
        return ax.get_figure(root=True)  # type: ignore[return-value]

    def __repr__(self) -> str:
        lost = [f"{count} in {name or ITSELF}" for name, count in self.dropped.items() if count]
        notes = [f"gains that are not finite, left out: {', '.join(lost)}."] if lost else []
        notes += [f"{name or ITSELF} not measured: {why}." for name, why in self.skipped.items()]
        rows = [
            [name or ITSELF, str(len(self.gains[name])), *(f"{value:.4g}" for value in row)]
            for name, row in self.quantiles().items()
        ]
        columns = ["layer", "instances", "min", "lower quartile", "median", "upper quartile", "max"]
        return text_table(columns, rows, title=f"gain by layer, p = {self.p:g}", caption=" ".join(notes))


@torch.no_grad()
def measure_gains(
    model: nn.Module,
    batches: Iterable[Any],
    p: float = 2.0,
    *,
    instance: Literal["auto", "sample"] = "auto",
    parts: Mapping[str, Iterable[str]] | None = None,
    include: Globs | None = None,
    exclude: Globs = (),
) -> GainReport:
    """Run the batches through the model in eval mode, and return the gain of every instance in every layer.

    Args:
        model: Any module, constrained or not; its modes and hooks are afterwards as they were.
        batches: Tensors, tuples or lists whose first item is the input, or dictionaries of keyword inputs.
        p: The norm, from 1 to ``inf``.
        instance: What counts as one input x, as in ``MaxGain``.
        parts: Equal blocks of fused layers' outputs to measure separately, as in ``MaxGain``.
        include: Globs over layer names: only these layers.
        exclude: Globs over layer names: not these layers.

    Examples:
        >>> report = measure_gains(nn.Linear(4, 2), [torch.randn(8, 4), torch.randn(8, 4)])
        >>> len(report.gains[""])
        16
    """
    p, instance = check_p(p), check_instance(instance)
    if isinstance(batches, Tensor | np.ndarray | Mapping | str) or not isinstance(batches, Iterable):
        raise MaxGainError(f"batches must be several, such as [batch] or a DataLoader, not {type(batches).__name__}.")
    found = find_layers(model, include, exclude, parts=parts, rescale=False)
    seen: dict[str, list[Tensor]] = {layer.name: [] for layer in found.layers}
    skipped = dict(found.skipped)

    def observe(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if layer.name in skipped:
            return
        is_untried = layer.own_forward and not seen[layer.name]
        try:
            if is_untried and (reason := homogeneity_error(layer, args, kwargs)):
                skipped[layer.name] = reason
            elif (x := first_input(args, kwargs)).numel():
                x, z = layer.linear_part(full(x), full(output) if isinstance(output, Tensor) else output)
                seen[layer.name].append(gain(z, x, p, layer.instance_dims(x.dim(), instance)).flatten())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a layer is given and returns is up to its model
            skipped[layer.name] = f"its call cannot be measured ({type(error).__name__}: {error})"

    with evaluating(model), observing(found.layers, observe):
        for batch in batches:
            call(model, batch, found.layers[0].weight.device)
    gains = {name: torch.cat(some).cpu().numpy() for name, some in seen.items() if some}
    if not gains:
        why = f" Not measured: {by_reason(skipped)}." if skipped else ""
        raise MaxGainError(f"no gain was measured: there was no batch, or the model ran none of its layers.{why}")
    if silent := [name for name in seen if name not in gains and name not in skipped]:
        warn(f"layers {listed(silent)} are not in the report: no batch went through them.")
    finite = {name: values[np.isfinite(values)] for name, values in gains.items()}
    return GainReport(finite, p, {name: len(gains[name]) - len(finite[name]) for name in gains}, skipped)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


_one_at_a_time = threading.RLock()


@contextmanager
def observing(layers: Iterable[Layer], observe: Callable[..., None]) -> Iterator[None]:
    """Call ``observe(layer, args, kwargs, output)`` whenever one of the layers runs."""

    def run(layer: Layer, module: nn.Module, *call: Any) -> None:
        with gathered_parameters(module):
            observe(layer, *call)

    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)  # the stance is the process's: a second thread would leave it behind
        # Compiled parts of a model were compiled without these hooks. What was never imported has compiled nothing.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            handle = layer.module.register_forward_hook(partial(run, layer), with_kwargs=True)
            _torch.put_first(layer.module._forward_hooks, handle.id)
            stack.callback(handle.remove)
        yield


def call(model: nn.Module, batch: Any, device: torch.device) -> Any:
    """Put a batch through a model, on the model's device."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    if isinstance(batch, Mapping):
        return model(**{key: v.to(device) if isinstance(v, Tensor) else v for key, v in batch.items()})
    return model(batch.to(device) if isinstance(batch, Tensor) else batch)
