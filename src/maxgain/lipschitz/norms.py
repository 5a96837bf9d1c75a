"""The operator norm ``max_x ‖Wx‖_p / ‖x‖_p`` of every layer: over all inputs, where a gain is over those seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotMeasuredError
from ..functional import check_count, check_is, check_positive
from ..layers import ITSELF, FoundLayer, find_layers
from ..measure import call, evaluating, watching
from ..strict_json import number, report
from ..text import Tabular
from .largest import Norm, largest_singular_value
from .maps import LinearMap, Sizes, check_operator_p, instance_sizes, linear_map
from .network import NotAChainError, chain_constant


@dataclass(frozen=True)
class NormReport(Tabular):
    """The operator norms that ``operator_norms`` found, which ``print`` shows as a table.

    For p = 1 and inf they are exact. For p = 2 they come from an iteration that approaches them from below:
    ``residuals`` says how far it got.
    """

    p: float
    layers: dict[str, Norm] = field(repr=False)
    bound: float | None
    """An upper bound of the network's Lipschitz constant in evaluation mode, if it is a chain of known parts."""
    covers: str
    """What ``bound`` covers, or why there is none."""

    @property
    def norms(self) -> dict[str, float]:
        """The operator norm of every layer, by its dotted name."""
        return {name: norm.value for name, norm in self.layers.items()}

    @property
    def residuals(self) -> dict[str, float]:
        """How far from convergence each norm is: some singular value lies within this fraction of it."""
        return {name: norm.residual for name, norm in self.layers.items()}

    @property
    def product(self) -> float:
        """The product of all layers' norms: whether it says anything of the network, ``covers`` tells."""
        return math.prod(self.norms.values())

    @property
    def _title(self) -> str:
        return f"operator norm by layer, p = {self.p:g}"

    @property
    def _caption(self) -> str:
        return f"bound {'none' if self.bound is None else f'{self.bound:.6g}'}: {self.covers}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [name or ITSELF, f"{norm.value:.6g}", f"{norm.residual:.1e}", str(norm.iterations)]
            for name, norm in self.layers.items()
        ]
        return ["layer", "norm", "residual", "iterations"], [*rows, ["product", f"{self.product:.6g}", "", ""]]

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text, which is also written to ``path`` if one is given."""
        layers = {
            name: {"norm": number(norm.value), "residual": number(norm.residual), "iterations": norm.iterations}
            for name, norm in self.layers.items()
        }
        bound = None if self.bound is None else number(self.bound)
        whole = {"p": number(self.p), "layers": layers, "product": number(self.product), "bound": bound}
        return report(whole | {"covers": self.covers}, path)


@torch.inference_mode(mode=False)
@torch.no_grad()
def operator_norms(
    model: nn.Module,
    example_input: Any,
    p: float = 2.0,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
    start: NormReport | None = None,
) -> NormReport:
    """The operator norm of every layer at the input size that it has in a forward of ``example_input``.

    A batch-norm layer is ``diag(α / sqrt(running_var + ε))``; other normalisation layers, if they are included, count
    with their scales alone, because what they do besides is not linear. p = 1 and p = inf are exact sums of absolute
    values. p = 2 is a power iteration with the layer's own forward and its transpose, that keeps the last vectors and
    takes the best of their combinations (Lanczos' method); what it returns is never above the norm.

    Args:
        model: measured in evaluation mode; its modes and hooks are afterwards as they were.
        example_input: a tensor, a tuple or list whose first item is the input, or a dictionary of keyword inputs.
        p: 1, 2 or ``inf``.
        include: globs over dotted names: only these layers.
        exclude: globs over dotted names: not these layers.
        tolerance: p = 2 is done when some singular value of W is known to lie within this fraction of what is
            returned: the largest one, unless the random start missed that.
        max_iterations: or after this many products with ``WᵀW``.
        start: an earlier report; the iteration begins where that one ended.

    Examples:
        >>> report = operator_norms(nn.Linear(2, 2), torch.zeros(1, 2), p=1)
        >>> list(report.norms)
        ['']
    """
    check_operator_p(p)
    check_positive("tolerance", tolerance)
    check_count("max_iterations", max_iterations)
    check_is("start", start, (NormReport, type(None)), "an earlier report of operator_norms")
    layers = find_layers(model, include, exclude, rescale=False)
    with evaluating(model):
        sizes = _sizes_in_forward(model, layers, example_input)
        found = {}
        for layer in layers:
            maps = _maps(layer, sizes[layer.name])
            earlier = None if start is None or layer.name not in start.layers else start.layers[layer.name].vector
            norms = [_norm(linear, p, tolerance, max_iterations, earlier) for linear in maps]
            found[layer.name] = max(norms, key=lambda norm: norm.value)
        bound, covers = _network_bound(model, layers, found, p, tolerance)
    return NormReport(float(p), found, bound, covers)


def _sizes_in_forward(model: nn.Module, layers: list[FoundLayer], example_input: Any) -> dict[str, set[Sizes]]:
    """Every size of input that each layer is given."""
    sizes: dict[str, set[Sizes]] = {layer.name: set() for layer in layers}

    def observe(layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        sizes[layer.name].add(instance_sizes(layer, x, output))

    with watching(layers, observe):
        call(model, example_input, layers[0].weight.device, "the example")
    return sizes


def _maps(layer: FoundLayer, sizes: set[Sizes]) -> list[LinearMap]:
    dtype = torch.float32 if layer.weight.device.type == "mps" else torch.float64
    maps = [linear_map(layer, size, dtype) for size in sorted(sizes) or (None,)]
    known = [linear for linear in maps if linear is not None]
    if not known:
        raise NotMeasuredError(
            f"layer {layer.name!r} did not run in the example's forward, so the size of its input is not known: "
            f"give an example that uses it, or leave it out with exclude={layer.name!r}."
        )
    return known


def _norm(linear: LinearMap, p: float, tolerance: float, max_iterations: int, earlier: Tensor | None) -> Norm:
    exact = linear.exact_norm(p)
    return largest_singular_value(linear, tolerance, max_iterations, earlier) if exact is None else Norm(exact.item())


def _network_bound(
    model: nn.Module, layers: list[FoundLayer], found: dict[str, Norm], p: float, tolerance: float
) -> tuple[float | None, str]:
    for name, norm in found.items():
        if not math.isfinite(norm.value):
            return None, f"no bound of the network: the weight of layer {name!r} is not finite."
        if norm.residual > tolerance:
            return None, f"no bound of the network: the norm of layer {name!r} has not converged."
    try:
        # A norm is approached from below: what may be missing is added. And it is that of Wx, which a layer may change
        # before it returns it: one with a linear part of its own, or a batch norm with a forward of its own.
        norms = {
            layer.module: found[layer.name].value * (1 + found[layer.name].residual)
            for layer in layers
            if layer.kind.output_is_part and (layer.kind.needs_output or not layer.own_forward)
        }
        constant = chain_constant(model, norms, p)
    except NotAChainError as error:
        return None, f"no bound of the network, which is not a chain of known parts: {error}."
    return constant, "the whole network in evaluation mode, a chain of parts whose Lipschitz constants are known."
