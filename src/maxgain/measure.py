"""Every instance's gain in every layer, over a data set: as quantiles, a table, a box plot, JSON."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from .errors import MaxGainError, MeasurementWarning
from .functional import check_choice, check_p
from .layers import ITSELF, FoundLayer, Instance, find_layers
from .observe import Hook, layer_gains
from .proof import Proof, expect_parts_to_show
from .strict_json import number, report
from .text import Tabular, extra

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = {"min": 0.0, "lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75, "max": 1.0}
Quantiles = tuple[float, float, float, float, float]


@dataclass(frozen=True, repr=False)
class GainReport(Tabular):
    """The gains that ``measure_gains`` found, which ``print`` shows as a table.

    A gain is a lower bound of the layer's operator norm.
    """

    gains: dict[str, np.ndarray]
    """Every instance's gain, by layer."""
    p: float
    dropped: dict[str, int]
    """How many instances of a layer had a gain that is not finite, and are not among the above."""

    def quantiles(self) -> dict[str, Quantiles]:
        """Minimum, lower quartile, median, upper quartile and maximum of every layer."""
        return {name: _quantiles(values) for name, values in self.gains.items()}

    def __repr__(self) -> str:
        return f"<GainReport of {len(self.gains)} layers, p = {self.p:g}>"

    @property
    def _title(self) -> str:
        return f"gain by layer, p = {self.p:g}"

    @property
    def _caption(self) -> str:
        lost = ", ".join(f"{count} in {name or ITSELF}" for name, count in self.dropped.items() if count)
        return f"left out, because their gain is not finite: {lost}." if lost else ""

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [name or ITSELF, str(len(self.gains[name])), *(f"{value:.4g}" for value in row)]
            for name, row in self.quantiles().items()
        ]
        return ["layer", "instances", *(name.replace("_", " ") for name in QUANTILES)], rows

    def boxplot(self, ax: Axes | None = None, *, bound: float | Mapping[str, float] | None = None) -> Figure:
        """One box per layer, whiskers from minimum to maximum, as in the paper's Figures 1 and 2."""
        with extra("matplotlib"):
            from matplotlib.figure import Figure
        if ax is None:
            ax = Figure(figsize=(max(4.0, 1.5 + 0.4 * len(self.gains)), 4), layout="constrained").subplots()
        return draw_boxes(ax, self.quantiles(), bound)

    def to_json(self, path: str | Path | None = None) -> str:
        """The quantiles as JSON text, which is also written to ``path`` if one is given."""
        layers = {
            name: {"instances": len(self.gains[name]), "dropped": self.dropped[name], **_named(row)}
            for name, row in self.quantiles().items()
        }
        return report({"p": number(self.p), "layers": layers}, path)


