"""What people see: tables and progress on a terminal, nothing but JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    json: bool = False
    """print machine-readable output and nothing else"""


class Screen:
    """Where a command shows what it does; silent for people when the output is for machines."""

    def __init__(self, *, for_machines: bool = False) -> None:
        self.console = Console(quiet=for_machines)
        self.for_machines = for_machines

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
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        quiet = self.for_machines or not error.is_terminal
        with Progress(*columns, console=error, disable=quiet, transient=True) as progress:
            yield progress


def strict(content: Any) -> Any:
    """The content as strict JSON can hold it: infinity is the text 'inf', and what is not a number is null."""
    if isinstance(content, dict):
        return {str(key): strict(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [strict(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None if math.isnan(content) else ("inf" if content > 0 else "-inf")
    return content
