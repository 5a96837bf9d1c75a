"""What a comparison runs: a plan of rows × folds or seeds, with the numbers that were chosen for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from maxgain.errors import RecipeError

from . import _files
from ._names import unknown
from .recipe import Recipe, fill, open_parts

FILE = "plan.json"
SEEDS_APART = 1000
"""Distance between the seeds of one fold, so that no two of up to 1,000 folds use the same seed."""

Pair = tuple[str, str]
Tuned = Literal["grid", "tpe", "early"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides a comparison except its results; stored as plan.json in the comparison's folder."""

    recipe: Recipe
    """what all runs have in common; a run adds its row's regulariser, its fold and its seed"""
    rows: tuple[str, ...]
    """regulariser texts, as typed: maxgain+dropout"""
    over: Literal["fold", "seed"]
    """what the two runs of a pair have in common"""
    units: tuple[int, ...]
    """the folds or the seeds"""
    contrasts: tuple[Pair, ...]
    """(row, baseline) pairs, one family of tests"""
    repeats: int = 1
    """seeds per fold"""
    decide_by: Literal["paired", "pooled"] = "paired"
    """the analysis that verdicts follow; the other one is a check"""
    rope: float | None = None
    """region of practical equivalence, in percentage points of accuracy"""
    tuned: Tuned | None = None
    """how the numbers that the rows leave open are chosen, for each row and fold"""
    budget: int | None = None
    """tuning runs per row and fold"""
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """values to try, by regulariser"""
    numbers: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    """the numbers that tuning chose: {row: {unit: {regulariser: number}}}"""
    tuning_runs: dict[str, int] = field(default_factory=dict)
    """how many runs each row's numbers were chosen with, per unit"""

    def __post_init__(self) -> None:
        if not self.rows:
            raise RecipeError("a comparison needs rows, such as none dropout maxgain.", field="rows")
        for name, choices in (("decide_by", ("paired", "pooled")), ("tuned", (None, *get_args(Tuned)))):
            if getattr(self, name) not in choices:
                raise RecipeError(unknown(name, getattr(self, name), filter(None, choices)), field=name)
        if self.rope is not None and not 0 < self.rope < 100:
            raise RecipeError(f"rope must be between 0 and 100 points, not {self.rope:g}.", field="rope")
        for name in ("budget", "grid"):
            if getattr(self, name) and self.tuned is None:
                raise RecipeError(f"{name} is for tuning: choose how with tuned.", field=name)
        names = set[str]().union(*map(self.tunable, self.rows))
        if unused := sorted(self.grid.keys() - names):
            raise RecipeError(f"no row leaves {unused[0]!r} open, so its grid has no use.", field="grid")
        if self.tuned and not names:
            raise RecipeError(
                f"no row leaves a number open for {self.tuned} to choose: write maxgain, not maxgain=2.", field="rows"
            )

    @property
    def overlap(self) -> float:
        """Test instances per training instance where training sets overlap, else 0.

        In cross-validation a run is tested on one fold; one more is held out if the run was not trained on it too.
        """
        folds = self.recipe.cross_validation
        if self.over == "seed" or folds is None:
            return 0.0
        return 1 / (folds - (1 if self.recipe.train_on == "train+validation" else 2))

    def tunable(self, row: str) -> set[str]:
        """The regularisers of a row whose numbers tuning chooses."""
        return {part.row.name for part in open_parts(row, self.tuned)}

    def recipes(self, row: str) -> tuple[Recipe, ...]:
        """The row's runs, unit by unit, with the numbers that were chosen for it."""
        chosen = self.numbers.get(row, {})
        return tuple(
            replace(one, regulariser=fill(row, chosen.get(unit, {}))) for unit in self.units for one in self.at(unit)
        )

    def at(self, unit: int) -> tuple[Recipe, ...]:
        """The recipe at a fold or seed, with each of its seeds, before a row is filled in."""
        if self.over == "seed":
            return (replace(self.recipe, seed=unit),)
        seeds = [(self.recipe.seed + unit + SEEDS_APART * repeat) % 2**32 for repeat in range(self.repeats)]
        return tuple(replace(self.recipe, fold=unit, seed=seed) for seed in seeds)

    def write(self, folder: Path) -> None:
        """Store the plan in the comparison's folder."""
        _files.write_json(folder / FILE, self)


