"""Which comparisons a folder of records holds: those that were asked for, or else those that the records make possible.

It follows from the folder alone, whatever order its records were written in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from maxgain.errors import FileError, RecordError

from ..comparing.comparison import Comparison, compare
from ..comparing.question import Over, Planned, Question, against, remembered
from ..comparing.records import Record, Records
from ..schema import score
from ..wording import clause, unknown

VARIED = ("regulariser", "seed", "fold")
"""What the runs of one recipe may differ in and still be compared."""


def comparisons(found: Records, asked: Sequence[Question] = (), baseline: str | None = None) -> dict[str, Comparison]:
    """The comparisons by name: the answers to what was asked, the newest first, or to what can be asked of the records.

    With a baseline, everything is compared with that instead of by the contrasts that were asked for.
    """
    questions = list(asked)[::-1] or list(possible(found))
    known = {name for question in questions for name in question.rows}
    if baseline is not None and baseline not in known:
        raise RecordError(unknown("regulariser in the records called", baseline, sorted(known)))
    if baseline is not None:
        questions = [
            replace(question, contrasts=against(baseline, list(question.rows)))
            if baseline in question.rows
            else question
            for question in questions
        ]
    answers = [compare(question, found, found.correct) for question in questions]
    return dict(zip(_names(answers), answers, strict=True))


def questions_in(folder: Path) -> tuple[list[Question], list[str]]:
    """What was asked in a folder, and what cannot be read of it, in words."""
    try:
        return remembered(folder), []
    except FileError as error:
        return [], [f"{clause(error)}: shown are the comparisons that the records make possible"]


def possible(found: Records) -> Iterator[Question]:
    """Questions that records answer of which nobody knows what they were made for.

    There is one for every recipe and every way of carrying it out: over the folds, where there are several, else over
    the seeds. Everything is compared with 'none', or else with the first in the alphabet.
    """
    ways: dict[str, list[Record]] = {}
    for run in sorted((*found.runs, *found.failed), key=way):
        ways.setdefault(way(run), []).append(run)
    for runs in chain.from_iterable(map(by_data, ways.values())):
        folds = {run["config"].get("fold") for run in runs} - {None}
        if len(folds) > 1:
            yield _question("fold", [run for run in runs if run["config"].get("fold") is not None])
        for fold in {None} | (folds if len(folds) == 1 else set()):
            if seeds := [run for run in runs if run["config"].get("fold") == fold]:
                yield _question("seed", seeds)


def by_data(runs: Sequence[Record]) -> list[list[Record]]:
    """The runs; apart, by their data, where there are other data for the same fold."""
    fingerprints: dict[int | None, set[str]] = {}
    for run in runs:
        fingerprints.setdefault(run["config"].get("fold"), set()).add(run["fingerprint"])
    if all(len(known) == 1 for known in fingerprints.values()):
        return [list(runs)]
    return [
        [run for run in runs if run["fingerprint"] == fingerprint]
        for fingerprint in dict.fromkeys(run["fingerprint"] for run in runs)
    ]


def way(run: Record) -> str:
    """Runs that are the same in this, and have the same fold or seed, can be compared."""
    settings = {name: value for name, value in run["config"].items() if name not in VARIED and value is not None}
    return json.dumps([run["recipe"], settings], sort_keys=True)


def _question(over: Over, runs: Sequence[Record]) -> Question:
    names = _row_names(runs)
    order = sorted(set(names.values()), key=lambda name: (name != "none", name))
    rows = {name: tuple(_planned(run) for run in _sorted(runs) if names[run["key"]] == name) for name in order}
    config = runs[0]["config"]
    done = [run for run in runs if run["status"] == "ok"]
    tested = all(score(run, "test_accuracy") is not None for run in done)
    return Question(
        recipe=runs[0]["recipe"],
        dataset=str(config.get("dataset", runs[0]["recipe"])),
        over=over,
        rows=rows,
        contrasts=against(order[0], order),
        train_on=config.get("train_on", "train"),
        cross_validation=config.get("cross_validation"),
        score="test_accuracy" if tested else "validation_accuracy",
        chosen={
            name: chosen for name in order if (chosen := _chosen(run for run in done if names[run["key"]] == name))
        },
    )


def _row_names(runs: Sequence[Record]) -> dict[str, str]:
    """Each run's row, by its key. Where a row has two runs on one fold with one seed, its numbers tell them apart."""
    places = [(run["regulariser"], run["config"].get("fold"), run["config"].get("seed")) for run in runs]
    doubled = {place[0] for place in places if places.count(place) > 1}
    return {
        run["key"]: run["config"]["regulariser"] if run["regulariser"] in doubled else run["regulariser"]
        for run in runs
    }


def _chosen(runs: Iterable[Record]) -> tuple[str, ...]:
    """Whose numbers were chosen for these runs, as far as their records say so."""
    return tuple(dict.fromkeys(name for run in runs for name in run.get("tuned") or {}))


def _sorted(runs: Sequence[Record]) -> list[Record]:
    return sorted(runs, key=lambda run: (run["config"].get("fold") or 0, run["config"].get("seed", 0), run["key"]))


def _planned(run: Record) -> Planned:
    config = run["config"]
    seed, fold = config.get("seed", 0), config.get("fold")
    return Planned(run["key"], config["regulariser"], seed, fold, fingerprint=run["fingerprint"])


def _names(answers: Sequence[Comparison]) -> list[str]:
    """The recipes' names, with whatever tells two comparisons of a recipe apart."""
    described = []
    for answer in answers:
        question = answer.question
        config = answer.runs[0]["config"] if answer.runs else {}
        settings = {name: value for name, value in config.items() if name not in VARIED}
        over = {"over": f"{len(question.units)} {question.over}s", "of": ", ".join(question.rows)}
        first = (
            {"first seed": min(run.seed for runs in question.rows.values() for run in runs)} if question.units else {}
        )
        against_what = {"contrasts": ", ".join(":".join(pair) for pair in question.contrasts)}
        described.append((question.recipe, settings | over | first | against_what))
    names: list[str] = []
    for recipe, settings in described:
        rivals = [other for name, other in described if name == recipe]
        telling = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in settings.items()
            if any(other.get(name) != value for other in rivals)
        ]
        name = f"{recipe} ({'; '.join(telling)})" if telling else recipe
        names.append(name if name not in names else f"{name}, {len(names) + 1}")
    return names
