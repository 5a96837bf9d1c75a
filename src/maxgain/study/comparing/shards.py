"""Parts of a plan that are carried out without knowing of each other, on as many machines, and put together later."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from maxgain.errors import FileError, MaxGainError, RecipeError, RunError

from .. import reading
from ..files import CLAIM, alone_in, folders_in, make_folder, whole_folder
from ..predictions import Predictions
from ..run_files import FILES, RESULT, read_result
from ..runs import RUNS, TUNING
from ..wording import clause
from . import records
from .records import Record, Records

Job = TypeVar("Job")
Warn = Callable[[str], None]

ROOMS = (RUNS, f"{TUNING}/{RUNS}")
"""Where a comparison or a search keeps its runs."""
RECORDS = (".", TUNING)
"""Where a folder of results keeps its records."""


@dataclass(frozen=True)
class Shard:
    """One of several parts, counted from 0."""

    number: int
    count: int

    @classmethod
    def parsed(cls, text: str) -> Shard:
        """From ``NUMBER/COUNT``, such as 0/4."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
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
    """Those that were left where they are, or failed."""
    warnings: tuple[str, ...] = ()
    """What in the parts could not be used, in words."""


def merge(out: Path, parts: Sequence[Path]) -> Merged:
    """Bring the finished runs of the parts, or the records of results folders, into another one, each once.

    What is there already is left alone.
    """
    recorded = {part: {room: records.read(part / room) for room in RECORDS} for part in parts}
    for part, rooms in recorded.items():
        if not any((part / room).is_dir() for room in ROOMS) and not any(map(_is_of_runs, rooms.values())):
            raise RunError(f"{part} is not the folder of a comparison, a search or results: it holds no runs.")
    damaged: list[str] = []
    counts = Counter(
        outcome
        for rooms in recorded.values()
        for room, found in rooms.items()
        if _is_of_runs(found)
        for outcome in _merge_records(found, out / room, damaged.append)
    )
    runs = [(run, out / room / run.name) for part in parts for room in ROOMS for run in folders_in(part / room)]
    if runs:
        with alone_in(out):
            counts.update(_merge_run(run, target, damaged.append) for run, target in runs)
    warnings = tuple(warning for rooms in recorded.values() for found in rooms.values() for warning in found.warnings)
    return Merged(counts["copied"], counts["known"], counts["unfinished"], (*warnings, *damaged))


def _merge_run(run: Path, target: Path, warn: Warn) -> str:
    if not (run / RESULT).exists():
        return "unfinished"
    if (target / RESULT).exists():
        with suppress(MaxGainError):  # a damaged one is named where it is used
            if records.scores(read_result(target)) != records.scores(read_result(run)):
                warn(f"the run {run.name} has other scores in {target.parent} already, which are kept")
        return "known"
    try:
        copied = list(_files(run))
    except FileError as error:
        warn(f"left out: {clause(error)}")
        return "unfinished"
    if (target / CLAIM).exists():  # begun there, and finished here
        with alone_in(target):
            for name in (*FILES, CLAIM):
                (target / name).unlink(missing_ok=True)
    with whole_folder(target) as folder:
        for path in copied:
            make_folder((folder / path).parent)
            shutil.copy2(run / path, folder / path)
    return "copied"


def _files(run: Path) -> Iterator[Path]:
    """What is copied of a run: files, and neither pipes and devices nor links that lead to them or to folders."""
    for path in sorted(run.rglob("*")):
        if path.name in FILES and path.parent == run:
            reading.expect_regular(path)
        if path.is_file():
            yield path.relative_to(run)


def _is_of_runs(found: Records) -> bool:
    return bool(found.runs or found.failed)


def _merge_records(found: Records, out: Path, warn: Warn) -> Iterator[str]:
    """Adds what is not there: runs that succeeded, and the failures of others, which count as attempts there too."""
    there = records.read(out)
    for run in found.runs:
        if (other := there.find(run["key"])) is not None:
            if records.scores(other) != records.scores(run):
                warn(f"the run {run['key']} has other scores in {out} already, which are kept")
            yield "known"
            continue
        records.append(out, run, _predictions(found, run, warn))
        yield "copied"
    for run in found.failed:
        known = {failure.get("finished") for failure in there.failures.get(run["key"], ())}
        if there.find(run["key"]) is None:
            for failure in found.failures[run["key"]]:
                if failure.get("finished") not in known:
                    records.append(out, failure)
        yield "unfinished"


def _predictions(found: Records, run: Record, warn: Warn) -> Predictions | None:
    """What a run predicted; damaged files are named, and the run does without."""
    try:
        return found.predictions(run)
    except FileError as error:
        warn(f"left out: {clause(error)}")
        return None
