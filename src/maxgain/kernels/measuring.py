"""Measure a layer on a GPU in one launch, however its input and output lie in memory.

The cost of an eager step is Python, not the GPU. So a launch is planned once for tensors of some shapes, and a compiled
kernel is launched without Triton's dispatcher from its second launch on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import direct_launch

HAS_TRITON = find_spec("triton") is not None
POWERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""The norms of the kernel, and their numbers there."""
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
PLAIN, BIASED, NORMALISED = 0, 1, 2
ALONG, ACROSS, APART = 0, 1, 2
DIRECT, REPEATED, SPREAD = 0, 1, 2
"""What these say is in ``triton_gains``."""
SAMPLES, LONG, ROWS, COLUMNS = (1, 8192, 1), (1, 2048, 8), (4, 256, 8), (32, 64, 1)
"""Tiles: instances per program, entries of each at once, and entries that a thread adds up before it keeps anything.

Dense layers have many short instances, convolutions few long ones. ``LONG`` is for instances that are summed in parts
and for rows beyond ``LONGEST_ROW``, ``COLUMNS`` for instances of which neighbours lie side by side."""
LONGEST_ROW = 4096
ENTRIES_PER_WARP = 512
LONGEST_WHOLE, PART = 1 << 16, 1 << 14
"""A longer instance is summed in parts of this size: a few large images are too few programs for a GPU."""
LARGEST_INSTANCE = 1 << 26
"""One program adds up the sums of all parts of an instance."""
INSTANCE_LEVELS, LEVELS = 4, 3
"""In how many levels of even distances the kernel finds instances, and the entries of one."""
UNIT = 16
"""As many entries a thread may read at once, if all sizes and distances are multiples of it."""
MAX_PLANS = 4096
"""A model whose shapes never repeat must not fill the memory with plans."""
ENOUGH_PROGRAMS, MOST_STEPS = 8192, 8
"""Some five times what an H200 runs at a time. A program does several tiles if there are more, up to so many."""


def measure(
    maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, x: Tensor, z: Tensor | None, vector: Tensor | None,
    variance: Tensor | None, eps: float, channel_dims: int, dims: int, p: float,
) -> str:  # fmt: skip
    """Raise ``maxima[slot]`` to the largest gain of the batch by a kernel, or return why there is none for it.

    The arguments are those of ``maxgain.gain.record``.
    """
    other = x if z is None else z
    key = key_of(x, z, vector, variance, channel_dims, dims, p, maxima)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, plan_for(*key))
    if isinstance(plan, str):
        return plan
    return launch(plan, x, other, vector, variance, eps, maxima, dropped, resting, slot)


