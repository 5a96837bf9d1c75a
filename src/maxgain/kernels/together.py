"""Measuring several layers in one launch: a small layer is measured in less time than its launch takes.

Compiled code asks for that: ``merging`` finds what it measures soon after one another. What is fixed for layers of some
shapes is worked out once, as such code is run by the host too if it is not captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import measuring
from .measuring import ENTRIES_PER_WARP, LONG, PART, PLAIN, Kernel, Part, Plan, key_of, measure, plan_for

LAYERS = 16
"""That one launch takes at most."""
MOST_PARTS = 64
"""Of one instance. One of more than one part is summed in parts, in the same launch, so that it pays sooner than for a
layer by itself."""
LARGE = 20 << 20
"""Rows of so many bytes, input and output together, are read faster by a launch of their own."""
ALIGNED = 16
"""Sizes are multiples of this, as the compiled kernel takes them to be."""


class Layers(NamedTuple):
    """What is to be measured, an entry per layer: see ``Part``."""

    indices: Sequence[int]
    form: Sequence[str]
    x: Sequence[Tensor]
    z: Sequence[Tensor | None]
    vector: Sequence[Tensor | None]
    variance: Sequence[Tensor | None]
    eps: Sequence[float]
    channel_dims: Sequence[int]
    instance_dims: Sequence[int]

    def parts(self) -> list[Part]:
        """The layers one by one."""
        return [Part(*part) for part in zip(*self[1:-1], strict=True)]


def measure_together(maxima: Tensor, dropped: Tensor, *columns: Any) -> None:
    """As ``measure`` for each of the layers, in as few launches as there can be."""
    layers, p = Layers(*columns[:-1]), columns[-1]
    key = (
        p,
        *layers.indices,
        *layers.eps,
        *layers.instance_dims,
        *[(x.shape, x.stride(), x.dtype) for x in layers.x],
        *[None if z is None else (z.shape, z.stride(), z.dtype) for z in layers.z],
        *[None if vector is None else vector.dtype for vector in layers.vector],
        *[None if variance is None else variance.dtype for variance in layers.variance],
        *layers.channel_dims,
        maxima.device,
        maxima.dtype,
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= measuring.MOST_PLANS:
            _plans.pop(next(iter(_plans)), None)  # another thread may have done so
        plan = _plans[key] = _plan(layers, p, maxima)
    launches, alone = plan
    for launch in launches:
        if not launch(layers, maxima, dropped):
            alone = [*alone, *launch.members]
    if alone:
        parts = layers.parts()
        for member in alone:
            measure(maxima, dropped, layers.indices[member], parts[member], layers.instance_dims[member], p)


_plans: dict[Any, tuple[list[_Launch], Sequence[int]]] = {}


class _Kind(NamedTuple):
    """What layers must have in common to share a launch."""

    is_row: bool
    tile: tuple[int, int, int]
    dtypes: tuple[torch.dtype, ...]


def _plan(layers: Layers, p: float, maxima: Tensor) -> tuple[list[_Launch], Sequence[int]]:
    """The launches, and the layers that are in none of them and measured by themselves."""
    alike: dict[_Kind, list[tuple[int, Plan]]] = {}
    for member, (part, dims) in enumerate(zip(layers.parts(), layers.instance_dims, strict=True)):
        z = part.x if part.z is None else part.z
        plan, is_row = plan_for(key_of(part.x, z, part, dims, p, maxima)), dims == 1
        if plan is None or not _fits(plan, is_row) or (is_row and part.x.nbytes + z.nbytes >= LARGE):
            continue
        longest = max(plan.x_size, plan.z_size)
        tile = measuring.ROWS if is_row and longest <= measuring.LONGEST_ROW else LONG
        dtypes = part.x.dtype, z.dtype, _dtype(part.vector), _dtype(part.variance)
        kind = _Kind(is_row, tile, dtypes)
        alike.setdefault(kind, []).append((member, plan))
    launches = [
        _Launch(layers, dict(members[start : start + LAYERS]), kind)
        for kind, members in alike.items()
        for start in range(0, len(members), LAYERS)
        if len(members[start : start + LAYERS]) > 1 and measuring.compiles(maxima.device)
    ]
    launched = {member for launch in launches for member in launch.members}
    return launches, [member for member in range(len(layers.x)) if member not in launched]


def _fits(plan: Plan, is_row: bool) -> bool:
    if plan.x_size % ALIGNED or plan.z_size % ALIGNED:
        return False
    if is_row:
        return plan.where == measuring.DIRECT
    channels = plan.channels or plan.z_size
    return max(plan.x_size, plan.z_size) <= MOST_PARTS * PART and (
        plan.form == PLAIN or (plan.inner == 1 and channels % ALIGNED == 0 and LONG[1] % channels == 0)
    )


def _dtype(tensor: Tensor | None) -> torch.dtype:
    return torch.float32 if tensor is None else tensor.dtype


def _filled(values: Sequence[Any], last: Any = None) -> tuple[Any, ...]:
    """As many as the kernel takes, of which no program reads those at the end."""
    return *values, *[values[0] if last is None else last] * (LAYERS - len(values))


def _not_told_apart(numbers: Sequence[int], last: int | None = None) -> tuple[int, ...]:
    """As ``_filled``, of numbers for which Triton is not to compile another kernel: see ``triton_gains``."""
    return tuple([2 * number + 3 for number in _filled(numbers, last)])


def _begins(programs: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The first program of every layer, and how many there are in all."""
    *begins, total = accumulate(programs, initial=0)
    return _not_told_apart(begins, total), total


