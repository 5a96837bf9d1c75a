"""Measuring on a GPU with one launch per layer: which kernel, how it is launched, and how torch.compile sees it.

What an eager step pays for here is Python, not the GPU. So kernel, grid and block sizes are chosen once per layer and
shape, and a compiled kernel is launched without going through Triton's dispatcher again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import finite, gain, normalised, without_bias

HAS_TRITON = find_spec("triton") is not None
POWERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""The norms that the kernel knows, by the number it knows them by."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = {"affine": 1, "batch_norm": 2}
TILE = 8192
"""How many entries a program reads at once."""
LARGEST_INSTANCE = 1 << 20
"""A longer instance keeps a single program busy for too long; torch's own reductions spread it over the GPU."""
MOST_PLANS = 512
"""A model whose shapes never repeat takes the plain path instead of filling the memory with plans."""


class Linear(NamedTuple):
    """What the linear part of a layer is made of: see ``maxgain.functional.without_bias`` and ``normalised``."""

    form: str
    """'affine': ``Wx`` is the output less the bias ``vector``. 'batch_norm': it follows from the input."""
    x: Tensor
    z: Tensor | None
    vector: Tensor | None
    variance: Tensor | None
    eps: float
    channel_dims: int


def covers(p: float, maxima: Tensor, part: Linear) -> bool:
    """Whether the kernel knows such tensors; whether it can take their strides is seen when it is launched."""
    tensors = (part.x, part.z, part.vector, part.variance)
    return (
        HAS_TRITON
        and p in POWERS
        and maxima.dtype == torch.float32
        and all(tensor is None or tensor.dtype in DTYPES for tensor in tensors)
    )


def measure(maxima: Tensor, dropped: Tensor, index: int, part: Linear, instance_dims: int, p: float) -> None:
    """Raise ``maxima[index]`` to the largest gain of the batch, and count in ``dropped`` what is not finite."""
    form, x, z, vector, variance, eps, channel_dims = part
    second = x if z is None else z
    aligned = (x.data_ptr() | second.data_ptr()) & 15 == 0
    key = (
        x.shape, x.stride(), x.dtype, second.shape, second.stride(), second.dtype, aligned,
        vector is not None and vector.dtype, form, channel_dims, instance_dims, p, x.device.index,
    )  # fmt: skip
    launch = _launches.get(key, _unplanned)
    if launch is _unplanned:
        launch = _launches[key] = _plan(key) if len(_launches) < MOST_PLANS else None
    if launch is None:
        record(maxima, dropped, index, plain_gains(part, instance_dims, p))
        return
    if vector is None:
        vector = maxima  # not read, but there must be a pointer
    launch(x, second, vector, vector if variance is None else variance, eps, maxima, dropped, index)


def plain_gains(part: Linear, instance_dims: int, p: float) -> Tensor:
    """What the kernel computes, in torch's own operations."""
    form, x, z, vector, variance, eps, channel_dims = part
    if form == "affine":
        assert z is not None
        return gain(without_bias(z, vector, channel_dims), x, p, instance_dims=instance_dims)
    assert vector is not None
    assert variance is not None
    return gain(normalised(x, vector, variance, eps), x, p, instance_dims=instance_dims)


def record(maxima: Tensor, dropped: Tensor, index: int, gains: Tensor) -> None:
    """Take the gains of a forward into the maximum of one layer, in place and without waiting for the device."""
    usable = finite(gains)
    maxima[index].clamp_(min=usable.amax())
    dropped[index].add_((usable != gains).sum())


# torch.compile sees both as single operations that change ``maxima`` and ``dropped`` in place. Written out, the changes
# of one packed tensor by many layers would become a chain of copies of it.


@torch.library.custom_op("maxgain::record", mutates_args=("maxima", "dropped"))
def record_op(maxima: Tensor, dropped: Tensor, index: int, gains: Tensor) -> None:
    """``record``, for torch.compile."""
    record(maxima, dropped, index, gains)


@torch.library.custom_op("maxgain::measure", mutates_args=("maxima", "dropped"), tags=(torch.Tag.flexible_layout,))
def measure_op(
    maxima: Tensor, dropped: Tensor, index: int, form: str, x: Tensor, z: Tensor | None, vector: Tensor | None,
    variance: Tensor | None, eps: float, channel_dims: int, instance_dims: int, p: float,
) -> None:  # fmt: skip
    """``measure``, for torch.compile."""
    measure(maxima, dropped, index, Linear(form, x, z, vector, variance, eps, channel_dims), instance_dims, p)


Launch = Callable[..., None]
_launches: dict[Any, Launch | None] = {}


def _unplanned() -> None:
    """Stands for a shape that was not met before."""


def _plan(key: tuple[Any, ...]) -> Launch | None:
    """How to launch the kernel for tensors like these; None if they are not laid out for it."""
    x_shape, x_stride, _, z_shape, z_stride, _, aligned, vector_dtype, form, channel_dims, instance_dims, p, _ = key
    x_layout, z_layout = _layout(x_shape, x_stride), _layout(z_shape, z_stride)
    whole_samples = instance_dims == len(x_shape) - 1
    if not aligned or None in (x_layout, z_layout) or ("channels_last" in (x_layout, z_layout) and not whole_samples):
        return None
    x_rows, z_rows = (math.prod(shape[: len(shape) - instance_dims]) for shape in (x_shape, z_shape))
    x_size, z_size = (math.prod(shape[len(shape) - instance_dims :]) for shape in (x_shape, z_shape))
    longest = max(x_size, z_size)
    if x_rows != z_rows or x_rows == 0 or min(x_size, z_size) == 0 or longest > LARGEST_INSTANCE:
        return None
    axis = len(z_shape) - channel_dims
    block = min(_power_of_two(longest), TILE)
    rows_per_program = min(TILE // 2 // block or 1, _power_of_two(x_rows))
    return _launcher(
        (-(-x_rows // rows_per_program), 1, 1),
        x_rows,
        x_size,
        z_size,
        POWERS[p],
        FORMS[form] if vector_dtype else 0,
        1 if z_layout == "channels_last" else math.prod(z_shape[axis + 1 :]),
        z_shape[axis],
        rows_per_program,
        block,
        warps=max(1, min(16, block * rows_per_program // 256)),
    )


def _launcher(grid: tuple[int, int, int], *constants: int, warps: int) -> Launch:
    """A function that launches the kernel: compiled by its first call, and called directly from then on."""
    from .triton_gains import gains_kernel

    direct: Launch | None = None

    def launch(x: Tensor, *arguments: Any) -> None:
        nonlocal direct
        if x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                launch(x, *arguments)
        elif direct is not None:
            direct(x, *arguments, *constants)
        else:
            direct = gains_kernel[grid](x, *arguments, *constants, num_warps=warps)[grid]

    return launch


def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
    """'contiguous' or 'channels_last' if every instance lies in one piece, in the order of instances; else None."""
    if _is_dense(shape, stride, range(len(shape))):
        return "contiguous"
    if len(shape) > 2 and _is_dense(shape, stride, (0, *range(2, len(shape)), 1)):
        return "channels_last"
    return None


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...], order: Iterable[int]) -> bool:
    expected = 1
    for dim in reversed(tuple(order)):
        if shape[dim] != 1 and stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
