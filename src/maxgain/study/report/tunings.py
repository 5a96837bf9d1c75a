"""What searches for good numbers left behind: the curves of `maxgain tune`, and the choices of `compare --tuned`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxgain.errors import RecordError

from .. import codec
from ..compare import records
from ..compare.records import Record, Records
from ..schema import score

SCORES = ("train_accuracy", "train_loss", "validation_accuracy", "validation_loss")


@dataclass(frozen=True)
class Tuning:
    """What every point of a search came to, and what was chosen."""

    title: str
    curve: tuple[Mapping[str, Any], ...]
    """A point's 'values' by regulariser, its 'status' and, where that is 'complete', its scores."""
    chosen: Mapping[str, float] | None
    """The values that won, where one search chose for all."""
    outcome: str
    """What was chosen, in words."""


def read(folder: Path, found: Records) -> list[Tuning]:
    """All searches whose traces lie in a folder; `found` are the runs that were made with what they chose."""
    tuned = records.read(folder / "tuning" / "results")
    return [*(_tune(path) for path in sorted(folder.rglob("curve.json"))), *_by_fold(tuned, found.runs)]


def _tune(path: Path) -> Tuning:
    """What `maxgain tune` left beside this file."""
    curve, tuned = _json(path), _json(path.with_name("tuned.json"))
    known = tuned is None or (isinstance(tuned, dict) and {"recipe", "asked", "values", "regulariser"} <= tuned.keys())
    if not (known and isinstance(curve, list) and all(map(_is_point, curve))):
        raise RecordError(f"{path} and the tuned.json beside it are not what 'maxgain tune' writes.")
    if tuned is None:
        return Tuning(path.parent.name, tuple(curve), None, "Nothing was chosen.")
    title = f"{tuned['recipe']}, {tuned['asked']}"
    return Tuning(title, tuple(curve), tuned["values"], f"Chosen: {tuned['regulariser']}.")


def _is_point(row: Any) -> bool:
    if not (isinstance(row, dict) and isinstance(row.get("values"), dict) and "status" in row):
        return False
    return row["status"] != "complete" or all(isinstance(row.get(score), int | float) for score in SCORES)


def _by_fold(tuning: Records, runs: Iterable[Record]) -> list[Tuning]:
    """The searches of `compare --tuned`, one a regulariser: its points' scores are means over the folds."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in (*tuning.runs, *tuning.failed):
        groups.setdefault((record["recipe"], record["regulariser"]), []).append(record)
    tunings = []
    for (recipe, regulariser), trials in sorted(groups.items()):
        folds = {trial["config"].get("fold") for trial in trials}
        title = f"{recipe}, {regulariser}" + (f", mean over {len(folds)} folds" if len(folds) > 1 else "")
        choices = {
            (run["config"].get("fold"), run["config"]["regulariser"])
            for run in runs
            if run["recipe"] == recipe and run["regulariser"] == regulariser and run.get("tuned")
        }
        words = [text if fold is None else f"{text} on fold {fold}" for fold, text in sorted(choices, key=str)]
        tunings.append(Tuning(title, averaged(trials), None, f"Chosen: {', '.join(words) or 'nothing yet'}."))
    return tunings


def averaged(trials: Sequence[Record]) -> tuple[dict[str, Any], ...]:
    """One row a point; a point that failed anywhere has no mean."""
    points: dict[tuple[tuple[str, float], ...], list[Record]] = {}
    for trial in trials:
        points.setdefault(tuple(trial["tuned"].items()), []).append(trial)
    rows = []
    for point, records_of in sorted(points.items()):
        row: dict[str, Any] = {"values": dict(point), "status": "complete"}
        if any(record["status"] == "failed" for record in records_of):
            rows.append(row | {"status": "failed"})
        else:
            rows.append(row | {name: _mean(score(record, name) for record in records_of) for name in SCORES})
    return tuple(rows)


def _mean(values: Iterable[float | None]) -> float:
    known = [math.nan if value is None else value for value in values]
    return math.fsum(known) / len(known)


def _json(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return codec.decode(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
