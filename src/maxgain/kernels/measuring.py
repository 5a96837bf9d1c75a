"""Measure a layer on a GPU in one or two launches.

The cost of an eager step is Python, not the GPU. So kernel, grid and block sizes are chosen once per layer and shape,
and a compiled kernel is launched without Triton's dispatcher from its second launch on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import direct_launch

HAS_TRITON = find_spec("triton") is not None
POWERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""The norms of the kernels, and their numbers there."""
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
FORMS = {"affine": 1, "batch_norm": 2}
PLAIN = 0
DIRECT, REPEATED, SPREAD = 0, 1, 2
"""Where the channel of an entry is: see ``triton_gains``."""
SAMPLES, LONG, ROWS = (1, 8192, 1), (1, 2048, 8), (4, 256, 8)
"""Tiles: instances per program, entries of each at once, and entries that a thread adds up before it keeps anything.

Dense layers have many short instances, convolutions few long ones. ``LONG`` is for instances that are summed in parts
and for rows beyond ``LONGEST_ROW``."""
LONGEST_ROW = 4096
ENTRIES_PER_WARP = 512
LONGEST_WHOLE, PART = 1 << 16, 1 << 14
"""A longer instance is summed in parts of this size: a few large images are too few programs for a GPU."""
LARGEST_INSTANCE = 1 << 26
"""One program holds the sums of all parts of an instance."""
MAX_PLANS = 512
"""A model whose shapes never repeat must not fill the memory with plans."""

fallbacks: dict[tuple[int, int], str] = {}
"""Why no kernel measured a layer, by the address of its maxima and its place there; ``checks`` reports it."""


class Part(NamedTuple):
    """What the linear part of a layer is made of: see ``maxgain.gain.record``."""

    form: str
    """'affine': ``Wx`` is the output z less the bias ``vector``. 'batch_norm': it follows from the input."""
    x: Tensor
    z: Tensor | None
    vector: Tensor | None
    variance: Tensor | None
    eps: float
    channel_dims: int


def measure(
    maxima: Tensor, dropped: Tensor, resting: Tensor, index: int, part: Part, instance_dims: int, p: float
) -> bool:
    """Raise ``maxima[index]`` to the largest gain of the batch by a kernel; return False if there is none for it."""
    _, x, z, vector, variance, eps, _ = part
    if z is None:
        z = x
    key = key_of(x, z, part, instance_dims, p, maxima)
    launch = _launches.get(key)
    if launch is None:
        launch = remember(_launches, key, _launcher(key))
    reason = launch if isinstance(launch, str) else launch(x, z, vector, variance, eps, maxima, dropped, resting, index)
    if reason:
        fallbacks[maxima.data_ptr(), index] = reason
    elif fallbacks:
        fallbacks.pop((maxima.data_ptr(), index), None)
    return not reason


Launch = Callable[..., str]
"""Launches the kernels, or returns why these tensors do not fit them."""
_launches: dict[Any, Launch | str] = {}


def remember(plans: dict[Any, Any], key: Any, plan: Any) -> Any:
    """Keep a plan in the place of the oldest one if there are too many."""
    if len(plans) >= MAX_PLANS:
        plans.pop(next(iter(plans)), None)  # another thread may have done so
    plans[key] = plan
    return plan


def key_of(x: Tensor, z: Tensor, part: Part, instance_dims: int, p: float, to: Tensor) -> tuple[Any, ...]:
    """Return all that a plan depends on."""
    form, _, _, vector, variance, _, channel_dims = part
    return (
        x.shape, x.stride(), x.dtype, z.shape, z.stride(), z.dtype, None if vector is None else vector.dtype,
        None if variance is None else variance.dtype, form, channel_dims, instance_dims, p, to.dtype,
        (vector is None or vector.is_contiguous()) and (variance is None or variance.is_contiguous()), x.device,
    )  # fmt: skip


