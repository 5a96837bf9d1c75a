"""Measure several layers in one launch: a small layer is measured in less time than its launch takes.

Compiled code calls this where ``merging`` found measurements soon after one another. Launches are planned once for
layers of some shapes, as the host runs such code too if it is not captured.
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
from .measuring import ENOUGH_PROGRAMS, ENTRIES_PER_WARP, LONG, MOST_STEPS, PART, PLAIN, Kernel, Plan, key_of, plan_for

LAYERS = 16
"""At most in one launch."""
MOST_PARTS = 64
"""Of one instance, at most. They are summed in the same launch, so that it pays sooner than for a single layer."""
ALIGNED = 16
"""Sizes are multiples of this, as the compiled kernel takes them to be."""


Tensors = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Inputs and outputs of all layers, and vectors with an entry for each channel, each once."""


class Layer(NamedTuple):
    """What ``maxgain::record`` takes of a layer. Of its tensors, where they are in the lists."""

    slot: int
    x: int
    z: int | None
    vector: int | None
    variance: int | None
    eps: float
    channel_dims: int
    dims: int

    def tensors(
        self, activations: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return x, z, vector and variance."""
        z = None if self.z is None else activations[self.z]
        vector, variance = (None if at is None else vectors[at] for at in (self.vector, self.variance))
        return activations[self.x], z, vector, variance


def serialize(layers: Sequence[Layer]) -> str:
    """Return one text, which is passed to an operator in less time than lists, and which is a key of plans."""
    return json.dumps(layers)


def record_layers(
    maxima: Tensor, dropped: Tensor, resting: Tensor, activations: Sequence[Tensor], vectors: Sequence[Tensor],
    layers: str, call_site: str, p: float,
) -> None:  # fmt: skip
    """As ``record`` for each of the layers, in as few launches as there can be.

    ``call_site`` names a place in compiled code that is given tensors of the same shapes, layouts and types in every
    call, with all else the same; '' where they may differ, so that plans are found by them.
    """
    tensors = activations, vectors
    key: tuple[Any, ...] = call_site, maxima.device
    if not call_site:
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
        plan = _plan([Layer(*layer) for layer in json.loads(layers)], tensors, p, maxima)
        measuring.remember(_plans, key, plan)
    alone = plan.alone
    if plan.launches and not _launch(plan, (maxima, dropped, resting), tensors):
        alone = [*alone, *[layer for launch in plan.launches for layer in launch.layers]]
    for layer in alone:
        given = layer.tensors(*tensors)
        torch.ops.maxgain.record(
            maxima, dropped, resting, layer.slot, *given, layer.eps, layer.channel_dims, layer.dims, p
        )


_plans: dict[Any, _Plan] = {}


def _launch(plan: _Plan, written: tuple[Tensor, Tensor, Tensor], tensors: Tensors) -> bool:
    """Launch the kernels if the tensors fit them, and return whether they do."""
    maxima = written[0]
    device = maxima.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _launch(plan, written, tensors)
    given = [*tensors[0], *tensors[1], maxima]  # the last one stands for what is not there
    pointers = [one.data_ptr() for one in given]
    if reduce(or_, pointers) & 15:
        return False
    # Its counters begin at zero; a launch that needs no workspace is given some pointer all the same.
    workspace = maxima.new_zeros(plan.workspace) if plan.workspace else maxima
    for launch in plan.launches:
        launch(device, (workspace, *written), given, pointers)
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
    workspace: int
    """How many numbers the launches write down meanwhile."""


def _plan(layers: Sequence[Layer], tensors: Tensors, p: float, maxima: Tensor) -> _Plan:
    alike: dict[_Kind, list[tuple[Layer, Plan]]] = {}
    alone = []
    usual_eps = next((layer.eps for layer in layers if layer.z is None), 0.0)
    for layer in layers:
        given, is_row = layer.tensors(*tensors), layer.dims == 1
        plan = plan_for(*key_of(*given, layer.channel_dims, layer.dims, p, maxima))
        if isinstance(plan, str) or not _fits(plan, is_row):
            alone.append(layer)
            continue
        tile = measuring.ROWS if is_row and max(plan.x_size, plan.z_size) <= measuring.LONGEST_ROW else LONG
        dtypes = tuple([one or torch.float32 for one in plan.dtypes])
        eps = float(layer.eps if layer.z is None else usual_eps)
        alike.setdefault(_Kind(is_row, tile, dtypes, eps), []).append((layer, plan))
    launches: list[_Launch] = []
    workspace = 0
    for kind, members in alike.items():
        for start in range(0, len(members), LAYERS):
            some = members[start : start + LAYERS]
            if len(some) > 1 and not measuring.compile_error(maxima.device):
                launches.append(_Launch(some, kind, len(tensors[0]), workspace))
                workspace += launches[-1].workspace
            else:
                alone += [layer for layer, _ in some]
    return _Plan(launches, alone, workspace)


def _fits(plan: Plan, is_row: bool) -> bool:
    if not plan.is_dense or plan.x_size % ALIGNED or plan.z_size % ALIGNED:
        return False
    if is_row:
        return plan.form == PLAIN or plan.channels == plan.z_size
    return max(plan.x_size, plan.z_size) <= MOST_PARTS * PART and (
        plan.form == PLAIN or (plan.inner == 1 and plan.channels % ALIGNED == 0 and LONG[1] % plan.channels == 0)
    )


def _filled(values: Sequence[Any], last: Any = None) -> tuple[Any, ...]:
    """Fill up to as many as the kernel takes, of which no program reads those at the end."""
    return *values, *[values[0] if last is None else last] * (LAYERS - len(values))


def _avoid_specialization(numbers: Sequence[int], last: int | None = None) -> tuple[int, ...]:
    """As ``_filled``, of numbers for which Triton is not to compile another kernel: see ``triton_gains``."""
    return tuple([2 * number + 3 for number in _filled(numbers, last)])


class _Launch:
    """Measures some of the layers."""

    def __init__(self, members: Sequence[tuple[Layer, Plan]], kind: _Kind, activations: int, first: int) -> None:
        """``first`` is where its own part of the workspace begins."""
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
        steps = 1 if not kind.is_row or sum(tiles) < 2 * ENOUGH_PROGRAMS else 2  # it looks for its layer once
        while 1 < steps < MOST_STEPS and sum(tiles) >= 4 * steps * ENOUGH_PROGRAMS:
            steps *= 2
        *begins, programs = accumulate((-(-count // steps) for count in tiles), initial=0)
        self.workspace = 3 * programs if max(parts) > 1 else 0  # a sum of x, one of Wx, and a counter for each
        constants = (
            kind.eps,
            first,
            _avoid_specialization([4 * layer.slot + plan.form for layer, plan in members]),
            _avoid_specialization(begins, programs),
            _avoid_specialization([plan.rows for plan in plans]),
            _filled([plan.x_size for plan in plans]),
            _filled([plan.z_size for plan in plans]),
            _filled([plan.channels for plan in plans]),
            plans[0].power,
            measuring.DIRECT if kind.is_row else measuring.REPEATED,
            *kind.tile,
            PART,
            MOST_PARTS if self.workspace else 0,
            steps,
        )
        warps = instances * block // ENTRIES_PER_WARP
        self.grid = programs, 1, 1
        self.measuring = Kernel(gains_of_layers_kernel, constants, warps)

    def __call__(
        self, device: int, written: tuple[Tensor, ...], tensors: Sequence[Tensor], pointers: Sequence[int]
    ) -> None:
        """Launch, given the tensors that are written, and all others with their pointers, a stand-in at the end."""
        self.measuring(
            device,
            self.grid,
            (*[column(tensors) for column in self.columns], *written),
            (*[column(pointers) for column in self.columns], *[one.data_ptr() for one in written]),
        )
