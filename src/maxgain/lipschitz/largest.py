"""The largest singular value of a map, from products with ``WᵀW`` alone: Lanczos' method, and what it guarantees.

The method keeps an orthonormal basis of vectors and takes, of all their combinations v of length 1, the one with the
largest ``s = ‖Wv‖``. So s is never above the norm. With ``r = ‖WᵀWv - s²v‖`` some singular value σ has
``|σ² - s²| ≤ r``, whatever W is: the tolerance is for how far σ may then be from s. That σ is the largest rests on the
random start: a direction that it holds almost nothing of would be missed by any method of this kind.
"""

from __future__ import annotations

import itertools
import math

import torch

from .maps import LinearMap, random_vector

KRYLOV_DIMENSION, KEPT = 20, 8
"""How many vectors the basis has at most, and how many it begins again with."""


def largest_singular_value(linear: LinearMap, tolerance: float, max_iterations: int) -> tuple[float, float]:
    """Return the norm of a map for p = 2, and within which fraction of it some singular value lies.

    The basis is extended by what ``WᵀW`` makes of its last vector. When it has grown too large, the search goes on with
    those combinations that are amplified most (a thick restart).
    """
    v = random_vector(linear.input_shape).to(linear.layer.weight.device, linear.dtype).unsqueeze(0)
    basis = v.new_empty(KRYLOV_DIMENSION, v.numel())
    basis[0] = (v / torch.linalg.vector_norm(v)).flatten()
    # What WᵀW does within the span of the basis, as a symmetric matrix: its upper triangle.
    within = torch.zeros(KRYLOV_DIMENSION, KRYLOV_DIMENSION, dtype=torch.float64, device="cpu")
    count = 1
    for iteration in itertools.count(1):
        amplified, _, back = linear.there_and_back(basis[count - 1].view_as(v))
        image = (amplified * back).flatten()
        known = basis[:count]
        inside = known @ image
        beyond = image - inside @ known
        again = known @ beyond  # once leaves rounding errors as large as the rest
        within[:count, count - 1], beyond = inside + again, beyond - again @ known
        length = torch.linalg.vector_norm(beyond).item()
        if not math.isfinite(length):
            break
        squares, turn = (part.flip(-1) for part in torch.linalg.eigh(within[:count, :count], UPLO="U"))
        square = max(squares[0].item(), 0.0)
        # A number whose square is within r of 1 is within 1 - sqrt(1 - r) of 1.
        squared = length * turn[-1, 0].abs().item() / square if square > 0 else 0.0
        residual = 1 - math.sqrt(max(0.0, 1 - squared))
        is_exhausted = length <= 100 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(image).item()
        if is_exhausted or residual <= tolerance or iteration >= max_iterations:
            return math.sqrt(square), residual
        if count == KRYLOV_DIMENSION:
            best = turn[:, :KEPT].T.to(basis) @ known
            count = len(best)
            basis[:count] = best
            within.zero_().diagonal()[:count] = squares[:count]
        basis[count] = beyond / length
        count += 1
    return math.nan, math.nan
