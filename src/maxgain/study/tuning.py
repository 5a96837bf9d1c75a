"""Choose the numbers that a regulariser leaves open: by a grid, by TPE, or by the early rule. No test data is used."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from maxgain.choosing import choose_gamma
from maxgain.errors import ChoiceError, RecipeError, RunError
from maxgain.text import text_table

from ._names import unknown
from .plan import Tuned
from .recipe import Chosen, Recipe, fill, open_parts
from .result import Result, is_guess
from .sentences import counted

FILE = "tuning.json"
BUDGET = 9
"""Tuning runs per row: nine values of one number, or three of each of two."""
GAMMAS = (1.25, 1.7, 2.3, 3.2, 4.3, 5.9, 8.0)
"""The early rule's grid, geometric."""
FRACTION, FEWEST_EPOCHS = 7, 3
"""The early rule trains for a seventh of the recipe, and at least three epochs."""
LEARNED, GUESSING = 0.999, 0.98
"""A training accuracy that says that the data are learned; a part of guessing's loss that says that nothing is."""
RULES: dict[Tuned, str] = {
    "grid": "best validation accuracy, then lowest validation loss, then smallest numbers",
    "tpe": "best validation accuracy, then lowest validation loss, then smallest numbers",
    "early": "smallest γ whose training loss after a seventh of the run is within 10 % of the lowest",
}
SCORES, FAILED = ("validation loss", "train accuracy"), ("failed", "", "")

Numbers = dict[str, float]
"""A number for each regulariser that is tuned."""
Run = Callable[[Sequence[Recipe]], Iterable[Result]]
"""Trains what is missing of these recipes, without their test parts."""
log = logging.getLogger("maxgain.study")


@dataclass(frozen=True)
class Choice:
    """What a search chose, in its folder's tuning.json."""

    regulariser: str
    by: Tuned
    rule: str
    runs: tuple[str, ...]
    """Keys of its results."""


@dataclass(frozen=True)
class Tuning:
    """What every point of a search came to, and which was chosen."""

    recipe: Recipe
    """the regulariser with its numbers left open"""
    by: Tuned
    results: tuple[Result, ...]
    """of all points, in the order of their numbers"""
    numbers: Numbers
    """what was chosen"""
    folder: Path = Path()
    """where the runs are"""

    @property
    def best(self) -> str:
        """The regulariser with the chosen numbers."""
        return fill(self.recipe.regulariser, self.numbers)

    def __str__(self) -> str:
        """A line per point, and what was chosen."""
        first, rows = "training loss" if self.by == "early" else "validation accuracy", []
        parts = open_parts(self.recipe.regulariser, self.by)
        for result in self.results:
            point = numbers_of(result.recipe, parts)
            score = result.history.train_loss[-1:] if self.by == "early" else [result.validation_accuracy]
            scores = [*score, result.validation_loss, result.train_accuracy]
            texts = ["" if score is None else f"{score:.4f}" for score in scores] if result.status == "ok" else FAILED
            rows.append([*map("{:g}".format, point.values()), *texts, "<- chosen" if point == self.numbers else ""])
        chosen = f"chosen: {self.best} ({RULES[self.by]})"
        title = f"{self.recipe.name}, {counted(len(rows), 'run')}"
        return text_table((*self.numbers, first, *SCORES, ""), rows, title=title, caption=chosen)


