"""What there is to choose in a regulariser, and the rule by which it is chosen: pure functions, no training.

The rule: the best validation accuracy; among equals the lowest validation loss, and then the smallest numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from maxgain.errors import RecipeError, RegulariserError

from ..recipes import MOST_VALUES, expect_runs
from ..regularisers import Chosen, parse
from ..wording import nearest

RULE = "best validation accuracy, then lowest validation loss, then smallest numbers"
BUDGET = 9
"""How many runs a row's numbers are chosen with by default: nine values of one number, or three of each of two."""

Point = dict[str, float]
"""A number for each tuned regulariser, by the regulariser's name."""
Trial = dict[str, Any]
"""What a point came to: its values, its status ('complete', 'pruned' or 'failed'), its scores or its error."""


@dataclass(frozen=True)
class Grid:
    """The numbers to try for what is called `name`: a regulariser, or its parameter."""

    name: str
    values: tuple[float, ...]

    @classmethod
    def parsed(cls, text: str) -> Grid:
        """The grid that a text like ``gamma=1.25:3:0.25`` means, both ends included."""
        name, _, numbers = text.partition("=")
        try:
            start, stop, step = map(float, numbers.split(":"))
            count = math.floor((stop - start) / step + 1e-9) + 1
            reachable = math.isfinite(start) and step > 0 and count > 0
        except (ValueError, ZeroDivisionError, OverflowError):
            reachable = False
        if not (name and reachable):
            raise RecipeError(f"{text!r} is no grid: write NAME=START:STOP:STEP, as in gamma=1.25:3:0.25.")
        if count > MOST_VALUES:
            raise RecipeError(f"the grid {text!r} has {count:,} values, and {MOST_VALUES:,} are the most.")
        return cls(name, tuple(dict.fromkeys(rounded(start + index * step) for index in range(count))))

    def names(self, part: Chosen) -> bool:
        """Whether these are values of that regulariser's number."""
        return self.name in _names(part)


def _names(part: Chosen) -> tuple[str, ...]:
    """What a regulariser's number may be called: by its own name, or by the regulariser's."""
    return (part.row.name,) if part.row.parameter is None else (part.row.parameter, part.row.name)


@dataclass(frozen=True)
class Dimension:
    """A number to choose: whose it is, and the values to try or the range to look in."""

    regulariser: str
    parameter: str
    low: float
    high: float
    values: tuple[float, ...] = ()
    """The values of a grid; without them the range is searched on a logarithmic scale."""
    usual: tuple[float, ...] = ()
    """What a person would try, the first one first."""


def dimensions(regulariser: str, grids: Sequence[Grid] = ()) -> tuple[Dimension, ...]:
    """What there is to choose in a regulariser: the numbers that its text leaves open.

    With grids, only what they name is chosen, and other numbers are what they are in a run that is not tuned.
    """
    if not grids:
        return tuple(_searched(part) for part in _open_parts(regulariser))
    pairs = [(part, grid) for part in _open_parts(regulariser) for grid in grids if grid.names(part)]
    if len({part.row.name for part, _ in pairs}) < len(pairs) or len({grid.name for _, grid in pairs}) < len(pairs):
        raise RecipeError(f"the grids do not name each number of {regulariser!r} once: use the regularisers' names.")
    return tuple(_gridded(part, grid.values) for part, grid in pairs)


def refuse_unused(grids: Sequence[Grid], regularisers: Sequence[str]) -> None:
    """Refuse a grid of a number that no regulariser leaves open."""
    for grid in grids:
        if not any(grid.names(part) for text in regularisers for part in _open_parts(text)):
            known = [name for text in regularisers for part in _open_parts(text) for name in _names(part)]
            meant = nearest(grid.name, known)
            hint = f": did you mean {meant!r}?" if meant else f": there is {' or '.join(known)}." if known else "."
            raise RecipeError(f"there is no {grid.name!r} to choose in {' or '.join(regularisers)}{hint}")


