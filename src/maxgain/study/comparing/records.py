"""The results of runs, one JSON line each, that every table and figure is rebuilt from without training.

A results folder holds one ``<recipe>.jsonl`` per recipe, and in ``predictions`` what each run said of every test image.
Lines are only ever added, and several processes may add at once. A run that failed is recorded as a failure with its
error, never as a number.
"""

import fcntl
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import FileError, MaxGainError, RecordError

from .. import files, predictions, reading
from ..files import locked
from ..lines import append_line
from ..predictions import Predictions
from ..recipes import Recipe, from_json, run_key, to_json
from ..schema import Metrics, Result, score
from ..schema import Record as Record
from ..training import DivergedError
from ..wording import clause

PREDICTIONS = "predictions"
"""The folder of the runs' predictions."""
BEGINNING = '{"key": "'
"""Of every line that is written here."""


@dataclass(frozen=True)
class Records:
    """What a results folder says: for each run its newest success or, where it has none, its newest failure.

    A run is known by its key, which is made of its recipe and its data: the same recipe on other data is another run.
    """

    runs: tuple[Record, ...]
    failed: tuple[Record, ...]
    warnings: tuple[str, ...]
    """What was left out of the files, in words: lines cut short by a writer that was killed, or of another version."""
    failures: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)
    """Every time that a run failed, by its key."""
    folders: tuple[Path, ...] = ()
    """Where the runs' predictions are looked for."""

    def find(self, key: str) -> Record | None:
        """The run with that key, if it ever succeeded."""
        return next((run for run in self.runs if run["key"] == key), None)

    def attempts(self, key: str) -> int:
        """How often a run was tried and failed; what a full disk or too little memory ended was no attempt."""
        return sum(failure.get("fault") != "machine" for failure in self.failures.get(key, ()))

    def predictions(self, run: Record) -> Predictions | None:
        """What a run said of every test image, where that was kept; `FileError` where it is damaged."""
        sha256 = run.get("predictions_sha256")
        paths = [folder / PREDICTIONS / f"{run['key']}.npz" for folder in self.folders]
        there = [path for path in paths if path.exists()]
        if sha256 is None or not there:
            return None
        for path in there[:-1]:
            with suppress(FileError):  # another folder's, of which the run there came to something else
                return predictions.read(path, sha256)
        return predictions.read(there[-1], sha256)

    def correct(self, run: Record) -> NDArray[np.bool_] | None:
        """Which test images a run classified right, where that was kept."""
        kept = self.predictions(run)
        return None if kept is None else kept.correct


def success(result: Result, history: list[Metrics]) -> Record:
    """What is recorded of a run that came to its end."""
    content = {name: value for name, value in result.items() if name != files.SEAL}  # the result's own
    return cast("Record", content | {"status": "ok", "history": history})


def failure(recipe: Recipe, fingerprint: str, error: Exception) -> Record:
    """What is recorded of a run that failed."""
    return {
        "status": "failed",
        "error": str(error),
        "fault": "training" if isinstance(error, DivergedError) else "machine",
        "key": run_key(recipe, fingerprint),
        "fingerprint": fingerprint,
        "recipe": recipe.name,
        "regulariser": recipe.regulariser,
        "seed": recipe.seed,
        "fold": recipe.fold,
        "finished": datetime.now(UTC).isoformat(),
        "config": to_json(recipe),
    }


def append(folder: str | Path, record: Mapping[str, Any], predicted: Predictions | None = None) -> None:
    """Add the record of a run to a results folder, which is made if need be: see `schema.Record` for what it holds.

    What the run predicted is kept beside it, under its key. A run that succeeded needs an accuracy, as a fraction, and
    one that failed an error in words. Fields that are not in the schema are kept, if strict JSON can hold them. When
    this returns, the record is on the disk.
    """
    try:
        _expect_scores(record)
        content = files.revived(files.plain(record, "the record"))
        content.pop(files.SEAL, None)  # the result's own; the record has more in it
        valid = checked(content)
    except ValueError as error:
        raise RecordError(f"{error}.") from error
    path = Path(folder) / f"{valid['recipe']}.jsonl"
    if predicted is not None:
        predictions.write(Path(folder) / PREDICTIONS / f"{valid['key']}.npz", predicted)
    try:
        append_line(path, files.encode(files.sealed({"key": valid["key"], **valid})), BEGINNING)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}.") from error


