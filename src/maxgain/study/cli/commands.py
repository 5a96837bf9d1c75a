"""The commands: each one's options, which tyro turns into flags, and what it does with them.

A command calls the study, prints what came out, and says what to type next.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from maxgain.errors import DataError, FileError, MaxGainError, RecipeError, RunError

from .. import api, tuning
from .. import data as datasets
from .._names import unknown
from ..api import Settings
from ..networks import NETWORKS
from ..plan import Tuned
from ..recipe import RECIPES, Recipe
from ..regularisers import REGULARISERS
from ..report import early_curve, gain_boxes
from ..result import Result
from ..run import Run
from ..running import Machine
from ..sentences import counted

NEAR = (0.67, 1, 1.5, 2, 3)
"""Factors of the early rule's choice: the best γ of every recorded search lies between the first and the last."""
console = Console(highlight=False, width=None)


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


@dataclass(frozen=True, kw_only=True)
class Train(Where):
    """Train one network. The same command continues a run that was stopped."""


def train(recipe: Recipe, asked: Train) -> None:
    """Train, and show the scores."""
    run = api.train(recipe.name, str(vars(asked)["regulariser"]), device=asked.device, **_passed_on(asked))
    _show_scores(run.result)
    suggest(("inspect", run.folder), ("report", run.folder))


@dataclass(frozen=True, kw_only=True)
class Tune(Many):
    """Choose the numbers that a regulariser leaves open. No test data is used."""

    regulariser: str = "maxgain"
    """what to tune: maxgain, or maxgain+dropout"""
    by: Literal["grid", "tpe"] = "grid"
    """try a grid, or let optuna's TPE propose"""
    early: bool = False
    """choose γ by the training loss after a seventh of the run: a cheap first look, which failed its test"""


def tune(recipe: Recipe, asked: Tune) -> None:
    """Tune, show every point, and draw the early rule's picture."""
    if asked.early and asked.by != "grid":
        raise RecipeError("choose one of --early and --by.")
    tuned = api.tune(
        recipe.name,
        asked.regulariser,
        by="early" if asked.early else asked.by,
        grid=tuning.parse_grid(asked.grid),
        budget=asked.budget,
        machine=_machine(asked),
        **_passed_on(asked),
    )
    console.print(str(tuned), markup=False, soft_wrap=True)
    if tuned.by == "early":
        picture = _save(early_curve(tuned.results, tuned.numbers["maxgain"]), tuned.folder / "early.png")
        console.print(f"picture: {picture}", soft_wrap=True)
        console.print("A first look: the early rule failed its test. Check its choice by validation accuracy:")
        near = ",".join(f"{tuned.numbers['maxgain'] * factor:.3g}" for factor in NEAR)
        grid = ("--regulariser", asked.regulariser, "--grid", f"maxgain={near}")
        suggest(("tune", recipe.name, *grid, *_changed(recipe, asked)))
        return
    suggest(("train", recipe.name, "--regulariser", tuned.best, *_changed(recipe, asked)))


@dataclass(frozen=True, kw_only=True)
class Compare(Many):
    """Train every row on every fold or seed, and test the differences in test accuracy."""

    rows: tuple[str, ...] = ()
    """regularisers to compare, the baseline first: none dropout maxgain=2"""
    folds: int | None = None
    """number of folds; data without folds of their own are cross-validated"""
    seeds: int | None = None
    """number of seeds; with --folds, on each of them"""
    contrasts: tuple[str, ...] = ()
    """pairs to test instead of all against the first: maxgain+dropout:dropout; 'matched' is every maxgain+X:X"""
    tuned: Tuned | None = None
    """first choose the numbers that rows leave open, on each fold"""
    rope: float | None = None
    """region of practical equivalence, in points; enables the verdict 'equivalent'"""
    decide_by: Literal["paired", "pooled"] = "paired"
    """analysis that verdicts follow; the other one is a check"""
    shard: str | None = None
    """train part I of N only (I/N, by fold or seed); then run the command without it in one folder with all runs"""


