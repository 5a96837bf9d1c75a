"""The exact ∞- and 1-norm of a convolution's matrix, without writing the matrix down.

Stride, dilation, padding and the input's size decide which taps of the kernel fall on which entry of the input. Along
each dimension there are only a few distinct ways in which they do: at the left border, in the middle, and so on. So the
largest absolute row or column sum is the largest over a few cases. Where several taps of one output read the same entry
(reflected, replicated or circular padding), the matrix holds their sum: taps are added up before absolute values are
taken.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

Line = tuple[tuple[int, ...], ...]
"""A row or column of the matrix along one dimension: for each entry that is not zero, the taps that it adds up."""


def sources(size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int], mode: str) -> Tensor:
    """Which entry each tap (second dimension) of each output (first dimension) reads; -1 where it reads a zero."""
    entries = torch.arange(1, size + 1, dtype=torch.float64, device="cpu").view(1, 1, -1)
    padded = F.pad(entries, padding, mode="constant" if mode == "zeros" else mode).flatten()
    return padded.unfold(0, dilation * (kernel - 1) + 1, stride)[:, ::dilation].long() - 1


def distinct_lines(reads: Tensor, *, rows: bool) -> list[Line]:
    """The rows (or columns) of the matrix along one dimension: equal ones once, and those that may be the largest."""
    lines: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for output, taps in enumerate(reads.tolist()):
        for tap, source in enumerate(taps):
            if source >= 0:
                line, entry = (output, source) if rows else (source, output)
                lines[line][entry].append(tap)
    distinct = sorted({tuple(sorted(map(tuple, line.values()))) for line in lines.values()}) or [()]
    return distinct if any(map(_adds_up, distinct)) else _undominated(distinct)


def _adds_up(line: Line) -> bool:
    return any(len(taps) > 1 for taps in line)


def _undominated(lines: list[Line]) -> list[Line]:
    """Without those whose taps are all among another's: their absolute sum cannot be the largest."""
    counts = [Counter(line) for line in lines]
    return [line for line, own in zip(lines, counts, strict=True) if not any(own < other for other in counts)]


@dataclass(frozen=True)
class AbsoluteSums:
    """The largest absolute row (or column) sum of a convolution's matrix, as a function of its weight.

    The weight is laid out as ``(outputs, inputs / groups, *kernel)``.
    """

    rows: bool
    groups: int
    adds_up: bool
    matrices: tuple[tuple[Tensor, ...], ...]
    """For each dimension and distinct line: what takes the taps of a kernel to the entries of the line."""

    @classmethod
    def of(cls, reads: Sequence[Tensor], groups: int, like: Tensor, *, rows: bool) -> "AbsoluteSums":
        """From what each tap reads along each dimension; the matrices are of the type and place of ``like``."""
        lines = [distinct_lines(dimension, rows=rows) for dimension in reads]
        matrices = tuple(
            tuple(_matrix(line, dimension.shape[1]).to(like) for line in distinct)
            for distinct, dimension in zip(lines, reads, strict=True)
        )
        return cls(rows, groups, any(_adds_up(line) for distinct in lines for line in distinct), matrices)

    def largest(self, weight: Tensor) -> Tensor:
        """The largest of the sums."""
        weight = weight.view(self.groups, -1, *weight.shape[1:])
        channels = 2 if self.rows else 1
        if not self.adds_up:
            weight = weight.abs().sum(channels, keepdim=True)
        sums = []
        for combination in product(*self.matrices):
            entries = weight
            for matrix in combination:
                # Not a matrix product: those may be set to round their factors (TF32).
                entries = (entries.movedim(3, -1).unsqueeze(-2) * matrix).sum(-1)
            sums.append(entries.abs().flatten(3).sum(3).sum(channels).amax())
        return torch.stack(sums).amax()


def _matrix(line: Line, kernel: int) -> Tensor:
    matrix = torch.zeros(len(line), kernel, device="cpu")
    for entry, taps in enumerate(line):
        matrix[entry, list(taps)] = 1
    return matrix
