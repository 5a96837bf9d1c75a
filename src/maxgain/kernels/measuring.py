"""Measuring on a GPU, in one or two launches per layer: which kernels, and how to launch them.

What an eager step pays for here is Python, not the GPU. So kernel, grid and block sizes are chosen once per layer and
shape, and a compiled kernel is launched without going through Triton's dispatcher again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MeasurementWarning
from ..functional import gain, normalised, record, without_bias
from ..torch_quirks import direct_launch

HAS_TRITON = find_spec("triton") is not None
POWERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""The norms that the kernel knows, by the number it knows them by."""
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
FORMS = {"affine": 1, "batch_norm": 2}
PLAIN = 0
DIRECT, REPEATED, SPREAD = 0, 1, 2
"""How an entry of an instance finds its channel: see ``triton_gains``."""
SAMPLES, LONG, ROWS = (1, 8192, 1), (1, 2048, 8), (4, 256, 8)
"""Tiles: how many instances a program takes, how many entries of each at once, and how many of those a thread adds up
before it keeps anything. A dense layer has many more instances than a convolution, and they are shorter. Long are
instances that are summed in parts, and rows beyond ``LONGEST_ROW``."""
LONGEST_ROW = 4096
ENTRIES_PER_WARP = 512
LONGEST_WHOLE, PART = 1 << 16, 1 << 14
"""A longer instance is summed in parts of this size: a few large images are too few programs for a GPU."""
LARGEST_INSTANCE = 1 << 24
"""Where sums of a longer one overflow, a single program would read it again for too long."""
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
    _, x, z, vector, variance, eps, _ = part
    if z is None:
        z = x
    key = key_of(x, z, part, instance_dims, p, maxima)
    launch = _launches.get(key, _UNPLANNED if len(_launches) < MOST_PLANS else None)
    if launch is _UNPLANNED:
        launch = _launches[key] = _launcher(key)
    if launch is None or not launch(x, z, vector, variance, eps, maxima, dropped, index):
        record(maxima, dropped, index, plain_gains(part, instance_dims, p))


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


Launch = Callable[..., bool]
_launches: dict[Any, Launch | None] = {}


_UNPLANNED: Any = object()
"""Stands for tensors of a kind that was not met before."""


def key_of(x: Tensor, z: Tensor, part: Part, instance_dims: int, p: float, to: Tensor) -> tuple[Any, ...]:
    """All that a plan depends on; x and z as the kernel reads them."""
    form, _, _, vector, variance, _, channel_dims = part
    return (
        x.shape, x.stride(), x.dtype, z.shape, z.stride(), z.dtype, None if vector is None else vector.dtype,
        None if variance is None else variance.dtype, form, channel_dims, instance_dims, p, to.dtype,
        (vector is None or vector.is_contiguous()) and (variance is None or variance.is_contiguous()), x.device,
    )  # fmt: skip


