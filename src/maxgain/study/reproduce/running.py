"""Running what an experiment still lacks, in the order in which it is needed, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ..compare import jobs as many
from ..compare import records
from ..compare.jobs import Job
from ..compare.records import Record, Records
from ..compare.workers import side_by_side
from ..runs import Place
from .experiments import Experiment


@dataclass(frozen=True)
class Stage:
    """The runs that choose γ, or those of the table."""

    name: Literal["tuning", "final"]
    jobs: tuple[Job, ...]
    place: Place
    known: Records

    @property
    def missing(self) -> list[Job]:
        """The runs without a record of a success; one that failed is tried again."""
        return many.missing(self.jobs, self.known)


def stages(experiment: Experiment, results: Path, place: Place) -> Iterator[Stage]:
    """The stages in their order; the table's runs are known once every γ is chosen.

    Runs are kept in folders under the place, and their records under ``results``, those of the tuning in a folder of
    their own: they have no test part.
    """
    choosing = replace(place.for_tuning, records=results / "tuning")
    tuning = many.identified(experiment.tuning(), choosing)
    yield Stage("tuning", tuple(tuning), choosing, records.read(choosing.results))
    known = records.read(choosing.results)
    if many.missing(tuning, known):
        return
    deciding = replace(place, records=results)
    final = many.identified(many.tuned(experiment.final(), tuning, known), deciding)
    yield Stage("final", tuple(final), deciding, records.read(deciding.results))


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
    jobs: Sequence[Job], stage: Stage, budget: Budget, at_once: int, on_done: Callable[[Job, Record, float], None]
) -> None:
    """Run jobs of a stage while there is time: side by side on a GPU, or in processes on a CPU."""
    started: dict[str, float] = {}

    def upcoming() -> Iterator[Job]:
        for job in jobs:
            if not budget.has_room():
                return
            started[job.key] = time.monotonic()
            yield job

    work = partial(many.run_recorded, place=stage.place)
    with closing(side_by_side(work, upcoming(), at_once, stage.place.device)) as outcomes:
        for job, record in outcomes:
            seconds = time.monotonic() - started[job.key]
            budget.longest = max(budget.longest, seconds)
            on_done(job, record, seconds)
