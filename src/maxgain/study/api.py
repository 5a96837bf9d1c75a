"""The study in Python: train, tune and compare, on your own data and networks or on those that recipes name.

    from maxgain.study import compare, dataset, page, train

    run = train("digits", "maxgain=2")            # run.result, run.history, run.model()
    data = dataset("mine", train=(images, labels), test=(more_images, more_labels))
    comparison = compare(data, ["none", "maxgain"], network=my_network, folds=5, tuned="early", out="runs/mine")
    print(comparison)                             # comparison.to_frame(): a pandas data frame
    page("runs/mine", "report.html")

The same call continues what was stopped and trains nothing twice. Progress goes to the logger 'maxgain.study'.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import msgspec

from maxgain.errors import RecipeError, RunError

from . import _files, comparison, tuning
from .comparison import Comparison
from .data import DATASETS, Dataset
from .networks import Builder, name_network
from .plan import Plan, Tuned, make_plan
from .recipe import RECIPES, Recipe
from .report import build_page
from .result import Inputs, Metrics, Result, Run, read_data
from .run import perform as perform_run
from .running import Machine, Runner
from .tuning import Tuning

RUNS, TUNING, COMPARISON = "runs", "tuning", "comparison.json"
log = logging.getLogger("maxgain.study")


class Settings(TypedDict, total=False):
    """Fields of a recipe that a call may change; `Recipe` describes them."""

    optimiser: Literal["adam", "sgd"]
    learning_rate: float
    epochs: int
    batch_size: int
    schedule: Literal["steps", "cosine", "triangular"]
    milestones: tuple[int, ...]
    decay: float
    weight_decay: float
    augment: bool
    cutout: int
    label_smoothing: float
    label_noise: float
    train_on: Literal["train", "train+validation"]
    include: tuple[str, ...]
    p: float
    seed: int
    fold: int | None
    cross_validation: int | None
    image_size: int | None
    precision: Literal["auto", "float32", "bfloat16"]


def train(
    data: Dataset | str,
    regulariser: str = "maxgain",
    *,
    network: str | Builder | None = None,
    out: str | Path | None = None,
    root: str | Path | None = None,
    device: str = "auto",
    **settings: Unpack[Settings],
) -> Run:
    """Train one network, or continue the run in `out`, and return it.

    Args:
        data: Your own data (see `dataset`), or the name of a recipe such as digits.
        regulariser: Regularisers joined by +, numbers optional: maxgain=2+dropout.
        network: Name of a network, or a function (shape, classes) -> module. Default: the recipe's, or mlp.
        out: The run's folder. Default: below runs/.
        root: Folder of the data sets that recipes name.
        device: cpu, cuda, or auto.
        **settings: Fields of the recipe to change.
    """
    recipe, inputs = _recipe(data, network, root, settings)
    recipe = replace(recipe, regulariser=regulariser)

    def report(line: Metrics) -> None:
        progress = {"done": line.epoch, "total": recipe.epochs}
        log.info("epoch %d, training loss %.4f", line.epoch, line.train_loss, extra=progress)

    folder = Path(out) if out else Path("runs") / recipe.title
    try:
        return perform_run(recipe, folder, inputs, device=device, on_epoch=report)
    finally:
        read_data.cache_clear()


def tune(
    data: Dataset | str,
    regulariser: str = "maxgain",
    *,
    by: Tuned = "grid",
    grid: Mapping[str, Sequence[float]] | None = None,
    budget: int | None = None,
    network: str | Builder | None = None,
    out: str | Path | None = None,
    root: str | Path | None = None,
    machine: Machine | None = None,
    **settings: Unpack[Settings],
) -> Tuning:
    """Choose the numbers that a regulariser leaves open, without the test part; `.best` is what to train with.

    Args:
        data: Your own data, or the name of a recipe.
        regulariser: What to tune: maxgain, or maxgain+dropout.
        by: 'grid' and 'tpe' choose by validation accuracy; 'early' chooses γ by the training loss of short runs, which
            failed its test.
        grid: Values to try, by regulariser: {"maxgain": [1, 1.5, 2]}.
        budget: Number of runs of a grid or of TPE. Default: 9, or 27 for TPE.
        network: Name of a network, or a function that makes one.
        out: The search's folder. Default: below runs/.
        root: Folder of the data sets that recipes name.
        machine: Device and number of runs at once.
        **settings: Fields of the recipe to change.
    """
    recipe, inputs = _recipe(data, network, root, settings)
    folder = Path(out) if out else Path("runs") / f"tune-{recipe.name}-{regulariser}"
    recipe = replace(recipe, regulariser=regulariser)
    with Runner(machine, inputs) as runner:
        run = partial(runner.run, folder=folder / TUNING, test=False, what="tuning")
        tuned = tuning.tune(recipe, run, by, grid=grid, budget=budget, at_once=runner.machine.at_once)
    choice = tuning.Choice(tuned.best, by, tuning.RULES[by], tuple(result.key for result in tuned.results))
    _files.write_json(folder / tuning.FILE, choice)
    return replace(tuned, folder=folder)


def compare(
    data: Dataset | str,
    rows: Sequence[str],
    *,
    folds: int | None = None,
    seeds: int | None = None,
    contrasts: Sequence[str] = (),
    tuned: Tuned | None = None,
    grid: Mapping[str, Sequence[float]] | None = None,
    budget: int | None = None,
    rope: float | None = None,
    decide_by: Literal["paired", "pooled"] = "paired",
    network: str | Builder | None = None,
    out: str | Path | None = None,
    root: str | Path | None = None,
    machine: Machine | None = None,
    shard: str | None = None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Train every row on every fold or seed and test the paired differences in test accuracy.

    Args:
        data: Your own data, or the name of a recipe.
        rows: Regularisers to compare, the baseline first: none, dropout, maxgain=2+dropout.
        folds: Number of folds. Data without folds of their own are cross-validated.
        seeds: Number of seeds; with folds, on each of them.
        contrasts: Pairs to test instead: maxgain+dropout:dropout; 'matched' is every maxgain+X:X.
        tuned: First choose the numbers that rows leave open, on each fold, as `tune` does.
        grid: Values to try when tuning, by regulariser.
        budget: Tuning runs per row and fold.
        rope: Region of practical equivalence in percentage points; enables the verdict 'equivalent'.
        decide_by: Analysis that verdicts follow.
        network: Name of a network, or a function that makes one.
        out: The comparison's folder. Default: below runs/.
        root: Folder of the data sets that recipes name.
        machine: Device and number of runs at once.
        shard: Train part i of n only ('0/4'), by fold or seed; the call without it collects all parts.
        **settings: Fields of the recipe to change. By default final runs train on the validation part too.
    """
    settings.setdefault("train_on", "train+validation")
    recipe, inputs = _recipe(data, network, root, settings)
    folder = Path(out) if out else Path("runs") / f"compare-{recipe.name}"
    plan = make_plan(
        recipe,
        rows,
        folds=folds,
        seeds=seeds,
        own_folds=1 if inputs.dataset or recipe.cross_validation else DATASETS[recipe.dataset].folds,
        contrasts=contrasts,
        tuned=tuned,
        budget=budget,
        grid={name: tuple(values) for name, values in (grid or {}).items()},
        rope=rope,
        decide_by=decide_by,
    )
    return run_plan(plan, folder, inputs=inputs, machine=machine, shard=shard)