def tune(
    recipe: Recipe,
    run: Run,
    by: Tuned,
    *,
    grid: Mapping[str, Sequence[float]] | None = None,
    budget: int | None = None,
    at_once: int = 1,
) -> Tuning:
    """Train points and choose one; `run` trains what is missing of them, so the same call continues a search."""
    recipe, grid = replace(recipe, train_on="train"), grid or {}
    if by not in RULES:
        raise RecipeError(unknown("rule", by, RULES), field="by")
    parts = open_parts(recipe.regulariser, by)
    if not parts:
        what = "γ" if by == "early" else "number"
        raise RecipeError(f"{recipe.regulariser} leaves no {what} open to tune.", field="regulariser")
    if budget is not None and budget < 1:
        raise RecipeError(f"budget must be at least 1, not {budget}.", field="budget")
    if unused := sorted(grid.keys() - {part.row.name for part in parts if by != "tpe"}):
        raise RecipeError(f"a grid for {unused[0]} has no use here.", field="grid")
    if by == "early":
        if budget is not None:
            raise RecipeError("budget is not for the early rule, which trains every γ of its grid.", field="budget")
        results, chosen = _tune_early(recipe, run, grid.get("maxgain", GAMMAS))
    else:
        if by == "tpe":
            results = _propose(recipe, run, budget or 3 * BUDGET, at_once)
        else:
            results = list(run(grid_recipes(recipe, grid, budget)))
        chosen = best(results, parts)
        if all(is_guess(result, "validation") for result in results):
            log.warning("no score is clearly above chance, so the choice means nothing: try other values")
    results.sort(key=lambda result: [*numbers_of(result.recipe, parts).values()])
    return Tuning(recipe, by, tuple(results), chosen)


def grid_recipes(recipe: Recipe, grid: Mapping[str, Sequence[float]], budget: int | None) -> list[Recipe]:
    """The recipe at every combination of values; with a budget, of the first values of each grid, that many in all.

    So a row with two numbers gets as many runs as a row with one. Without a grid, a number's usual values are taken.
    """
    parts, values = open_parts(recipe.regulariser), dict[str, Sequence[float]]()
    for part, size in zip(parts, _sizes(len(parts), budget or BUDGET), strict=True):
        name = part.row.name
        known = grid.get(name, part.row.grid)
        if name not in grid or budget is not None:
            if size > len(known):
                raise RecipeError(f"{name} has {len(known)} values to try, not {size}; give a grid.", field="budget")
            known = known[:size]
        if not known:
            raise RecipeError(f"the grid of {name} has no values.", field="grid")
        if wrong := [value for value in known if not part.row.valid(value)]:
            raise RecipeError(f"{wrong[0]:g} is no {part.row.parameter} of {name}.", field="grid")
        values[name] = sorted(known)
    points = [dict(zip(values, point, strict=True)) for point in product(*values.values())]
    return [at(replace(recipe, train_on="train"), point) for point in points]


def at(recipe: Recipe, numbers: Mapping[str, float]) -> Recipe:
    """The recipe with these numbers."""
    return replace(recipe, regulariser=fill(recipe.regulariser, numbers))


def numbers_of(recipe: Recipe, parts: Sequence[Chosen]) -> Numbers:
    """The numbers that a recipe has for these regularisers."""
    known = {choice.row.name: choice.number for choice in recipe.chosen}
    return {part.row.name: known[part.row.name] for part in parts}


def best(results: Iterable[Result], parts: Sequence[Chosen]) -> Numbers:
    """The numbers of the best validation accuracy; ties go to the lowest loss, then to the smallest numbers."""

    def rank(result: Result) -> tuple[float, float, list[float]]:
        loss = math.inf if result.validation_loss is None else result.validation_loss
        return -(result.validation_accuracy or 0.0), loss, list(numbers_of(result.recipe, parts).values())

    finished = [result for result in results if result.status == "ok" and result.validation_accuracy is not None]
    if not finished:
        raise RunError("no tuning run finished, so no number can be chosen.")
    return numbers_of(min(finished, key=rank).recipe, parts)


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The values in texts like maxgain=1,1.5,2 or maxgain=1:3:0.5 (both ends included), by regulariser."""
    grid = {}
    for text in texts:
        name, _, numbers = text.partition("=")
        try:
            if ":" in numbers:
                start, stop, step = map(float, numbers.split(":"))
                count = math.floor((stop - start) / step + 1e-9) + 1
                values = tuple(float(f"{start + index * step:g}") for index in range(count))
            else:
                values = tuple(map(float, numbers.split(",")))
        except (ValueError, ZeroDivisionError, OverflowError):
            values = ()
        if not values or not all(map(math.isfinite, values)) or len(set(values)) < len(values):
            raise RecipeError(f"{text!r} is no grid: write maxgain=1,1.5,2 or maxgain=1:3:0.5.", field="grid")
        grid[name] = values
    return grid


def _sizes(count: int, budget: int) -> list[int]:
    """How many values each of `count` numbers gets, as evenly as possible, so that their product is the budget."""
    sizes: list[int] = []
    for left in range(count, 0, -1):
        sizes.insert(0, max(size for size in range(1, budget + 1) if budget % size == 0 and size**left <= budget))
        budget //= sizes[0]
    return sizes


def _propose(recipe: Recipe, run: Run, budget: int, at_once: int) -> list[Result]:
    """Train what optuna's TPE proposes, a few points at once; the same call proposes the same points."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    rows = [part.row for part in open_parts(recipe.regulariser)]
    ranges = {row.name: optuna.distributions.FloatDistribution(*(row.search or ()), log=True) for row in rows}
    results: dict[str, Result] = {}
    for done in range(0, budget, at_once):
        trials = [study.ask(ranges) for _ in range(min(at_once, budget - done))]
        points = [{name: float(f"{value:.3g}") for name, value in trial.params.items()} for trial in trials]
        recipes = [at(recipe, point) for point in points]
        results |= {result.recipe.key: result for result in run(recipes)}
        for trial, proposed in zip(trials, recipes, strict=True):
            accuracy = results[proposed.key].validation_accuracy
            study.tell(trial, accuracy, state=optuna.trial.TrialState.FAIL if accuracy is None else None)
    return list(results.values())


