"""Running what an experiment still lacks, in the order in which it is needed, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from ..comparing import jobs as many
from ..comparing import records
from ..comparing.jobs import Job
from ..comparing.records import Record, Records
from ..comparing.shards import Shard
from ..comparing.workers import side_by_side
from ..recipes import run_key
from ..runs import TUNING, Place
from .experiments import Experiment

ATTEMPTS = 2
"""How often a run is tried before it counts as failed."""


@dataclass(frozen=True)
class Recorded:
    """What a results folder holds; runs on which numbers are chosen have a folder of their own, and no test scores."""

    tuning: Records
    final: Records

    @classmethod
    def read(cls, results: Path) -> Recorded:
        """Everything in the folder."""
        return cls(records.read(results / TUNING), records.read(results))


@dataclass(frozen=True)
class Stage:
    """The runs that choose numbers, or those of the table."""

    name: Literal["tuning", "final"]
    jobs: tuple[Job, ...]
    known: Records

    @cached_property
    def missing(self) -> list[Job]:
        """The runs without a record of a success, but for those that failed as often as a run is tried."""
        return [job for job in many.missing(self.jobs, self.known) if self.known.attempts(job.key) < ATTEMPTS]

    @cached_property
    def by_row(self) -> dict[str, list[Record]]:
        """The records of the runs that succeeded, by row."""
        found: dict[str, list[Record]] = {job.row: [] for job in self.jobs}
        for job in self.jobs:
            record = None if job.error else self.known.find(job.key)
            if record is not None:
                found[job.row].append(record)
        return found

    @property
    def recorded(self) -> tuple[Record, ...]:
        """All of them, row by row."""
        return tuple(run for runs in self.by_row.values() for run in runs)


Identify = Callable[[Sequence[Job]], list[Job]]
"""Gives jobs the fingerprints of their data, which are part of what a run is."""


def tuning_stage(experiment: Experiment, known: Records, identify: Identify) -> Stage:
    """The runs on which numbers are chosen."""
    return Stage("tuning", tuple(identify(experiment.tuning())), known)


def final_stage(experiment: Experiment, tuning: Stage, known: Records, identify: Identify) -> Stage:
    """The runs of the table, with the numbers that were chosen; without those of rows whose search is not over."""
    searching = {job.row for job in tuning.missing}
    jobs = many.tuned([job for job in experiment.final() if job.row not in searching], tuning.jobs, tuning.known)
    return Stage("final", tuple(identify(jobs)), known)


def by_records(known: Records) -> Identify:
    """Without the data: the fingerprints that the records of a fold, or of the whole data set, have.

    Where records are of several data sets under one name, those count of which there are most.
    """
    keys = {run["key"] for run in (*known.runs, *known.failed)}
    fingerprints: dict[tuple[str, int | None], dict[str, None]] = {}
    for run in (*known.runs, *known.failed):
        config = run["config"]
        fingerprints.setdefault((config["dataset"], config.get("fold")), {})[run["fingerprint"]] = None

    def most_recorded(jobs: Sequence[Job]) -> str:
        part = (jobs[0].recipe.dataset, jobs[0].recipe.fold)
        matches = {one: sum(run_key(job.recipe, one) in keys for job in jobs) for one in fingerprints.get(part, {})}
        return max(matches, key=lambda one: matches[one], default="")

    def identify(jobs: Sequence[Job]) -> list[Job]:
        parts: dict[int | None, list[Job]] = {}
        for job in jobs:
            parts.setdefault(job.recipe.fold, []).append(job)
        found = {fold: most_recorded(those) for fold, those in parts.items()}
        return [replace(job, fingerprint=found[job.recipe.fold]) for job in jobs]

    return identify


def stages(
    experiment: Experiment, results: Path, place: Place, shard: Shard | None = None
) -> Iterator[tuple[Stage, Place]]:
    """The stages in their order, and where their runs are; the table's are known once every number is chosen.

    What is recorded is read anew for every stage, for whoever takes them one by one runs what is missing between.
    """
    mine = Shard(0, 1) if shard is None else shard
    choosing, deciding = replace(place.for_tuning, records=results / TUNING), replace(place, records=results)

    def identified(jobs: Sequence[Job], place: Place) -> list[Job]:
        return many.identified(part_of(experiment, jobs, mine), place)

    tuning = tuning_stage(experiment, records.read(choosing.results), partial(identified, place=choosing))
    yield tuning, choosing
    tuning = replace(tuning, known=records.read(choosing.results))
    if not tuning.missing:
        known = records.read(deciding.results)
        yield final_stage(experiment, tuning, known, partial(identified, place=deciding)), deciding


def part_of(experiment: Experiment, jobs: Sequence[Job], shard: Shard) -> list[Job]:
    """Those of an experiment's jobs that are in a part, together with the runs that their numbers are chosen with."""
    tuning, final = experiment.tuning(), experiment.final()
    chosen = {job.row for job in tuning} & {job.row for job in final}

    def together(job: Job) -> Hashable:
        return many.tuned_together(job) if job.row in chosen else job.recipe

    mine = {together(job) for job in shard.of([*tuning, *final], together)}
    return [job for job in jobs if together(job) in mine]


@dataclass
class Budget:
    """How much time there is, and how long a run takes: no run is started that cannot be finished."""

    minutes: float | None
    longest: float = 0.0
    """Of the runs so far, in seconds."""
    began: float = field(default_factory=time.monotonic)

    def has_room(self) -> bool:
        """Whether one more run can be expected to end in time."""
        return self.minutes is None or time.monotonic() - self.began + self.longest < 60 * self.minutes


def run_missing(
    stage: Stage, place: Place, budget: Budget, at_once: int, on_done: Callable[[Job, Record, float], None]
) -> None:
    """Run what is missing of a stage while there is time, side by side; what fails is tried once more at the end."""
    jobs = stage.missing
    for _ in range(ATTEMPTS):
        if not jobs or not budget.has_room():
            return
        _run(jobs, place, budget, at_once, on_done)
        tried = {job.key for job in jobs}
        stage = replace(stage, known=records.read(place.results))
        jobs = [job for job in stage.missing if job.key in tried and job.key in stage.known.failures]


def _run(
    jobs: Sequence[Job], place: Place, budget: Budget, at_once: int, on_done: Callable[[Job, Record, float], None]
) -> None:
    started: dict[str, float] = {}

    def upcoming() -> Iterator[Job]:
        for job in jobs:
            if not budget.has_room():
                return
            started[job.key] = time.monotonic()
            yield job

    work = partial(many.run_recorded, place=place)
    with closing(side_by_side(work, upcoming(), at_once, place.device)) as outcomes:
        for job, record in outcomes:
            seconds = time.monotonic() - started[job.key]
            budget.longest = max(budget.longest, seconds)
            on_done(job, record, seconds)
