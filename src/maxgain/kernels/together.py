"""Measuring several layers in one launch: a small layer is measured in less time than its launch takes.

Compiled code asks for that: ``merging`` finds what it measures soon after one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import measuring
from .measuring import Kernel, Part, Plan, key_of, measure, plan_for

LAYERS = 8
"""That one launch takes at most."""
SAMPLES, SUMMED_ROWS = (1, 4096, 8), (64, 64, 8)
"""Tiles: of convolutions, smaller than for a single one since there are more programs, and of rows of known sums, which
are not read but where these over- or underflowed."""
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
    """The sums of powers of the entries of every row, where the compiled code has added them up on its way."""
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
    are_summed = [_is_summed(layers, member) for member in range(len(parts))]
    known = (*layers.indices, *layers.eps, *are_summed, *keys)
    launches = _launches.get(known)
    if launches is None:
        launches = _launches[known] = _launchers(layers, keys) if len(_launches) < measuring.MOST_PLANS else {}
    alone = set(range(len(parts)))
    for members, launch in launches.items():
        if launch(layers, maxima, dropped):
            alone -= {*members}
    for member in alone:
        measure(maxima, dropped, layers.indices[member], parts[member], layers.instance_dims[member], p)


Launch = Callable[[Layers, Tensor, Tensor], bool]
_launches: dict[Any, dict[tuple[int, ...], Launch]] = {}


def _launchers(layers: Layers, keys: Sequence[Any]) -> dict[tuple[int, ...], Launch]:
    """Which layers are launched together, and how; a layer that is not among them is measured by itself."""
    alike: dict[Any, list[int]] = {}
    plans: dict[int, Plan] = {}
    for member, key in enumerate(keys):
        plan, is_row = plan_for(key), layers.instance_dims[member] == 1
        if plan is not None and _fits(plan, is_row):
            plans[member] = plan
            is_summed = _is_summed(layers, member)
            dtypes = tuple(_dtype(tensors[member]) for tensors in layers[2:6])
            alike.setdefault((_tile(plan, is_row, is_summed), is_row, is_summed, dtypes), []).append(member)
    return {
        members: _launcher(layers, members, [plans[member] for member in members], *kind)
        for (*kind, _), all_members in alike.items()
        for start in range(0, len(all_members), LAYERS)
        if len(members := tuple(all_members[start : start + LAYERS])) > (0 if kind[2] else 1)
        and measuring.compiles(keys[0][-1])
    }


def _tile(plan: Plan, is_row: bool, is_summed: bool) -> tuple[int, int, int]:
    if not is_row:
        return SAMPLES
    if is_summed:
        return SUMMED_ROWS
    return measuring.ROWS if max(plan.x_size, plan.z_size) <= measuring.LONGEST_ROW else measuring.LONG_ROWS


def _fits(plan: Plan, is_row: bool) -> bool:
    if plan.parts > 0 or plan.x_size % ALIGNED or plan.z_size % ALIGNED:
        return False
    if is_row or plan.form == measuring.PLAIN:
        return True
    channels = plan.channels or plan.z_size
    return plan.inner == 1 and channels % ALIGNED == 0 and SAMPLES[1] % channels == 0


def _is_summed(layers: Layers, member: int) -> bool:
    return all(sums is not None and sums.is_contiguous() for sums in (layers.x_sums[member], layers.z_sums[member]))


def _dtype(tensor: Tensor | None) -> torch.dtype:
    return torch.float32 if tensor is None else tensor.dtype


def _launcher(
    layers: Layers,
    members: Sequence[int],
    plans: Sequence[Plan],
    tile: tuple[int, int, int],
    is_row: bool,
    is_summed: bool,
) -> Launch:
    """A function that launches the kernel for some of the layers; it says no to tensors that it does not fit."""
    from .triton_gains import gains_of_layers_kernel

    instances, block, _ = tile
    *begins, programs = accumulate((-(-plan.rows // instances) for plan in plans), initial=0)

    def filled(values: Sequence[Any], other: Any = None) -> tuple[Any, ...]:
        """As many as the kernel takes, of which no program reads those at the end."""
        return *values, *[values[0] if other is None else other] * (LAYERS - len(values))

    constants = (
        filled([float(layers.eps[member]) for member in members]),
        filled([layers.indices[member] for member in members]),
        filled(begins, programs),
        filled([plan.rows for plan in plans]),
        filled([plan.x_size for plan in plans]),
        filled([plan.z_size for plan in plans]),
        filled([0 if plan.form == measuring.PLAIN else plan.z_size for plan in plans]),
        filled([plan.channels or plan.z_size for plan in plans]),
        filled([int(plan.form == measuring.FORMS["batch_norm"]) for plan in plans]),
        is_summed,
        measuring.DIRECT if is_row else measuring.REPEATED,
        plans[0].power,
        *tile,
    )
    warps = instances * block // measuring.ENTRIES_PER_WARP
    kernel = Kernel(gains_of_layers_kernel, (programs, 1, 1), constants, warps)

    def launch(layers: Layers, maxima: Tensor, dropped: Tensor) -> bool:
        device = maxima.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(layers, maxima, dropped)
        tensors = []
        for column in (layers.x, layers.z, layers.vector, layers.variance, layers.x_sums, layers.z_sums):
            given = [column[member] for member in members]
            if column is layers.z:  # a batch norm has none, and does not read it
                given = [layers.x[member] if z is None else z for member, z in zip(members, given, strict=True)]
            # What is not read needs a pointer all the same.
            tensors.append(filled([maxima if tensor is None else tensor for tensor in given]))
        pointers = [tuple([tensor.data_ptr() for tensor in column]) for column in tensors]
        if any(pointer & 15 for column in pointers for pointer in column):
            return False
        kernel(device, (*tensors, maxima, dropped), (*pointers, maxima.data_ptr(), dropped.data_ptr()))
        return True

    return launch
