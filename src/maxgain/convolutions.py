"""The settings of a convolution as its forward reads them, and the sizes that follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def settings(layer: Any, *names: str) -> list[tuple[int, ...]]:
    """Each setting along each dimension; one that was changed after the layer was made may be a plain number."""
    values = (getattr(layer, name) for name in names)
    return [(value,) * len(layer.kernel_size) if isinstance(value, int) else tuple(value) for value in values]


def enough_input(layer: Any) -> tuple[int, ...]:
    """The shape of an input that is large enough."""
    each = zip(*settings(layer, "dilation", "kernel_size", "stride"), strict=True)
    return (2, layer.in_channels, *(2 * gap * k + stride for gap, k, stride in each))


def least_extents(layer: Any, lengths: Iterable[int]) -> list[int]:
    """How large a transposed convolution's output is at least, for an input of these lengths."""
    each = zip(lengths, *settings(layer, "stride", "padding", "dilation", "kernel_size"), strict=True)
    return [(n - 1) * stride - 2 * pad + gap * (k - 1) + 1 for n, stride, pad, gap, k in each]


def output_size(layer: Any, x: Tensor, shape: torch.Size) -> dict[str, Any]:
    """What to ask a transposed convolution for; nothing for its usual size, which torch may refuse to be asked for."""
    least = least_extents(layer, x.shape[-len(layer.kernel_size) :])
    asked = list(shape[-len(least) :])
    usual = [n + more for n, more in zip(least, *settings(layer, "output_padding"), strict=True)]
    return {} if asked == usual else {"output_size": asked}
