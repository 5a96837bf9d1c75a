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
import torch.nn.functional as F

from .maps import LinearMap, random_vector

KRYLOV_DIMENSION, KEPT = 20, 8
"""How many vectors the basis has at most, and how many it begins again with."""


def largest_singular_value(linear: LinearMap, tolerance: float, max_iterations: int) -> tuple[float, float]:
    """Return the norm of a map for p = 2, and within which fraction of it some singular value lies.

    The basis is extended by what ``WᵀW`` makes of its last vector. When it has grown too large, the search goes on with
    those combinations that are amplified most (a thick restart).
    """
    v = random_vector(linear.input_shape).to(linear.layer.weight.device, linear.dtype).unsqueeze(0)
    basis = v.flatten(1)[:0]
    # What WᵀW does within the span of the basis, as a symmetric matrix: its lower triangle.
    within = torch.empty(0, 0, dtype=torch.float64, device="cpu")
    for iteration in itertools.count(1):
        amplified, _, back = linear.there_and_back(v)
        image, basis = (amplified * back).flatten(), torch.cat([basis, v.flatten(1)])
        inside = basis @ image
        beyond = image - inside @ basis
        again = basis @ beyond  # once leaves rounding errors as large as the rest
        beyond -= again @ basis
        length = torch.linalg.vector_norm(beyond)
        if not torch.isfinite(length):
            break
        within = F.pad(within, (0, 1, 0, 1))
        within[-1] = inside + again
        squares, turns = torch.linalg.eigh(within)  # ascending
        square = max(squares[-1].item(), 0.0)
        # A number whose square is within r of 1 is within 1 - sqrt(1 - r) of 1.
        r = length.item() * turns[-1, -1].abs().item() / square if square > 0 else 0.0
        residual = 1 - math.sqrt(max(0.0, 1 - r))
        if residual <= tolerance or iteration >= max_iterations:
            return math.sqrt(square), residual
        if len(basis) == KRYLOV_DIMENSION:
            basis, within = turns[:, -KEPT:].T.to(basis) @ basis, squares[-KEPT:].diag()
        v = (beyond / length).view_as(v)
    return math.nan, math.nan
