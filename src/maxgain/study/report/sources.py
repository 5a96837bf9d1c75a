"""What there is to report in a folder: of `train`, `tune` and `compare`, one of them or all together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from maxgain.errors import MaxGainError, RecordError

from ..comparing import records
from ..comparing.question import Question
from ..comparing.records import Record, Records
from ..files import folders_in
from ..run_files import CONFIG, RESULT, read_metrics, read_result
from ..runs import Place
from ..wording import clause, counted
from . import tunings
from .comparisons import questions_in
from .tunings import Tuning

DEEPEST = 4
"""How many folders down things are looked for."""


@dataclass
class Sources:
    """Everything that was found."""

    runs: dict[str, Record] = field(default_factory=dict)
    """By key, so that a run that was found twice counts once."""
    failed: dict[str, Record] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    """The keys of runs of `maxgain train`, which nobody asked to compare."""
    asked: list[Question] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    """Those of the records."""

    @property
    def records(self) -> Records:
        """The runs as one results folder would have them."""
        failed = tuple(run for key, run in self.failed.items() if key not in self.runs)
        return Records(tuple(self.runs.values()), failed, tuple(self.warnings), folders=tuple(self.folders))

    def __bool__(self) -> bool:
        return bool(self.runs or self.failed or self.tunings)


def read(folder: Path) -> Sources:
    """What lies in a folder, and in the folders inside it that no command has made for itself."""
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder: name one that maxgain train, tune or compare has made.")
    found = Sources()
    for place in _places(folder, DEEPEST):
        if (place / CONFIG).exists():
            _add_run(place, found)
        else:
            _add_records(place, found)
    return found


def _places(folder: Path, depth: int) -> Iterator[Path]:
    """The folder itself if a command has made it, otherwise those that a command has made inside it."""
    made = (folder / CONFIG).exists() or (folder / "curve.json").exists() or Place(folder).results.is_dir()
    if made or any(folder.glob("*.jsonl")):
        yield folder
    elif depth:
        for inside in folders_in(folder):
            yield from _places(inside, depth - 1)


def _add_run(folder: Path, found: Sources) -> None:
    if not (folder / RESULT).exists():
        found.warnings.append(f"{folder} holds a run that is not finished; it is left out.")
        return
    try:
        result = read_result(folder)
        run = records.checked(records.success(result, read_metrics(folder, result)))
    except (MaxGainError, ValueError) as error:
        found.warnings.append(f"{folder} holds a run that cannot be used, and is left out: {clause(error)}.")
        return
    _tell_of_contradictions(folder, [run], found)
    if found.runs.setdefault(run["key"], run) is run:
        found.alone.add(run["key"])


def _tell_of_contradictions(folder: Path, runs: Sequence[Record], found: Sources) -> None:
    """Which runs another folder has with other scores; in a page of both, one of them cannot be right."""
    others = [(run, found.runs[run["key"]]) for run in runs if run["key"] in found.runs]
    count = sum(records.scores(run) != records.scores(other) for run, other in others)
    if count:
        found.warnings.append(
            f"{folder}: another folder here has other scores for {counted(count, 'run')} of it; make a page of each."
        )


def _add_records(folder: Path, found: Sources) -> None:
    results = Place(folder).results
    kept = records.read(results if results.is_dir() else folder)
    asked, problems = questions_in(folder)
    _tell_of_contradictions(folder, kept.runs, found)
    found.runs |= {run["key"]: run for run in kept.runs}
    found.failed |= {run["key"]: run for run in kept.failed}
    found.alone -= {run["key"] for run in kept.runs}
    found.asked += asked
    tuned, unread = tunings.read(folder, kept)
    found.tunings += tuned
    found.warnings += [*kept.warnings, *problems, *unread]
    found.folders += kept.folders
