"""Parts of a plan that are carried out without knowing of each other, on as many machines, and put together later."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from maxgain.errors import RecipeError, RunError

from ..files import whole_folder
from ..locks import alone_in
from ..run_files import RESULT

Job = TypeVar("Job")

ROOMS = ("runs", "tuning/runs")
"""Where a comparison or a search keeps its runs."""


@dataclass(frozen=True)
class Shard:
    """One of several parts, counted from 0."""

    number: int
    count: int

    @classmethod
    def parsed(cls, text: str) -> Shard:
        """From ``NUMBER/COUNT``, such as 0/4."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise RecipeError(
                f"--shard must be NUMBER/COUNT with a number from 0 to COUNT - 1, such as 0/4, not {text!r}."
            )
        return cls(int(match[1]), int(match[2]))

    def of(self, jobs: Sequence[Job], together: Callable[[Job], Hashable]) -> list[Job]:
        """This part of the jobs, in their order; jobs for which ``together`` says the same stay in one part."""
        groups = list(dict.fromkeys(together(job) for job in jobs))
        mine = set(groups[self.number :: self.count])
        return [job for job in jobs if together(job) in mine]


@dataclass(frozen=True)
class Merged:
    """What became of the runs of some folders."""

    copied: int
    known: int
    """Those that were there already."""
    unfinished: int
    """Those that were left where they are."""


def merge(out: Path, parts: Sequence[Path]) -> Merged:
    """Copy the finished runs of the parts' folders into another one, each once; a run that is there is left alone."""
    for part in parts:
        if not any((part / room).is_dir() for room in ROOMS):
            raise RunError(f"{part} is not the folder of a comparison or a search: it holds no runs.")
    copied = known = unfinished = 0
    with alone_in(out):
        for run, target in [
            (run, out / room / run.name) for part in parts for room in ROOMS for run in _runs(part / room)
        ]:
            if not (run / RESULT).exists():
                unfinished += 1
            elif (target / RESULT).exists():
                known += 1
            else:
                if target.exists():  # begun there, and finished here
                    shutil.rmtree(target)
                with whole_folder(target) as folder:
                    shutil.copytree(run, folder, dirs_exist_ok=True)
                copied += 1
    return Merged(copied, known, unfinished)


def _runs(room: Path) -> list[Path]:
    return (
        sorted(path for path in room.iterdir() if path.is_dir() and not path.name.startswith("."))
        if room.is_dir()
        else []
    )
