"""What people see: text, tables and progress on a terminal; machines get nothing but JSON."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from .. import codec
from ..tables import Table
from .progress import Bars

WIDTH_OF_A_FILE = 160

NO_BREAK = "\N{NO-BREAK SPACE}"
_TOGETHER = re.compile(r" (?=[=<≤±] |%)|(?<= [=<≤±]) ")

DataFolder = Path | None


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    json: bool = False
    """print machine-readable output and nothing else"""


class Screen:
    """Where a command shows what it does; silent for people when the output is for machines."""

    def __init__(self, *, for_machines: bool = False, silent: bool = False) -> None:
        # Paths may hold brackets and colons, which are no markup; a file or a pipe has no width to fit tables into.
        self.console = Console(quiet=for_machines or silent, markup=False, emoji=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH_OF_A_FILE
        self.for_machines = for_machines
        self.silent = silent

    @property
    def watched(self) -> bool:
        """Whether somebody sees it as it happens."""
        return self.console.is_terminal and not self.for_machines and not self.silent

    def show(self, what: str | Table, *, strong: bool = False) -> None:
        """Prints a table, or text, which wraps at words on a terminal and not at all in a file."""
        if isinstance(what, Table):
            self.console.print(what.drawn(self.console.width))
        else:
            text = wrapped(what, self.console.width) if self.console.is_terminal else what
            self.console.print(text, style="bold" if strong else None, highlight=False, soft_wrap=True)

    def end(self, files: Sequence[Path] = (), steps: Mapping[str, str] | None = None) -> None:
        """Says which files were written and what to type next, each command with what it is for."""
        if files:
            self.show(f"written: {_gathered(files)}")
        width = max(map(len, steps or ()), default=0)
        for command, purpose in (steps or {}).items():
            # One line, so that it can be copied; where that is too long, the command has a line of its own.
            fits = len(f"next: {' ' * width}  # {purpose}") <= self.console.width
            self.show(f"next: {command:<{width}}  # {purpose}" if fits else f"next: {command}\n      # {purpose}")

    def finish(self, result: Any) -> None:
        """Prints the result for machines, if that is what was asked for."""
        if self.for_machines and not self.silent:
            sys.stdout.write(codec.encode(result, indent=2) + "\n")

    @contextmanager
    def progress(self) -> Iterator[Bars]:
        """Progress bars on standard error; none where that is not a terminal."""
        error = Console(stderr=True)
        with Bars(error, hidden=self.for_machines or self.silent or not error.is_terminal) as bars:
            yield bars


def typed(*words: object) -> str:
    """A maxgain command as it is typed in a shell."""
    return shlex.join(["maxgain", *map(str, words)])


def complain(text: str) -> None:
    """Writes to standard error, wrapped at words where that is a terminal."""
    error = Console(stderr=True)
    sys.stderr.write((wrapped(text, error.width) if error.is_terminal else text) + "\n")


def wrapped(text: str, width: int) -> str:
    """The text with line ends between words; a word that is longer than the line is left whole, to be copied whole.

    What is read as one, like p = 0.35 and 95 %, stays on one line.
    """
    return "\n".join(
        line
        if cell_len(line) <= width
        else textwrap.fill(
            _TOGETHER.sub(NO_BREAK, line),
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip())),
            break_long_words=False,
            break_on_hyphens=False,
        ).replace(NO_BREAK, " ")
        for line in text.split("\n")
    )


def _gathered(files: Sequence[Path]) -> str:
    """The files by folder: runs/one/ result.json, model.safetensors."""
    folders: dict[Path, list[str]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append(file.name)
    return "; ".join(
        str(folder / names[0]) if len(names) == 1 else f"{', '.join(names)} in {folder}"
        for folder, names in folders.items()
    )