def compare(recipe: Recipe, asked: Compare) -> None:
    """Compare, and show rows and verdicts."""
    compared = api.compare(
        recipe.name,
        asked.rows,
        folds=asked.folds,
        seeds=asked.seeds,
        contrasts=asked.contrasts,
        tuned=asked.tuned,
        grid=tuning.parse_grid(asked.grid),
        budget=asked.budget,
        rope=asked.rope,
        decide_by=asked.decide_by,
        machine=_machine(asked),
        shard=asked.shard,
        **_passed_on(asked),
    )
    if asked.shard:
        console.print(f"part {asked.shard} is trained; copy all parts into one folder and run without --shard there.")
        return
    console.print(str(compared), markup=False, soft_wrap=True)
    suggest(("report", asked.out or Path("runs") / f"compare-{recipe.name}"))
    if stopped := sum(result.fault == "machine" for result in compared.failed):
        raise RunError(f"{counted(stopped, 'run')} could not be finished; the same command tries again.")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one page about the runs and comparisons in a folder."""

    folder: Positional[Path]
    """folder of a run, a comparison, or several"""
    out: Path = Path("report.html")
    """the page"""


def report(asked: Report) -> None:
    """Write the page."""
    console.print(f"open in a browser: {api.page(asked.folder, asked.out).absolute().as_uri()}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show the gains of a finished run beside its operator norms, layer by layer."""

    folder: Positional[Path]
    """the run's folder"""
    out: Path | None = None
    """picture of the gains; None: gains.png in the folder"""


def inspect(asked: Inspect) -> None:
    """Show gains beside operator norms, and draw the gains."""
    run = Run(asked.folder)
    result = run.result
    if result.status != "ok":
        raise FileError(f"the run in {asked.folder} failed: {result.error}")
    if not result.gains:
        raise FileError(f"the network in {asked.folder} has no layer with a gain.")
    part = "test" if "test" in result.gains else "train"
    table = _table("layer", f"median gain ({part})", f"largest gain ({part})", "operator norm")
    norms: Mapping[str, float | None] = result.operator_norms
    if not norms and result.recipe.network in NETWORKS:  # a network of one's own needs its function
        norms = run.operator_norms().norms
    for layer, quantiles in result.gains[part].items():
        table.add_row(layer, *map(_number, (quantiles[2], quantiles[4], norms.get(layer))))
    console.print(table)
    picture = save_gains({result.recipe.regulariser: result}, asked.out or asked.folder / "gains.png")
    console.print(f"picture: {picture}", soft_wrap=True)
    suggest(("report", asked.folder))


@dataclass(frozen=True, kw_only=True)
class List:
    """List recipes, regularisers and networks; with a name, describe it."""

    name: Positional[str | None] = None
    """one of them"""


