"""One function per command: call the study, print what came out, and say what to type next."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from maxgain.errors import DataError, FileError, MaxGainError, RecipeError, RunError

from .. import api, tuning
from .. import data as datasets
from .._names import unknown
from ..api import Settings
from ..networks import NETWORKS
from ..recipe import RECIPES, Recipe
from ..regularisers import REGULARISERS
from ..report import early_curve, gain_boxes
from ..run import Result, Run
from ..running import Machine
from ..sentences import counted
from . import options

NEAR = (0.67, 1, 1.5, 2, 3)
"""Factors of the early rule's choice: the best γ of every recorded search lies between the first and the last."""
console = Console(highlight=False, width=None)


def train(recipe: Recipe, asked: options.Train) -> None:
    """Train, and show the scores."""
    settings, network = _settings(asked)
    regulariser = str(vars(asked)["regulariser"])
    run = api.train(
        recipe.name, regulariser, network=network, out=asked.out, root=asked.data, device=asked.device, **settings
    )
    _show_scores(run.result)
    suggest(("inspect", run.folder), ("report", run.folder))


def tune(recipe: Recipe, asked: options.Tune) -> None:
    """Tune, show every point, and draw the early rule's picture."""
    if asked.early and asked.by != "grid":
        raise RecipeError("choose one of --early and --by.")
    settings, network = _settings(asked)
    tuned = api.tune(
        recipe.name,
        asked.regulariser,
        by="early" if asked.early else asked.by,
        grid=tuning.parse_grid(asked.grid),
        budget=asked.budget,
        network=network,
        out=asked.out,
        root=asked.data,
        machine=_machine(asked),
        **settings,
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


def compare(recipe: Recipe, asked: options.Compare) -> None:
    """Compare, and show rows and verdicts."""
    settings, network = _settings(asked)
    folder = asked.out or Path("runs") / f"compare-{recipe.name}"
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
        network=network,
        out=folder,
        root=asked.data,
        machine=_machine(asked),
        shard=asked.shard,
        **settings,
    )
    if asked.shard:
        console.print(f"part {asked.shard} is trained; copy all parts into one folder and run without --shard there.")
        return
    console.print(str(compared), markup=False, soft_wrap=True)
    suggest(("report", folder))
    if stopped := sum(result.fault == "machine" for result in compared.failed):
        raise RunError(f"{counted(stopped, 'run')} could not be finished; the same command tries again.")


def report(asked: options.Report) -> None:
    """Write the page."""
    console.print(f"open in a browser: {api.page(asked.folder, asked.out).absolute().as_uri()}", soft_wrap=True)


def inspect(asked: options.Inspect) -> None:
    """Show gains beside operator norms, and draw the gains."""
    run = Run(asked.folder)
    result = run.result
    if result.status != "ok":
        raise FileError(f"the run in {asked.folder} failed: {result.error}")
    if not result.gains:
        raise FileError(f"the network in {asked.folder} has no layer with a gain.")
    part = "test" if "test" in result.gains else "train"
    table = _table("layer", f"median gain ({part})", f"largest gain ({part})", "operator norm")
    norms = result.operator_norms or run.operator_norms().norms
    for layer, quantiles in result.gains[part].items():
        table.add_row(layer, *map(_number, (quantiles[2], quantiles[4], norms.get(layer))))
    console.print(table)
    picture = save_gains({result.recipe.regulariser: result}, asked.out or asked.folder / "gains.png")
    console.print(f"picture: {picture}", soft_wrap=True)
    suggest(("report", asked.folder))


def list_all(asked: options.List) -> None:
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


def data(asked: options.Data) -> None:
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


def _settings(asked: Any) -> tuple[Settings, str]:
    """The recipe's fields among the options, and the network."""
    settings: Any = {name: value for name, value in vars(asked).items() if name in Settings.__annotations__}
    return settings, asked.network


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


def _machine(asked: options.Many) -> Machine:
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
