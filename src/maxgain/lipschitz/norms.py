"""The operator norm ``max_x ‖Wx‖_p / ‖x‖_p`` of every layer: over all inputs, where a gain is over those seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import NotMeasuredError
from ..layers import FoundLayer, find_layers
from ..measure import call, evaluating, extra
from ..observe import watch
from .maps import LinearMap, Sizes, check_operator_p, instance_sizes, linear_map, random_vector
from .network import NotAChainError, chain_constant

if TYPE_CHECKING:
    from rich.table import Table

KRYLOV_DIMENSION = 20
"""How many vectors Lanczos' method keeps at most, and how many when it begins anew."""
KEPT = 8


@dataclass(frozen=True)
class Norm:
    """One layer's operator norm, and how well it is known."""

    value: float
    residual: float = 0.0
    """Some singular value of W lies within this fraction of ``value``; 0 for a closed form."""
    iterations: int = 0
    vector: Tensor | None = field(default=None, repr=False, compare=False)
    """The input that is amplified most, for p = 2."""


@dataclass(frozen=True)
class NormReport:
    """The operator norms that ``operator_norms`` found.

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

    def table(self, title: str | None = None) -> Table:
        """The norms as a table for the terminal."""
        with extra("rich"):
            from rich.table import Table
        bound = "none" if self.bound is None else f"{self.bound:.6g}"
        table = Table(title=title or f"operator norm by layer, p = {self.p:g}", caption=f"bound {bound}: {self.covers}")
        table.add_column("layer")
        for column in ("norm", "residual", "iterations"):
            table.add_column(column, justify="right")
        for name, norm in self.layers.items():
            table.add_row(name, f"{norm.value:.6g}", f"{norm.residual:.1e}", str(norm.iterations))
        table.add_section()
        table.add_row("product", f"{self.product:.6g}")
        return table

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text, which is also written to ``path`` if one is given."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        layers = {
            name: {"norm": number(norm.value), "residual": number(norm.residual), "iterations": norm.iterations}
            for name, norm in self.layers.items()
        }
        p = "inf" if math.isinf(self.p) else self.p
        whole = {"p": p, "layers": layers, "product": number(self.product), "bound": self.bound, "covers": self.covers}
        text = json.dumps(whole, indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


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
    takes the best of their combinations (Lanczos' method).

    Args:
        model: measured in evaluation mode; its modes and hooks are afterwards as they were.
        example_input: a tensor, a tuple or list whose first item is the input, or a dictionary of keyword inputs.
        p: 1, 2 or ``inf``.
        include: globs over dotted names: only these layers.
        exclude: globs over dotted names: not these layers.
        tolerance: p = 2 is done when the residual ``‖WᵀWv − s²v‖ / s²`` is at most this.
        max_iterations: or after this many products with ``WᵀW``.
        start: an earlier report; the iteration begins where that one ended.

    >>> report = operator_norms(nn.Linear(2, 2), torch.zeros(1, 2), p=1)
    >>> list(report.norms)
    ['']
    """
    check_operator_p(p)
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

    def observer(layer: FoundLayer) -> Callable[[Tensor, Tensor], None]:
        return lambda x, output: sizes[layer.name].add(instance_sizes(layer, x, output))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(watch(layer, observer(layer)).remove)
        call(model, example_input, layers[0].weight.device)
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
    if exact is not None:
        return Norm(exact.item())
    begin = random_vector(linear.input_shape).to(linear.layer.weight.device, linear.dtype)
    if earlier is not None and earlier.shape == begin.shape:
        begin = earlier.to(begin) + 0.01 * begin  # alone it would hold on to what used to be amplified most
    return largest_singular_value(linear.gram, begin, tolerance, max_iterations)


def largest_singular_value(gram: Callable[[Tensor], Tensor], v: Tensor, tolerance: float, max_iterations: int) -> Norm:
    """The largest singular value of W from products with ``WᵀW``, begun with v, by Lanczos' method.

    It keeps an orthonormal basis, one row a vector, of the span of v, WᵀWv, (WᵀW)²v, ..., and what ``WᵀW`` makes of
    each. When that has grown too large, it goes on with those combinations that W amplifies most (a thick restart).
    """
    basis, images = v.reshape(1, -1) / torch.linalg.vector_norm(v), v.new_empty(0, v.numel())
    iterations = 0
    while True:
        image = gram(basis[-1].view_as(v)).view(1, -1)
        iterations += 1
        if not image.isfinite().all():
            return Norm(math.nan, math.nan, iterations)
        images = torch.cat([images, image])
        beyond = image
        for _ in range(2):  # once leaves rounding errors behind that are as large as what is looked for
            beyond = beyond - beyond @ basis.T @ basis
        length = torch.linalg.vector_norm(beyond)
        exhausted = length <= 100 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(image)
        if exhausted or len(basis) == KRYLOV_DIMENSION or iterations >= max_iterations:
            small = basis @ images.T
            best = torch.linalg.eigh((small + small.T) / 2).eigenvectors[:, -KEPT:].T
            basis, images = best @ basis, best @ images
            square = torch.sum(basis[-1] * images[-1]).clamp_min(0)
            residual = torch.linalg.vector_norm(images[-1] - square * basis[-1]) / square if square > 0 else square
            if exhausted or residual <= tolerance or iterations >= max_iterations:
                return Norm(square.sqrt().item(), residual.item(), iterations, basis[-1].view_as(v))
        basis = torch.cat([basis, beyond / length])


def _network_bound(
    model: nn.Module, layers: list[FoundLayer], found: dict[str, Norm], p: float, tolerance: float
) -> tuple[float | None, str]:
    for name, norm in found.items():
        if not math.isfinite(norm.value):
            return None, f"no bound of the network: the weight of layer {name!r} is not finite."
        if norm.residual > tolerance:
            return None, f"no bound of the network: the norm of layer {name!r} has not converged."
    try:
        constant = chain_constant(model, {layer.module: found[layer.name].value for layer in layers}, p)
    except NotAChainError as error:
        return None, f"no bound of the network, for it is not a chain of known parts: {error}."
    return constant, "the whole network in evaluation mode, a chain of parts whose Lipschitz constants are known."
