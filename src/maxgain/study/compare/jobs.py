"""Every regulariser on every fold or seed, paired: what is to be run, the running, and what the records show.

What is to be run is a pure function of what was asked for, and what is shown is one of the records. What lies between
trains only what has no record of a success: a run that failed is tried again, and its failure is recorded as a
failure, never as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from maxgain.errors import MaxGainError, RecipeError, RunError

from ..data.table import DATASETS
from ..recipes import Recipe, key, run_name, to_json
from ..regularisers import filled, parse
from ..runs import Place, perform, read_metrics
from . import records, statistics
from . import tuning_rule as choice
from .records import Record, Records
from .tuning_rule import Grid, Point, Tried
from .workers import CHECKPOINT_SECONDS, data_for, in_processes


@dataclass(frozen=True)
class Pairing:
    """What the runs of a pair have in common: the fold that they are on, or the seed that they begin with."""

    over: Literal["fold", "seed"]
    numbers: tuple[int, ...]
    cross_validation: int | None = None
    """How many folds a data set is cut into that has none of its own."""

    def apply(self, recipe: Recipe, number: int) -> Recipe:
        """The recipe on that fold, or with that seed."""
        if self.over == "seed":
            return replace(recipe, seed=number)
        return replace(recipe, fold=number, cross_validation=self.cross_validation)


@dataclass(frozen=True)
class Job:
    """One run: the line of the table that it belongs to, and all that decides what it computes."""

    regulariser: str
    """As it was asked for; in the recipe's own text the tuned numbers are filled in."""
    recipe: Recipe
    tuned: Point = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What the run is called in the records."""
        return key(self.recipe)

    @property
    def name(self) -> str:
        """What the run is called by people."""
        return run_name(self.recipe)


@dataclass(frozen=True)
class Comparison:
    """What recorded runs show."""

    rows: Mapping[str, statistics.Row]
    """By regulariser; those that could not be compared have none."""
    pairs: tuple[int, ...]
    """The folds or seeds that are compared: those on which every regulariser that ever succeeded did."""
    failures: tuple[tuple[Job, str], ...]
    """The runs without a score, and why they have none."""

    @property
    def test(self) -> str | None:
        """The name of the test, in words."""
        return next((row.test.method for row in self.rows.values() if row.test), None)


def folds(recipe: Recipe, count: int) -> Pairing:
    """The first disjoint folds of the recipe's data set, or so many of cross-validation where it has a single split."""
    there = DATASETS[recipe.dataset].folds if recipe.dataset in DATASETS else 1
    if there < 2:
        if count < 3:
            raise RecipeError(f"{recipe.dataset} has a single split, and cross-validation takes 3 --folds at least.")
        return Pairing("fold", tuple(range(count)), cross_validation=count)
    if not 1 <= count <= there:
        raise RecipeError(f"{recipe.dataset} has {there} folds, so --folds must be from 1 to {there}, not {count}.")
    return Pairing("fold", tuple(range(count)))


def seeds(recipe: Recipe, count: int) -> Pairing:
    """So many seeds, from the recipe's own on."""
    if count < 1:
        raise RecipeError(f"--seeds must be at least 1, not {count}.")
    return Pairing("seed", tuple(range(recipe.seed, recipe.seed + count)))


def plan(recipe: Recipe, regularisers: Sequence[str], pairing: Pairing) -> list[Job]:
    """Every regulariser on every fold or seed, pair by pair."""
    if len(set(regularisers)) < len(regularisers):
        raise RecipeError(f"{' '.join(regularisers)} names a regulariser twice.")
    for regulariser in regularisers:
        parse(regulariser)
    return [
        Job(regulariser, replace(pairing.apply(recipe, number), regulariser=regulariser))
        for number in pairing.numbers
        for regulariser in regularisers
    ]


def plan_tuning(jobs: Sequence[Job], grids: Sequence[Grid]) -> list[Job]:
    """The runs on which the numbers that the jobs' regularisers leave open are chosen, fold by fold.

    A choice belongs to the data that it is made on: jobs that differ in their seed alone share the first one's.
    """
    first: dict[tuple[str, int | None], Job] = {}
    for job in jobs:
        first.setdefault(_decision(job), job)
    return [
        _at(job, point, "train")
        for job in first.values()
        for point in choice.points([choice.small_grid(number) for number in choice.dimensions(job.regulariser, grids)])
        if point
    ]


