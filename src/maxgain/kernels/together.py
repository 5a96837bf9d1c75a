"""Measuring several layers in one launch: a small layer is measured in less time than its launch takes.

Compiled code asks for that: ``merging`` finds what it measures soon after one another. What is fixed for layers of some
shapes is worked out once, as such code is run by the host too if it is not captured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import itemgetter, or_
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
STEPS = 2
"""How many tiles of rows a program does if there are many: it looks for its layer once."""
ENOUGH_PROGRAMS = 8192
"""Some five times what an H200 runs at a time: with fewer, many wait for the last ones."""
ALIGNED = 16
"""Sizes are multiples of this, as the compiled kernel takes them to be."""


class Tensors(NamedTuple):
    """Those of all layers, each once."""

    activations: Sequence[Tensor]
    """Inputs and outputs."""
    vectors: Sequence[Tensor]
    """An entry for each channel."""


class Layer(NamedTuple):
    """What is fixed of a layer that is measured: see ``Part``. Of its tensors, where they are among ``Tensors``."""

    position: int
    """Among all layers of the constraint."""
    form: str
    x: int
    z: int | None
    vector: int | None
    variance: int | None
    eps: float
    channel_dims: int
    instance_dims: int

    def part(self, tensors: Tensors) -> Part:
        """The layer with its tensors."""
        activations, vectors = tensors
        return Part(
            self.form,
            activations[self.x],
            None if self.z is None else activations[self.z],
            None if self.vector is None else vectors[self.vector],
            None if self.variance is None else vectors[self.variance],
            self.eps,
            self.channel_dims,
        )


def described(layers: Sequence[Layer]) -> str:
    """As one text, which an operator is given in less time than lists, and which plans are found by."""
    return json.dumps(layers)


def measure_together(
    maxima: Tensor, dropped: Tensor, activations: Sequence[Tensor], vectors: Sequence[Tensor], layers: str, place: str,
    p: float,
) -> None:  # fmt: skip
    """As ``measure`` for each of the layers, in as few launches as there can be.

    ``place`` is the name of a place in compiled code that is given tensors of the same shapes, layouts and types in
    every call, with all else the same; or nothing, where they may differ, so that they have to be looked at.
    """
    tensors = Tensors(activations, vectors)
    key: tuple[Any, ...] = place, maxima.device
    if not place:
        key = (
            layers,
            p,
            maxima.device,
            maxima.dtype,
            *[(one.shape, one.stride(), one.dtype) for one in activations],
            *[(one.dtype, one.is_contiguous()) for one in vectors],
        )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= measuring.MOST_PLANS:
            _plans.pop(next(iter(_plans)), None)  # another thread may have done so
        plan = _plans[key] = _plan([Layer(*layer) for layer in json.loads(layers)], tensors, p, maxima)
    alone = plan.alone
    if plan.launches and not _launch(plan, maxima, dropped, tensors):
        alone = [*alone, *[layer for launch in plan.launches for layer in launch.layers]]
    for layer in alone:
        measure(maxima, dropped, layer.position, layer.part(tensors), layer.instance_dims, p)


_plans: dict[Any, _Plan] = {}


def _launch(plan: _Plan, maxima: Tensor, dropped: Tensor, tensors: Tensors) -> bool:
    """Whether the tensors fit the kernels, which were launched then."""
    device = maxima.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _launch(plan, maxima, dropped, tensors)
    given = [*tensors.activations, *tensors.vectors, maxima]  # the last one stands for what is not there
    pointers = [one.data_ptr() for one in given]
    if reduce(or_, pointers) & 15:
        return False
    # Counters among them begin at zero; a launch that has no use for room is given something all the same.
    room = maxima.new_zeros(plan.room) if plan.room else maxima
    for launch in plan.launches:
        launch(device, (room, maxima, dropped), given, pointers)
    return True


class _Kind(NamedTuple):
    """What layers must have in common to share a launch."""

    is_row: bool
    tile: tuple[int, int, int]
    dtypes: tuple[torch.dtype, ...]
    eps: float


class _Plan(NamedTuple):
    """How some layers are measured."""

    launches: list[_Launch]
    alone: list[Layer]
    """Those that are in none of the launches, and measured by themselves."""
    room: int
    """How many numbers the launches write down meanwhile."""


def _plan(layers: Sequence[Layer], tensors: Tensors, p: float, maxima: Tensor) -> _Plan:
    alike: dict[_Kind, list[tuple[Layer, Plan]]] = {}
    alone = []
    usual_eps = next((layer.eps for layer in layers if layer.form == "batch_norm"), 0.0)
    for layer in layers:
        part, is_row = layer.part(tensors), layer.instance_dims == 1
        z = part.x if part.z is None else part.z
        plan = plan_for(key_of(part.x, z, part, layer.instance_dims, p, maxima))
        if plan is None or not _fits(plan, is_row):
            alone.append(layer)
            continue
        tile = measuring.ROWS if is_row and max(plan.x_size, plan.z_size) <= measuring.LONGEST_ROW else LONG
        dtypes = part.x.dtype, z.dtype, _dtype(part.vector), _dtype(part.variance)
        eps = float(part.eps if part.form == "batch_norm" else usual_eps)
        alike.setdefault(_Kind(is_row, tile, dtypes, eps), []).append((layer, plan))
    launches: list[_Launch] = []
    room = 0
    for kind, members in alike.items():
        for start in range(0, len(members), LAYERS):
            some = members[start : start + LAYERS]
            if len(some) > 1 and measuring.compiles(maxima.device):
                launches.append(_Launch(some, kind, len(tensors.activations), room))
                room += launches[-1].room
            else:
                alone += [layer for layer, _ in some]
    return _Plan(launches, alone, room)


def _fits(plan: Plan, is_row: bool) -> bool:
    if plan.x_size % ALIGNED or plan.z_size % ALIGNED or (plan.x_step, plan.z_step) != (plan.x_size, plan.z_size):
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


class _Launch:
    """Measures some of the layers."""

    def __init__(self, members: Sequence[tuple[Layer, Plan]], kind: _Kind, activations: int, first: int) -> None:
        """``first`` is where its own part begins of the room for what is written down."""
        from .triton_gains import gains_of_layers_kernel

        self.layers = [layer for layer, _ in members]
        plans = [plan for _, plan in members]
        places = (
            [layer.x for layer in self.layers],
            [layer.x if layer.z is None else layer.z for layer in self.layers],
            [-1 if layer.vector is None else activations + layer.vector for layer in self.layers],
            [-1 if layer.variance is None else activations + layer.variance for layer in self.layers],
        )
        self.columns = [itemgetter(*_filled(column)) for column in places]
        instances, block, _ = kind.tile
        parts = [1 if kind.is_row else -(-max(plan.x_size, plan.z_size) // PART) for plan in plans]
        tiles = [-(-plan.rows // instances) * of_each for plan, of_each in zip(plans, parts, strict=True)]
        steps = STEPS if kind.is_row and sum(tiles) >= STEPS * ENOUGH_PROGRAMS else 1
        *begins, programs = accumulate((-(-count // steps) for count in tiles), initial=0)
        self.room = 3 * programs if max(parts) > 1 else 0  # a sum of x, one of Wx, and a counter for each
        constants = (
            kind.eps,
            first,
            _not_told_apart([4 * layer.position + plan.form for layer, plan in members]),
            _not_told_apart(begins, programs),
            _not_told_apart([plan.rows for plan in plans]),
            _filled([plan.x_size for plan in plans]),
            _filled([plan.z_size for plan in plans]),
            _filled([plan.channels or plan.z_size for plan in plans]),
            plans[0].power,
            measuring.DIRECT if kind.is_row else measuring.REPEATED,
            *kind.tile,
            PART,
            MOST_PARTS if self.room else 0,
            steps,
        )
        warps = instances * block // ENTRIES_PER_WARP
        self.measuring = Kernel(gains_of_layers_kernel, (programs, 1, 1), constants, warps)

    def __call__(
        self, device: int, written: tuple[Tensor, ...], tensors: Sequence[Tensor], pointers: Sequence[int]
    ) -> None:
        """With what is written to, and all tensors, at the end one for what is not there, and where they lie."""
        self.measuring(
            device,
            (*[column(tensors) for column in self.columns], *written),
            (*[column(pointers) for column in self.columns], *[one.data_ptr() for one in written]),
        )