def list_all(asked: List) -> None:
    """List all names, or describe one."""
    if asked.name is None:
        for title, names in (("recipes", RECIPES), ("regularisers", REGULARISERS), ("networks", NETWORKS)):
            console.print(textwrap.fill(f"{title}: {', '.join(names)}", 78, subsequent_indent="  "))
        suggest(("list", "maxgain"), ("train", "digits", "--regulariser", "maxgain+batchnorm"))
        return
    texts = [*_described(asked.name)]
    if not texts:
        known = [*RECIPES, *REGULARISERS, *NETWORKS]
        raise MaxGainError(unknown("recipe, regulariser or network", asked.name, known))
    console.print("\n\n".join(texts), markup=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Data:
    """List the data sets, fetch one, or check one."""

    action: Positional[Literal["list", "fetch", "check"]] = "list"
    """what to do"""
    name: Positional[str | None] = None
    """the data set"""
    data: Path | None = None
    """folder of the data sets; None: $MAXGAIN_DATA, or a cache folder"""


def data(asked: Data) -> None:
    """List, fetch or check data sets."""
    if asked.action == "list":
        table = _table("name", "here", "what it is", "size")
        for name, source in datasets.DATASETS.items():
            here = "" if source.any_size else "yes" if datasets.is_there(name, asked.data) else "no"
            table.add_row(name, here, source.what, source.size)
        console.print(table)
        return
    if asked.name is None:
        raise DataError(f"'maxgain data {asked.action}' needs the name of a data set.")
    if asked.action == "fetch":
        console.print(f"{asked.name} is in {datasets.fetch(asked.name, asked.data, progress=True)}", soft_wrap=True)
    elif problem := datasets.check(asked.name, asked.data):
        raise DataError(problem)
    else:
        console.print(f"{asked.name} is complete")


ROWS = ("none", "weightdecay", "dropout", "maxgain", "maxgain+weightdecay")
GRID = {
    "maxgain": (1, 1.5, 1.25, 2, 0.75, 3),
    "weightdecay": (0.01, 0.003, 0.03, 0.001, 0.02, 0.1),
    "dropout": (1, 1.5, 0.5, 1.25, 0.75, 0.25),
}
"""Values to try, most plausible first; a row with two numbers takes the first of each."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Compare regularisers on digits with a third of the labels random, in a few minutes."""

    out: Path = Path("runs/demo")
    """folder of the results"""
    jobs: int | None = None
    """runs at once; None: one per core"""
    folds: int = 5
    """number of folds of cross-validation"""
    epochs: int | None = None
    """number of epochs; None: the recipe's"""
    budget: int = 6
    """tuning runs per row and fold"""


def demo(asked: Demo) -> None:
    """Compare, then show one sentence, one table, one picture and the next command."""
    console.print("digits, a third of the training and validation labels random, test labels clean")
    settings: api.Settings = {} if asked.epochs is None else {"epochs": asked.epochs}
    compared = api.compare(
        "noisy-digits",
        ROWS,
        folds=asked.folds,
        tuned="grid",
        grid=GRID,
        budget=asked.budget,
        out=asked.out,
        machine=Machine(device="cpu", jobs=asked.jobs),
        **settings,
    )
    console.print(str(compared), markup=False, soft_wrap=True)
    shown = {row: compared.results[row][0] for row in ("none", "maxgain") if compared.results.get(row)}
    console.print(f"gains without and with MaxGain: {save_gains(shown, asked.out / 'gains.png')}", soft_wrap=True)
    suggest(("report", asked.out))


# --- What they share


def _passed_on(asked: Any) -> dict[str, Any]:
    """The options that every function of the study takes: files, the network, and the recipe's fields."""
    settings = {name: value for name, value in vars(asked).items() if name in Settings.__annotations__}
    return settings | {"network": asked.network, "out": asked.out, "root": asked.data}


def _changed(recipe: Recipe, asked: Any) -> list[str]:
    """The flags that change the recipe, as words."""
    words: list[str] = []
    for name, value in vars(asked).items():
        if name != "regulariser" and hasattr(recipe, name) and value != getattr(recipe, name):
            flag = name.replace("_", "-")
            several = value if isinstance(value, tuple) else (value,)
            words += (
                [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", *map(str, several)]
            )
    return words


def _machine(asked: Many) -> Machine:
    return Machine(device=asked.device, jobs=asked.jobs, engine=asked.engine)


def _show_scores(result: Result) -> None:
    table = _table("part", "accuracy", "loss", "largest gain")
    for part in ("train", "validation", "test"):
        accuracy, loss = getattr(result, f"{part}_accuracy"), getattr(result, f"{part}_loss")
        if accuracy is not None:
            gains = [quantiles[4] for quantiles in result.gains.get(part, {}).values() if quantiles[4] is not None]
            table.add_row(part, f"{accuracy:.2%}", _number(loss), _number(max(gains, default=None)))
    console.print(table)
    if result.note:
        console.print(f"note: {result.note}", soft_wrap=True)


def save_gains(results: Mapping[str, Result], path: Path) -> Path:
    """Draw the gains of these runs, a panel each."""
    return _save(gain_boxes(results), path)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _described(name: str) -> Iterable[str]:
    if name in RECIPES:
        recipe = RECIPES[name]
        known = {key: value for key, value in vars(recipe).items() if value not in (None, (), "none", 0, False)}
        yield "\n".join([f"recipe {name}", *(f"  {key}: {value}" for key, value in known.items() if key != "name")])
    if name in REGULARISERS:
        row = REGULARISERS[name]
        number = "" if row.parameter is None else f" (number: {row.parameter}, default {row.default:g})"
        grid = f"\n  values to try: {', '.join(f'{value:g}' for value in row.grid)}" if row.grid else ""
        yield f"regulariser {name}{number}\n" + _wrapped(row.about) + grid
    if name in NETWORKS:
        builder: Any = NETWORKS[name]
        yield f"network {name}\n" + _wrapped(getattr(builder, "func", builder).__doc__ or "")


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 78, initial_indent="  ", subsequent_indent="  ")


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.overflow = "fold"
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def suggest(*commands: Sequence[object]) -> None:
    """Print the commands to type next."""
    lines = [shlex.join(["maxgain", *map(str, words)]) for words in commands]
    console.print("next: " + "\n      ".join(lines), markup=False, soft_wrap=True)
