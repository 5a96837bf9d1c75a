"""Which layers share a launch of the kernel that measures, and what each launch is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layouts import ACROSS, Layout, lay_out

POWERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""The norms of the kernel, and their numbers there."""
DIRECT, REPEATED, SPREAD = 0, 1, 2
"""The channel of a position in an instance is the position, or its remainder by the number of channels, which is the
same in every tile, or that remainder where it is not, or the position divided by ``inner`` if this is above 1."""
COLUMNS = 32
"""Of the kernel's table."""
NEVER = (1 << 31) - 1
"""Where the programs of an entry begin that there is not."""
SAMPLES, LONG, ROWS, COLUMN_WISE = (1, 8192, 1), (1, 2048, 8), (4, 256, 4), (32, 64, 1)
"""Tiles: instances per program, entries of each at once, and entries that a thread adds up before it keeps anything.

Dense layers have many short instances, convolutions few long ones. ``SAMPLES`` is for a convolution that has a launch
of its own, ``LONG`` for all others, for instances in parts and for rows beyond ``LONGEST_ROW``, and ``COLUMN_WISE`` for
instances of which neighbours lie side by side."""
LONGEST_ROW = 4096
ENTRIES_PER_WARP = 512
LONGEST_WHOLE, PART, LONGEST_PART = 1 << 16, 1 << 14, 1 << 16
"""A longer instance is summed in parts of this size: a few large images are too few programs for a GPU. Convolutions
that share a launch are cut sooner, and into longer parts where there are many."""
UNIT = 16
"""As many entries a thread may read at once, if all sizes and distances are multiples of it."""
MAX_ENTRIES = 16
"""In one launch."""
ENOUGH_PROGRAMS, MOST_STEPS = 8192, 8
"""Some five times what an H200 runs at a time. A program does several tiles if there are more, up to so many."""


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

    def tensors(self, activations: Sequence[Any], vectors: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Return x, z, vector and variance."""
        z = None if self.z < 0 else activations[self.z]
        vector, variance = (None if at < 0 else vectors[at] for at in (self.vector, self.variance))
        return activations[self.x], z, vector, variance


NUMBERS = len(Layer._fields) - 1


class Entry(NamedTuple):
    """A layer, a batch norm, or a layer with the batch norm that reads its output: z is read once for both."""

    layer: Layer | None
    norm: Layer | None
    layout: Layout

    @property
    def longest(self) -> int:
        """How many entries the larger of both instances has."""
        return max(self.layout.x_size, self.layout.z_size)

    @property
    def is_biased(self) -> bool:
        """Whether a bias is to be taken off."""
        return self.layer is not None and self.layer.vector >= 0

    def tiles(self, instances: int) -> int:
        """Return how many tiles of so many instances there are."""
        (lows, *_), *others = self.layout.instances
        return -(-lows // instances) * math.prod(count for count, *_ in others)

    def places(self, vectors: int) -> tuple[int, ...]:
        """Where x, z, bias, scale and variance are, of which the last begin at ``vectors``; -1 for what is missing."""
        x = z = bias = scale = variance = -1
        if self.norm is not None:
            x, z, scale, variance = self.norm.x, self.norm.x, self.norm.vector, self.norm.variance
        if self.layer is not None:
            x, z, bias = self.layer.x, self.layer.z, self.layer.vector
        return x, z, *(at if at < 0 else vectors + at for at in (bias, scale, variance))

    def numbers(self, where: int) -> list[int]:
        """Return the sizes and distances that the kernel reads, which come in a unit."""
        return [self.layout.channels if where != DIRECT and self.layout.inner == 1 else 0, *self.layout.numbers()]

    def row(self, kind: Kind, parts: int, steps: int, tiles: int) -> list[int]:
        """Return the row of the kernel's table but for its first column."""
        slots = [-1 if layer is None else layer.slot for layer in (self.layer, self.norm)]
        counts = [count for count, *_ in self.layout.instances[:3]]
        numbers = [number // kind.unit for number in self.numbers(kind.where)]
        eps = torch.tensor(0.0 if self.norm is None else self.norm.eps, dtype=torch.float32)
        return [*slots, self.is_biased, parts, steps, tiles, *counts, *numbers, int(eps.view(torch.int32))]


class Kind(NamedTuple):
    """What entries must have in common to share a launch."""

    unit: int
    levels: tuple[int, int, int, int]
    """How many levels the entries of x have and which lie side by side; and so of z."""
    where: int
    inner: int
    tile: tuple[int, int, int]
    is_row: bool
    dtypes: tuple[torch.dtype, ...]


def kind_of(entry: Entry, dtypes: tuple[torch.dtype, ...]) -> Kind:
    """Choose how an entry is measured."""
    layout, is_row = entry.layout, (entry.layer or entry.norm).dims == 1  # type: ignore[union-attr]
    lows, (x_kind, z_kind) = layout.instances[0][0], layout.kinds
    is_across = ACROSS in (x_kind, z_kind)
    instances, block, vec = COLUMN_WISE if is_across else ROWS if is_row and entry.longest <= LONGEST_ROW else LONG
    if instances > 1:  # as many short rows as fill the tile
        rest = instances * block
        block = min(power_of_two(entry.longest), block)
        instances = min(rest // block, power_of_two(lows))
    where, inner, has_vector = DIRECT, 1, entry.norm is not None or entry.is_biased
    if layout.channels != layout.z_size and (has_vector or (layout.inner == 1 and layout.channels % UNIT == 0)):
        inner = layout.inner
        where = REPEATED if inner == 1 and block % layout.channels == 0 else SPREAD
    return Kind(
        unit=math.gcd(UNIT, lows * is_across, *entry.numbers(where)),
        levels=(len(layout.x), x_kind, len(layout.z), z_kind),
        where=where,
        inner=inner,
        tile=(instances, block, min(vec, block)),
        is_row=is_row,
        dtypes=dtypes,
    )


def group(
    layers: Sequence[Layer], activations: Sequence[Tensor], vectors: Sequence[Tensor], missing: torch.dtype
) -> tuple[list[tuple[Kind, list[Entry]]], list[Layer]]:
    """Return the entries of each launch, and the layers whose layout the kernel cannot read."""
    layouts: dict[Layer, Layout] = {}
    for layer in layers:
        x, z, *others = layer.tensors(activations, vectors)
        layout = lay_out(None if z is None else x, x if z is None else z, layer.dims, layer.channel_dims)
        if layout is not None and all(one is None or one.stride() == (1,) for one in others):
            layouts[layer] = layout
    norms = {(layer.x, layer.dims, layer.channel_dims): layer for layer in layouts if layer.z < 0}
    readers = {layer: norms.pop((layer.z, layer.dims, layer.channel_dims), None) for layer in layouts if layer.z >= 0}
    entries = [Entry(layer, norm, layouts[layer]) for layer, norm in readers.items()]
    twins = [layer for layer in layouts if layer.z < 0 and layer not in readers.values()]
    entries += [Entry(None, norm, layouts[norm]) for norm in twins]

    types = [*[one.dtype for one in (*activations, *vectors)], missing]
    alike: dict[Kind, list[Entry]] = {}
    for entry in entries:
        dtypes = tuple([types[at] for at in entry.places(len(activations))])
        alike.setdefault(kind_of(entry, dtypes), []).append(entry)
    groups = [
        (kind, some[at : at + MAX_ENTRIES]) for kind, some in alike.items() for at in range(0, len(some), MAX_ENTRIES)
    ]
    return groups, [layer for layer in layers if layer not in layouts]


class Order(NamedTuple):
    """What a launch is told."""

    programs: int
    table: list[list[int]]
    constants: tuple[int, ...]
    warps: int
    is_in_parts: bool


def order(kind: Kind, entries: Sequence[Entry], p: float) -> Order:
    """Choose how many programs measure each entry, and write the kernel's table."""
    is_alone, longest = len(entries) == 1, max(entry.longest for entry in entries)
    instances, block, vec = kind.tile
    whole = LONGEST_WHOLE if is_alone or kind.is_row else PART
    if is_alone and not kind.is_row and kind.tile == LONG and longest <= whole:
        _, block, vec = SAMPLES
        block = min(power_of_two(longest), block)
    tiles = [entry.tiles(instances) for entry in entries]
    part, parts = _cut(entries, tiles, whole) if kind.tile == LONG else (PART, [1] * len(entries))
    # A program that did several long instances would need more registers.
    steps = min(MOST_STEPS, max(1, sum(tiles) // ENOUGH_PROGRAMS)) if instances > 1 else 1
    programs, table = 0, []
    for entry, tile, count in zip(entries, tiles, parts, strict=True):
        table.append([programs, *entry.row(kind, count, steps, tile)])
        programs += -(-tile // steps) * count
    places, is_in_parts = 1 if is_alone else MAX_ENTRIES, max(parts) > 1
    table += [[NEVER] * COLUMNS] * (places - len(table))
    constants = (
        places, kind.unit, *kind.levels, POWERS[p], kind.where, kind.inner,
        any(entry.is_biased for entry in entries), any(entry.norm is not None for entry in entries),
        instances, block, vec, part, power_of_two(max(parts)) if is_in_parts else 0,
    )  # fmt: skip
    return Order(programs, table, constants, max(1, block * instances // ENTRIES_PER_WARP), is_in_parts)


def _cut(entries: Sequence[Entry], tiles: Sequence[int], whole: int) -> tuple[int, list[int]]:
    """Return how long parts are, and how many of them the instances of each entry have: 1 up to ``whole`` entries."""
    part = PART
    while True:
        parts = [-(-entry.longest // part) if entry.longest > whole else 1 for entry in entries]
        programs = sum(count * tile for count, tile in zip(parts, tiles, strict=True))
        if max(parts) == 1 or part == LONGEST_PART or programs < 2 * ENOUGH_PROGRAMS:
            return part, parts
        part *= 2


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
