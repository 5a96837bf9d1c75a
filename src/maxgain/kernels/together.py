"""Measuring several layers in two launches: a small layer is measured in less time than its launch takes.

The first adds up the powers of entries, in parts of the instances; the second makes gains and maxima of the sums.
Compiled code asks for that: ``merging`` finds what it measures soon after one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import measuring
from .measuring import ENTRIES_PER_WARP, PART, PARTS, PLAIN, Kernel, Part, Plan, key_of, measure, plan_for

LAYERS = 16
"""That one launch takes at most."""
SUMMED_ROWS = (64, 64, 8)
"""The tile of rows whose sums are known: they are not read but where these over- or underflowed."""
MOST_PARTS = 64
"""Of one instance."""
ALIGNED = 16
"""Sizes are multiples of this, as the compiled kernel takes them to be."""


class Layers(NamedTuple):
    """What is to be measured, an entry per layer: see ``Part``."""

    indices: Sequence[int]
    forms: Sequence[str]
    x: Sequence[Tensor]
    z: Sequence[Tensor | None]
    vector: Sequence[Tensor | None]
    variance: Sequence[Tensor | None]
    eps: Sequence[float]
    channel_dims: Sequence[int]
    instance_dims: Sequence[int]
    x_sums: Sequence[Tensor | None]
    """The sums of powers of every row of x, where the compiled code has added them up on its way."""
    z_sums: Sequence[Tensor | None]
    """The same of Wx."""


def measure_together(maxima: Tensor, dropped: Tensor, *columns: Any) -> None:
    """As ``measure`` for each of the layers, in as few launches as there can be."""
    layers, p = Layers(*columns[:-1]), columns[-1]
    parts = [Part(*rest) for rest in zip(*layers[1:8], strict=True)]
    keys = [
        key_of(part.x, part.x if part.z is None else part.z, part, dims, p, maxima)
        for part, dims in zip(parts, layers.instance_dims, strict=True)
    ]
    are_summed = [sums is not None and sums.is_contiguous() for sums in (*layers.x_sums, *layers.z_sums)]
    known = (*layers.indices, *layers.eps, *are_summed, *keys)
    launches = _launches.get(known)
    if launches is None:
        launches = _launches[known] = _launchers(layers, keys) if len(_launches) < measuring.MOST_PLANS else []
    alone = set(range(len(parts)))
    for launch in launches:
        if launch(layers, maxima, dropped):
            alone -= {*launch.members}
    for member in alone:
        measure(maxima, dropped, layers.indices[member], parts[member], layers.instance_dims[member], p)


_launches: dict[Any, list[_Launch]] = {}


def _launchers(layers: Layers, keys: Sequence[Any]) -> list[_Launch]:
    """Which layers are launched together, and how; a layer that is in none of them is measured by itself."""
    alike: dict[Any, list[int]] = {}
    plans: dict[int, Plan] = {}
    for member, key in enumerate(keys):
        plan, is_row = plan_for(key), layers.instance_dims[member] == 1
        if plan is not None and _fits(plan, is_row):
            plans[member] = plan
            is_long = is_row and max(plan.x_size, plan.z_size) > measuring.LONGEST_ROW
            dtypes = tuple(_dtype(tensors[member]) for tensors in layers[2:6])
            alike.setdefault((is_row, is_long, dtypes), []).append(member)
    return [
        _Launch(layers, members, [plans[member] for member in members], is_row, is_long)
        for (is_row, is_long, _), all_members in alike.items()
        for start in range(0, len(all_members), LAYERS)
        if len(members := all_members[start : start + LAYERS]) > 1 or layers.x_sums[members[0]] is not None
        if measuring.compiles(keys[0][-1])
    ]


def _fits(plan: Plan, is_row: bool) -> bool:
    if plan.x_size % ALIGNED or plan.z_size % ALIGNED:
        return False
    if is_row:
        return True
    channels = plan.channels or plan.z_size
    return max(plan.x_size, plan.z_size) <= MOST_PARTS * PART and (
        plan.form == PLAIN or (plan.inner == 1 and channels % ALIGNED == 0 and PARTS[1] % channels == 0)
    )


def _dtype(tensor: Tensor | None) -> torch.dtype:
    return torch.float32 if tensor is None else tensor.dtype


def _filled(values: Sequence[Any], last: Any = None) -> tuple[Any, ...]:
    """As many as the kernel takes, of which no program reads those at the end."""
    return *values, *[values[0] if last is None else last] * (LAYERS - len(values))


def _begins(programs: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The first program of every layer, and how many there are in all."""
    *begins, total = accumulate(programs, initial=0)
    return _filled(begins, total), total


