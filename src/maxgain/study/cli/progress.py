"""Progress bars that say how much there is, how much is done and how long it will take, on terminals of any width."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

SHORTEST_BAR = 8


class Bars(Progress):
    """A bar per task; what a task's status says is shown as far as there is room, part by part, and never cut."""

    def __init__(self, console: Console, *, hidden: bool = False) -> None:
        self._many: list[ManyRuns] = []
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),  # what the others leave of the line
            _Count(),
            _Status(console),
            _TimeLeft(),
            console=console,
            disable=hidden,
            transient=True,
            refresh_per_second=4,
            speed_estimate_period=3600,
        )

    def many(self, title: str, total: int, done: int) -> ManyRuns:
        """A bar for many runs, and one below it for each that is under way."""
        runs = ManyRuns(self, title, total, done)
        self._many.append(runs)
        return runs

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, a few times per second: first the newest numbers are asked for."""
        for runs in self._many:
            runs.look()
        return super().get_renderables()


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

    def began(self, name: str, folder: Path, epochs: int) -> None:
        """A run is under way, in this folder."""
        task = self._bars.add_task(f"  {name}", total=epochs, status="epochs")
        self._running[name] = _Running(task, folder / "metrics.jsonl", epochs)

    def ended(self, name: str, *, failed: bool = False) -> None:
        """A run is over."""
        if name in self._running:
            self._bars.remove_task(self._running.pop(name).task)
        self._failed += failed
        self.stands_at(self._done + 1, f"runs, {self._failed} failed" if self._failed else "runs")

    def stands_at(self, done: int, status: str) -> None:
        """So many are over, and that is how it looks."""
        self._done = done
        self._bars.update(self._task, completed=done, status=status)

    def look(self) -> None:
        """Moves the bars to where the runs are."""
        progress = float(self._done)
        for run in list(self._running.values()):
            self._bars.update(run.task, completed=run.done)
            progress += run.done / run.epochs
        self._bars.update(self._task, completed=progress)


class _Whole(ProgressColumn):
    """A column that is never cut or wrapped."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True)


class _Count(_Whole):
    def render(self, task: Task) -> Text:
        return Text(_count(task), no_wrap=True)


class _Status(_Whole):
    """The parts of a status, divided by commas, that there is room for beside the rest of the line."""

    max_refresh = None

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> Text:
        taken = len(task.description) + SHORTEST_BAR + len(_count(task)) + len(_time_left(task)) + 4
        parts = str(task.fields.get("status", "")).split(", ")
        while parts and len(", ".join(parts)) > self._console.width - taken:
            parts.pop()
        return Text(", ".join(parts), no_wrap=True)


class _TimeLeft(_Whole):
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
