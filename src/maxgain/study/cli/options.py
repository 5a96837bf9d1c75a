"""The options of each command, as frozen dataclasses that tyro turns into flags."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from ..recipe import Recipe


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


@dataclass(frozen=True, kw_only=True)
class Tune(Many):
    """Choose the numbers that a regulariser leaves open. No test data is used."""

    regulariser: str = "maxgain"
    """what to tune: maxgain, or maxgain+dropout"""
    by: Literal["grid", "tpe"] = "grid"
    """try a grid, or let optuna's TPE propose"""
    early: bool = False
    """choose γ by the training loss after a seventh of the run: a cheap first look, which failed its test"""


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
    tuned: Literal["grid", "tpe", "early"] | None = None
    """first choose the numbers that rows leave open, on each fold"""
    rope: float | None = None
    """region of practical equivalence, in points; enables the verdict 'equivalent'"""
    decide_by: Literal["paired", "pooled"] = "paired"
    """analysis that verdicts follow; the other one is a check"""
    shard: str | None = None
    """train part I of N only (I/N, by fold or seed); then run the command without it in one folder with all runs"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one page about the runs and comparisons in a folder."""

    folder: tyro.conf.Positional[Path]
    """folder of a run, a comparison, or several"""
    out: Path = Path("report.html")
    """the page"""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show the gains of a finished run beside its operator norms, layer by layer."""

    folder: tyro.conf.Positional[Path]
    """the run's folder"""
    out: Path | None = None
    """picture of the gains; None: gains.png in the folder"""


@dataclass(frozen=True, kw_only=True)
class List:
    """List recipes, regularisers and networks; with a name, describe it."""

    name: tyro.conf.Positional[str | None] = None
    """one of them"""


@dataclass(frozen=True, kw_only=True)
class Data:
    """List the data sets, fetch one, or check one."""

    action: tyro.conf.Positional[Literal["list", "fetch", "check"]] = "list"
    """what to do"""
    name: tyro.conf.Positional[str | None] = None
    """the data set"""
    data: Path | None = None
    """folder of the data sets; None: $MAXGAIN_DATA, or a cache folder"""


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


def for_recipe(options: type, recipe: Recipe, hidden: frozenset[str]) -> type:
    """The command's options with a flag for each field of the recipe, whose values are the defaults."""
    help_texts, hints = _attribute_docs(Recipe), get_type_hints(Recipe)
    taken = {field.name for field in fields(options)} | hidden | {"name", "dataset"}
    flags: list[Any] = [
        (name, Annotated[hints[name], tyro.conf.arg(help=help_texts.get(name, ""))], getattr(recipe, name))
        for name in hints
        if name not in taken
    ]
    made = make_dataclass(options.__name__, flags, bases=(options,), frozen=True, kw_only=True)
    made.__doc__ = options.__doc__
    return made


def _attribute_docs(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: after.value.value
        for field, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
