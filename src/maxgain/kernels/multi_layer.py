"""Measure several layers in one launch: a small layer is measured in less time than its launch takes.

Compiled code calls this where ``merging`` found measurements soon after one another. Launches are planned once for
layers of some shapes, as the host runs such code too if it is not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import measuring
from .measuring import ENOUGH_PROGRAMS, ENTRIES_PER_WARP, LONG, MOST_STEPS, PART, Kernel, Plan, key_of, plan_for

ENTRIES = 16
"""At most in one launch."""
MOST_PARTS = 64
"""Of one instance, at most. They are summed in the same launch, so that it pays sooner than for a single layer."""
LONGEST_PART = 4 * PART
ALIGNED = 16
"""Sizes are multiples of this, as the compiled kernel takes them to be."""
NARROW_ROWS, NARROW = (8, 128, 8), {*range(129), *range(257, 385)}
"""The tile of short rows that would leave much of a wider one empty, and how long they are."""

Tensors = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Inputs and outputs of all layers, and vectors with an entry for each channel, each once."""


class Layer(NamedTuple):
    """What ``record`` takes of a layer. Of its tensors, where they are in the lists; -1 if it has none."""

    slot: int
    x: int
    z: int
    vector: int
    variance: int
    channel_dims: int
    dims: int
    eps: float = 0.0

    def tensors(self, given: Tensors) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return x, z, vector and variance."""
        activations, vectors = given
        z = None if self.z < 0 else activations[self.z]
        vector, variance = (None if at < 0 else vectors[at] for at in (self.vector, self.variance))
        return activations[self.x], z, vector, variance


NUMBERS = len(Layer._fields) - 1


def record_layers(
    maxima: Tensor, dropped: Tensor, resting: Tensor, activations: Sequence[Tensor], vectors: Sequence[Tensor],
    layers: Sequence[int], eps: Sequence[float], p: float,
    *, record: Callable[..., None], is_idle: Callable[[Tensor, Sequence[int]], bool],
) -> None:  # fmt: skip
    """Measure layers in as few launches as there can be; ``record`` measures those that cannot share one.

    ``layers`` has the numbers of each ``Layer`` but for its ε.
    """
    if is_idle(maxima, layers[::NUMBERS]):
        return
    tensors = activations, vectors
    if len(eps) == 1:
        alone = [Layer(*layers)._replace(eps=eps[0])]
    else:
        key = (
            *layers, *eps, p, maxima.device, maxima.dtype,
            *[(one.shape, one.stride(), one.dtype) for one in activations],
            *[(one.dtype, one.is_contiguous()) for one in vectors],
        )  # fmt: skip
        plan = _plans.get(key)
        if plan is None:
            each = [Layer(*layers[at : at + NUMBERS]) for at in range(0, len(layers), NUMBERS)]
            some = [layer._replace(eps=one) for layer, one in zip(each, eps, strict=True)]
            plan = measuring.remember(_plans, key, _plan(some, tensors, p, maxima))
        alone = plan.alone if _launch(plan, (maxima, dropped, resting), tensors) else plan.layers
    for layer in alone:
        given = layer.tensors(tensors)
        record(maxima, dropped, resting, layer.slot, *given, layer.eps, layer.channel_dims, layer.dims, p)


_plans: dict[Any, _Plan] = {}


def _launch(plan: _Plan, written: tuple[Tensor, Tensor, Tensor], tensors: Tensors) -> bool:
    """Launch the kernels if the tensors fit them, and return whether they do."""
    maxima = written[0]
    device = maxima.get_device()
    if not plan.launches:
        return True
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
    """What entries must have in common to share a launch."""

    is_row: bool
    tile: tuple[int, int, int]
    where: int
    dtypes: tuple[torch.dtype, ...]
    eps: float


class _Entry(NamedTuple):
    """A layer, a batch norm, or a convolution with the batch norm that reads its output: z is read once for both."""

    layer: Layer | None
    norm: Layer | None
    plan: Plan

    @property
    def layers(self) -> list[Layer]:
        """Both, or the one that there is."""
        return [layer for layer in (self.layer, self.norm) if layer is not None]

    def places(self, vectors: int) -> tuple[int, ...]:
        """Where x, z, bias, scale and variance are, of which the last begin at ``vectors``; -1 for what is missing."""
        x, z, bias, scale, variance = self.layers[0].x, self.layers[0].x, -1, -1, -1
        if self.layer is not None:
            z, bias = self.layer.z, self.layer.vector
        if self.norm is not None:
            scale, variance = self.norm.vector, self.norm.variance
        return x, z, *(at if at < 0 else vectors + at for at in (bias, scale, variance))

    @property
    def channels(self) -> int:
        """How many there are, or a stand-in where it does not matter."""
        return ALIGNED if self.norm is None and self.plan.form == measuring.PLAIN else self.plan.channels

    @property
    def sizes(self) -> tuple[int, int]:
        """How many entries an instance has in x, and in z; a batch norm that is alone has no x."""
        return self.plan.x_size * (self.layer is not None), self.plan.z_size


class _Plan(NamedTuple):
    """How some layers are measured."""

    layers: list[Layer]
    launches: list[_Launch]
    alone: list[Layer]
    """Those that are in none of the launches, and measured by themselves."""
    workspace: int
    """How many numbers the launches write down meanwhile."""


def _plan(layers: list[Layer], tensors: Tensors, p: float, maxima: Tensor) -> _Plan:
    given = [*tensors[0], *tensors[1], maxima]
    alone = []
    alike: dict[_Kind, list[_Entry]] = {}
    entries = _entries(layers, tensors, p, maxima)
    usual_eps = next((entry.norm.eps for entry in entries if entry.norm), 0.0)
    for entry in entries:
        is_row, longest = entry.layers[0].dims == 1, max(entry.plan.x_size, entry.plan.z_size)
        tile = LONG
        if is_row and longest <= measuring.LONGEST_ROW:
            tile = NARROW_ROWS if longest in NARROW else measuring.ROWS
        where = measuring.DIRECT
        if not is_row:
            where = measuring.SPREAD if LONG[1] % entry.channels else measuring.REPEATED
        eps = float(usual_eps if entry.norm is None else entry.norm.eps)
        dtypes = tuple([given[at].dtype for at in entry.places(len(tensors[0]))])
        alike.setdefault(_Kind(is_row, tile, where, dtypes, eps), []).append(entry)
    launches: list[_Launch] = []
    workspace = 0
    for kind, members in alike.items():
        for start in range(0, len(members), ENTRIES):
            some = members[start : start + ENTRIES]
            measured = [layer for entry in some for layer in entry.layers]
            if len(measured) > 1 and not measuring.compile_error(maxima.device):
                launches.append(_Launch(some, kind, len(tensors[0]), workspace))
                workspace += launches[-1].workspace
            else:
                alone += measured
    shared = {layer for entry in entries for layer in entry.layers}
    return _Plan(layers, launches, [*alone, *[layer for layer in layers if layer not in shared]], workspace)


def _entries(layers: list[Layer], tensors: Tensors, p: float, maxima: Tensor) -> list[_Entry]:
    """The layers that fit into a shared launch, each batch norm beside the layer whose output it reads."""
    plans: dict[Layer, Plan] = {}
    for layer in layers:
        plan = plan_for(*key_of(*layer.tensors(tensors), layer.channel_dims, layer.dims, p, maxima))
        if not isinstance(plan, str) and _fits(plan, layer.dims == 1):
            plans[layer] = plan
    norms = [layer for layer in plans if layer.z < 0]
    entries = []
    for layer in [layer for layer in plans if layer.z >= 0]:
        norm = next((norm for norm in norms if (norm.x, norm.dims) == (layer.z, layer.dims)), None)
        if norm is not None:
            norms.remove(norm)
        entries.append(_Entry(layer, norm, plans[layer]))
    return entries + [_Entry(None, norm, plans[norm]) for norm in norms]


def _fits(plan: Plan, is_row: bool) -> bool:
    if not plan.is_dense or plan.x_size % ALIGNED or plan.z_size % ALIGNED:
        return False
    if is_row:
        return plan.form == measuring.PLAIN or plan.channels == plan.z_size
    return max(plan.x_size, plan.z_size) <= MOST_PARTS * PART and (
        plan.form == measuring.PLAIN or (plan.inner == 1 and plan.channels % ALIGNED == 0)
    )


def _filled(values: Sequence[Any], last: Any = None) -> tuple[Any, ...]:
    """Fill up to as many as the kernel takes, of which no program reads those at the end."""
    return *values, *[values[0] if last is None else last] * (ENTRIES - len(values))


def _avoid_specialization(numbers: Sequence[int], last: int | None = None) -> tuple[int, ...]:
    """As ``_filled``, of numbers for which Triton is not to compile another kernel: see ``triton_gains``."""
    return tuple([2 * number + 3 for number in _filled(numbers, last)])


class _Launch:
    """Measures some of the layers."""

    def __init__(self, entries: Sequence[_Entry], kind: _Kind, activations: int, first: int) -> None:
        """``first`` is where its own part of the workspace begins."""
        from .triton_gains import gains_of_layers_kernel

        places = [entry.places(activations) for entry in entries]
        self.columns = [itemgetter(*_filled(column)) for column in zip(*places, strict=True)]
        plans, sizes = [entry.plan for entry in entries], [entry.sizes for entry in entries]
        instances, block, _ = kind.tile
        # A program looks for its entry once: it does several tiles of rows, or a longer part, where there are many.
        part, steps = PART, 1
        while True:
            parts = [1 if kind.is_row else -(-max(both) // part) for both in sizes]
            tiles = [-(-plan.rows // instances) * of_each for plan, of_each in zip(plans, parts, strict=True)]
            if kind.is_row or part == LONGEST_PART or sum(tiles) < 2 * ENOUGH_PROGRAMS:
                break
            part *= 2
        while kind.is_row and steps < MOST_STEPS and sum(tiles) >= (2 if steps == 1 else 4 * steps) * ENOUGH_PROGRAMS:
            steps *= 2
        *begins, programs = accumulate((-(-count // steps) for count in tiles), initial=0)
        self.workspace = 5 * programs if max(parts) > 1 else 0  # four sums and a counter for each
        slots = [2 * (layer.slot + 1) + (layer.vector >= 0) if layer else 0 for layer, _, _ in entries]
        constants = (
            kind.eps,
            first,
            _avoid_specialization(slots),
            _avoid_specialization([norm.slot + 1 if norm else 0 for _, norm, _ in entries]),
            _avoid_specialization(begins, programs),
            _avoid_specialization([plan.rows for plan in plans]),
            _filled([x_size for x_size, _ in sizes]),
            _filled([z_size for _, z_size in sizes]),
            _filled([entry.channels for entry in entries]),
            plans[0].power,
            kind.where,
            *kind.tile,
            part,
            MOST_PARTS if self.workspace else 0,
            steps,
            any(layer.vector >= 0 for layer, _, _ in entries if layer),
            any(norm for _, norm, _ in entries),
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