def read(folder: str | Path) -> Records:
    """Everything recorded in a results folder; nothing if there is no such folder yet.

    What is no record of this version is left out, with a warning that says how many lines and which is the first.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is a file: results are kept in a folder.")
    runs: dict[str, Record] = {}
    times: dict[str, dict[str | None, Record]] = {}
    warnings: list[str] = []
    for path in _files_in(folder):
        found, problems = _records_in(path)
        warnings += problems
        # Lines of several machines are in any order; what nobody can read the time of comes first.
        for record in sorted(found, key=lambda record: finished(record) or datetime.min.replace(tzinfo=UTC)):
            if record["status"] == "ok":
                runs[record["key"]] = record
            else:  # a line that was copied from machine to machine is one failure
                times.setdefault(record["key"], {})[record.get("finished")] = record
        warnings += _contradictions(path, found)
    failures = {name: tuple(known.values()) for name, known in times.items()}
    unsuccessful = tuple(known[-1] for name, known in failures.items() if name not in runs)
    return Records(tuple(runs.values()), unsuccessful, tuple(warnings), failures, (folder,))


def finished(record: Mapping[str, Any]) -> datetime | None:
    """When a run ended, if its record says so in a way that can be read."""
    try:
        time = datetime.fromisoformat(record.get("finished", ""))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def scores(record: Result) -> tuple[float | None, ...]:
    """What two records of one run should agree on."""
    return tuple(score(record, name) for name in ("validation_accuracy", "test_accuracy"))


def _contradictions(path: Path, found: Sequence[Record]) -> list[str]:
    """How many runs are recorded twice with scores that differ, as on two machines, in words."""
    known: dict[str, set[tuple[float | None, ...]]] = {}
    for record in found:
        if record["status"] == "ok":
            known.setdefault(record["key"], set()).add(scores(record))
    count = sum(len(different) > 1 for different in known.values())
    if not count:
        return []
    run = "1 run is" if count == 1 else f"{count} runs are"
    return [f"{path}: {run} recorded more than once, with scores that differ; the newest record of each counts"]


def _files_in(folder: Path) -> list[Path]:
    """The files of a results folder; one that cannot be listed is not taken for an empty one, as `glob` would do."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"cannot read {folder}: {error.strerror or error}.") from error


def _records_in(path: Path) -> tuple[list[Record], list[str]]:
    """The file's records, and what is wrong with its other lines."""
    found, wrong, warnings = [], [], []
    try:
        reading.expect_regular(path)
        with locked(path, os.O_RDONLY, fcntl.LOCK_SH):  # so that no line is seen half written
            for line in reading.read_lines(path, object):
                if line.cut_short:
                    warnings.append(
                        f"{path}, line {line.number}: cut short when its writer was stopped, and left out; that run "
                        "has no record"
                    )
                    continue
                try:
                    found.append(_record_in(line, path.stem))
                except (ValueError, MaxGainError) as error:
                    wrong.append(f"line {line.number}: {clause(error)}")
    except (OSError, FileError) as error:
        raise RecordError(f"cannot read {path}: {clause(getattr(error, 'strerror', None) or error)}.") from error
    if wrong:
        which = wrong[0] if len(wrong) == 1 else f"{len(wrong)} lines, of which the first is {wrong[0]}"
        warnings.append(f"{path}: left out what is no record of this version of maxgain: {which}")
    return found, warnings


def _record_in(line: reading.Line[object], recipe: str) -> Record:
    if line.problem is not None:
        raise ValueError(line.problem)
    record = checked(files.revived(line.content))
    if record["recipe"] != recipe:
        raise ValueError(f"it is of the recipe {record['recipe']!r}, whose file is {record['recipe']}.jsonl")
    return record


def checked(content: Any) -> Record:
    """The content, if it is a record; else `ValueError` or one of our own errors says what is wrong with it."""
    reading.converted(content, Record)
    files.expect_seal(content)
    record: Record = content
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", record["recipe"], re.ASCII):
        raise ValueError(f"the recipe's name {record['recipe']!r} cannot be the name of a file")
    made = run_key(from_json(record["config"]), record["fingerprint"])
    if record["key"] != made:
        raise ValueError(f"it has the key {record['key']}, but its config and data make it {made}")
    named = _expect_scores(record)
    if record["status"] == "failed":
        if named:
            raise ValueError(f"a run that failed has no results, but this one has a {min(named)}")
        if not record.get("error"):
            raise ValueError("a run that failed must say why, in 'error'")
    elif not named & {"test_accuracy", "validation_accuracy"}:
        raise ValueError("a run that succeeded must have a test_accuracy or a validation_accuracy")
    return record


def _expect_scores(record: Mapping[str, Any]) -> set[str]:
    """The names of the scores in a record, all of which are numbers that can be results."""
    names = {name for name in record if name.endswith(("_accuracy", "_loss")) and record[name] is not None}
    for name in sorted(names):
        value, top = files.revived(record[name]), 1 if name.endswith("_accuracy") else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= top:
            raise ValueError(f"{name} is {value!r}, but must be a number from 0 to {top}")
    return names
