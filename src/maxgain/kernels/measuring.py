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
from ..torch_quirks import direct_launch

HAS_TRITON = find_spec("triton") is not None
POWERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""The norms that the kernel knows, by the number it knows them by."""
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
FORMS = {"affine": 1, "batch_norm": 2}
TILE = 8192
"""How many entries a program reads at once."""
LARGEST_INSTANCE = 1 << 20
"""A longer instance keeps a single program busy for too long; torch's own reductions spread it over the GPU."""
MOST_PLANS = 512
"""A model whose shapes never repeat takes the plain path instead of filling the memory with plans."""


class Part(NamedTuple):
    """What the linear part of a layer is made of: see ``maxgain.functional.without_bias`` and ``normalised``."""

    form: str
    """'affine': ``Wx`` is the output z less the bias ``vector``. 'batch_norm': it follows from the input."""
    x: Tensor
    z: Tensor | None
    vector: Tensor | None
    variance: Tensor | None
    eps: float
    channel_dims: int


def measure(maxima: Tensor, dropped: Tensor, index: int, part: Part, instance_dims: int, p: float) -> None:
    """Raise ``maxima[index]`` to the largest gain of the batch, and count in ``dropped`` what is not finite."""
    form, x, z, vector, variance, eps, channel_dims = part
    if z is None:
        z = x
    key = (
        x.shape, x.stride(), x.dtype, z.shape, z.stride(), z.dtype, vector is not None and vector.dtype,
        form, channel_dims, instance_dims, p, maxima.dtype, x.device,
    )  # fmt: skip
    launch = _launches.get(key, _unplanned)
    if launch is _unplanned:
        launch = _launches[key] = _plan(key) if len(_launches) < MOST_PLANS else None
    if launch is None or (x.data_ptr() | z.data_ptr()) & 15 or type(x) is not Tensor:
        record(maxima, dropped, index, plain_gains(part, instance_dims, p))
        return
    if vector is None:
        vector = maxima  # not read, but there must be a pointer
    launch(x, z, vector, vector if variance is None else variance, eps, maxima, dropped, index)


@torch.no_grad()
def plain_gains(part: Part, instance_dims: int, p: float) -> Tensor:
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
# of one packed tensor by many layers would become a chain of copies of it. They are defined by the dispatcher's own
# means, because ``torch.library.custom_op`` adds some 100 µs of Python to every call.

_library = torch.library.Library("maxgain", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "record(Tensor(a!) maxima, Tensor(b!) dropped, int index, Tensor gains) -> ()"
)
_library.define(  # type: ignore[no-untyped-call]
    "measure(Tensor(a!) maxima, Tensor(b!) dropped, int index, str form, Tensor x, Tensor? z, Tensor? vector, "
    "Tensor? variance, float eps, int channel_dims, int instance_dims, float p) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


def _measure_unpacked(maxima: Tensor, dropped: Tensor, index: int, *rest: Any) -> None:
    *part, instance_dims, p = rest
    measure(maxima, dropped, index, Part(*part), instance_dims, p)


for _key in ("CPU", "CUDA", "MPS", "XPU"):
    _library.impl("record", record, _key)  # type: ignore[no-untyped-call]
    _library.impl("measure", _measure_unpacked, _key)  # type: ignore[no-untyped-call]
for _name in ("record", "measure"):
    _library.impl(_name, lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]

Launch = Callable[..., None]
_launches: dict[Any, Launch | None] = {}


def _unplanned() -> None:
    """Stands for tensors of a kind that was not met before."""


def _plan(key: tuple[Any, ...]) -> Launch | None:
    """How to launch the kernel for tensors like these; None if it does not know them or their layout."""
    (
        x_shape, x_stride, x_dtype, z_shape, z_stride, z_dtype, vector_dtype, form, channel_dims, instance_dims, p,
        maxima_dtype, device,
    ) = key  # fmt: skip
    x_layout, z_layout = _layout(x_shape, x_stride), _layout(z_shape, z_stride)
    x_rows, z_rows = (math.prod(shape[: len(shape) - instance_dims]) for shape in (x_shape, z_shape))
    x_size, z_size = (math.prod(shape[len(shape) - instance_dims :]) for shape in (x_shape, z_shape))
    longest = max(x_size, z_size)
    known = (
        HAS_TRITON
        and device.type == "cuda"
        and p in POWERS
        and maxima_dtype == torch.float32
        and {x_dtype, z_dtype, vector_dtype or torch.float32} <= DTYPES
        and x_layout is not None
        and z_layout is not None
        and (x_layout == z_layout == "contiguous" or instance_dims == len(x_shape) - 1)
        and x_rows == z_rows > 0
        and min(x_size, z_size) > 0
        and longest <= LARGEST_INSTANCE
    )
    if not known:
        return None
    axis = len(z_shape) - channel_dims
    block = min(power_of_two(longest), TILE)
    rows_per_program = min(TILE // 2 // block or 1, power_of_two(x_rows))
    return _launcher(
        (-(-x_rows // rows_per_program), 1, 1),
        x_rows,
        x_size,
        z_size,
        POWERS[p],
        FORMS[form] if vector_dtype else 0,
        1 if z_layout == "channels_last" else math.prod(z_shape[axis + 1 :]),
        0 if z_shape[axis] == z_size else z_shape[axis],
        rows_per_program,
        block,
        warps=max(1, min(16, block * rows_per_program // 512)),
    )


def _launcher(grid: tuple[int, int, int], *constants: int, warps: int) -> Launch:
    """A function that launches the kernel: compiled by its first call, and called directly from then on."""
    from .triton_gains import gains_kernel

    direct: Launch | None = None

    def launch(x: Tensor, *arguments: Any) -> None:
        nonlocal direct
        if x.get_device() != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                launch(x, *arguments)
        elif direct is not None:
            direct(x, *arguments, *constants)
        else:
            direct = direct_launch(gains_kernel[grid](x, *arguments, *constants, num_warps=warps), grid)

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


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(0, n - 1).bit_length()
