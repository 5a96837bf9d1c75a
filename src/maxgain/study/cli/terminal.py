"""What people see: text, tables and progress on a terminal of any width; machines get nothing but JSON."""

from __future__ import annotations

import codecs
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from .. import files
from ..run_files import METRICS
from ..tables import WIDTH_OF_A_FILE, Table

SHORTEST_BAR = 8

NO_BREAK = "\N{NO-BREAK SPACE}"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # all but the end of a line
_TOGETHER = re.compile(r" (?=[=<≤±] |%)|(?<= [=<≤±]) ")

PLAINLY = "maxgain.plainly"
"""What an output does about characters that its encoding has not: see `_plainly`."""
_PLAIN = {"─": "-", "–": "-", "−": "-", "→": ">", "×": "x", "±": "+-", "≤": "<=", "≈": "~", "…": "...", "·": "-"}
_PLAIN |= {"‖": "|", "ℓ": "l", "∞": "inf", "²": "^2", "₂": "2", "γ": "gamma", "λ": "lambda", "α": "alpha", "∇": "grad "}

DataFolder = Path | None


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Plain letters for what we write ourselves, and a question mark for the rest."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error(PLAINLY, _plainly)


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    json: bool = False
    """print machine-readable output and nothing else"""


class Screen:
    """Where a command shows what it does; silent for people when the output is for machines."""

    def __init__(self, *, for_machines: bool = False, silent: bool = False) -> None:
        # Paths may hold brackets and colons, which are no markup.
        self.console = _Output(quiet=for_machines or silent, markup=False, emoji=False)
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
        if isinstance(what, Table) and self.console.is_terminal:
            self.console.print(what.drawn(self.console.width))
        else:
            text = visible(str(what))
            text = wrapped(text, self.console.width) if self.console.is_terminal else text
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
            sys.stdout.write(files.encode(result, indent=2) + "\n")

    def progress(self) -> Bars:
        """Progress bars on standard error, for a ``with``; none where that is not a terminal."""
        error = Console(stderr=True)
        return Bars(error, hidden=self.for_machines or self.silent or not error.is_terminal)


def typed(*words: object) -> str:
    """A maxgain command as it is typed in a shell; a path that begins with a dash is told from a flag."""
    paths = {word for word in words if isinstance(word, Path) and str(word).startswith("-")}
    return shlex.join(["maxgain", *(f"./{word}" if word in paths else str(word) for word in words)])


class _Output(Console):
    """A console that leaves it to the command line what to do when nobody reads any longer: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled."""
        raise


def complain(text: str) -> None:
    """Writes to standard error, wrapped at words where that is a terminal; where nobody can hear it, it is lost."""
    if sys.stderr is None:  # it was closed from the beginning
        return
    error, text = Console(stderr=True), visible(text)
    try:
        sys.stderr.write((wrapped(text, error.width) if error.is_terminal else text) + "\n")
    except OSError:
        discard(sys.stderr)


def flush() -> None:
    """Writes what is still to be written: here a failure can be answered, and when Python ends it cannot."""
    if sys.stdout is not None:  # it was closed from the beginning
        sys.stdout.flush()


def discard(stream: TextIO) -> None:
    """Lets a stream that cannot be written lead nowhere, or Python would try once more when it ends."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # a test's stream has no number
        os.dup2(nowhere.fileno(), stream.fileno())


def visible(text: str) -> str:
    """The text with its control codes spelt out: what a file or its name says must not steer the terminal."""
    return _CONTROL.sub(lambda code: f"\\x{ord(code[0]):02x}", text)


def wrapped(text: str, width: int) -> str:
    """The text with line ends between words; a word that is longer than the line is left whole, to be copied whole.

    What is read as one, like p = 0.35 and 95 %, stays on one line.
    """
    return "\n".join(
        line
        if cell_len(_COLOUR.sub("", line)) <= width
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


# --- Progress: how much there is, how much is done, how long it will take ---------------------------------------------


class Bars(Progress):
    """A bar per task; what a task's status says is shown as far as there is room, part by part, and never cut."""

    def __init__(self, console: Console, *, hidden: bool = False) -> None:
        status = _Status(table_column=Column(no_wrap=True))
        status.console = console
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),  # what the others leave of the line
            _Count(table_column=Column(no_wrap=True)),
            status,
            _TimeLeft(table_column=Column(no_wrap=True)),
            console=console,
            disable=hidden,
            transient=True,
            refresh_per_second=4,
            speed_estimate_period=3600,
        )

    def many(self, title: str, total: int, done: int) -> ManyRuns:
        """A bar for many runs, and one below it for each that is under way."""
        return ManyRuns(self, title, total, done)


@dataclass(frozen=True)
class _Running:
    task: TaskID
    metrics: Path
    epochs: int

    @property
    def done(self) -> int:
        """How many epochs are over: a line each."""
        try:
            return min(self.epochs, self.metrics.read_bytes().count(b"\n"))
        except OSError:  # it has only just begun
            return 0


class ManyRuns:
    """How far many runs are that happen in processes of their own, seen from the files that they write."""

    def __init__(self, bars: Bars, title: str, total: int, done: int) -> None:
        self._bars = bars
        self._done, self._failed = done, 0
        self._running: dict[str, _Running] = {}
        self._task = bars.add_task(title, total=total, completed=done, status="runs")
        bars.update(self._task, look=self.look)  # which needs the task; and adding a task draws it at once

    def began(self, name: str, folder: Path, epochs: int) -> None:
        """A run is under way, in this folder."""
        task = self._bars.add_task(f"  {name}", total=epochs, status="epochs")
        self._running[name] = _Running(task, folder / METRICS, epochs)

    def ended(self, name: str, *, failed: bool = False) -> None:
        """A run is over."""
        if name in self._running:
            self._bars.remove_task(self._running.pop(name).task)
        self._failed += failed
        self.stands_at(self._done + 1, f"runs, {self._failed} failed" if self._failed else "runs")

    def stands_at(self, done: int, status: str) -> None:
        """How many are over, and what to say of them."""
        self._done = done
        self._bars.update(self._task, completed=done, status=status)

    def look(self) -> None:
        """Moves the bars to where the runs are."""
        progress = float(self._done)
        for run in list(self._running.values()):
            self._bars.update(run.task, completed=run.done)
            progress += run.done / run.epochs
        self._bars.update(self._task, completed=progress)


class _Count(ProgressColumn):
    """How much is done; the bar of many runs first asks for the newest numbers, for all bars below it too."""

    def render(self, task: Task) -> Text:
        if "look" in task.fields:
            task.fields["look"]()
        return Text(_count(task), no_wrap=True)


class _Status(ProgressColumn):
    """The parts of a status, divided by commas, that there is room for beside the rest of the line."""

    max_refresh = None
    console: Console

    def render(self, task: Task) -> Text:
        taken = len(task.description) + SHORTEST_BAR + len(_count(task)) + len(_time_left(task)) + 4
        parts = str(task.fields.get("status", "")).split(", ")
        while parts and len(", ".join(parts)) > self.console.width - taken:
            parts.pop()
        return Text(", ".join(parts), no_wrap=True)


class _TimeLeft(ProgressColumn):
    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(_time_left(task), no_wrap=True)


def _count(task: Task) -> str:
    return f"{math.floor(task.completed + 1e-9)}/{'?' if task.total is None else math.floor(task.total)}"


def _time_left(task: Task) -> str:
    if task.finished:
        return ""
    if task.time_remaining is None:
        return "–:–– left"
    minutes, seconds = divmod(math.ceil(task.time_remaining), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days left"
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
