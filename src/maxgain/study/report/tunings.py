"""What searches for good numbers left behind: the curves of `maxgain tune`, and the choices of `compare --tuned`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, TypedDict

from maxgain.errors import FileError, MaxGainError, MissingFileError, RecordError

from .. import files
from ..comparing import records
from ..comparing.records import Record, Records
from ..comparing.tuning_rule import RULE, worth
from ..regularisers import brief
from ..run_files import RESULT, read_result
from ..runs import RUNS, Place
from ..schema import score
from ..wording import clause
from .comparisons import by_data, way

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
    caution: str = ""
    """How fine the choice was, in words."""
    made: tuple[Mapping[str, Any], ...] = ()
    """What the trials' results say of when and with what they were made, where they are there."""


class Point(TypedDict, total=False):
    """A line of a search's curve."""

    values: Required[dict[str, float]]
    status: Required[Literal["complete", "pruned", "failed"]]
    train_accuracy: float
    train_loss: float
    validation_accuracy: float
    validation_loss: float


class Chosen(TypedDict):
    """What a search has chosen."""

    validation_images: NotRequired[int]

    recipe: str
    asked: str
    regulariser: str
    values: dict[str, float]
    curve_sha256: NotRequired[str]
    """Of the curve that it was chosen from; see `files.checksum`."""


def read(folder: Path, found: Records) -> tuple[list[Tuning], list[str]]:
    """All searches whose traces lie in a folder, and what is wrong with those that cannot be read.

    `found` are the runs that were made with what they chose.
    """
    tuned = records.read(Place(folder).for_tuning.results)
    tunings, problems = _by_fold(tuned, found.runs), list(tuned.warnings)
    for path in sorted(folder.rglob("curve.json"), reverse=True):
        try:
            tunings.insert(0, _tune(path))
        except (FileError, RecordError) as error:
            problems.append(f"a search is left out: {clause(error)}")
    return tunings, problems


def _tune(path: Path) -> Tuning:
    """What `maxgain tune` left beside this file."""
    curve: list[Point] = files.read_json(path, list[Point])
    names = {tuple(row["values"]) for row in curve}
    incomplete = [row for row in curve if row["status"] == "complete" and not set(SCORES) <= row.keys()]
    if len(names) > 1 or incomplete:
        raise RecordError(f"{path} is not what 'maxgain tune' writes: its points differ in what they have.")
    try:
        tuned: Chosen = files.read_json(path.with_name("tuned.json"), Chosen)
    except MissingFileError:
        return Tuning(path.parent.name, tuple(curve), None, "Nothing was chosen.")
    if tuple(tuned["values"]) not in names or tuned.get("curve_sha256") not in (None, files.checksum(curve)):
        raise RecordError(f"{path} and the tuned.json beside it are not of one search, or one of them is damaged.")
    title = f"{tuned['recipe']}, {tuned['asked']}"
    return Tuning(
        title,
        tuple(curve),
        tuned["values"],
        f"Chosen: {tuned['regulariser']}.",
        _caution(tuned, curve),
        tuple(_results(path.parent)),
    )


def _caution(tuned: Chosen, curve: Sequence[Point]) -> str:
    """As the terminal says it, where the search says on how many images it chose."""
    chosen = next((row for row in curve if row["values"] == tuned["values"] and row["status"] == "complete"), None)
    images = tuned.get("validation_images", 0)
    if chosen is None or images < 1:
        return ""
    words = worth({**chosen, "validation_images": images}, [dict(row) for row in curve])
    return f"{RULE[0].upper()}{RULE[1:]}; {words}."


def _results(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The results of a search's runs, as far as they can be read."""
    for path in sorted(folder.glob(f"{RUNS}/*/{RESULT}")):
        with suppress(MaxGainError):
            yield read_result(path.parent)


def _by_fold(tuning: Records, runs: Sequence[Record]) -> list[Tuning]:
    """The searches of `compare --tuned`, one per regulariser: its points' scores are means over the folds.

    Runs of other settings, on other data or with another seed are another search.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in (*tuning.runs, *tuning.failed):
        groups.setdefault((record["recipe"], record["regulariser"], way(record)), []).append(record)
    tunings, made = [], Counter[tuple[str, str]]()
    for (recipe, regulariser, settings), tried in sorted(groups.items()):
        searches = [trials for of_data in by_data(tried) for trials in _by_seed(of_data)]
        outcome = _chosen([run for run in runs if run["regulariser"] == regulariser and _chosen_by(run, settings)])
        if len(searches) > 1:
            outcome = (
                "What was chosen is not told, as the same was searched for on other data too, or with other seeds."
            )
        for trials in searches:
            folds = {trial["config"].get("fold") for trial in trials}
            title = f"{recipe}, {regulariser}" + (f", mean over {len(folds)} folds" if len(folds) > 1 else "")
            made[recipe, regulariser] += 1
            title += f" (search {made[recipe, regulariser]})" if made[recipe, regulariser] > 1 else ""
            tunings.append(Tuning(title, averaged(trials), None, outcome))
    return tunings


def _by_seed(trials: Sequence[Record]) -> list[list[Record]]:
    """The runs; apart, by the seed that those of their folds follow from, where a point was tried with several."""
    points = Counter((trial["config"].get("fold"), *trial.get("tuned", {}).items()) for trial in trials)
    if max(points.values()) == 1:
        return [list(trials)]
    searches: dict[int, list[Record]] = {}
    for trial in trials:
        config = trial["config"]
        searches.setdefault(config.get("seed", 0) - (config.get("fold") or 0), []).append(trial)
    return list(searches.values())


def _chosen_by(run: Record, settings: str) -> bool:
    """Whether a run's numbers were chosen by runs with these settings, which are trained on the training part alone."""
    return bool(run.get("tuned")) and way({**run, "config": run["config"] | {"train_on": "train"}}) == settings


def _chosen(runs: Sequence[Record]) -> str:
    choices = {(run["config"].get("fold"), brief(run["config"]["regulariser"], run["tuned"])) for run in runs}
    words = [text if fold is None else f"{text} on fold {fold}" for fold, text in sorted(choices, key=str)]
    return f"Chosen: {', '.join(words) or 'nothing yet'}."


def averaged(trials: Sequence[Record]) -> tuple[dict[str, Any], ...]:
    """One row per point; a point that failed anywhere, or was not tried everywhere, has no mean."""
    folds = {trial["config"].get("fold") for trial in trials}
    points: dict[tuple[tuple[str, float], ...], list[Record]] = {}
    for trial in trials:
        points.setdefault(tuple(trial.get("tuned", {}).items()), []).append(trial)
    rows = []
    for point, records_of in sorted(points.items()):
        row: dict[str, Any] = {"values": dict(point), "status": "complete"}
        if any(record["status"] == "failed" for record in records_of):
            rows.append(row | {"status": "failed"})
        elif {record["config"].get("fold") for record in records_of} < folds:
            rows.append(row | {"status": "unfinished"})
        else:
            rows.append(row | {name: _mean(score(record, name) for record in records_of) for name in SCORES})
    return tuple(rows)


def _mean(values: Iterable[float | None]) -> float:
    known = [math.nan if value is None else value for value in values]
    return math.fsum(known) / len(known)