def key_of(
    x: Tensor, z: Tensor | None, vector: Tensor | None, variance: Tensor | None, channel_dims: int, dims: int, p: float,
    maxima: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Return all that a plan depends on: what ``plan_for`` takes."""
    other = x if z is None else z
    return (
        x.shape, x.stride(), x.dtype, other.shape, other.stride(), other.dtype,
        None if vector is None else (vector.dtype, vector.stride()),
        None if variance is None else (variance.dtype, variance.stride()),
        z is None, channel_dims, dims, p, maxima.dtype, x.device,
    )  # fmt: skip


class Plan(NamedTuple):
    """How tensors of some shapes are measured."""

    rows: int
    x_size: int
    z_size: int
    power: int
    form: int
    inner: int
    """How many entries of an instance of z in a row have the same channel."""
    channels: int
    is_dense: bool
    """Whether instances, and the entries of each, follow one another without gaps."""
    grid: tuple[int, int, int]
    parts: int
    numbers: tuple[int, ...]
    """What the kernel takes after the layer's index."""
    constants: tuple[int, ...]
    warps: int
    dtypes: tuple[Any, ...]
    copies: tuple[bool, bool, bool]
    """Whether x, z and the vectors are made contiguous, in a layout that the kernel cannot read."""


_plans: dict[Hashable, Plan | str] = {}
"""Plans, or why there is none."""


def remember(plans: dict[Any, Any], key: Any, plan: Any) -> Any:
    """Keep a plan in the place of the oldest one if there are too many."""
    if len(plans) >= MAX_PLANS:
        plans.pop(next(iter(plans)), None)  # another thread may have done so
    plans[key] = plan
    return plan


def plan_for(
    x_shape: torch.Size, x_stride: Sequence[int], x_dtype: torch.dtype,
    z_shape: torch.Size, z_stride: Sequence[int], z_dtype: torch.dtype,
    vector: tuple[torch.dtype, Sequence[int]] | None, variance: tuple[torch.dtype, Sequence[int]] | None,
    is_norm: bool, channel_dims: int, dims: int, p: float, maxima_dtype: torch.dtype, device: torch.device,
) -> Plan | str:  # fmt: skip
    """Plan the launch for tensors like these, or return why the kernel cannot measure them."""
    x_outer, z_outer = len(x_shape) - dims, len(z_shape) - dims
    x_size, z_size = math.prod(x_shape[x_outer:]), math.prod(z_shape[z_outer:])
    rows, longest = math.prod(x_shape[:x_outer]), max(x_size, z_size)
    dtypes = {x_dtype, z_dtype, *[given[0] for given in (vector, variance) if given is not None]}
    reasons = {
        "Triton is not installed": not HAS_TRITON,
        f"{device.type} is no GPU that Triton is used on": device.type != "cuda",
        f"the kernels know p = 1, 2 and inf, not {p:g}": p not in POWERS,
        "the kernels know float32, bfloat16 and float16 only": not dtypes <= DTYPES or maxima_dtype != torch.float32,
        "input and output differ in the number of instances": rows != math.prod(z_shape[:z_outer]),
        "there is nothing to measure": not min(rows, x_size, z_size),
        f"an instance has more than {LARGEST_INSTANCE} entries": longest > LARGEST_INSTANCE,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return reason
    if error := compile_error(device):
        return error

    # Instances, numbered alike in x and z; and the entries of one, in the order in which they lie in memory.
    copies_x = copies_z = False
    lows_and_uppers = _instances(x_shape[:x_outer], x_stride, z_shape[:z_outer], z_stride)
    x_inner, z_inner = _entries(x_shape, x_stride, x_outer), _entries(z_shape, z_stride, z_outer)
    if lows_and_uppers is None or max(len(x_inner), len(z_inner)) > LEVELS:
        copies_x, copies_z = True, True
        x_stride, z_stride = _contiguous(x_shape), _contiguous(z_shape)
        lows_and_uppers = _instances((rows,), (x_size,), (rows,), (z_size,))
        x_inner, z_inner = [(x_size, 1)], [(z_size, 1)]
    assert lows_and_uppers is not None
    (lows, x_low, z_low), (mids, x_mid, z_mid), (highs, x_high, z_high), (tops, x_top, z_top) = lows_and_uppers
    x_kind, z_kind = _kind(x_inner, x_low, lows), _kind(z_inner, z_low, lows)
    axis = len(z_shape) - channel_dims
    inner = math.prod(
        size
        for dim, size in enumerate(z_shape[z_outer:], z_outer)
        if (z_stride[dim], -dim) < (z_stride[axis], -axis) and dim != axis
    )

    is_across = ACROSS in (x_kind, z_kind)
    parts = -(-longest // PART) if longest > LONGEST_WHOLE and not is_across else 0
    is_long = parts > 0 if dims > 1 else longest > LONGEST_ROW
    instances, entries, vec = COLUMNS if is_across else LONG if is_long else SAMPLES if dims > 1 else ROWS
    block = min(power_of_two(longest), entries)
    if instances > 1:
        instances = min(instances * entries // block, power_of_two(lows))  # as many short rows as fill the tile
    channels = z_shape[axis]
    form = PLAIN if vector is None else NORMALISED if is_norm else BIASED
    where = REPEATED if inner == 1 and block % channels == 0 else SPREAD
    if form == PLAIN or channels == z_size:
        where = DIRECT

    numbers = [
        *(x_size, x_top, x_high, x_mid, x_low * (x_kind != ACROSS), *_levels(x_inner)),
        *(z_size, z_top, z_high, z_mid, z_low * (z_kind != ACROSS), *_levels(z_inner)),
    ]
    if max(numbers) >= 1 << 31 or any(sum((n - 1) * s for n, s in levels) >= 1 << 31 for levels in (x_inner, z_inner)):
        return "its entries are too far apart"
    unit = math.gcd(UNIT, lows * is_across, *numbers)
    tiles = tops * highs * mids * -(-lows // instances)
    steps = 1 if parts else min(MOST_STEPS, max(1, tiles // ENOUGH_PROGRAMS))
    copies_vectors = any(given is not None and given[1] != (1,) for given in (vector, variance))
    return Plan(
        rows=rows,
        x_size=x_size,
        z_size=z_size,
        power=POWERS[p],
        form=form,
        inner=inner,
        channels=channels,
        is_dense=x_inner == [(x_size, 1)] and z_inner == [(z_size, 1)] and rows == lows
        and (rows == 1 or (x_low, z_low) == (x_size, z_size)) and not (copies_x or copies_vectors),
        grid=(-(-tiles // steps), max(parts, 1), 1),
        parts=parts,
        numbers=(lows, mids, highs, tiles, steps, parts, *(number // unit for number in numbers)),
        constants=(
            unit, len(x_inner), x_kind, len(z_inner), z_kind, POWERS[p], form, where,
            *((inner, channels) if where != DIRECT else (1, 1)),
            instances, block, min(vec, block), PART, power_of_two(parts) if parts else 0,
        ),
        warps=max(1, block * instances // ENTRIES_PER_WARP),
        dtypes=(x_dtype, z_dtype, vector and vector[0], variance and variance[0]),
        copies=(copies_x, copies_z and not is_norm, copies_vectors),
    )  # fmt: skip


Level = tuple[int, int]
"""How many there are, and the distance from one to the next."""


def _entries(shape: Sequence[int], stride: Sequence[int], outer: int) -> list[Level]:
    """The levels in which the entries of an instance lie, the last one with the smallest distance."""
    found = [(step, -dim, shape[dim]) for dim, step in enumerate(stride) if dim >= outer and shape[dim] != 1]
    levels: list[Level] = []
    for step, _, size in sorted(found, reverse=True):
        if levels and levels[-1][1] == step * size:
            levels[-1] = (levels[-1][0] * size, step)
        else:
            levels.append((size, step))
    return levels or [(1, 1)]


def _instances(
    x_shape: Sequence[int], x_stride: Sequence[int], z_shape: Sequence[int], z_stride: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Number of instances and their distances in x and z, from the innermost level on; None if these are too many."""
    if x_shape != z_shape:
        return None
    found = sorted(
        [(x_step, z_step, size) for x_step, z_step, size in zip(x_stride, z_stride, x_shape, strict=False) if size > 1],
        reverse=True,
    )
    levels: list[tuple[int, int, int]] = []
    for x_step, z_step, size in found:
        if levels and levels[-1][1:] == (x_step * size, z_step * size):
            levels[-1] = (levels[-1][0] * size, x_step, z_step)
        else:
            levels.append((size, x_step, z_step))
    if len(levels) > INSTANCE_LEVELS:
        return None
    return [*reversed(levels), *[(1, 0, 0)] * (INSTANCE_LEVELS - len(levels))]


def _kind(levels: list[Level], low: int, lows: int) -> int:
    """Which entries lie side by side."""
    if levels[-1][1] == 1:
        return ALONG
    return ACROSS if low == 1 and lows > 1 else APART


def _levels(levels: list[Level]) -> tuple[int, ...]:
    """The lengths of the last two of three levels, and the distances in all; 0 where the kernel does not use them."""
    missing = [(0, 0)] * (LEVELS - len(levels))
    (_, s0), (a, s1), (b, s2) = missing + levels
    return a * (len(levels) == 3), b * (len(levels) > 1), s0, s1, s2 * (s2 != 1)


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def launch(
    plan: Plan, x: Tensor, z: Tensor, vector: Tensor | None, variance: Tensor | None, eps: float,
    maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int,
) -> str:  # fmt: skip
    """Launch the kernel, or return why these tensors do not fit it."""
    if type(x) is not Tensor:
        return f"its input is a {type(x).__name__}"
    if maxima.device != x.device:
        return "the model lies on several devices"
    device = x.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return launch(plan, x, z, vector, variance, eps, maxima, dropped, resting, slot)
    copies_x, copies_z, copies_vectors = plan.copies
    if copies_x or copies_z:
        x, z = x.contiguous() if copies_x else x, z.contiguous() if copies_z else z
    if copies_vectors:
        vector, variance = (None if one is None else one.contiguous() for one in (vector, variance))
    # What is not there is not read, but there must be a pointer.
    vector = maxima if vector is None else vector
    variance = vector if variance is None else variance
    workspace = maxima.new_zeros(plan.grid[0] * (2 * plan.parts + 1)) if plan.parts else maxima
    tensors = x, z, vector, variance, workspace, maxima, dropped, resting
    pointers = [tensor.data_ptr() for tensor in tensors]
    is_odd = bool((pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15)
    kernel = _kernel(plan.constants, plan.dtypes, plan.warps)
    kernel(device, plan.grid, tensors, None if is_odd else pointers, eps, slot, *plan.numbers)
    return ""


class Kernel:
    """A kernel with its constants, launched directly once it is compiled."""

    def __init__(self, kernel: Any, constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.constants, self.warps = kernel, constants, warps
        self.direct: Callable[..., None] | None = None

    def __call__(
        self, device: int, grid: tuple[int, int, int], tensors: Sequence[Any], pointers: Sequence[Any] | None,
        *numbers: float,
    ) -> None:  # fmt: skip
        """Launch on the current stream of the device; the pointers are the tensors', in tuples where those are.

        None if tensors are not aligned: then Triton's dispatcher finds another compiled kernel.
        """
        if self.direct is not None and pointers is not None:
            self.direct(device, grid, *pointers, *numbers, *self.constants)
            return
        compiled = self.kernel[grid](*tensors, *numbers, *self.constants, num_warps=self.warps)
        if pointers is not None:
            self.direct = direct_launch(compiled)


@cache
def _kernel(constants: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], warps: int) -> Kernel:
    """One for all layers that differ in sizes alone; ``dtypes`` tells their compiled code apart."""
    from .triton_gains import gains_kernel

    return Kernel(gains_kernel, constants, warps)


@cache
def compile_error(device: torch.device) -> str:
    """Say why Triton cannot compile for this GPU, which is tried once; return nothing if it can."""
    try:
        import triton.language as tl

        from .triton_project import project_kernel

        with torch.cuda.device(device):
            one, zeros = torch.ones(1, device=device), torch.zeros(3, dtype=torch.int64, device=device)
            project_kernel[1, 1, 1](
                zeros,
                one,
                one,
                zeros,
                one,
                one,
                zeros,
                zeros,
                zeros,
                1,
                1,
                0,
                tl.float32,
                1,
                16,
                16,
                1,
                True,
                num_warps=4,
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


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
