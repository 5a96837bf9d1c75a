"""What there is of every experiment in results/, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from maxgain.study.comparison import Comparison
from maxgain.study.plan import Plan
from maxgain.study.recipe import Recipe
from maxgain.study.result import Result, load

from .plan import EXPERIMENTS, Experiment, by_key


@dataclass(frozen=True)
class State:
    """An experiment and what there is of it."""

    experiment: Experiment
    tuned: Mapping[str, Result]
    results: Sequence[Result]
    again: Sequence[Result] = ()
    """Runs that were made again, of a recipe that has a result already."""

    @cached_property
    def settled(self) -> Experiment | None:
        """The experiment with its recipe; None while that is being chosen."""
        return self.experiment.settled(self.tuned)

    @cached_property
    def plan(self) -> Plan | None:
        """The table's runs; None until all numbers are chosen."""
        return self.settled.plan(self.tuned) if self.settled else None

    @property
    def searched(self) -> list[Recipe]:
        """All runs that choose something, as far as they are known."""
        tuning = self.settled.tuning() if self.settled else {}
        return [*self.experiment.rehearsals(), *(recipe for recipes in tuning.values() for recipe in recipes)]

    @cached_property
    def comparison(self) -> Comparison | None:
        """What came out; None before all runs are done, so that no score is seen early."""
        if self.plan is None:
            return None
        found = self.experiment.compare(self.plan, self.results)
        return None if any(row.missing for row in found.rows) else found

    @property
    def progress(self) -> str:
        """How far it is."""
        wanted = self.searched
        tried = sum(recipe.key in self.tuned for recipe in wanted)
        if self.plan is None:
            return "not run" if not tried else f"choosing numbers: {tried} of {len(wanted)} runs"
        rows = self.experiment.compare(self.plan, self.results).rows
        planned, missing = sum(row.planned for row in rows), sum(row.missing for row in rows)
        return "not run" if missing == planned and not tried else f"{planned - missing} of {planned} runs"


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
