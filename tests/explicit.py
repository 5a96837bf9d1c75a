"""What tests compare with, in the most obvious way: every bit of a structure, a norm, a gain."""

import math
from typing import Any

import torch
from torch import Tensor

INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that -0.0 is not 0.0 and nan is nan."""
    return tensor.detach().clone().view(INT_OF_SIZE[tensor.element_size()]) if tensor.is_floating_point() else tensor


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nested structures of tensors and numbers agree in every bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)


def norm(v: Tensor, p: float) -> float:
    """‖v‖_p in Python's own floats, scaled so that nothing over- or underflows."""
    values = [abs(float(entry)) for entry in v.detach().flatten().tolist()]
    largest = max(values)
    if largest == 0 or math.isinf(p):
        return largest
    return float(largest * math.fsum((value / largest) ** p for value in values) ** (1 / p))


def largest_gain(z: Tensor, x: Tensor, p: float = 2.0) -> float:
    """The largest ‖z‖/‖x‖ over the first dimension."""
    return max(norm(z_, p) / norm(x_, p) for z_, x_ in zip(z, x, strict=True))
