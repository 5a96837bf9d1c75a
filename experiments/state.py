"""What there is of every experiment in results/, how far it is, and what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import stats

from maxgain.study.comparison import Comparison, Contrast, compare
from maxgain.study.plan import Plan
from maxgain.study.recipe import Chosen, Recipe, open_parts
from maxgain.study.result import Result, load
from maxgain.study.statistics import ALPHA, holm, p_outside
from maxgain.study.tuning import at, best

from .plan import EXPERIMENTS, TUNING_SEED, Experiment

RELATIVE_REGION = 0.05
"""Differences that do not matter, in parts of the baseline's error rate: the second plan's rule."""
EARLY, TOLERANCE = 0.14, 1.10
"""The early rule: after which part of a run it looks, and how far above the lowest a training loss may be."""
ALIKE = 0.20
"""Rows' variances count as alike where Bartlett's test has at least this p: the second plan's rule."""


@dataclass(frozen=True)
class State:
    """An experiment and what there is of it."""

    experiment: Experiment
    tuned: Mapping[str, Result]
    """Runs on validation images, by recipe key."""
    results: Sequence[Result]
    again: Sequence[Result] = ()
    """Runs that were made again, of a recipe that has a result already."""

    @property
    def rehearsals(self) -> list[Recipe]:
        """The runs that choose among the candidates."""
        row = self.experiment.rows[0]
        candidates = self.experiment.candidates
        return [replace(one, regulariser=row, seed=TUNING_SEED, train_on="train") for one in candidates]

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe, the best of the candidates where there are some; None while one has no result."""
        candidates = self.experiment.candidates
        if not candidates:
            return self.experiment.recipe
        if any(run.key not in self.tuned for run in self.rehearsals):
            return None
        runs = [self.tuned[run.key] for run in self.rehearsals]
        scores = [(run.validation_accuracy or 0.0, -(run.validation_loss or 0.0)) for run in runs]
        return candidates[scores.index(max(scores))]

    def open_part(self, row: str) -> Chosen | None:
        """The regulariser of a row whose number is chosen, if there is one."""
        return next((part for part in open_parts(row) if part.row.name in self.experiment.grid), None)

    @cached_property
    def tuning(self) -> dict[tuple[str, int], dict[float, Recipe]]:
        """The runs that choose a row's number by row and fold; seeds share one choice. A fold's seed is its number."""
        one, recipe, found = self.experiment, self.recipe, {}
        for unit in (TUNING_SEED,) if one.over == "seed" else one.units:
            for row in one.rows if recipe else ():
                if recipe and (part := self.open_part(row)):
                    fold = unit if one.over == "fold" else recipe.fold
                    base = replace(recipe, regulariser=row, seed=unit, fold=fold, train_on="train")
                    name = part.row.name
                    found[row, unit] = {value: at(base, {name: value}) for value in one.grid[name]}
        return found

    @property
    def searched(self) -> list[Recipe]:
        """All runs that choose something, as far as they are known."""
        return [*self.rehearsals, *(run for runs in self.tuning.values() for run in runs.values())]

    @cached_property
    def points(self) -> dict[str, dict[float, list[Result]]]:
        """What every number that was tried came to, by row; several results over folds."""
        found: dict[str, dict[float, list[Result]]] = {}
        for (row, _), runs in self.tuning.items():
            by_value = found.setdefault(row, {})
            for value, run in sorted(runs.items()):
                if run.key in self.tuned:
                    by_value.setdefault(value, []).append(self.tuned[run.key])
        return found

    @cached_property
    def plan(self) -> Plan | None:
        """The table's runs with their numbers; None until all are chosen."""
        if self.recipe is None or any(run.key not in self.tuned for run in self.searched):
            return None
        one, numbers = self.experiment, dict[str, dict[int, dict[str, float]]]()
        for (row, unit), runs in self.tuning.items():
            results = {value: self.tuned[run.key] for value, run in runs.items()}
            if one.early:
                chosen = {"maxgain": early_choice({gamma: [result] for gamma, result in results.items()})}
            else:
                chosen = best(results.values(), [part for part in [self.open_part(row)] if part])
            numbers.setdefault(row, {}).update(dict.fromkeys(one.units if one.over == "seed" else (unit,), chosen))
        return Plan(
            recipe=replace(self.recipe, train_on="train+validation"), rows=one.rows, over=one.over, units=one.units,
            contrasts=one.pairs, numbers=numbers, decide_by="paired" if one.decide_by == "paired" else "pooled",
        )  # fmt: skip

    @cached_property
    def so_far(self) -> Comparison | None:
        """What the results show so far, by the analysis that the plan's rule names."""
        if self.plan is None:
            return None
        found = compare(self.plan, self.results)
        if self.experiment.decide_by == "variances" and variances_p(found) < ALIKE:
            found = compare(replace(self.plan, decide_by="paired"), self.results)
        return found

    @property
    def comparison(self) -> Comparison | None:
        """What came out; None before all runs are done, so that no score is seen early."""
        return None if self.so_far is None or any(row.missing for row in self.so_far.rows) else self.so_far

    @property
    def progress(self) -> str:
        """How far it is."""
        tried = sum(run.key in self.tuned for run in self.searched)
        if self.so_far is None:
            return "not run" if not tried else f"choosing numbers: {tried} of {len(self.searched)} runs"
        planned, missing = (sum(getattr(row, name) for row in self.so_far.rows) for name in ("planned", "missing"))
        return "not run" if missing == planned and not tried else f"{planned - missing} of {planned} runs"

    def region_of(self, contrast: Contrast) -> float:
        """The region of equivalence in points."""
        assert self.so_far is not None
        baseline = self.so_far.row(contrast.second).mean or 0.0
        return self.experiment.region or 100 * RELATIVE_REGION * (1 - baseline)

    def verdict(self, contrast: Contrast) -> str:
        """The comparison's, or 'equivalent' by two one-sided tests against the region, Holm-corrected."""
        assert self.so_far is not None
        if contrast.verdict != "inconclusive" or contrast.with_failures:
            return contrast.verdict
        family = self.so_far.contrasts
        outside = [p_outside(one.difference, self.region_of(one) / 100) for one in family]
        p = holm(outside)[family.index(contrast)]
        return "equivalent" if p is not None and p < ALPHA else contrast.verdict