def read_plan(folder: Path) -> Plan:
    """The plan of the comparison in a folder."""
    return _files.read_json(folder / FILE, Plan)


def make_plan(
    recipe: Recipe,
    rows: Sequence[str],
    *,
    folds: int | None = None,
    seeds: int | None = None,
    own_folds: int = 1,
    contrasts: Sequence[str] = (),
    **settings: Any,
) -> Plan:
    """The plan for these rows on `folds` folds or `seeds` seeds, or that many seeds on each fold.

    `own_folds` is the number of disjoint folds that the data have; data without any are cross-validated. A contrast is
    a text such as maxgain+dropout:dropout; 'matched' is every maxgain+X:X. By default all rows are tested against the
    first.
    """
    if folds is None and seeds is None:
        raise RecipeError("give the number of folds or of seeds to compare over.", field="folds")
    for name, count in (("folds", folds), ("seeds", seeds)):
        if count is not None and count < 1:
            raise RecipeError(f"{name} must be at least 1, not {count}.", field=name)
    if isinstance(rows, str):
        raise RecipeError("rows must be several texts, such as ['none', 'maxgain'].", field="rows")
    spellings: dict[str, str] = {}
    for row in rows:
        spelling = fill(row, {} if settings.get("tuned") else None)  # a tuned number is not the default
        if spelling in spellings:
            raise RecipeError(f"{spellings[spelling]} and {row} are the same regulariser.", field="rows")
        spellings[spelling] = row
    if folds is None:
        pairing: dict[str, Any] = {"over": "seed", "units": tuple(range(recipe.seed, recipe.seed + (seeds or 0)))}
    else:
        if own_folds > 1 and folds > own_folds:
            raise RecipeError(f"{recipe.dataset} has {own_folds} folds, not {folds}.", field="folds")
        if own_folds == 1 and folds < 3:
            raise RecipeError(f"cross-validation needs at least 3 folds, not {folds}.", field="folds")
        recipe = replace(recipe, fold=0, cross_validation=folds if own_folds == 1 else None)
        pairing = {"over": "fold", "units": tuple(range(folds)), "repeats": seeds or 1}
    pairs = parse_contrasts(contrasts, rows) or tuple((row, rows[0]) for row in rows[1:])
    return Plan(recipe=recipe, rows=tuple(rows), contrasts=pairs, **pairing, **settings)


def parse_contrasts(texts: Sequence[str], rows: Sequence[str]) -> tuple[Pair, ...]:
    """The pairs of rows that texts like maxgain+dropout:dropout name."""
    pairs: list[Pair] = []
    for text in texts:
        first, colon, second = text.partition(":")
        if text == "matched":
            pairs += _matched(rows)
        elif not colon or first not in rows or second not in rows or first == second:
            raise RecipeError(
                f"{text!r} is no contrast: write ROW:BASELINE with two of {', '.join(rows)}, or 'matched'.",
                field="contrasts",
            )
        else:
            pairs.append((first, second))
    if len({frozenset(pair) for pair in pairs}) < len(pairs):
        raise RecipeError("a contrast is named twice.", field="contrasts")
    return tuple(pairs)


def _matched(rows: Sequence[str]) -> list[Pair]:
    by_parts = {frozenset(row.split("+")): row for row in rows}
    pairs = []
    for parts, row in by_parts.items():
        rest = frozenset(part for part in parts if part.partition("=")[0] != "maxgain")
        baseline = by_parts.get(rest or frozenset({"none"}))
        if rest != parts and baseline is not None:
            pairs.append((row, baseline))
    if not pairs:
        raise RecipeError("'matched' needs a pair like dropout and maxgain+dropout.", field="contrasts")
    return pairs
