"""``maxgain COMMAND ...``: read the options, run the command, answer an error with one sentence.

Exit codes: 0 done, 1 a bug, 2 something is wrong with what was asked for, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import ast
import inspect
import logging
import os
import shlex
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, make_dataclass, replace
from types import FrameType
from typing import Annotated, Any, NoReturn, get_type_hints

import tyro
from rich.console import Console
from rich.progress import Progress

import maxgain
from maxgain.errors import MaxGainError, RecipeError

from .._names import unknown
from ..recipe import RECIPES, Recipe
from . import commands

COMMANDS: dict[str, tuple[type, Callable[..., None]]] = {
    "demo": (commands.Demo, commands.demo),
    "train": (commands.Train, commands.train),
    "tune": (commands.Tune, commands.tune),
    "compare": (commands.Compare, commands.compare),
    "report": (commands.Report, commands.report),
    "inspect": (commands.Inspect, commands.inspect),
    "list": (commands.List, commands.list_all),
    "data": (commands.Data, commands.data),
}
HIDDEN = {
    "train": frozenset[str](),
    "tune": frozenset({"train_on"}),
    "compare": frozenset({"regulariser", "fold", "cross_validation"}),
}
"""Commands that take a recipe, and the fields of it that are no flags there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True, highlight=False)
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminate)
    _show_warnings_briefly(console)
    flags: set[str] = set()
    try:
        return _run(words, flags)
    except KeyboardInterrupt:
        command = shlex.join(["maxgain", *words])
        console.print(f"maxgain: stopped; to continue: {command}", soft_wrap=True, markup=False)
        return 130
    except MaxGainError as error:
        console.print(f"maxgain: {_sentence(error, flags)}", soft_wrap=True, markup=False)
        return 2
    except BrokenPipeError:  # as in `maxgain list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        console.print(f"maxgain: {error.strerror or error}{where}.", soft_wrap=True, markup=False)
        return 2


def _run(words: list[str], flags: set[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = [f"  {name:<{width}}  {_summary(kind)}" for name, (kind, _) in COMMANDS.items()]
        text = "\n".join(
            ["usage: maxgain COMMAND [options]", "", *rows, "", "'maxgain COMMAND --help' lists its options."]
        )
        sys.stdout.write(text + "\n")
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"maxgain {maxgain.__version__}\n")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise MaxGainError(unknown("command", name, COMMANDS))
    kind, command = COMMANDS[name]
    if name in HIDDEN:
        if not rest or rest[0].startswith("-"):
            usage = f"'maxgain {name}' needs a recipe first: {', '.join(RECIPES)}."
            if rest and rest[0] in ("-h", "--help"):
                sys.stdout.write(f"usage: maxgain {name} RECIPE [options]\n\n{kind.__doc__}\n\n{usage}\n")
                sys.stdout.write(f"'maxgain {name} digits --help' lists the options with that recipe's defaults.\n")
                return 0
            raise RecipeError(usage)
        recipe, *rest = rest
        row = RECIPES[recipe]
        defaults = replace(row, train_on="train+validation") if name == "compare" else row
        kind = _for_recipe(kind, defaults, HIDDEN[name])
        name = f"{name} {recipe}"
    flags |= {field.name for field in fields(kind)}
    parsed: Any = tyro.cli(kind, args=rest, prog=f"maxgain {name}")
    with _progress():
        command(*([RECIPES[name.partition(" ")[2]]] if " " in name else []), parsed)
    return 0


def _for_recipe(command: type, recipe: Recipe, hidden: frozenset[str]) -> type:
    """The command's options with a flag for each field of the recipe, whose values are the defaults."""
    help_texts, hints = _attribute_docs(Recipe), get_type_hints(Recipe)
    taken = {field.name for field in fields(command)} | hidden | {"name", "dataset"}
    flags: list[Any] = [
        (name, Annotated[hints[name], tyro.conf.arg(help=help_texts.get(name, ""))], getattr(recipe, name))
        for name in hints
        if name not in taken
    ]
    made = make_dataclass(command.__name__, flags, bases=(command,), frozen=True, kw_only=True)
    made.__doc__ = command.__doc__
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


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _sentence(error: MaxGainError, flags: set[str]) -> str:
    """The error's text, with the flag that is meant in place of the field's name."""
    text, field = str(error), getattr(error, "field", "")
    flag = "--" + field.replace("_", "-")
    if field not in flags:
        return text
    return flag + text.removeprefix(field) if text.startswith(field) else f"{text.rstrip('.')} ({flag})."


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _show_warnings_briefly(console: Console) -> None:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        console.print(f"maxgain: warning: {message}", soft_wrap=True, markup=False)

    warnings.showwarning = show


class _progress(logging.Handler):  # noqa: N801 -- used as a context manager
    """Show what the study logs: a bar on a terminal, one line per tenth of the work elsewhere."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None)
        self.tenth = 0

    def emit(self, record: logging.LogRecord) -> None:
        done, total = getattr(record, "done", None), getattr(record, "total", None)
        text = record.getMessage()
        if done is None or not total:
            self.console.print(f"maxgain: {text}", soft_wrap=True, markup=False)
        elif self.console.is_terminal:
            self.bar.update(self.task, completed=done, total=total, description=text[:60])
        elif done <= 1 or 10 * done // total != self.tenth:
            self.tenth = 10 * done // total
            self.console.print(text, soft_wrap=True, markup=False)

    def __enter__(self) -> None:
        logger = logging.getLogger("maxgain.study")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)
        self.bar.start()

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        logging.getLogger("maxgain.study").removeHandler(self)