def tuned(jobs: Sequence[Job], tuning: Sequence[Job], known: Records) -> list[Job]:
    """The jobs with the numbers that were chosen on their folds, to be trained on all but the test part."""
    curves: dict[tuple[str, int | None], list[Tried]] = {}
    for trial in tuning:
        record = known.find(trial.key)
        scores: Tried = {"status": "failed"} if record is None else {**record, "status": "complete"}
        curves.setdefault(_decision(trial), []).append(scores | {"values": trial.tuned})
    return [_at(job, _chosen(job, curves.get(_decision(job))), "train+validation") for job in jobs]


def missing(jobs: Sequence[Job], known: Records) -> list[Job]:
    """The jobs that no recorded run has done, each once."""
    return list({job.key: job for job in jobs if known.find(job.key) is None}.values())


def perform_all(jobs: Sequence[Job], place: Place, processes: int, told: Callable[[Job, Record], None]) -> None:
    """Runs the jobs, so many at a time, and records each as soon as it is done."""
    work = partial(_recorded, place=place)
    with closing(in_processes(work, jobs, max(1, min(processes, len(jobs))))) as outcomes:
        for job, record in outcomes:
            told(job, record)


def comparison(jobs: Sequence[Job], known: Records, baseline: str, pairing: Pairing) -> Comparison:
    """What the records show of the jobs: every regulariser against the baseline, on complete pairs alone.

    A regulariser all of whose runs failed is not compared, and does not keep the others from being so.
    """
    scores: dict[str, dict[int, float]] = {job.regulariser: {} for job in jobs}
    failures = []
    errors = {record["key"]: record["error"] for record in known.failed}
    for job in jobs:
        record = known.find(job.key)
        accuracy = None if record is None else record["test_accuracy"]
        if accuracy is None:
            failures.append((job, errors.get(job.key, "it was not run")))
        else:
            number = job.recipe.seed if pairing.over == "seed" else job.recipe.fold
            scores[job.regulariser][number or 0] = accuracy
    scores = {regulariser: by_number for regulariser, by_number in scores.items() if by_number}
    overlap = statistics.overlap(pairing.over, to_json(jobs[0].recipe))
    pairs, rows = statistics.compare_pairs(scores, baseline, overlap)
    return Comparison({row.regulariser: row for row in rows}, pairs, tuple(failures))


def _decision(job: Job) -> tuple[str, int | None]:
    """What a choice of numbers is made for."""
    return job.regulariser, job.recipe.fold


def _at(job: Job, point: Point, train_on: Literal["train", "train+validation"]) -> Job:
    regulariser = filled(job.regulariser, point)
    return replace(job, tuned=point, recipe=replace(job.recipe, regulariser=regulariser, train_on=train_on))


def _chosen(job: Job, curve: list[Tried] | None) -> Point:
    if curve is None:  # there is no number to choose
        return {}
    best = choice.best(curve)
    if best is None:
        where = "" if job.recipe.fold is None else f" on fold {job.recipe.fold}"
        raise RunError(
            f"nothing could be chosen for {job.regulariser}{where}, as all {len(curve)} runs that were to show what is "
            "good failed: leave it out, or give another --grid."
        )
    point: Point = best["values"]
    return point


def _recorded(job: Job, place: Place) -> Record:
    """Runs a job, from its checkpoint if it has one, and returns the record that is written of it."""
    recipe, own = job.recipe, place.of(job.recipe)
    dataset = data_for(recipe, place)
    record: Record
    try:
        result = perform(recipe, replace(own, checkpoint_seconds=CHECKPOINT_SECONDS), dataset, resume=True)
        record = records.success(result, read_metrics(own.folder))
    except MaxGainError as error:
        record = records.failure(recipe, str(error))
    record |= {"regulariser": job.regulariser, "tuned": job.tuned}
    records.append(place.results, record)
    return record
