"""The mathematics of the method: what a gain is, and what exceeding a bound does to a weight.

Training under MaxGain solves ``min f(W_1, ..., W_l)`` subject to ``max_x ‖W_i x‖_p / ‖x‖_p ≤ γ`` for every layer i,
where x runs over the inputs that the layer is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import NormError


def gain(z: Tensor, x: Tensor, p: float = 2.0, dims: int = 1) -> Tensor:
    """Return ``‖z‖_p / ‖x‖_p`` over the last ``dims`` dimensions, where ``z = Wx``; 0 where x is 0.

    Norms are accumulated in float32 at least. The result is not finite where z or x is not.

    Examples:
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> gain(2 * x, x)
        tensor([2., 0.])
    """
    z_norm, x_norm = norm(z, p, dims), norm(x, p, dims)
    gains = torch.where(x_norm == 0, 0.0, z_norm / x_norm)
    return torch.where(torch.isinf(x_norm), torch.nan, gains)  # z may be finite where a stride leaves out what is not


def project_(weights: Sequence[Tensor], gains: Tensor, gamma: Tensor | float) -> Tensor:
    """Divide each weight by ``max(1, gain / γ)``, in place, and return what it was multiplied by.

    ``W / max(1, gain / γ)`` is the nearest multiple of W whose gain is at most γ. A weight within its bound is not
    touched. A gain that is negative or not finite is unknown, and changes nothing.

    Examples:
        >>> weight = torch.tensor([[6.0]])
        >>> project_([weight], torch.tensor([3.0]), 2.0)
        tensor([0.6667])
        >>> weight
        tensor([[4.]])
    """
    factors = torch.where(torch.isfinite(gains), gains / gamma, 1.0).clamp_min(1.0)
    # Reading a value is free on a CPU; on a GPU a weight within its bound is divided by 1.
    values = factors.tolist() if factors.device.type == "cpu" else [math.inf] * len(weights)
    alike: list[Tensor] = []
    divisors: list[Tensor] = []
    with torch.no_grad():
        for weight, factor, value in zip(weights, factors, values, strict=True):
            if value > 1 and (weight.dtype, weight.device) == (factor.dtype, factor.device):
                alike.append(weight)
                divisors.append(factor)
            elif value > 1:  # a factor rounded to bfloat16 would miss the bound by up to 0.4 %
                wide = torch.promote_types(weight.dtype, factor.dtype)
                weight.copy_(weight.to(wide).div_(factor.to(weight.device)))
        if alike:
            torch._foreach_div_(alike, divisors)
    return factors.reciprocal()


def without_bias(output: Tensor, bias: Tensor | None, channel_dims: int) -> Tensor:
    """Return ``Wx`` of a layer that returned ``Wx + b``; channels are the dimension ``channel_dims`` from the end."""
    if bias is None:
        return output
    rounded = bias.to(output.dtype)  # as the layer added it: autocast rounds the bias first
    return output - rounded.to(torch.promote_types(output.dtype, torch.float32)).view(-1, *[1] * (channel_dims - 1))


def norm(v: Tensor, p: float, dims: int) -> Tensor:
    """Return the p-norm over the last dimensions, in float32 at least."""
    over, wide = tuple(range(-dims, 0)), torch.promote_types(v.dtype, torch.float32)
    if p in (1, 2, math.inf):
        norms: Tensor = torch.linalg.vector_norm(v, p, over, dtype=wide)
        return norms
    largest: Tensor = torch.linalg.vector_norm(v, math.inf, over, keepdim=True, dtype=wide)
    scaled = v / largest.clamp_min(torch.finfo(wide).tiny)  # so that no power over- or underflows
    norms = torch.linalg.vector_norm(scaled, p, over)
    return largest.squeeze(over) * norms


def check_p(p: Any) -> float:
    """Return p if it names a norm."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not p >= 1:
        raise NormError(f"p must be a number from 1 to float('inf'), not {p!r:.40}: no other defines a norm.")
    return float(p)
