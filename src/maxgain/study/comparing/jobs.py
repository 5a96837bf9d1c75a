"""Every regulariser on every fold or seed, paired: which runs there are, and running those that have no record.

Which runs there are is a pure function of what was asked for. A run that failed is tried again, and its failure is
recorded as a failure, never as a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from maxgain.errors import MaxGainError, RecipeError

from ..data.table import DATASETS
from ..recipes import Recipe, expect_count, expect_runs, run_key, run_name
from ..regularisers import filled, spelt
from ..run_files import read_metrics, read_predictions
from ..runs import Place, perform
from ..schema import Result
from . import records, tuning_rule
from .engine import Engine
from .question import Over, Planned
from .records import Record, Records
from .tuning_rule import Grid, Point, Trial
from .workers import CHECKPOINT_SECONDS, data_for, fingerprints, tell_of_each

SEEDS_APART = 1000
"""Between the seeds of a fold, so that no two folds (up to this many) share one."""


@dataclass(frozen=True)
class Pairing:
    """What the runs of a pair have in common: the fold that they are on, or the seed that they begin with."""

    over: Over
    units: tuple[int, ...]
    """The folds or the seeds."""
    repeats: int = 1
    """How many seeds there are per fold."""
    cross_validation: int | None = None
    """How many folds a data set is cut into that has none of its own."""

    def recipes(self, recipe: Recipe, unit: int) -> list[Recipe]:
        """The recipe with that seed; or on that fold, with the fold's own seeds, the same for every regulariser."""
        if self.over == "seed":
            return [replace(recipe, seed=unit)]
        seeds = [(recipe.seed + unit + SEEDS_APART * repeat) % 2**32 for repeat in range(self.repeats)]
        return [replace(recipe, fold=unit, cross_validation=self.cross_validation, seed=seed) for seed in seeds]


@dataclass(frozen=True)
class Job:
    """One run: the row of the table that it belongs to, and all that decides what it computes."""

    row: str
    """The regulariser as it was asked for; in the recipe's own text the chosen numbers are filled in."""
    recipe: Recipe
    chosen: Point = field(default_factory=dict)
    """The numbers that were chosen by tuning, or are tried in it."""
    error: str | None = None
    """Why it cannot be run."""
    fingerprint: str = ""
    """Of its data: see `identified`."""

    @property
    def key(self) -> str:
        """What the run is called in the records."""
        return run_key(self.recipe, self.fingerprint)

    @property
    def name(self) -> str:
        """What the run is called by people, who also find its folder by it."""
        return run_name(self.recipe)

    @property
    def called(self) -> str:
        """What people call it who see it running, among others of its recipe."""
        recipe = self.recipe
        fold = "" if recipe.fold is None else f", fold {recipe.fold}"
        return f"{recipe.regulariser}{fold}, seed {recipe.seed}"

    @property
    def planned(self) -> Planned:
        """What a comparison has to know of it."""
        recipe, name = self.recipe, None if self.error else self.key
        return Planned(name, spelt(recipe.chosen), recipe.seed, recipe.fold, self.error, self.fingerprint)


def folds(recipe: Recipe, count: int, seeds: int = 1) -> Pairing:
    """The first disjoint folds of the recipe's data set, or folds of cross-validation where it has a single split."""
    expect_count("--seeds", seeds)
    expect_count("--folds", count)
    there = DATASETS[recipe.dataset].folds if recipe.dataset in DATASETS else 1
    if there < 2:
        if count < 3:
            raise RecipeError(f"{recipe.dataset} has a single split, and cross-validation takes 3 --folds at least.")
        return Pairing("fold", tuple(range(count)), seeds, cross_validation=count)
    if not 1 <= count <= there:
        raise RecipeError(f"{recipe.dataset} has {there} folds, so --folds must be from 1 to {there}, not {count}.")
    return Pairing("fold", tuple(range(count)), seeds)


def seeds(recipe: Recipe, count: int) -> Pairing:
    """A number of seeds, from the recipe's own on."""
    expect_count("--seeds", count)
    return Pairing("seed", tuple(range(recipe.seed, recipe.seed + count)))


def plan(recipe: Recipe, regularisers: Sequence[str], pairing: Pairing) -> list[Job]:
    """Every regulariser on every fold or seed, pair by pair."""
    expect_runs(len(regularisers) * len(pairing.units) * pairing.repeats)
    return [
        Job(regulariser, replace(paired, regulariser=regulariser))
        for unit in pairing.units
        for paired in pairing.recipes(recipe, unit)
        for regulariser in regularisers
    ]


