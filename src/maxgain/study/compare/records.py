"""The results of runs, one JSON line each, that every table and figure is rebuilt from without training.

A results folder holds one ``<recipe>.jsonl`` per recipe. Lines are only ever added, and several processes may add at
once. A run that failed is recorded as a failure with its error, never as a number.
"""

import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from maxgain.errors import RecordError

from .. import codec
from ..locks import locked
from ..recipes import Recipe, from_json, key, to_json
from ..schema import Metrics, Result
from ..schema import Record as Record
from ..wording import clause


@dataclass(frozen=True)
class Records:
    """What a results folder says: for each run its newest success or, where it has none, its newest failure."""

    runs: tuple[Record, ...]
    failed: tuple[Record, ...]
    warnings: tuple[str, ...]
    """What was left out of the files, in words: lines cut short by a writer that was killed."""

    def find(self, key: str) -> Record | None:
        """The run with that key, if it ever succeeded."""
        return next((run for run in self.runs if run["key"] == key), None)

    def where(self, *, recipe: str | None = None, regulariser: str | None = None) -> "Records":
        """Only the runs of a recipe, of a regulariser, or of both."""

        def wanted(record: Record) -> bool:
            return recipe in (None, record["recipe"]) and regulariser in (None, record["regulariser"])

        return Records(tuple(filter(wanted, self.runs)), tuple(filter(wanted, self.failed)), self.warnings)


def success(result: Result, history: list[Metrics]) -> Record:
    """What is recorded of a run that came to its end."""
    return cast("Record", {**result, "status": "ok", "history": history})


def failure(recipe: Recipe, error: str) -> Record:
    """What is recorded of a run that failed."""
    about = {"key": key(recipe), "recipe": recipe.name, "seed": recipe.seed, "fold": recipe.fold}
    return cast("Record", about | {"config": to_json(recipe), "status": "failed", "error": error})


def append(folder: str | Path, record: Mapping[str, Any]) -> str:
    """Add the record of a run to a results folder, which is made if need be, and return its key.

    A record holds ``status`` ('ok' or 'failed'), ``recipe`` (its name), ``regulariser`` and ``config`` (the whole
    recipe, which the key is made of); 'ok' also needs an accuracy, as a fraction, and 'failed' an ``error`` in words.
    All else that strict JSON can hold is kept as it is. When this returns, the record is on the disk.
    """
    try:
        checked = _checked(codec.revived(record))
        name = key(from_json(checked["config"]))
        if checked.get("key", name) != name:
            raise RecordError(f"this record has the key {checked['key']}, but its config makes it {name}.")
        line = codec.encode({"key": name} | {**checked, "key": name}).encode() + b"\n"
    except ValueError as error:
        raise RecordError(f"{error}.") from error
    path = Path(folder) / f"{checked['recipe']}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as descriptor:
            _append_line(descriptor, line)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}.") from error
    return name


def read(folder: str | Path) -> Records:
    """Everything recorded in a results folder; nothing if there is no such folder yet.

    A last line that is cut short is left out with a warning. Any other line that is no record raises `RecordError`.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is a file: results are kept in a folder.")
    runs: dict[str, Record] = {}
    failed: dict[str, Record] = {}
    warnings: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        for record in _records_in(path, warnings.append):
            (runs if record["status"] == "ok" else failed)[record["key"]] = record
    unsuccessful = tuple(record for name, record in failed.items() if name not in runs)
    return Records(tuple(runs.values()), unsuccessful, tuple(warnings))


_BEGINNING = b'{"key": "'
"""Of every line that is written here: another last line without an end is somebody else's, and is not cut off."""


def _append_line(descriptor: int, line: bytes) -> None:
    """Add a line to a locked file in one write, so that other writers' lines stay whole whatever happens to us.

    A writer killed in mid-write leaves a piece of a line at the end: nobody holds it any more, so it is cut off.
    """
    size = os.fstat(descriptor).st_size
    piece = _unended_line(descriptor, size)
    if piece and (_is_object(piece) or not (piece.startswith(_BEGINNING) or _BEGINNING.startswith(piece))):
        line = b"\n" + line
    elif piece:
        size -= len(piece)
        os.ftruncate(descriptor, size)
    if os.write(descriptor, line) < len(line):
        os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _unended_line(descriptor: int, size: int) -> bytes:
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return b""
    return os.pread(descriptor, size, 0).rpartition(b"\n")[2]


def _records_in(path: Path, warn: Callable[[str], None]) -> Iterator[Record]:
    try:
        with locked(path, os.O_RDONLY, fcntl.LOCK_SH):  # so that no line is seen half written
            lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == len(lines) and not _is_object(line):
            warn(f"{path}, line {number}: cut short when its writer was stopped, and left out; that run has no record")
            continue
        try:
            record = _checked(codec.decode(line))
            if not isinstance(record.get("key"), str):
                raise RecordError("it has no key.")
            if record["recipe"] != path.stem:
                raise RecordError(f"it is of the recipe {record['recipe']!r}, whose file is {record['recipe']}.jsonl.")
        except (ValueError, RecursionError, RecordError) as error:
            raise RecordError(
                f"{path}, line {number} is no record of a run: {clause(error)}; correct or delete that line."
            ) from error
        yield record


def _checked(record: Any) -> Record:
    """The record, unless it is incomplete or holds what cannot be a result."""
    if not isinstance(record, dict):
        raise RecordError("a record must be an object with named fields.")
    for name, kind in (("recipe", str), ("regulariser", str), ("config", dict)):
        if not isinstance(record.get(name), kind):
            raise RecordError(f"{name!r} is missing or of the wrong kind.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", record["recipe"], re.ASCII):
        raise RecordError(f"the recipe's name {record['recipe']!r} cannot be the name of a file.")
    numbers = {name for name in record if name.endswith(("_accuracy", "_loss")) and record[name] is not None}
    for name in sorted(numbers):
        value, top = record[name], 1 if name.endswith("_accuracy") else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= top:
            raise RecordError(f"{name} is {value!r}, but must be a number from 0 to {top}.")
    match record.get("status"):
        case "ok" if not numbers & {"test_accuracy", "validation_accuracy"}:
            raise RecordError("a run that succeeded must have a test_accuracy or a validation_accuracy.")
        case "failed" if numbers:
            raise RecordError(f"a run that failed has no results, but this one has a {min(numbers)}.")
        case "failed" if not (isinstance(record.get("error"), str) and record["error"]):
            raise RecordError("a run that failed must say why, in 'error'.")
        case "ok" | "failed":
            return cast("Record", record)
        case status:
            raise RecordError(f"status is {status!r}, but must be 'ok' or 'failed'.")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