def early_choice(runs: Mapping[float, Sequence[Result]]) -> float:
    """The smallest γ whose training loss after 14 % of the run is within 10 % of the lowest; one or more runs per γ."""
    losses: dict[float, float] = {}
    for gamma, results in runs.items():
        read = [result.history.train_loss[early_epoch(result.recipe) - 1] for result in results]
        losses[gamma] = float(np.mean([math.inf if loss is None else loss for loss in read]))
    return min(gamma for gamma, loss in losses.items() if loss <= TOLERANCE * min(losses.values()))


def early_epoch(recipe: Recipe) -> int:
    """The epoch after which the early rule reads it."""
    return round(EARLY * recipe.epochs)


def variances_p(comparison: Comparison) -> float:
    """Bartlett's p for the rows' variances over their seeds; 1 where they cannot be compared."""
    scores = [list(row.scores.values()) for row in comparison.rows if len(row.scores) > 1]
    known = [values for values in scores if np.ptp(values) > 0]
    return float(stats.bartlett(*known).pvalue) if len(known) > 1 else 1.0


def by_key(results: Iterable[Result]) -> dict[str, Result]:
    """The newest result of each recipe key; a finished one goes before a failed one."""
    ordered = sorted(results, key=lambda result: (result.status == "ok", result.finished))
    return {result.recipe.key: result for result in ordered}


def read(results: Path) -> dict[str, State]:
    """All experiments, by what is in results/ and, where it was run since, in results/plan-2/."""
    folders = [results, results / "plan-2"]
    tuned, tuned_since = (by_key(_in(folder / "tuning")) for folder in folders)
    final, since = (by_key(_in(folder)) for folder in folders)
    again = [one for key, one in since.items() if key in final]  # which replace no recorded run
    again += [one for key, one in tuned_since.items() if key in tuned]
    tuned, final = {**tuned_since, **tuned}, {**since, **final}
    return {
        name: State(experiment, tuned, tuple(final.values()), tuple(again)) for name, experiment in EXPERIMENTS.items()
    }


def _in(folder: Path) -> Iterator[Result]:
    for path in sorted(folder.glob("*.jsonl")):
        yield from load(path)