class Plan(NamedTuple):
    """Arguments of ``gains_kernel``, in its order, and the tensors that are copied first."""

    rows: int
    x_size: int
    z_size: int
    x_step: int
    z_step: int
    """Entries from one instance to the next."""
    parts: int
    """Of each instance, that are summed first; 0 if it is summed at once."""
    power: int
    form: int
    where: int
    inner: int
    channels: int
    """0 where every position is one."""
    instances: int
    block: int
    vec: int
    copies: tuple[bool, bool, bool]
    """Whether x, z and the vectors are made contiguous, in a layout that the kernels cannot read."""


def plan_for(key: tuple[Any, ...]) -> Plan | str:
    """Plan the launches for tensors like these, or return why the kernels cannot measure them."""
    (
        x_shape, x_stride, x_dtype, z_shape, z_stride, z_dtype, vector_dtype, variance_dtype, form, channel_dims,
        instance_dims, p, maxima_dtype, are_vectors_dense, device,
    ) = key  # fmt: skip
    axis = len(z_shape) - channel_dims
    x_layout, x_step = _layout(x_shape, x_stride, instance_dims)
    z_layout, z_step = _layout(z_shape, z_stride, instance_dims)
    if z_layout == "channels_last" and axis != 1 and vector_dtype:
        z_layout = ""  # its channels are not the last of these
    x_rows, z_rows = (math.prod(shape[: len(shape) - instance_dims]) for shape in (x_shape, z_shape))
    x_size, z_size = (math.prod(shape[len(shape) - instance_dims :]) for shape in (x_shape, z_shape))
    longest = max(x_size, z_size)
    dtypes = {x_dtype, z_dtype, vector_dtype or torch.float32, variance_dtype or torch.float32, maxima_dtype}
    reasons = {
        "Triton is not installed": not HAS_TRITON,
        f"{device.type} is no GPU that Triton is used on": device.type != "cuda",
        f"the kernels know p = 1, 2 and inf, not {p:g}": p not in POWERS,
        "the kernels know float32, bfloat16 and float16 only": not dtypes <= DTYPES or maxima_dtype != torch.float32,
        "input and output differ in the number of instances": x_rows != z_rows,
        "there is nothing to measure": not min(x_rows, x_size, z_size),
        f"an instance has more than {LARGEST_INSTANCE} entries": longest > LARGEST_INSTANCE,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return reason
    parts = -(-longest // PART) if longest > LONGEST_WHOLE else 0
    is_long = parts > 0 if instance_dims > 1 else longest > LONGEST_ROW
    instances, entries, vec = LONG if is_long else SAMPLES if instance_dims > 1 else ROWS
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
        x_step if x_layout else x_size,
        z_step if z_layout else z_size,
        parts,
        POWERS[p],
        FORMS[form] if vector_dtype else PLAIN,
        where,
        inner,
        channels,
        instances,
        block,
        min(vec, block),
        (not x_layout, not z_layout and form != "batch_norm", not are_vectors_dense),
    )


class Kernel:
    """A kernel with its grid and constants, launched directly once it is compiled."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.grid, self.constants, self.warps = kernel, grid, constants, warps
        self.direct: Callable[..., None] | None = None

    def __call__(
        self, device: int, tensors: tuple[Any, ...], pointers: tuple[Any, ...] | None, *numbers: float
    ) -> None:
        """Launch on the current stream of the device; the pointers are the tensors', in tuples where those are.

        None if tensors are not aligned: then Triton's dispatcher finds another compiled kernel.
        """
        if self.direct is not None and pointers is not None:
            self.direct(device, *pointers, *numbers, *self.constants)
            return
        compiled = self.kernel[self.grid](*tensors, *numbers, *self.constants, num_warps=self.warps)
        if pointers is not None:
            self.direct = direct_launch(compiled, self.grid)


@cache
def compile_error(device: torch.device) -> str:
    """Say why Triton cannot compile for this GPU, which is tried once; return nothing if it can."""
    try:
        import triton.language as tl

        from .triton_project import project_kernel

        with torch.cuda.device(device):
            one, zeros = torch.ones(1, device=device), torch.zeros(3, dtype=torch.int64, device=device)
            project_kernel[1, 1, 1](
                zeros, one, one, zeros, one, one, zeros, zeros, 1, tl.float32, 1, 16, 16, 1, True, num_warps=4
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # there may be no compiler, or no header of Python's, or the GPU may be too old
        said = str(error).strip().partition("\n")[0]
        return (
            f"Triton cannot compile for {device} ({type(error).__name__}: {said}). It needs a C compiler, Python's "
            "headers, and a recent GPU"
        )
    return ""


def _launcher(key: tuple[Any, ...]) -> Launch | str:
    """Return a function that launches the kernels, or why there is none."""
    plan = plan_for(key)
    if isinstance(plan, str):
        return plan
    if error := compile_error(key[-1]):
        return error
    from .triton_gains import gains_kernel, sums_kernel

    warps = max(1, plan.block * plan.instances // ENTRIES_PER_WARP)
    wide = power_of_two(plan.parts) if plan.parts else 0
    measuring = Kernel(gains_kernel, (-(-plan.rows // plan.instances), 1, 1), (*plan[:14], wide), warps)
    constants = *plan[1:11], plan.block, plan.vec, PART
    summing = Kernel(sums_kernel, (plan.rows, plan.parts, 1), constants, warps) if plan.parts else None
    copies_x, copies_z, copies_vectors = plan.copies

    def launch(
        x: Tensor, z: Tensor, vector: Tensor | None, variance: Tensor | None, eps: float,
        maxima: Tensor, dropped: Tensor, resting: Tensor, index: int,
    ) -> str:  # fmt: skip
        if type(x) is not Tensor:
            return f"its input is a {type(x).__name__}"
        if maxima.device != x.device:
            return "the model lies on several devices"
        device = x.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(x, z, vector, variance, eps, maxima, dropped, resting, index)
        if copies_x or copies_z:
            x, z = x.contiguous() if copies_x else x, z.contiguous() if copies_z else z
        if copies_vectors:
            vector, variance = (None if one is None else one.contiguous() for one in (vector, variance))
        if vector is None:
            vector = maxima  # not read, but there must be a pointer
        if variance is None:
            variance = vector
        pointers = x.data_ptr(), z.data_ptr(), vector.data_ptr(), variance.data_ptr()
        is_odd = bool((pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15)
        tensors, sums = (x, z, vector, variance), maxima
        if summing is not None:
            sums = maxima.new_empty(2, plan.rows, plan.parts)
            at = None if is_odd else (*pointers, sums.data_ptr(), resting.data_ptr())
            summing(device, (*tensors, sums, resting), at, eps, index)
        written = sums, maxima, dropped, resting
        all_at = None if is_odd else (*pointers, *(one.data_ptr() for one in written))
        measuring(device, (*tensors, *written), all_at, eps, index)
        return ""

    return launch


def _layout(shape: tuple[int, ...], stride: tuple[int, ...], instance_dims: int) -> tuple[str, int]:
    """Return 'contiguous' or 'channels_last' and the entries from one instance to the next; '' for any other layout."""
    outer, dims = len(shape) - instance_dims, len(shape)
    others = [(size, step) for size, step in zip(shape[:outer], stride[:outer], strict=True) if size != 1]
    step = others[-1][1] if others else math.prod(shape[outer:])
    if any(step != size * smaller for (_, step), (size, smaller) in pairwise(others)):
        return "", 0  # instances are not evenly spaced
    if _is_dense(shape, stride, range(outer, dims)):
        return "contiguous", step
    if outer == 1 and _is_dense(shape, stride, (*range(2, dims), 1)):
        return "channels_last", step
    return "", 0


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...], order: Iterable[int]) -> bool:
    expected = 1
    for dim in reversed(tuple(order)):
        if shape[dim] != 1 and stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