class _Launch:
    """Measures some of the layers; it says no to tensors that the kernels do not fit."""

    def __init__(self, layers: Layers, plans: dict[int, Plan], kind: _Kind) -> None:
        from .triton_gains import gains_of_layers_kernel

        self.members = [*plans]
        rows = [plan.rows for plan in plans.values()]
        parts = [1 if kind.is_row else -(-max(plan.x_size, plan.z_size) // PART) for plan in plans.values()]
        *firsts, self.sums = accumulate(
            (2 * count * of_each if of_each > 1 else 0 for count, of_each in zip(rows, parts, strict=True)), initial=0
        )
        instances, block, _ = kind.tile
        begins, programs = _begins(
            [-(-count // instances) * of_each for count, of_each in zip(rows, parts, strict=True)]
        )
        constants = (
            _filled([float(layers.eps[member]) for member in plans]),
            _not_told_apart([layers.indices[member] for member in plans]),
            begins,
            _not_told_apart(firsts),
            _not_told_apart(rows),
            _not_told_apart(parts),
            _filled([plan.x_size for plan in plans.values()]),
            _filled([plan.z_size for plan in plans.values()]),
            _filled([0 if plan.form == PLAIN else plan.z_size for plan in plans.values()]),
            _filled([plan.channels or plan.z_size for plan in plans.values()]),
            _not_told_apart([int(plan.form == measuring.FORMS["batch_norm"]) for plan in plans.values()]),
            next(iter(plans.values())).power,
            measuring.DIRECT if kind.is_row else measuring.REPEATED,
            *kind.tile,
            measuring.LARGEST_INSTANCE if kind.is_row else PART,
            MOST_PARTS if self.sums else 0,
        )
        warps = instances * block // ENTRIES_PER_WARP
        self.measuring = Kernel(gains_of_layers_kernel, (programs, 1, 1), constants, warps)

    def __call__(self, layers: Layers, maxima: Tensor, dropped: Tensor) -> bool:
        device = maxima.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(layers, maxima, dropped)
        x, z, vector, variance = ([column[member] for member in self.members] for column in layers[2:6])
        # What is not read needs a pointer all the same.
        tensors = (
            _filled(x),
            _filled([other if one is None else one for one, other in zip(z, x, strict=True)]),
            _filled([maxima if one is None else one for one in vector]),
            _filled([maxima if one is None else one for one in variance]),
        )
        pointers = tuple([tuple([tensor.data_ptr() for tensor in column]) for column in tensors])
        if any(pointer & 15 for column in pointers for pointer in column):
            return False
        sums = counts = maxima  # not used if every instance is whole
        if self.sums:
            sums, counts = maxima.new_empty(self.sums), maxima.new_zeros(self.sums, dtype=torch.int32)
        self.measuring(
            device,
            (*tensors, sums, counts, maxima, dropped),
            (*pointers, sums.data_ptr(), counts.data_ptr(), maxima.data_ptr(), dropped.data_ptr()),
        )
        return True
