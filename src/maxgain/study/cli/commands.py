"""The commands, functions whose parameters tyro turns into flags: each calls the study and prints what came out."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from matplotlib.figure import Figure
from rich.console import Console
from tyro.conf import Positional, Suppress, arg

from maxgain.errors import DataError, FileError, MaxGainError, RecipeError, RunError
from maxgain.text import text_table

from .. import api, tuning
from .. import data as datasets
from .._names import unknown
from ..networks import NETWORKS
from ..plan import Tuned
from ..recipe import RECIPES, Recipe
from ..regularisers import REGULARISERS
from ..report import early_curve, gain_boxes
from ..report.figures import gains_of
from ..result import RESULT
from ..run import Run
from ..running import Machine
from ..sentences import counted

T = TypeVar("T")
Flat = Annotated[T, arg(name="")]
"""Its fields are flags without a prefix."""
NEAR = (0.67, 1, 1.5, 2, 3)
"""Factors of the early rule's choice: the best γ of every recorded search lies between the first and the last."""
console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Flags(Recipe):
    """A recipe whose fields are flags."""

    name: Suppress[str]
    dataset: Suppress[str]


@dataclass(frozen=True)
class TuneFlags(Flags):
    """The same for a search, which trains on the training part."""

    train_on: Suppress[Literal["train", "train+validation"]] = "train"


@dataclass(frozen=True)
class CompareFlags(Flags):
    """The same for a comparison, whose rows and folds are its own options."""

    regulariser: Suppress[str] = "none"
    fold: Suppress[int | None] = None
    cross_validation: Suppress[int | None] = None


@dataclass(frozen=True, kw_only=True)
class Where:
    """Options of every command that trains."""

    data: Path | None = None
    """folder of the data sets; None: $MAXGAIN_DATA, or a cache folder"""
    out: Path | None = None
    """folder of the results; None: below runs/"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one"""


@dataclass(frozen=True, kw_only=True)
class Many(Where):
    """Options of every command that trains many runs."""

    jobs: int | None = None
    """runs at once; None: one per core; on a GPU one"""
    engine: Literal["processes", "ray"] = "processes"
    """processes of this machine, or tasks on a Ray cluster ($RAY_ADDRESS; without it a local one)"""
    grid: tuple[str, ...] = ()
    """values to try when tuning: maxgain=1,1.5,2 or maxgain=1:3:0.5"""
    budget: int | None = None
    """tuning runs, per row and fold; None: 9; 27 for tpe"""


def train(*, where: Flat[Where], recipe: Flat[Flags]) -> None:
    """Train one network. The same command continues a run that was stopped."""
    run = api.train(recipe.name, recipe.regulariser, **_passed_on(where, recipe))
    result, rows = run.result, []
    for part in ("train", "validation", "test"):
        if (accuracy := getattr(result, f"{part}_accuracy")) is not None:
            gains = [quantiles[4] for quantiles in result.gains.get(part, {}).values() if quantiles[4] is not None]
            numbers = getattr(result, f"{part}_loss"), max(gains, default=None)
            rows.append((part, f"{accuracy:.2%}", *map(_number, numbers)))
    console.print(text_table(("part", "accuracy", "loss", "largest gain"), rows, title=result.recipe.title))
    if result.note:
        console.print(f"note: {result.note}")
    suggest(("inspect", run.folder), ("report", run.folder))


def tune(
    *, where: Flat[Many], by: Literal["grid", "tpe"] = "grid", early: bool = False, recipe: Flat[TuneFlags]
) -> None:
    """Choose the numbers that a regulariser leaves open. No test data is used.

    Args:
        where: files and machine
        by: try a grid, or let optuna's TPE propose
        early: choose γ by the training loss after a seventh of the run: a cheap first look, which failed its test
        recipe: what is trained
    """
    if early and by != "grid":
        raise RecipeError("choose one of --early and --by.")
    rule: Tuned = "early" if early else by
    tuned = api.tune(recipe.name, recipe.regulariser, by=rule, **_passed_on(where, recipe))
    console.print(str(tuned))
    same = (*_changed(recipe), *(("--data", where.data) if where.data else ()))
    if early:
        _draw(early_curve(tuned.results, tuned.numbers["maxgain"]), tuned.folder / "early.png")
        console.print("A first look: the early rule failed its test. Check its choice by validation accuracy:")
        near = ",".join(f"{tuned.numbers['maxgain'] * factor:.3g}" for factor in NEAR)
        grid = ("--regulariser", recipe.regulariser, "--grid", f"maxgain={near}")
        suggest(("tune", recipe.name, *grid, *same))
    else:
        suggest(("train", recipe.name, "--regulariser", tuned.best, *same))


