"""The operator norm ``max_x ‖Wx‖_p / ‖x‖_p`` of every layer: over all inputs, where a gain is over those seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import MaxGainError
from ..layers import Found, Globs, Layer, find_layers, first_input
from ..measure import call, evaluating, observing
from ..text import ITSELF, text_table
from .largest import largest_singular_value
from .maps import LinearMap, Shapes, check_operator_p, fixed_shapes, instance_shapes, no_norm
from .network import NotAChainError, chain_constant


@dataclass(frozen=True, repr=False)
class NormReport:
    """The operator norms that ``operator_norms`` found, which ``print`` shows as a table.

    For p = 1 and inf they are exact. For p = 2 an iteration approaches them from below.
    """

    p: float
    norms: dict[str, float]
    """The operator norm of every layer."""
    residuals: dict[str, float]
    """How far from convergence each norm is: some singular value lies within this fraction of it."""
    bound: float | None
    """An upper bound of the network's Lipschitz constant in eval mode, if it is a chain of known parts."""
    covers: str
    """What ``bound`` covers, or why there is none."""

    @property
    def product(self) -> float:
        """The product of all layers' norms; ``covers`` says whether it bounds the network."""
        return math.prod(self.norms.values())

    def __repr__(self) -> str:
        rows = [[name or ITSELF, f"{norm:.6g}", f"{self.residuals[name]:.1e}"] for name, norm in self.norms.items()]
        rows.append(["product", f"{self.product:.6g}", ""])
        caption = f"bound {'none' if self.bound is None else f'{self.bound:.6g}'}: {self.covers}"
        title = f"operator norm by layer, p = {self.p:g}"
        return text_table(["layer", "norm", "residual"], rows, title=title, caption=caption)


@torch.inference_mode(mode=False)
@torch.no_grad()
def operator_norms(
    model: nn.Module,
    example_input: Any,
    p: float = 2.0,
    *,
    include: Globs | None = None,
    exclude: Globs = (),
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> NormReport:
    """Return the operator norm of every layer at the input size that it has in a forward of ``example_input``.

    A batch-norm layer is ``diag(α / sqrt(running_var + ε))``; of other normalisation layers, if they are included, the
    scales alone count. p = 1 and p = inf are exact sums of absolute values. p = 2 is Lanczos' method with the layer's
    own forward and its transpose, and never above the norm.

    Args:
        model: Run in eval mode; its modes and hooks are afterwards as they were.
        example_input: A tensor, a tuple or list whose first item is the input, or a dictionary of keyword inputs.
        p: 1, 2 or ``inf``.
        include: Globs over layer names: only these layers.
        exclude: Globs over layer names: not these layers.
        tolerance: p = 2 ends when some singular value is known to lie within this fraction of the result: the largest
            one, unless the random start missed it.
        max_iterations: Or after this many products with ``WᵀW``.

    Examples:
        >>> report = operator_norms(nn.Linear(2, 2), torch.zeros(1, 2), p=1)
        >>> list(report.norms)
        ['']
    """
    p = check_operator_p(p)
    found = find_layers(model, include, exclude, rescale=False)
    shapes: dict[Layer, set[Shapes]] = {layer: set() for layer in found.layers}

    def observe(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        shapes[layer].add(instance_shapes(layer, first_input(args, kwargs), output))

    with evaluating(model):
        with observing(found.layers, observe):
            call(model, example_input, found.layers[0].weight.device)
        norms, residuals = {}, {}
        for layer, seen in shapes.items():
            fixed = fixed_shapes(layer)
            each = [_norm(layer, one, p, tolerance, max_iterations) for one in ([fixed] if fixed else sorted(seen))]
            if not each:
                raise MaxGainError(
                    f"layer {layer.name!r} did not run in the example's forward, so the size of its input is not "
                    f"known. Give an example that uses it, or pass exclude={layer.name!r}."
                )
            norms[layer.name], residuals[layer.name] = max(each)
        try:
            bound: float | None = _network_bound(model, found, norms, residuals, p, tolerance)
            covers = "the whole network in eval mode, a chain of parts whose Lipschitz constants are known."
        except NotAChainError as error:
            bound, covers = None, f"no bound of the network: {error}."
    return NormReport(p, norms, residuals, bound, covers)


def _norm(layer: Layer, shapes: Shapes, p: float, tolerance: float, max_iterations: int) -> tuple[float, float]:
    """Return the norm of a layer at one input shape, and its residual."""
    linear = LinearMap(layer, shapes, torch.float32 if layer.weight.device.type == "mps" else torch.float64)
    if reason := linear.linearity_error():
        raise no_norm(layer, f"{reason}. Pass exclude={layer.name!r}.")
    exact = linear.exact_norm(p)
    return largest_singular_value(linear, tolerance, max_iterations) if exact is None else (exact.item(), 0.0)


def _network_bound(
    model: nn.Module, found: Found, norms: dict[str, float], residuals: dict[str, float], p: float, tolerance: float
) -> float:
    """Return an upper bound of the network's Lipschitz constant; raise ``NotAChainError`` if none is known."""
    for name, norm in norms.items():
        if not math.isfinite(norm) or not residuals[name] <= tolerance:
            why = "has not converged" if math.isfinite(norm) else "is not finite"
            raise NotAChainError(f"the norm of layer {name!r} {why}")
    # A norm is approached from below: what may be missing is added.
    known = {
        layer.module: norms[layer.name] * (1 + residuals[layer.name])
        for layer in found.layers
        # The output is Wx and a bias; a registered layer may have an activation behind it.
        if layer.kind.form == "affine" or (layer.kind.form == "batch_norm" and not layer.own_forward)
    }
    return chain_constant(model, known, p)
