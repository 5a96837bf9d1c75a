"""What the records say of an experiment: which runs are done, what was chosen and, once all are done, what came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from ..comparing.comparison import Comparison, compare
from ..comparing.jobs import Job, tuning_failures
from ..comparing.records import Record
from ..comparing.tuning_rule import best
from ..wording import listed
from .experiments import Experiment
from .paper import GAINS, Box
from .running import Recorded, Stage, by_records, final_stage, tuning_stage

LAYERS = len(GAINS["none"]["train"])
"""How many layers the paper shows the gains of."""
Boxes = tuple[Box, ...]
Curve = tuple[tuple[float, Record], ...]
"""The numbers that were tried for a row on a fold, the smallest first, and the runs that they came to."""


@dataclass(frozen=True)
class State:
    """An experiment and its records."""

    experiment: Experiment
    tuning: Stage
    certain: Stage
    """Those of the final runs whose numbers are known: they have none to choose, or their row's search is over."""

    @property
    def searching(self) -> set[str]:
        """The rows whose numbers are not chosen yet."""
        return {job.row for job in self.tuning.missing}

    @property
    def final(self) -> Stage | None:
        """All final runs; None until every number is chosen: before that, nobody knows which runs there are."""
        return None if self.tuning.missing else self.certain

    @property
    def planned(self) -> int:
        """How many final runs there should be."""
        return len(self.experiment.final())

    @property
    def left(self) -> list[Job]:
        """The final runs that are still to be trained, those with numbers to choose at the end while these are open."""
        return [*self.certain.missing, *(job for job in self.experiment.final() if job.row in self.searching)]

    def done_of(self, row: str) -> int:
        """How many final runs of a row have a result."""
        return len(self.certain.by_row.get(row, ()))

    @property
    def done(self) -> int:
        """How many final runs have a result."""
        return len(self.runs)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to run: every run has a result, or failed as often as it is tried."""
        return not self.tuning.missing and not self.certain.missing

    @cached_property
    def runs(self) -> tuple[Record, ...]:
        """The records of the final runs."""
        return self.certain.recorded

    @cached_property
    def comparison(self) -> Comparison | None:
        """What the records answer; None until all runs are done, so that nobody looks at test scores before that."""
        if not self.is_complete or not self.certain.jobs:
            return None
        images = next((run["validation_images"] for run in self.tuning.recorded if "validation_images" in run), None)
        known = self.certain.known
        failures = tuning_failures(self.tuning.jobs, self.tuning.known)
        return compare(self.experiment.question(self.certain.jobs, images, failures), known, known.correct)

    @cached_property
    def curves(self) -> dict[str, dict[int | None, Curve]]:
        """By row and fold, what was tried so far and what it came to on the validation part."""
        found: dict[str, dict[int | None, list[tuple[float, Record]]]] = {}
        for job in self.tuning.jobs:
            record = self.tuning.known.find(job.key)
            points = found.setdefault(job.row, {}).setdefault(job.recipe.fold, [])
            if record is not None:
                (value,) = job.chosen.values()
                points.append((value, record))
        return {
            row: {fold: tuple(sorted(points, key=lambda point: point[0])) for fold, points in folds.items()}
            for row, folds in found.items()
        }

    def chosen(self, row: str, fold: int | None = None) -> float | None:
        """The number that was chosen for a row; None until all that are to be tried have been, or if all failed."""
        found = (job.chosen for job in self.certain.jobs if job.row == row and job.recipe.fold == fold)
        return next((value for numbers in found for value in numbers.values()), None)

    def grid(self, row: str, fold: int | None = None) -> tuple[float, ...]:
        """The numbers that are tried for a row, the smallest first."""
        jobs = (job for job in self.tuning.jobs if job.row == row and job.recipe.fold == fold)
        return tuple(sorted(value for job in jobs for value in job.chosen.values()))

    def leading(self, row: str, fold: int | None = None) -> float | None:
        """The number that would be chosen if the search ended now."""
        points = self.curves.get(row, {}).get(fold, ())
        trials: list[dict[str, Any]] = [
            {**record, "status": "complete", "values": {row: value}} for value, record in points
        ]
        won = best(trials)
        return None if won is None else float(won["values"][row])

    def measured(self, row: str, part: str) -> list[Boxes]:
        """The quantiles of the gains in each layer, from the input on, of those runs of a row that have them."""
        return [boxes for run in self.certain.by_row.get(row, ()) if len(boxes := _boxes(run, part)) == LAYERS]

    def gains(self, row: str, part: str) -> Boxes | None:
        """These quantiles averaged over the runs."""
        boxes = np.array(self.measured(row, part))
        if not len(boxes):
            return None
        return tuple((low, lower, middle, upper, high) for low, lower, middle, upper, high in boxes.mean(axis=0))


def look(experiment: Experiment, recorded: Recorded) -> State:
    """The state of an experiment, by what is recorded."""
    tuning = tuning_stage(experiment, recorded.tuning, by_records(recorded.tuning))
    return State(experiment, tuning, final_stage(experiment, tuning, recorded.final, by_records(recorded.final)))


def deviation(ours: Sequence[Box], published: Sequence[Box]) -> float:
    """How far medians of gains are from the paper's: relative deviations, without sign, averaged over layers."""
    return float(np.mean([abs(own[2] / other[2] - 1) for own, other in zip(ours, published, strict=True)]))


def device_and_hours(runs: Sequence[Record]) -> tuple[str, float]:
    """What runs were trained on, and how long, in hours; runs that shared a GPU are counted one by one."""
    devices = sorted({run["device"] for run in runs})
    return listed(devices), sum(run["seconds"] for run in runs) / 3600


def _boxes(run: Record, part: str) -> Boxes:
    """The quantiles of a run's gains by layer; none where one of them is missing or no number."""
    quantiles = run.get("gain_quantiles", {}).get(part, {}).values()
    boxes = tuple(tuple(value for value in five if value is not None and math.isfinite(value)) for five in quantiles)
    return cast("Boxes", boxes) if all(len(box) == 5 for box in boxes) else ()
