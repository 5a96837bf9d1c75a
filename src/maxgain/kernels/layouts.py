"""Where the entries of a layer's input and output lie in memory, in the few numbers that the kernel reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

ALONG, ACROSS, APART = 0, 1, 2
"""Neighbouring entries of an instance lie side by side in memory, or neighbouring instances do, or neither."""
INSTANCE_LEVELS, LEVELS = 4, 3
"""In how many levels of even distances the kernel finds instances, and the entries of one."""
TOO_FAR = 1 << 31

Level = tuple[int, int]
"""How many there are, and the distance from one to the next."""


class Layout(NamedTuple):
    """How the instances of x and z lie, which are numbered alike, and the entries of each."""

    instances: list[tuple[int, int, int]]
    """Number of instances and their distances in x and in z, from the innermost level on."""
    x: list[Level]
    z: list[Level]
    """The levels of the entries of an instance, the last one with the smallest distance."""
    x_size: int
    z_size: int
    channels: int
    inner: int
    """1 if the channels of z follow one another; else how many entries a channel has, which do."""

    @property
    def kinds(self) -> tuple[int, int]:
        """Which entries of x and of z lie side by side."""
        lows, *distances = self.instances[0]
        x, z = (
            ALONG if levels[-1][1] == 1 else ACROSS if low == 1 and lows > 1 else APART
            for levels, low in zip((self.x, self.z), distances, strict=True)
        )
        return x, z

    def numbers(self) -> list[int]:
        """Return what the kernel's table has of x, and then of z."""
        (_, *low), (_, *mid), (_, *high), (_, *top) = self.instances
        found: list[int] = []
        for at, (size, levels) in enumerate(((self.x_size, self.x), (self.z_size, self.z))):
            (_, s0), (a, s1), (b, s2) = [(0, 0)] * (LEVELS - len(levels)) + levels
            # 0 where the kernel reads no number, so that it stands in the way of no common unit.
            entries = a * (len(levels) == 3), b * (len(levels) > 1), s0, s1, s2 * (s2 != 1)
            found += [size, top[at], high[at], mid[at], low[at] * (self.kinds[at] != ACROSS), *entries]
        return found


def lay_out(x: Tensor | None, z: Tensor, dims: int, channel_dims: int) -> Layout | None:
    """Find the layout of an input, or of none, and of an output with the same instances.

    None if the kernel cannot read it: there are too many levels, channels between other dimensions, or entries of one
    instance too far apart.
    """
    outer, axis = z.dim() - dims, z.dim() - channel_dims
    instances = _merge((z if x is None else x).stride(), z.stride(), z.shape[:outer])
    x_levels, x_size = [(1, 1)], 0
    if x is not None:
        x_levels, x_size = _entries(x, x.dim() - dims), math.prod(x.shape[x.dim() - dims :])
    z_levels, z_size, channels = _entries(z, outer), math.prod(z.shape[outer:]), z.shape[axis]
    within = [size for step, dim, size in _by_distance(z, outer) if (step, dim) < (z.stride(axis), -axis)]
    inner = math.prod(within) if channels > 1 else 1
    too_many = len(instances) > INSTANCE_LEVELS or max(len(x_levels), len(z_levels)) > LEVELS
    if too_many or inner * channels not in (z_size, channels):
        return None
    instances += [(1, 0, 0)] * (INSTANCE_LEVELS - len(instances))
    layout = Layout(instances, x_levels, z_levels, x_size, z_size, channels, inner)
    reach = [sum((count - 1) * step for count, step in levels) for levels in (x_levels, z_levels)]
    return layout if max(*reach, *layout.numbers()) < TOO_FAR else None


def _by_distance(tensor: Tensor, outer: int) -> list[tuple[int, int, int]]:
    """Distance, negative dimension and size of the dimensions of an instance, from the largest distance on."""
    steps = tensor.stride()
    return sorted([(steps[d], -d, tensor.shape[d]) for d in range(outer, tensor.dim()) if tensor.shape[d] > 1])[::-1]


def _entries(tensor: Tensor, outer: int) -> list[Level]:
    """The levels in which the entries of an instance lie, the last one with the smallest distance."""
    found = _by_distance(tensor, outer)
    steps, sizes = [step for step, _, _ in found], [size for _, _, size in found]
    return [(count, step) for count, step, _ in _merge(steps, steps, sizes)[::-1]] or [(1, 1)]


def _merge(x_steps: Sequence[int], z_steps: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Make one level of those that follow one another at one distance, from the smallest distance on."""
    found = sorted(
        ((x_step, z_step, size) for x_step, z_step, size in zip(x_steps, z_steps, sizes, strict=False) if size > 1),
        reverse=True,
    )
    levels: list[tuple[int, int, int]] = []
    for x_step, z_step, size in found:
        if levels and levels[-1][1:] == (x_step * size, z_step * size):
            levels[-1] = (levels[-1][0] * size, x_step, z_step)
        else:
            levels.append((size, x_step, z_step))
    return levels[::-1]