def run_plan(
    plan: Plan, folder: Path, *, inputs: Inputs | None = None, machine: Machine | None = None, shard: str | None = None
) -> Comparison:
    """Choose the plan's open numbers, train what is missing of it in `folder`, and compare."""
    if shard is not None:
        plan = replace(plan, units=_part(plan.units, shard))
    with Runner(machine, inputs, shared=shard is not None) as runner:
        if plan.tuned is not None:
            plan = _choose(plan, plan.tuned, folder / TUNING, runner)
        recipes = [recipe for unit in zip(*map(plan.recipes, plan.rows), strict=True) for recipe in unit]
        results: list[Result] = []
        for result in runner.run(recipes, folder / RUNS, what="comparing"):
            if not results and shard is None:  # not before: a plan whose data cannot be read is no comparison
                plan.write(folder)
            results.append(result)
    compared = comparison.compare(plan, results)
    if shard is None:
        _files.write_json(folder / COMPARISON, compared.to_json())
    return compared


def page(folder: str | Path, out: str | Path = "report.html") -> Path:
    """Write one self-contained page of a run, a comparison, or all that lie below a folder, and return its path."""
    _files.write(Path(out), build_page(Path(folder)).encode())
    return Path(out)


def _choose(plan: Plan, by: Tuned, folder: Path, runner: Runner) -> Plan:
    """The plan with the numbers that tuning chose for each row and fold; seeds share one choice."""
    groups = [plan.units] if plan.over == "seed" else [(unit,) for unit in plan.units]
    rows = {row: names for row in plan.rows if (names := plan.tunable(row))}
    searches = {(row, units): replace(plan.at(units[0])[0], regulariser=row) for units in groups for row in rows}
    known: dict[str, Result] = {}

    def run(recipes: Sequence[Recipe]) -> list[Result]:
        missing = [recipe for recipe in recipes if recipe.key not in known]
        known.update((result.recipe.key, result) for result in runner.run(missing, folder, test=False, what="tuning"))
        return [known[recipe.key] for recipe in recipes]

    if by == "grid":  # all rows at once keeps every core busy
        run([point for recipe in searches.values() for point in tuning.grid_recipes(recipe, plan.grid, plan.budget)])
    numbers: dict[str, dict[int, dict[str, float]]] = {row: {} for row in rows}
    counts: dict[str, int] = {}
    for (row, units), recipe in searches.items():
        grid = {name: plan.grid[name] for name in plan.grid.keys() & rows[row]}
        try:
            chosen = tuning.tune(recipe, run, by, grid=grid, budget=plan.budget, at_once=runner.machine.at_once)
        except RunError as error:
            log.warning("%s keeps its default numbers: %s", row, error)
            continue
        numbers[row] |= dict.fromkeys(units, chosen.numbers)
        counts[row] = len(chosen.results)
    return replace(plan, numbers=numbers, tuning_runs=counts)