class _Launch:
    """Measures some of the layers; it says no to tensors that the kernels do not fit."""

    def __init__(
        self, layers: Layers, members: Sequence[int], plans: Sequence[Plan], is_row: bool, is_long: bool
    ) -> None:
        from .triton_gains import gains_of_layers_kernel, sums_of_layers_kernel

        self.members = members
        x_known = [layers.x_sums[member] is not None for member in members]
        z_known = [layers.z_sums[member] is not None for member in members]
        # What is known already need not be read: it has no entries.
        x_sizes = [0 if known else plan.x_size for plan, known in zip(plans, x_known, strict=True)]
        z_sizes = [0 if known else plan.z_size for plan, known in zip(plans, z_known, strict=True)]
        rows = [plan.rows for plan in plans]
        parts = [1 if is_row else -(-max(plan.x_size, plan.z_size) // PART) for plan in plans]
        sums = [count * of_each for count, of_each in zip(rows, parts, strict=True)]
        *firsts, self.all_sums = accumulate((2 * count for count in sums), initial=0)
        self.firsts = firsts, [first + count for first, count in zip(firsts, sums, strict=True)]
        """Where the sums of every layer begin: those of x, and those of Wx."""
        given = (
            _filled([0 if plan.form == PLAIN else plan.z_size for plan in plans]),
            _filled([plan.channels or plan.z_size for plan in plans]),
            _filled([int(plan.form == measuring.FORMS["batch_norm"]) for plan in plans]),
            plans[0].power,
            measuring.DIRECT if is_row else measuring.REPEATED,
        )
        eps = _filled([float(layers.eps[member]) for member in members])

        tile = PARTS if not is_row else measuring.LONG_ROWS if is_long else measuring.ROWS
        tiles = [
            (-(-plan.rows // tile[0]) * of_each if x_size or z_size else 0)
            for plan, of_each, x_size, z_size in zip(plans, parts, x_sizes, z_sizes, strict=True)
        ]
        begins, programs = _begins(tiles)
        sizes = _filled(x_sizes), _filled(z_sizes)
        to_sum = (eps, begins, _filled(firsts), _filled(rows), _filled(parts), *sizes, *given, *tile)
        self.summing = _kernel(sums_of_layers_kernel, programs, (*to_sum, 1 << 30 if is_row else PART), tile)
        self.has_to_sum = programs > 0

        tile = SUMMED_ROWS if is_row else PARTS
        begins, programs = _begins([-(-plan.rows // tile[0]) for plan in plans])
        sizes = _filled([plan.x_size for plan in plans]), _filled([plan.z_size for plan in plans])
        x_parts = [1 if known else of_each for known, of_each in zip(x_known, parts, strict=True)]
        z_parts = [1 if known else of_each for known, of_each in zip(z_known, parts, strict=True)]
        indices = _filled([layers.indices[member] for member in members])
        to_measure = (eps, indices, begins, _filled(rows), _filled(x_parts), _filled(z_parts), *sizes, *given, *tile)
        self.measuring = _kernel(gains_of_layers_kernel, programs, (*to_measure, 1 if is_row else MOST_PARTS), tile)

    def __call__(self, layers: Layers, maxima: Tensor, dropped: Tensor) -> bool:
        device = maxima.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(layers, maxima, dropped)
        columns: Any = (*layers[2:6], *layers[9:])
        x, z, vector, variance, x_sums, z_sums = ([column[member] for member in self.members] for column in columns)
        # What is not read needs a pointer all the same.
        tensors = (
            _filled(x),
            _filled([other if one is None else one for one, other in zip(z, x, strict=True)]),
            _filled([maxima if one is None else one for one in vector]),
            _filled([maxima if one is None else one for one in variance]),
        )
        pointers = tuple(tuple(tensor.data_ptr() for tensor in column) for column in tensors)
        if any(pointer & 15 for column in pointers for pointer in column):
            return False
        sums = maxima.new_empty(self.all_sums)
        if self.has_to_sum:
            self.summing(device, (*tensors, sums), (*pointers, sums.data_ptr()))
        places = [list(zip(x_sums, self.firsts[0], strict=True)), list(zip(z_sums, self.firsts[1], strict=True))]
        summed: list[Any] = []
        if self.measuring.direct is None:
            summed = [_filled([sums[first:] if one is None else one for one, first in place]) for place in places]
        begin, step = sums.data_ptr(), sums.element_size()
        summed_pointers = [
            _filled([begin + step * first if one is None else one.data_ptr() for one, first in place])
            for place in places
        ]
        self.measuring(
            device,
            (*tensors, *summed, maxima, dropped),
            (*pointers, *summed_pointers, maxima.data_ptr(), dropped.data_ptr()),
        )
        return True


def _kernel(kernel: Any, programs: int, constants: tuple[Any, ...], tile: tuple[int, int, int]) -> Kernel:
    return Kernel(kernel, (programs, 1, 1), constants, tile[0] * tile[1] // ENTRIES_PER_WARP)