def _tune_early(recipe: Recipe, run: Run, gammas: Sequence[float]) -> tuple[list[Result], Numbers]:
    """Train each γ for a seventh of the recipe and choose by training loss; widen the grid once at a chosen end."""
    if len(gammas) < 2 or list(gammas) != sorted(gammas) or gammas[0] <= 0:
        raise RecipeError("the early rule needs at least two γ, positive and ascending.", field="grid")
    epochs = max(FEWEST_EPOCHS, round(recipe.epochs / FRACTION))
    if epochs >= recipe.epochs:
        raise RecipeError(f"the early rule needs more than {epochs} epochs, not {recipe.epochs}.", field="epochs")
    results: list[Result] = []

    def choose(*more: float) -> float:
        """Train these γ too, and choose of all so far."""
        results.extend(run([at(replace(recipe, epochs=epochs), {"maxgain": gamma}) for gamma in more]))
        losses, guessing = early_losses(results), math.log(results[0].classes)
        learned = {gamma: loss if loss < GUESSING * guessing else math.inf for gamma, loss in losses.items()}
        if math.inf == min(learned.values()):
            raise RunError(
                f"no run learned anything: the lowest training loss is {min(losses.values()):.3g}, and guessing has "
                f"{guessing:.3g}. Try larger γ, or another learning rate."
            )
        try:
            return choose_gamma(learned)
        except ChoiceError:  # the smallest trains as well as any
            return min(losses)

    chosen = choose(*gammas)
    ratios = {gammas[0]: gammas[0] / gammas[1], gammas[-1]: gammas[-1] / gammas[-2]}
    if chosen in ratios:
        log.info("γ = %g is an end of the grid: widening it", chosen)
        chosen = choose(*(float(f"{chosen * ratios[chosen] ** step:.3g}") for step in (1, 2)))
    losses = early_losses(results)
    if chosen in (min(losses), max(losses)):
        log.warning("γ = %g is an end of the wider grid, too: try another grid", chosen)
    if any((result.train_accuracy or 0) >= LEARNED for result in results):
        log.warning("%d epochs learn the training data, so the rule misleads: tune by accuracy", epochs)
    for setting in ("label_smoothing", "label_noise"):
        if getattr(recipe, setting):
            log.warning("%s changes what a low training loss means, so the rule misleads: tune by accuracy", setting)
    return results, {"maxgain": chosen}


def early_losses(results: Iterable[Result]) -> dict[float, float]:
    """The last training loss of each γ; infinite where the run failed."""
    losses = {}
    for result in results:
        known = result.history.train_loss if result.status == "ok" else []
        losses[result.recipe.gamma or math.nan] = math.inf if not known or known[-1] is None else known[-1]
    return losses