def within_budget(space: Sequence[Dimension], budget: int) -> tuple[Dimension, ...]:
    """The dimensions with values to try, exactly `budget` points in all; where grids say what to try, just those.

    So a regulariser with two numbers gets as many tuning runs as one with a single number, and fewer values of each.
    """
    if any(dimension.values for dimension in space):
        return tuple(space)
    return tuple(
        replace(dimension, values=_first(dimension, size))
        for dimension, size in zip(space, _sizes(len(space), budget), strict=True)
    )


def points(space: Sequence[Dimension]) -> list[Point]:
    """Every combination of the grids' values, the last varying fastest."""
    expect_runs(math.prod(len(dimension.values) for dimension in space))
    combinations = product(*(dimension.values for dimension in space))
    return [dict(zip((dimension.regulariser for dimension in space), values, strict=True)) for values in combinations]


def best(rows: Iterable[Trial]) -> Trial | None:
    """The row to choose by the rule, if any is complete and has a score."""

    def rank(row: Trial) -> tuple[float, float, list[float]]:
        loss = row.get("validation_loss")
        known = math.inf if loss is None else loss  # as where it is not a number
        return -row["validation_accuracy"], known, list(row["values"].values())

    scored = (row for row in rows if row["status"] == "complete" and row.get("validation_accuracy") is not None)
    return min(scored, key=rank, default=None)


def worth(chosen: Trial, curve: Sequence[Trial]) -> str:
    """How fine the choice is, in words: what one validation image is worth, how many trials are close, or failed."""
    images = chosen["validation_images"]
    complete = [row for row in curve if row["status"] == "complete" and row["values"] != chosen["values"]]
    lead = (chosen["validation_accuracy"] - row["validation_accuracy"] for row in complete)
    close = sum(round(behind * images) <= 1 for behind in lead)
    others = f"{close or 'none'} of the {len(complete)} other trials {'are' if close > 1 else 'is'} that close to it"
    if not complete:
        others = "no other trial came to its end"
    failed = sum(row["status"] == "failed" for row in curve)
    lost = f"; {failed} of {len(curve)} trials failed and could not be chosen: the same search tries them again"
    image = f"one of the {images:,} validation images is worth {100 / images:.2g} points"
    return f"{image}, and {others}{lost if failed else ''}"


def rounded(value: float) -> float:
    """The number as a regulariser's text holds it, so that what is reported is what was trained."""
    return float(f"{value:g}")


def _sizes(count: int, budget: int) -> list[int]:
    """How many values each of `count` numbers gets, as evenly as can be, so that their product is the budget."""
    sizes: list[int] = []
    for left in range(count, 0, -1):
        sizes.insert(0, max(size for size in range(1, budget + 1) if budget % size == 0 and size**left <= budget))
        budget //= sizes[0]
    return sizes


def _first(dimension: Dimension, size: int) -> tuple[float, ...]:
    if size > len(dimension.usual):
        raise RecipeError(
            f"a grid of {size} values is more than {dimension.regulariser} has, which are {len(dimension.usual)}: "
            f"take a smaller --budget, or give --grid {dimension.regulariser}=START:STOP:STEP."
        )
    return tuple(sorted(map(float, dimension.usual[:size])))


def _open_parts(regulariser: str) -> list[Chosen]:
    return [part for part in parse(regulariser) if part.is_open]


def _searched(part: Chosen) -> Dimension:
    if part.row.search is None:
        raise RegulariserError(f"{part.row.name} has no usual range: give --grid {part.row.name}=START:STOP:STEP.")
    return Dimension(part.row.name, str(part.row.parameter), *part.row.search, usual=part.row.usual)


def _gridded(part: Chosen, values: tuple[float, ...]) -> Dimension:
    for value in values:
        if not part.row.valid(value):
            raise RegulariserError(f"{value:g} is no {part.row.parameter} that {part.row.name} can have.")
    return Dimension(part.row.name, str(part.row.parameter), min(values), max(values), values)