def plan_tuning(jobs: Sequence[Job], grids: Sequence[Grid], budget: int) -> list[Job]:
    """The runs that show which numbers are good for what the jobs' regularisers leave open, fold by fold.

    A choice belongs to the data that it is made on: jobs that differ in their seed alone share the first one's.
    """
    first: dict[tuple[str, int | None], Job] = {}
    for job in jobs:
        first.setdefault(tuned_together(job), job)
    return [
        _with_numbers(job, point, "train")
        for job in first.values()
        for point in tuning_rule.points(tuning_rule.within_budget(tuning_rule.dimensions(job.row, grids), budget))
        if point
    ]


def tuned(jobs: Sequence[Job], tuning: Sequence[Job], known: Records) -> list[Job]:
    """The jobs with the numbers that were chosen on their folds; one for which nothing could be chosen has an error."""
    curves: dict[tuple[str, int | None], list[Trial]] = {}
    for trial in tuning:
        record = known.find(trial.key)
        scores: Trial = {"status": "failed"} if record is None else {**record, "status": "complete"}
        curves.setdefault(tuned_together(trial), []).append(scores | {"values": trial.chosen})
    return [_tuned(job, curves.get(tuned_together(job))) for job in jobs]


def tuning_runs(tuning: Sequence[Job]) -> dict[str, int]:
    """How many runs each row's numbers are chosen with, on every fold."""
    return {row: count for (row, _), count in Counter(map(tuned_together, tuning)).items()}


def tuned_numbers(tuning: Sequence[Job]) -> dict[str, tuple[str, ...]]:
    """Whose numbers are chosen for each row."""
    return {trial.row: tuple(trial.chosen) for trial in tuning}


def tuning_failures(tuning: Sequence[Job], known: Records) -> dict[str, int]:
    """How many of the runs that choose a row's numbers have no score, by the rows that lack any."""
    return dict(Counter(trial.row for trial in tuning if known.find(trial.key) is None))


def identified(jobs: Sequence[Job], place: Place) -> list[Job]:
    """The jobs with the fingerprints of their data, which tell runs of the same recipe apart."""
    known = fingerprints([job.recipe for job in jobs], place)
    return [replace(job, fingerprint=fingerprint) for job, fingerprint in zip(jobs, known, strict=True)]


def missing(jobs: Sequence[Job], known: Records) -> list[Job]:
    """The jobs that can be run and have no record of a success, each once."""
    wanted = (job for job in jobs if job.error is None and known.find(job.key) is None)
    return list({job.key: job for job in wanted}.values())


def recorded(jobs: Sequence[Job], known: Records) -> int:
    """How many of the jobs have a record of a success."""
    return sum(job.error is None and known.find(job.key) is not None for job in jobs)


def perform_all(
    jobs: Sequence[Job],
    place: Place,
    engine: Engine,
    on_done: Callable[[Job, Record], None],
    on_start: Callable[[Job], None] = lambda job: None,
) -> None:
    """Run the jobs, as many at once as the engine can, and record each as soon as it is done."""
    work = partial(run_recorded, place=place, perform=engine.perform)
    with closing(engine.each(work, tell_of_each(jobs, on_start), len(jobs))) as outcomes:
        for job, record in outcomes:
            on_done(job, record)


def tuned_together(job: Job) -> tuple[str, int | None]:
    """What a choice of numbers is made for: a row on a fold."""
    return job.row, job.recipe.fold


def _with_numbers(job: Job, point: Point, train_on: Literal["train", "train+validation"]) -> Job:
    regulariser = filled(job.row, point)
    return replace(job, chosen=point, recipe=replace(job.recipe, regulariser=regulariser, train_on=train_on))


def _tuned(job: Job, curve: list[Trial] | None) -> Job:
    if curve is None:  # there is no number to choose
        return job
    best = tuning_rule.best(curve)
    if best is None:
        return replace(job, error=f"no number could be chosen: all {len(curve)} tuning runs failed")
    return _with_numbers(job, best["values"], job.recipe.train_on)


def run_recorded(job: Job, place: Place, perform: Callable[..., Result] = perform) -> Record:
    """Run a job, from its checkpoint if it has one, and return the record that is written of it."""
    recipe, dataset = job.recipe, data_for(job.recipe, place)
    own = place.of(recipe, dataset.fingerprint)
    record: Record
    predicted = None
    try:
        result = perform(recipe, replace(own, checkpoint_seconds=CHECKPOINT_SECONDS), dataset, resume=True)
        record = records.success(result, read_metrics(own.folder, result))
        predicted = read_predictions(own.folder, result)
    except MaxGainError as error:
        record = records.failure(recipe, dataset.fingerprint, error)
    record |= {
        "regulariser": job.row,
        "tuned": job.chosen,
        "classes": len(dataset.classes),
        "validation_images": len(dataset.validation),
    }
    records.append(place.results, record, predicted)
    return record