def compare(
    *,
    where: Flat[Many],
    rows: tuple[str, ...] = (),
    folds: int | None = None,
    seeds: int | None = None,
    contrasts: tuple[str, ...] = (),
    tuned: Tuned | None = None,
    rope: float | None = None,
    decide_by: Literal["paired", "pooled"] = "paired",
    shard: str | None = None,
    recipe: Flat[CompareFlags],
) -> None:
    """Train every row on every fold or seed, and test the differences in test accuracy.

    Args:
        where: files and machine
        rows: regularisers to compare, the baseline first: none dropout maxgain=2
        folds: number of folds; data without folds of their own are cross-validated
        seeds: number of seeds; with --folds, on each of them
        contrasts: pairs to test instead of all against the first: maxgain+dropout:dropout; 'matched' is every
            maxgain+X:X
        tuned: first choose the numbers that rows leave open, on each fold
        rope: region of practical equivalence, in points; enables the verdict 'equivalent'
        decide_by: analysis that verdicts follow; the other one is a check
        shard: train part I of N only (I/N, by fold or seed); then run the command without it in one folder with all
            runs
        recipe: what all rows have in common
    """
    compared = api.compare(
        recipe.name,
        rows,
        folds=folds,
        seeds=seeds,
        contrasts=contrasts,
        tuned=tuned,
        rope=rope,
        decide_by=decide_by,
        shard=shard,
        **_passed_on(where, recipe),
    )
    if shard:
        console.print(f"part {shard} is trained; copy all parts into one folder and run without --shard there.")
        return
    console.print(str(compared))
    suggest(("report", where.out or Path("runs") / f"compare-{recipe.name}"))
    if stopped := sum(result.fault == "machine" for result in compared.failed):
        raise RunError(f"{counted(stopped, 'run')} could not be finished; the same command tries again.")


def report(folder: Positional[Path], *, out: Path = Path("report.html")) -> None:
    """Write one page about the runs and comparisons in a folder.

    Args:
        folder: folder of a run, a comparison, or several
        out: the page
    """
    console.print(f"open in a browser: {api.page(folder, out).absolute().as_uri()}")


def inspect(folder: Positional[Path], *, out: Path | None = None) -> None:
    """Show the gains of a finished run beside its operator norms, layer by layer.

    Args:
        folder: the run's folder
        out: picture of the gains; None: gains.png in the folder
    """
    if (folder / "runs").is_dir() and not (folder / RESULT).exists():
        raise FileError(f"{folder} has several runs: inspect one of those in {folder / 'runs'}.")
    run = Run(folder)
    result = run.result
    if not result.gains:
        raise FileError(f"the run in {folder} has no gains: {result.error or 'no layer was measured.'}")
    norms: Mapping[str, float | None] = result.operator_norms
    if not norms and result.recipe.network in NETWORKS:  # a network of one's own needs its function
        norms = run.operator_norms().norms
    part, gains = gains_of(result)
    rows = [(layer, *map(_number, (row[2], row[4], norms.get(layer)))) for layer, row in gains.items()]
    heads = ("layer", "median gain", "largest gain", "operator norm")
    console.print(text_table(heads, rows, title=f"{result.recipe.title}, gains of {part} images"))
    _draw(gain_boxes({result.recipe.regulariser: result}), out or folder / "gains.png")
    suggest(("report", folder))


def list_all(name: Positional[str | None] = None) -> None:
    """List recipes, regularisers and networks; with a name, describe it.

    Args:
        name: one of them
    """
    if name is None:
        for title, names in (("recipes", RECIPES), ("regularisers", REGULARISERS), ("networks", NETWORKS)):
            console.print(textwrap.fill(f"{title}: {', '.join(names)}", 78, subsequent_indent="  "))
        suggest(("list", "maxgain"), ("train", "digits", "--regulariser", "maxgain+batchnorm"))
        return
    lines: list[str] = []
    if name in RECIPES:
        fields = {key: value for key, value in vars(RECIPES[name]).items() if value not in (None, (), "none", 0, False)}
        lines += [f"recipe {name}", *(f"{key}: {value}" for key, value in fields.items() if key != "name")]
    elif name in REGULARISERS:
        row = REGULARISERS[name]
        number = "" if row.parameter is None else f" (number: {row.parameter}, default {row.default:g})"
        lines += [f"regulariser {name}{number}", row.about]
        lines += [f"values to try: {', '.join(f'{value:g}' for value in row.grid)}"] if row.grid else []
    elif name in NETWORKS:
        builder: Any = NETWORKS[name]
        lines += [f"network {name}", getattr(builder, "func", builder).__doc__ or ""]
    else:
        known = [*RECIPES, *REGULARISERS, *NETWORKS]
        raise MaxGainError(unknown("recipe, regulariser or network", name, known))
    console.print(lines[0])
    for line in lines[1:]:
        console.print(textwrap.fill(" ".join(line.split()), 78, initial_indent="  ", subsequent_indent="  "))


