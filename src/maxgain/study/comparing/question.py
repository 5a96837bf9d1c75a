"""What a comparison is about: its rows with their runs, its contrasts and its rules.

Questions are kept beside the records that answer them, so that a page that is made later is about the comparisons that
were made, and about no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from maxgain.errors import RecipeError

from ..files import write_json
from ..reading import read_json
from ..regularisers import parse
from .statistics import Design, Pair

FILE = "asked.json"
"""The questions of a folder, the newest last."""

Over = Literal["fold", "seed"]
Analysis = Literal["paired", "pooled"]


@dataclass(frozen=True)
class Planned:
    """A run that a comparison asks for."""

    key: str | None
    """What it is called in the records; None where it cannot be run."""
    regulariser: str
    """With its numbers."""
    seed: int
    fold: int | None = None
    error: str | None = None
    """Why it cannot be run."""
    fingerprint: str = ""
    """Of its data."""


@dataclass(frozen=True)
class Question:
    """Everything that decides a comparison except the records."""

    recipe: str
    dataset: str
    over: Over
    """What the two runs of a pair have in common."""
    rows: dict[str, tuple[Planned, ...]]
    contrasts: tuple[Pair, ...]
    """One family; the first of each pair is expected to be the better one."""
    train_on: str
    cross_validation: int | None = None
    decide_by: Analysis = "paired"
    """The analysis that verdicts follow; the other is shown beside it."""
    rope: float | None = None
    """Differences of accuracy smaller than this do not matter in practice; None where nobody said so."""
    score: str = "test_accuracy"
    tuning_runs: dict[str, int] = field(default_factory=dict)
    """How many runs each row's numbers were chosen with, on every fold."""
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """Whose numbers were chosen for a row, by the rows for which any were: the names of regularisers."""
    validation_images: int | None = None
    """How many images they were chosen on."""
    tuning_failures: dict[str, int] = field(default_factory=dict, compare=False)
    """How many of those runs have no score, over all folds, by the rows that lack any."""

    def __post_init__(self) -> None:
        """Refuse, for files that somebody else may have written, what does not hang together."""
        if not self.rows:
            raise ValueError("it has no rows")
        if strange := sorted({name for pair in self.contrasts for name in pair} - self.rows.keys()):
            raise ValueError(f"a contrast names {strange[0]!r}, which is no row")
        if self.cross_validation is not None and self.cross_validation < 3:
            raise ValueError(f"there is no cross-validation with {self.cross_validation} folds")

    @property
    def design(self) -> Design:
        """How the differences are tested."""
        return Design.of(self.over, self.cross_validation, self.train_on)

    @property
    def units(self) -> tuple[int, ...]:
        """The folds or seeds over which runs are paired."""
        return tuple(sorted({self.unit(run) for runs in self.rows.values() for run in runs}))

    def unit(self, run: Planned) -> int:
        """The fold or the seed of a run."""
        return run.seed if self.over == "seed" else run.fold or 0

    def to_json(self) -> dict[str, Any]:
        """The question as strict JSON can hold it."""
        return asdict(self)


def against(baseline: str, rows: Sequence[str]) -> tuple[Pair, ...]:
    """Every other row against the baseline."""
    return tuple((row, baseline) for row in rows if row != baseline)


def contrasts(texts: Sequence[str], rows: Sequence[str]) -> tuple[Pair, ...]:
    """The contrasts that texts like ``maxgain+dropout:dropout`` name; ``matched`` stands for every X and maxgain+X."""
    pairs: list[Pair] = []
    for text in texts:
        if text == "matched":
            pairs += _matched(rows)
            continue
        first, colon, second = (part.strip() for part in text.partition(":"))
        if not colon:
            raise RecipeError(f"{text!r} is no contrast: write FIRST:SECOND, as in maxgain:none, or 'matched'.")
        for name in (first, second):
            if name not in rows:
                raise RecipeError(f"the contrast {text!r} needs {name!r}, which is not one of {', '.join(rows)}.")
        if first == second:
            raise RecipeError(f"the contrast {text!r} compares a row with itself.")
        pairs.append((first, second))
    doubled = [pair for pair in pairs if pairs.count(pair) > 1 or pair[::-1] in pairs]
    if doubled:
        raise RecipeError(f"{':'.join(doubled[0])} is named twice, the other way round perhaps.")
    return tuple(pairs)


def remember(folder: Path, question: Question) -> None:
    """Keep the question in the folder; one that was asked before becomes the newest."""
    kept = [other for other in remembered(folder) if other != question]
    write_json(folder / FILE, [other.to_json() for other in (*kept, question)])


def remembered(folder: Path) -> list[Question]:
    """The questions that were asked in a folder, the newest last."""
    return read_json(folder / FILE, list[Question]) if (folder / FILE).exists() else []


def _matched(rows: Sequence[str]) -> list[Pair]:
    by_parts = {_parts(row): row for row in rows}
    pairs = []
    for parts, row in by_parts.items():
        bounded = {part for part in parts if part.partition("=")[0] == "maxgain"}
        plain = by_parts.get(parts - bounded or frozenset({"none"})) if bounded else None
        if plain is not None:
            pairs.append((row, plain))
    if not pairs:
        raise RecipeError(f"'matched' finds no X beside maxgain+X in {', '.join(rows)}.")
    return pairs


def _parts(regulariser: str) -> frozenset[str]:
    """The regularisers in a text, whatever their order."""
    parse(regulariser)
    return frozenset(part.strip() for part in regulariser.split("+"))