def _part(units: tuple[int, ...], shard: str) -> tuple[int, ...]:
    """The folds or seeds of a shard like 0/4."""
    typed = re.fullmatch(r"(\d+)/(\d+)", shard)
    number, count = map(int, typed.groups()) if typed else (0, 0)
    if not number < min(count, len(units)):
        what = f"with I from 0 to N - 1, and at most {len(units) - 1}"
        raise RecipeError(f"{shard!r} is no shard of {len(units)} folds or seeds: write I/N {what}.", field="shard")
    return units[number::count]


def _recipe(
    data: Dataset | str, network: str | Builder | None, root: str | Path | None, settings: Settings
) -> tuple[Recipe, Inputs]:
    """What a call asks to train."""
    own = data if isinstance(data, Dataset) else None
    if own is not None:
        recipe = Recipe(own.name, own.name, "mlp", "adam", learning_rate=1e-3, epochs=30, batch_size=32)
    elif isinstance(data, str):
        recipe = RECIPES[data]
    else:
        raise RecipeError("data must be the name of a recipe, or what `dataset` returns.", field="data")
    builder = network if callable(network) else None
    if builder is not None:
        if own is None:
            raise RecipeError("a network of your own needs data of your own: see `dataset`.", field="network")
        network = name_network(builder, own)
    if unknown := sorted(settings.keys() - Settings.__annotations__.keys()):
        raise RecipeError(f"a recipe has no {unknown[0]!r}.", field=unknown[0])
    changes = {**settings, "network": network or recipe.network}
    try:
        recipe = msgspec.convert(msgspec.to_builtins(recipe) | changes, Recipe)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").partition("[")[0]
        raise RecipeError(f"{name}: {text[:1].lower()}{text[1:]}.", field=name) from error
    return recipe, Inputs(root=Path(root).expanduser() if root else None, dataset=own, network=builder)
