"""The largest absolute row or column sum of a convolution's matrix, without writing the matrix down.

Stride, dilation, padding and the input's size decide which taps of the kernel fall on which input. Along each dimension
there are few distinct cases: at the left border, in the middle, and so on. Where several taps of one output read the
same input (reflected, replicated or circular padding), they are added up before absolute values are taken.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def sources(size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int], mode: str) -> Tensor:
    """Return which input each tap (second dimension) of each output (first dimension) reads; -1 for a zero."""
    entries = torch.arange(1, size + 1, dtype=torch.float64, device="cpu").view(1, 1, -1)
    padded = F.pad(entries, padding, mode="constant" if mode == "zeros" else mode).flatten()
    return padded.unfold(0, dilation * (kernel - 1) + 1, stride)[:, ::dilation].long() - 1


class Lines(NamedTuple):
    """The rows, or columns, of a convolution's matrix that may have the largest absolute sum."""

    matrices: list[list[Tensor]]
    """For each dimension and distinct line: what takes the taps of a kernel to the entries of the line."""
    adds_up: bool
    """Whether an entry may be the sum of several taps."""

    @classmethod
    def of(cls, reads: Sequence[Tensor], like: Tensor, *, rows: bool) -> "Lines":
        """Find them from what each tap reads along each dimension; in the dtype and on the device of ``like``."""
        matrices = [[matrix.to(like) for matrix in _lines_along(dimension, rows=rows)] for dimension in reads]
        return cls(matrices, any(bool((one.sum(1) > 1).any()) for each in matrices for one in each))


def _lines_along(reads: Tensor, *, rows: bool) -> list[Tensor]:
    lines: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for output, taps in enumerate(reads.tolist()):
        for tap, source in enumerate(taps):
            if source >= 0:
                line, entry = (output, source) if rows else (source, output)
                lines[line][entry].append(tap)
    distinct = sorted({tuple(sorted(map(tuple, line.values()))) for line in lines.values()}) or [()]
    # A line whose entries are all among another's cannot have the largest sum.
    largest = [line for line in distinct if not any(Counter(line) < Counter(other) for other in distinct)]
    every = range(reads.shape[1])
    entries = [[[float(tap in taps) for tap in every] for taps in line] for line in largest]
    return [torch.tensor(line, device="cpu").view(-1, len(every)) for line in entries]


def largest_absolute_sum(weight: Tensor, groups: int, lines: Lines, *, rows: bool) -> Tensor:
    """Return the largest sum, of a weight that is laid out as ``(outputs, inputs / groups, *kernel)``."""
    weight, channels, sums = weight.view(groups, -1, *weight.shape[1:]), 2 if rows else 1, []
    if not lines.adds_up:
        weight = weight.abs().sum(channels, keepdim=True)
    for combination in product(*lines.matrices):
        entries = weight
        for matrix in combination:  # not a matrix product, which may round its factors (TF32)
            entries = (entries.movedim(3, -1).unsqueeze(-2) * matrix).sum(-1)
        sums.append(entries.abs().flatten(3).sum(3).sum(channels).amax())
    return torch.stack(sums).amax()
