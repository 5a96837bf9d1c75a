"""What somebody wants compared, and the way from there to the comparison: for the command line and for Python alike.

Who asks also says how runs are performed: in processes with progress bars, or one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import maxgain
from maxgain.errors import RecipeError

from ..files import alone_in, write_json
from ..recipes import RECIPES, Recipe, expect_count
from ..regularisers import parse, settled, spelt, with_gamma
from ..runs import Place
from . import jobs as work
from . import records, sentences, tuning_rule
from .comparison import Comparison, compare
from .jobs import Job, Pairing
from .question import FILE, Analysis, Question, against, contrasts, remember
from .records import Records
from .tuning_rule import Grid

COMPARISON = "comparison.json"
FILES = (COMPARISON, FILE)
"""What a comparison writes into its folder, beside runs and records."""

Perform = Callable[[str, Sequence[Job], Place], None]
"""Makes sure that each of the jobs has a record in that place, or has failed; the text says what they are for."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Everything that decides which runs there are and what they are to show; `maxgain compare --help` explains it."""

    recipe: Recipe
    regularisers: tuple[str, ...]
    folds: int | None = None
    seeds: int | None = None
    gamma: float | None = None
    baseline: str | None = None
    contrasts: tuple[str, ...] = ()
    rope: float | None = None
    decide_by: Analysis = "paired"
    tuned: bool = False
    budget: int | None = None
    grid: tuple[str, ...] = ()
    hold_out: bool = False

    def __post_init__(self) -> None:
        if not self.regularisers:
            raise RecipeError("a comparison needs --regularisers, such as: none dropout maxgain.")
        if self.baseline is not None and self.baseline not in self.regularisers:
            raise RecipeError(f"the baseline {self.baseline!r} is not one of {', '.join(self.regularisers)}.")
        if self.baseline is not None and self.contrasts:
            raise RecipeError("--contrasts say what is tested against what: leave out --baseline.")
        if self.folds is None and self.seeds is None:
            raise RecipeError("a comparison needs --folds or --seeds, or both, and how many.")
        usual = RECIPES[self.recipe.name].fold if self.recipe.name in RECIPES else None
        if self.folds is not None and self.recipe.fold != usual:
            raise RecipeError("--folds goes through the folds from 0 on: leave out --fold.")
        if self.rope is not None and not 0 < self.rope < 100:
            raise RecipeError(f"--rope must be a number of percentage points between 0 and 100, not {self.rope:g}.")
        self._refuse_useless_tuning()
        self._refuse_doubles()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The rows: the regularisers with the bound that was given for all."""
        return with_gamma(self.regularisers, self.gamma)

    @cached_property
    def grids(self) -> list[Grid]:
        """The values to try where numbers are tuned."""
        return [Grid.parsed(text) for text in self.grid]

    @cached_property
    def pairing(self) -> Pairing:
        """The folds or the seeds."""
        if self.folds is None:
            return work.seeds(self.recipe, self.seeds or 0)
        return work.folds(self.recipe, self.folds, 1 if self.seeds is None else self.seeds)

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """What is tested against what, by the names of the rows."""
        if self.contrasts:
            asked = contrasts(self.contrasts, self.regularisers)
        else:
            asked = against(self.baseline or self.regularisers[0], self.regularisers)
        named = dict(zip(self.regularisers, self.names, strict=True))
        return tuple((named[first], named[second]) for first, second in asked)

    def jobs(self) -> list[Job]:
        """Every run whose score is compared, its numbers not yet chosen."""
        tuning_rule.refuse_unused(self.grids, self.names)
        recipe = replace(self.recipe, train_on="train" if self.hold_out else "train+validation")
        return work.plan(recipe, self.names, self.pairing)

    def tuning(self, jobs: Sequence[Job]) -> list[Job]:
        """The runs that choose the jobs' numbers, if numbers are to be chosen."""
        return work.plan_tuning(jobs, self.grids, self.budget or tuning_rule.BUDGET) if self.tuned else []

    def question(self, jobs: Sequence[Job], tuning: Sequence[Job], known: Records | None = None) -> Question:
        """What the records are to answer; `known` are those of the tuning runs."""
        tried = () if known is None else known.runs
        return Question(
            recipe=self.recipe.name,
            dataset=self.recipe.dataset,
            over=self.pairing.over,
            rows={name: tuple(job.planned for job in jobs if job.row == name) for name in self.names},
            contrasts=self.pairs(),
            train_on=jobs[0].recipe.train_on,
            cross_validation=self.pairing.cross_validation,
            decide_by=self.decide_by,
            rope=None if self.rope is None else self.rope / 100,
            tuning_runs=work.tuning_runs(tuning),
            chosen=work.tuned_numbers(tuning),
            validation_images=next((run["validation_images"] for run in tried if "validation_images" in run), None),
            tuning_failures={} if known is None else work.tuning_failures(tuning, known),
        )

    def _refuse_doubles(self) -> None:
        """Refuse two names for the same runs; a number that is chosen by tuning is not the default."""
        spelling = {name: spelt(parse(name) if self.tuned else settled(name)) for name in self.names}
        for place, name in enumerate(self.names):
            if other := next((other for other in self.names[:place] if spelling[other] == spelling[name]), None):
                raise RecipeError(f"{other} and {name} are the same regulariser: leave one of them out.")

    def _refuse_useless_tuning(self) -> None:
        for flag, given in (("--grid", self.grid), ("--budget", self.budget is not None)):
            if given and not self.tuned:
                raise RecipeError(f"{flag} says what --tuned tries: it needs --tuned.")
        if self.budget is not None and self.grid:
            raise RecipeError("a grid has as many runs as values: leave out --budget or --grid.")
        if self.budget is not None:
            expect_count("--budget", self.budget)


def answered(asked: Asked, place: Place, perform: Perform) -> Comparison:
    """The comparison that was asked for, after performing what it needs and has no record of."""
    jobs = asked.jobs()
    tuning = asked.tuning(jobs)
    asked.pairs()  # which may be refused, before anything is trained
    with alone_in(place.folder, *FILES):
        jobs, tuning = work.identified(jobs, place), work.identified(tuning, place.for_tuning)
        known = None
        if tuning:
            perform("tuning", tuning, place.for_tuning)
            known = records.read(place.for_tuning.results)
            jobs = work.tuned(jobs, tuning, known)
        question = asked.question(jobs, tuning, known)
        remember(place.folder, question)
        perform("comparing", jobs, place)
        found = records.read(place.results)
        return compare(question, found, found.correct)


def write(comparison: Comparison, place: Place) -> None:
    """Keep the comparison in comparison.json in its folder."""
    write_json(place.folder / COMPARISON, {"maxgain": maxgain.__version__} | sentences.to_json(comparison))