def data(
    action: Positional[Literal["list", "fetch", "check"]] = "list",
    name: Positional[str | None] = None,
    *,
    data: Path | None = None,
) -> None:
    """List the data sets, fetch one, or check one.

    Args:
        action: what to do
        name: the data set
        data: folder of the data sets; None: $MAXGAIN_DATA, or a cache folder
    """
    if action == "list":
        for each, source in datasets.DATASETS.items():
            here = "" if source.any_size else "here" if datasets.is_there(each, data) else "not here"
            line = f"{each:<10}{here:<10}{source.what}: {source.size}"
            console.print(textwrap.fill(line, 78, subsequent_indent=" " * 20))
        return
    if name is None:
        raise DataError(f"'maxgain data {action}' needs the name of a data set.")
    if action == "fetch":
        console.print(f"{name} is in {datasets.fetch(name, data, progress=True)}")
    elif problem := datasets.check(name, data):
        raise DataError(problem)
    else:
        console.print(f"{name} is complete")


ROWS = ("none", "weightdecay", "dropout", "maxgain", "maxgain+weightdecay")
GRID = {
    "maxgain": (1, 1.5, 1.25, 2, 0.75, 3),
    "weightdecay": (0.01, 0.003, 0.03, 0.001, 0.02, 0.1),
    "dropout": (1, 1.5, 0.5, 1.25, 0.75, 0.25),
}
"""Values to try, most plausible first; a row with two numbers takes the first of each."""


def demo(
    *,
    out: Path = Path("runs/demo"),
    jobs: int | None = None,
    folds: int = 5,
    epochs: int = RECIPES["noisy-digits"].epochs,
    budget: int = 6,
) -> None:
    """Compare regularisers on digits with a third of the labels random, in two minutes.

    Args:
        out: folder of the results
        jobs: runs at once; None: one per core
        folds: number of folds of cross-validation
        epochs: number of epochs
        budget: tuning runs per row and fold
    """
    console.print("digits, a third of the training and validation labels random, test labels clean")
    compared = api.compare(
        "noisy-digits",
        ROWS,
        folds=folds,
        tuned="grid",
        grid=GRID,
        budget=budget,
        out=out,
        machine=Machine(device="cpu", jobs=jobs),
        epochs=epochs,
    )
    console.print(str(compared))
    shown = {row: compared.results[row][0] for row in ("none", "maxgain") if compared.results.get(row)}
    if shown:
        _draw(gain_boxes(shown), out / "gains.png")
    suggest(("report", out))


# What commands have in common


def _passed_on(where: Where, recipe: Recipe) -> dict[str, Any]:
    """What the functions of the study take: files, the machine, the network, and the recipe's fields."""
    settings = {name: getattr(recipe, name) for name in api.Settings.__annotations__}
    settings |= {"network": recipe.network, "out": where.out, "root": where.data}
    if not isinstance(where, Many):
        return settings | {"device": where.device}
    machine = Machine(device=where.device, jobs=where.jobs, engine=where.engine)
    return settings | {"grid": tuning.parse_grid(where.grid), "budget": where.budget, "machine": machine}


def _changed(recipe: Recipe) -> list[str]:
    """The flags that change the recipe, as words."""
    words: list[str] = []
    for name, default in vars(RECIPES[recipe.name]).items():
        value, flag = getattr(recipe, name), name.replace("_", "-")
        if value == default or name == "regulariser":
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def _draw(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    console.print(f"picture: {path}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def suggest(*commands: Sequence[object]) -> None:
    """Print the commands to type next."""
    lines = [shlex.join(["maxgain", *map(str, words)]) for words in commands]
    console.print("next: " + "\n      ".join(lines))