class Plan(NamedTuple):
    """How the kernels are launched, in the order of their arguments."""

    rows: int
    x_size: int
    z_size: int
    x_step: int
    z_step: int
    """From one instance to the next there are so many entries."""
    parts: int
    """Of each instance, that are summed first; 0 if there is no need."""
    power: int
    form: int
    where: int
    inner: int
    channels: int
    """0 where every position is one."""
    instances: int
    block: int
    together: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many programs measure."""
        return -(-self.rows // self.instances), 1, 1

    @property
    def for_sums(self) -> tuple[int, ...]:
        """What ``sums_kernel`` is given beside tensors and ε."""
        return *self[1:11], self.block, self.together, PART

    @property
    def for_gains(self) -> tuple[int, ...]:
        """What ``gains_kernel`` is given beside tensors, ε and index."""
        return *self, power_of_two(self.parts) if self.parts else 0

    @property
    def warps(self) -> int:
        """How many of each program's."""
        return max(1, self.block * self.instances // ENTRIES_PER_WARP)


def plan_for(key: tuple[Any, ...]) -> Plan | None:
    """How to launch the kernels for tensors like these; None if they do not know them or their layout."""
    (
        x_shape, x_stride, x_dtype, z_shape, z_stride, z_dtype, vector_dtype, variance_dtype, form, channel_dims,
        instance_dims, p, maxima_dtype, are_vectors_dense, device,
    ) = key  # fmt: skip
    x_layout, z_layout = _layout(x_shape, x_stride, instance_dims), _layout(z_shape, z_stride, instance_dims)
    x_step, z_step = (_step(*one, instance_dims) for one in ((x_shape, x_stride), (z_shape, z_stride)))
    x_rows, z_rows = (math.prod(shape[: len(shape) - instance_dims]) for shape in (x_shape, z_shape))
    x_size, z_size = (math.prod(shape[len(shape) - instance_dims :]) for shape in (x_shape, z_shape))
    longest, axis = max(x_size, z_size), len(z_shape) - channel_dims
    known = (
        HAS_TRITON
        and device.type == "cuda"
        and p in POWERS
        and maxima_dtype == torch.float32
        and are_vectors_dense
        and {x_dtype, z_dtype, vector_dtype or torch.float32, variance_dtype or torch.float32} <= DTYPES
        and x_layout is not None
        and z_layout is not None
        and (z_layout == "contiguous" or axis == 1 or not vector_dtype)  # channels that are not the last of these
        and x_rows == z_rows > 0
        and min(x_size, z_size) > 0
        and longest <= LARGEST_INSTANCE
    )
    if not known or x_step is None or z_step is None:
        return None
    parts = -(-longest // PART) if longest > LONGEST_WHOLE else 0
    is_long = parts > 0 if instance_dims > 1 else longest > LONGEST_ROW
    instances, entries, together = LONG if is_long else SAMPLES if instance_dims > 1 else ROWS
    block = min(power_of_two(longest), entries)
    if instances > 1:
        instances *= entries // block  # as many short rows as fill the tile
    inner = 1 if z_layout == "channels_last" else math.prod(z_shape[axis + 1 :])
    channels = z_shape[axis]
    where = REPEATED if inner == 1 and block % channels == 0 else SPREAD
    if not vector_dtype or channels == z_size:
        where, inner, channels = DIRECT, 1, 0
    return Plan(
        x_rows,
        x_size,
        z_size,
        x_step,
        z_step,
        parts,
        POWERS[p],
        FORMS[form] if vector_dtype else PLAIN,
        where,
        inner,
        channels,
        instances,
        block,
        min(together, block),
    )


class Kernel:
    """A kernel with its grid and constants: compiled by its first launch, and launched directly from then on."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.grid, self.constants, self.warps = kernel, grid, constants, warps
        self.direct: Callable[..., None] | None = None

    def __call__(
        self, device: int, tensors: tuple[Any, ...], pointers: tuple[Any, ...] | None, *numbers: float
    ) -> None:
        """On the current stream of that device; the pointers are the tensors', in tuples where those are in tuples.

        There are none if tensors begin at odd addresses: Triton then looks for another compiled kernel each time.
        """
        if self.direct is not None and pointers is not None:
            self.direct(device, *pointers, *numbers, *self.constants)
            return
        compiled = self.kernel[self.grid](*tensors, *numbers, *self.constants, num_warps=self.warps)
        if pointers is not None:
            self.direct = direct_launch(compiled, self.grid)


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton can compile for this GPU here, which is tried once; if not, the plain path is taken."""
    try:
        import triton.language as tl

        from .triton_project import project_kernel

        with torch.cuda.device(device):
            one, zeros = torch.ones(1, device=device), torch.zeros(3, dtype=torch.int64, device=device)
            project_kernel[1, 1, 1](
                zeros, one, one, zeros, one, one, one, zeros, 1, False, tl.float32, 1, 16, 16, 1, True, num_warps=4
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # there may be no compiler, or no header of Python's, or the GPU may be too old
        said = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"Triton cannot compile for {device} here ({type(error).__name__}: {said}), so gains are taken by torch's "
            "own operations, which is slower. It needs a C compiler, Python's headers, and a GPU that is not too old.",
            MeasurementWarning,
            stacklevel=2,
        )
        return False
    return True


def _launcher(key: tuple[Any, ...]) -> Launch | None:
    """A function that launches the kernels; it says no to tensors that they do not fit."""
    plan = plan_for(key)
    if plan is None or not compiles(key[-1]):
        return None
    from .triton_gains import gains_kernel, sums_kernel

    measuring = Kernel(gains_kernel, plan.grid, plan.for_gains, plan.warps)
    summing = Kernel(sums_kernel, (plan.rows, plan.parts, 1), plan.for_sums, plan.warps) if plan.parts else None

    def launch(
        x: Tensor, z: Tensor, vector: Tensor | None, variance: Tensor | None, eps: float,
        maxima: Tensor, dropped: Tensor, index: int,
    ) -> bool:  # fmt: skip
        if vector is None:
            vector = maxima  # not read, but there must be a pointer
        if variance is None:
            variance = vector
        if type(x) is not Tensor:
            return False
        pointers = x.data_ptr(), z.data_ptr(), vector.data_ptr(), variance.data_ptr()
        is_odd = bool((pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15)
        device = x.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(x, z, vector, variance, eps, maxima, dropped, index)
        tensors, sums = (x, z, vector, variance), maxima
        if summing is not None:
            sums = maxima.new_empty(2, plan.rows, plan.parts)
            summing(device, (*tensors, sums), None if is_odd else (*pointers, sums.data_ptr()), eps)
        measuring(
            device,
            (*tensors, sums, maxima, dropped),
            None if is_odd else (*pointers, sums.data_ptr(), maxima.data_ptr(), dropped.data_ptr()),
            eps,
            index,
        )
        return True

    return launch


def _layout(shape: tuple[int, ...], stride: tuple[int, ...], instance_dims: int) -> str | None:
    """'contiguous' or 'channels_last' if every instance lies in one piece; else None."""
    outer, dims = len(shape) - instance_dims, len(shape)
    if _is_dense(shape, stride, range(outer, dims)):
        return "contiguous"
    if outer == 1 and _is_dense(shape, stride, (*range(2, dims), 1)):
        return "channels_last"
    return None


def _step(shape: tuple[int, ...], stride: tuple[int, ...], instance_dims: int) -> int | None:
    """How many entries there are from one instance to the next, where that is always the same; else None."""
    outer = len(shape) - instance_dims
    others = [(size, step) for size, step in zip(shape[:outer], stride[:outer], strict=True) if size != 1]
    if any(step != size * smaller for (_, step), (size, smaller) in pairwise(others)):
        return None
    return others[-1][1] if others else math.prod(shape[outer:])


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...], order: Iterable[int]) -> bool:
    expected = 1
    for dim in reversed(tuple(order)):
        if shape[dim] != 1 and stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
