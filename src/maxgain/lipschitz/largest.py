"""The largest singular value of a map, from products with ``WᵀW`` alone: Lanczos' method, and what it guarantees.

The method keeps an orthonormal basis of vectors and takes, of all their combinations v of length 1, the one with the
largest ``s = ‖Wv‖``. So s is never above the norm. With ``r = ‖WᵀWv - s²v‖`` some singular value σ has
``|σ² - s²| ≤ r``, whatever W is: the tolerance is for how far σ may then be from s. That σ is the largest rests on the
random start: a direction that it holds almost nothing of would be missed by any method of this kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .maps import LinearMap, random_vector

KRYLOV_DIMENSION, KEPT = 20, 8
"""How many vectors the basis has at most, and how many it begins again with."""
WORTH_ROUNDING = 10_000
"""How many entries a vector must have for most iterations to be taken in float32, which is faster on a CPU."""
ROUNDED_TOLERANCE = 1e-6
"""How far float32 is trusted with the iteration."""


@dataclass(frozen=True)
class Norm:
    """One layer's operator norm, and how well it is known."""

    value: float
    residual: float = 0.0
    """Some singular value of W lies within this fraction of ``value``; 0 for a closed form."""
    iterations: int = 0
    """How many products with ``WᵀW`` it took."""
    vector: Tensor | None = field(default=None, repr=False, compare=False)
    """The input that is amplified most, for p = 2."""


def largest_singular_value(linear: LinearMap, tolerance: float, max_iterations: int, earlier: Tensor | None) -> Norm:
    """The norm of a map for p = 2, begun with a random vector, or near an earlier result."""
    device = linear.layer.weight.device
    v = random_vector(linear.input_shape).to(device, linear.dtype)
    if earlier is not None and earlier.shape == v.shape:
        v = earlier.to(v) + 0.01 * v  # alone it would hold on to what used to be amplified most
    size = float(linear.there_and_back(v.unsqueeze(0))[0] / torch.linalg.vector_norm(v))
    if not math.isfinite(size):
        return Norm(math.nan, math.nan, 1)
    size = size or 1.0

    done = 0
    if device.type == "cpu" and v.numel() >= WORTH_ROUNDING:
        # To half the tolerance, so that what rounding adds leaves one product in float64 to be done as a rule.
        rounded, rough = linear.rounded_to(torch.float32), max(tolerance / 2, ROUNDED_TOLERANCE)
        near = _lanczos(_gram(rounded, size), v.float(), rough, max_iterations - 1)
        v, done = v if near.vector is None else near.vector.to(v), near.iterations
    found = _lanczos(_gram(linear, size), v, tolerance, max_iterations - done)
    return Norm(found.value * size, found.residual, done + found.iterations, found.vector)


def _gram(linear: LinearMap, size: float) -> Callable[[Tensor], Tensor]:
    """``v → WᵀWv / size²``: divided, because the squares of a small or large W are beyond float32."""

    def gram(v: Tensor) -> Tensor:
        length, _, back = linear.there_and_back(v.unsqueeze(0))
        return ((length / size) * (back / size)).squeeze(0)

    return gram


def _lanczos(gram: Callable[[Tensor], Tensor], v: Tensor, tolerance: float, max_iterations: int) -> Norm:
    """The root of the largest eigenvalue of ``gram``, begun with v.

    The basis is extended by what ``gram`` makes of its last vector. When it has grown too large, the search goes on
    with those combinations that are amplified most (a thick restart).
    """
    basis = v.new_empty(KRYLOV_DIMENSION, v.numel())
    basis[0] = (v / torch.linalg.vector_norm(v)).flatten()
    # What gram does within the span of the basis, as a symmetric matrix: its upper triangle.
    within = torch.zeros(KRYLOV_DIMENSION, KRYLOV_DIMENSION, dtype=torch.float64, device="cpu")
    count, iterations = 1, 0
    while True:
        image = gram(basis[count - 1].view_as(v)).flatten()
        iterations += 1
        within[:count, count - 1], beyond = _split(image, basis[:count])
        length = torch.linalg.vector_norm(beyond).item()
        if not math.isfinite(length):
            return Norm(math.nan, math.nan, iterations)
        squares, turn = (part.flip(-1) for part in torch.linalg.eigh(within[:count, :count], UPLO="U"))
        square = max(squares[0].item(), 0.0)
        residual = _distance(length * turn[-1, 0].abs().item() / square) if square > 0 else 0.0
        exhausted = length <= 100 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(image).item()
        ended = exhausted or residual <= tolerance or iterations >= max_iterations
        if ended or count == KRYLOV_DIMENSION:
            best = turn[:, :KEPT].T.to(basis) @ basis[:count]
            if ended:
                return Norm(math.sqrt(square), residual, iterations, best[0].view_as(v))
            count = len(best)
            basis[:count] = best
            within.zero_().diagonal()[:count] = squares[:count]
        basis[count] = beyond / length
        count += 1


def _split(image: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """What of a vector lies within the span of the basis, as coefficients, and the rest of it."""
    within = basis @ image
    beyond = image - within @ basis
    again = basis @ beyond  # once leaves rounding errors behind that are as large as what is looked for
    return within + again, beyond - again @ basis


def _distance(squared: float) -> float:
    """How far a number may be from 1 if its square is no further from 1 than this."""
    return 1 - math.sqrt(max(0.0, 1 - squared))