@torch.no_grad()
def measure_gains(
    model: nn.Module,
    batches: Iterable[Any],
    p: float = 2.0,
    *,
    instance: Instance = "auto",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
) -> GainReport:
    """Runs the batches through the model in evaluation mode and takes the gain of every instance in every layer.

    Args:
        model: any module, constrained or not; its modes and hooks are afterwards as they were.
        batches: tensors, tuples or lists whose first item is the input, or dictionaries of keyword inputs.
        p: the norm, from 1 to ``inf``.
        instance: what one x is, as in ``MaxGain``.
        include: globs over dotted names: only these layers.
        exclude: globs over dotted names: not these layers.

    Examples:
        >>> report = measure_gains(nn.Linear(4, 2), [torch.randn(8, 4), torch.randn(8, 4)])
        >>> len(report.gains[""])
        16
    """
    check_p(p)
    check_choice("instance", instance, get_args(Instance))
    batches = several(batches)
    layers = find_layers(model, include, exclude, rescale=False)
    seen: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def observe(layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        seen[layer.name].append(layer_gains(layer, x, output, p, instance).flatten())

    proofs = {layer.name: Proof(layer, instance) for layer in layers if layer.own_forward}
    with evaluating(model), watching(layers, observe, instance, proofs):
        device = layers[0].weight.device
        for number, batch in enumerate(batches):
            call(model, batch, device, f"batch {number}")
            if number == 0:
                expect_parts_to_show(proofs.values())
    silent = [name for name, parts in seen.items() if not sum(map(len, parts))]
    if len(silent) == len(layers):
        raise MaxGainError("no gain was measured: there was no batch, or the model ran none of its layers.")
    if silent:
        warnings.warn(
            f"not in the report, for no batch went through them: {', '.join(map(repr, silent))}.",
            MeasurementWarning,
            stacklevel=2,
        )
    return _report({name: torch.cat(parts).cpu().numpy() for name, parts in seen.items() if name not in silent}, p)


def _report(gains: Mapping[str, np.ndarray], p: float) -> GainReport:
    kept = {name: values[np.isfinite(values)] for name, values in gains.items()}
    return GainReport(kept, p, {name: len(gains[name]) - len(kept[name]) for name in gains})


def _quantiles(values: np.ndarray) -> Quantiles:
    if not len(values):
        return (np.nan,) * 5
    low, lower, middle, upper, high = np.quantile(values.astype(np.float64), list(QUANTILES.values())).tolist()
    return low, lower, middle, upper, high


def _named(row: Quantiles) -> dict[str, float | str | None]:
    return {name: number(value) for name, value in zip(QUANTILES, row, strict=True)}


def draw_boxes(
    ax: Axes, quantiles: Mapping[str, Quantiles], bound: float | Mapping[str, float] | None = None
) -> Figure:
    """Draws one box per layer from its five quantiles, and the bound if there is one."""
    keys = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(keys, row, strict=True)) for row in quantiles.values()]
    ax.bxp(
        boxes,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": "#9ec5e8", "edgecolor": "#1f4e79"},
        medianprops={"color": "#b5371f", "linewidth": 1.4},
        whiskerprops={"color": "#1f4e79"},
        capprops={"color": "#1f4e79"},
    )
    if bound is not None:
        bounds = bound if isinstance(bound, Mapping) else dict.fromkeys(quantiles, bound)
        ends = [position + end for position in range(1, len(boxes) + 1) for end in (-0.5, 0.5)]
        heights = [bounds[name] for name in quantiles for _ in range(2)]
        ax.plot(ends, heights, color="#444444", linestyle="--", linewidth=1)
    names = [name.replace("$", r"\$") for name in quantiles]  # or matplotlib reads it as a formula
    ax.set_xticks(range(1, len(boxes) + 1), names, rotation=60, ha="right", fontsize="small")
    ax.set_ylabel("gain")
    ax.set_ylim(bottom=0)
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass
class Telling:
    """Calls a function with whatever goes through a layer."""

    observe: Callable[[FoundLayer, Tensor, Tensor], None]

    def see(self, layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        """After each forward of the layer."""
        self.observe(layer, x, output)


@contextmanager
def watching(
    layers: Iterable[FoundLayer],
    observe: Callable[[FoundLayer, Tensor, Tensor], None],
    instance: Instance = "auto",
    proofs: Mapping[str, Proof] | None = None,
) -> Iterator[None]:
    """Within this context ``observe(layer, input, output)`` is called whenever one of the layers runs.

    The proofs of some are told how these are called.
    """
    notes = {name: proof.note for name, proof in (proofs or {}).items()}
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(Hook(layer, Telling(observe), notes.get(layer.name), instance).remove)
        yield


def several(batches: Iterable[Any]) -> Iterable[Any]:
    """The batches, unless it is one that would be taken for many."""
    if isinstance(batches, Tensor | np.ndarray | Mapping | str | bytes):
        raise MaxGainError("batches must be several: put a single one into a list, as in [batch].")
    if not isinstance(batches, Iterable):
        raise MaxGainError(f"batches must be an iterable of batches, such as a list or a DataLoader, not {batches!r}.")
    return batches


def call(model: nn.Module, batch: Any, device: torch.device, what: str = "the batch") -> Any:
    """Puts a batch through a model, wherever it lies; through a compiled one's original, whose hooks are seen."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(batch, tuple | list):
        if not batch:
            raise MaxGainError(f"{what} is empty: a tuple or list must have the input as its first item.")
        batch = batch[0]
    try:
        if isinstance(batch, Mapping):
            return model(**{key: _moved(value, device) for key, value in batch.items()})
        return model(_moved(batch, device))
    except (MaxGainError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a forward is arbitrary code, and may raise anything when it is given the wrong input
        said = str(error).strip().partition("\n")[0].removesuffix(".")
        raise MaxGainError(
            f"{type(model).__name__} cannot be run on {what} ({_described(batch)}): {type(error).__name__}: {said}."
        ) from error


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_described(value)}" for key, value in batch.items())
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} of shape {tuple(batch.shape)}"
    return type(batch).__name__
