"""What people see: tables and progress on a terminal, nothing but JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..files import strict

WIDTH_OF_A_FILE = 160

DataFolder = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="DIR",
        help="where the data sets are",
        help_behavior_hint="(default: $MAXGAIN_DATA, or a cache folder)",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    json: bool = False
    """print machine-readable output and nothing else"""


class Screen:
    """Where a command shows what it does; silent for people when the output is for machines."""

    def __init__(self, *, for_machines: bool = False) -> None:
        # Paths may hold brackets and colons, which are no markup; a file or a pipe has no width to cut tables to.
        self.console = Console(quiet=for_machines, markup=False, emoji=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH_OF_A_FILE
        self.for_machines = for_machines

    @property
    def watched(self) -> bool:
        """Whether somebody sees it as it happens."""
        return self.console.is_terminal and not self.for_machines

    def show(self, *what: Any) -> None:
        """Prints text or a table."""
        self.console.print(*what, highlight=False, soft_wrap=True)

    def finish(self, result: Any) -> None:
        """Prints the result for machines, if that is what was asked for."""
        if self.for_machines:
            sys.stdout.write(json.dumps(strict(result), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress bar on standard error; none where that is not a terminal."""
        error = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),  # what the others leave of the line
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
        )
        quiet = self.for_machines or not error.is_terminal
        with Progress(*columns, console=error, disable=quiet, transient=True) as progress:
            yield progress
