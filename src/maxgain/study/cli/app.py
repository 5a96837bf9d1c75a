"""``maxgain COMMAND ...``: read the options, run the command, answer an error with one sentence.

Exit codes: 0 done, 1 a bug, 2 a bad option, file or value, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console
from rich.progress import Progress

import maxgain
from maxgain.errors import MaxGainError, RecipeError

from .._names import unknown
from ..recipe import RECIPES
from . import commands

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": commands.demo,
    "train": commands.train,
    "tune": commands.tune,
    "compare": commands.compare,
    "report": commands.report,
    "inspect": commands.inspect,
    "list": commands.list_all,
    "data": commands.data,
}
CHANGES = {"train": {}, "tune": {"regulariser": "maxgain"}, "compare": {"train_on": "train+validation"}}
"""The commands that take a recipe, and what differs from it by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        console.print(f"maxgain: warning: {message}")

    warnings.showwarning = show
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(words, console)
    except KeyboardInterrupt:
        console.print(f"maxgain: stopped; to continue: {shlex.join(['maxgain', *words])}")
        return 130
    except MaxGainError as error:
        console.print(f"maxgain: {_sentence(error, words)}")
        return 2
    except BrokenPipeError:  # as in `maxgain list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        console.print(f"maxgain: {error.strerror or error}{where}.")
        return 2


def _run(words: Sequence[str], console: Console) -> int:
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = [f"  {name:<{width}}  {_summary(command)}\n" for name, command in COMMANDS.items()]
        sys.stdout.write("usage: maxgain COMMAND [options]\n\n")
        sys.stdout.writelines([*rows, "\n'maxgain COMMAND --help' lists its options.\n"])
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"maxgain {maxgain.__version__}\n")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise MaxGainError(unknown("command", name, COMMANDS))
    command = COMMANDS[name]
    if name in CHANGES:
        if not rest or rest[0].startswith("-"):
            usage = f"'maxgain {name}' needs a recipe first: {', '.join(RECIPES)}."
            if rest[:1] not in (["-h"], ["--help"]):
                raise RecipeError(usage)
            sys.stdout.write(f"usage: maxgain {name} RECIPE [options]\n\n{_summary(command)}\n\n{usage}\n")
            sys.stdout.write(f"'maxgain {name} digits --help' lists the options with that recipe's defaults.\n")
            return 0
        recipe, *rest = rest
        kind = get_type_hints(command)["recipe"]
        command = partial(command, recipe=kind(**vars(RECIPES[recipe]) | CHANGES[name]))
        name = f"{name} {recipe}"
    handler, logger = _Progress(console), logging.getLogger("maxgain.study")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        tyro.cli(command, args=rest, prog=f"maxgain {name}")
    finally:
        handler.bar.stop()
        logger.removeHandler(handler)
    return 0


def _summary(command: Callable[..., None]) -> str:
    return (command.__doc__ or "").partition("\n")[0]


def _sentence(error: MaxGainError, words: Sequence[str]) -> str:
    """The error's text, with the flag in place of the field's name."""
    text, field = str(error), error.field
    if field not in _flags(COMMANDS.get(words[0])):
        return text
    flag = "--" + field.replace("_", "-")
    return flag + text.removeprefix(field) if text.startswith(field) else f"{text.rstrip('.')} ({flag})."


def _flags(part: Any) -> set[str]:
    """The parameters of a command, and the fields of those that are dataclasses, as far as they are flags."""
    flags = set()
    for name, hint in get_type_hints(part, include_extras=True).items() if part else ():
        if get_origin(hint) is not Annotated:
            flags.add(name)
        elif is_dataclass(kind := get_args(hint)[0]):
            flags |= _flags(kind)
    return flags


class _Progress(logging.Handler):
    """Show what the study logs: a bar on a terminal, one line per tenth of the work elsewhere."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self.bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=None)
        self.tenth = 0

    def emit(self, record: logging.LogRecord) -> None:
        done, total = getattr(record, "done", None), getattr(record, "total", None)
        text = record.getMessage()
        if done is None or not total:
            self.console.print(f"maxgain: {text}")
        elif self.console.is_terminal:
            self.bar.start()
            self.bar.update(self.task, completed=done, total=total, description=text[:60])
            if done == total:
                self.bar.stop()  # before anything else is printed
        elif done <= 1 or 10 * done // total != self.tenth:
            self.tenth = 10 * done // total
            self.console.print(text)
