"""One function from records to a comparison, which the terminal, the JSON and the page all show.

Nothing that is shown is computed anywhere else. Every row's failures are part of it: a failed run takes its own pairs
away and nobody else's, and a verdict that would not survive counting failures as guessing is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import FileError, RegulariserError

from ..regularisers import brief, parse
from ..schema import score
from ..wording import counted
from . import statistics
from .bootstrap import Bootstrap, bootstrap
from .question import Planned, Question
from .records import Record, Records
from .statistics import Difference, Pair, Scores, Summary, Verdict

NOT_RUN = "it was not run"

Correct = NDArray[np.bool_]
"""Whether a run classified each image of its test part right."""
ScoreOf = Callable[[Planned], float | None]


@dataclass(frozen=True)
class Row:
    """A row of the table: its scores, and how many of its runs they come from."""

    name: str
    label: str
    """The name with its numbers, where all its runs have the same ones; but for factors of 1 that nobody named."""
    scores: dict[int, float]
    """By fold or seed. Several runs on one fold are averaged; where one of them has no score, the fold has none."""
    summary: Summary | None
    planned: int
    """How many runs there should be."""
    done: int
    """How many runs have a score."""
    failed: int


@dataclass(frozen=True)
class Failure:
    """A run without a score, and why it has none."""

    row: str
    run: Planned
    error: str

    @property
    def was_run(self) -> bool:
        """Whether it failed, rather than not having been run yet."""
        return self.error != NOT_RUN


@dataclass(frozen=True)
class Analyses:
    """A contrast by both analyses, each corrected for the whole family; None where there is nothing to analyse."""

    paired: Difference | None
    pooled: Difference | None


@dataclass(frozen=True)
class Contrast:
    """Two rows, and whether the first is better than the second."""

    first: str
    second: str
    pairs: tuple[int, ...]
    """The folds or seeds where both have a score."""
    planned: int
    """How many of them there should be."""
    analyses: Analyses
    decided: Difference | None
    """The analysis that the verdict follows."""
    among_survivors: Verdict
    """What the runs that have a score show."""
    failures_as_chance: Analyses | None
    """The same with failed runs counted as guessing; None where neither row has any."""
    decided_with_failures: Difference | None
    verdict: Verdict
    """What may be said: inconclusive, unless counting failures as guessing leads to the same verdict."""
    equivalent: bool
    """Whether the difference is too small to matter, even where it is established."""
    welch: Difference | None
    """Without pairing, as a check; None where training sets overlap, for which it has no correction."""
    bootstrap: Bootstrap | None
    """With the test set's own sampling error, over seeds on one split, where the runs' predictions were kept."""


@dataclass(frozen=True)
class Cell:
    """One row beside another in the matrix of all rows. Its p-value is of that pair alone, not corrected."""

    mean: float
    wins: int
    ties: int
    losses: int
    p_value: float | None


@dataclass(frozen=True, repr=False)
class Comparison:
    """What the records answer to a question."""

    question: Question
    rows: tuple[Row, ...]
    contrasts: tuple[Contrast, ...]
    matrix: tuple[tuple[Cell | None, ...], ...]
    """Every row against every row, in their order; None for a row and itself, and where no pair has both scores."""
    failures: tuple[Failure, ...]
    runs: tuple[Record, ...]
    """The records behind the scores, row by row."""
    chance: float = 0.0
    """The accuracy of guessing, which failed runs count as in `failures_as_chance`."""
    notes: tuple[str, ...] = ()
    """What a reader has to know: about the data, and about records that were left out."""

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(row.label for row in self.rows)} on {self.question.dataset}>"

    def __str__(self) -> str:
        """Tables of the rows and the contrasts, and the outcome in words."""
        from .shown import text  # which shows comparisons, and so cannot be there before them

        return text(self)

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        from .shown import html

        return html(self)

    @property
    def tested(self) -> int:
        """How many contrasts have a p-value: what p-values and intervals are corrected for."""
        return sum(contrast.decided is not None and contrast.decided.p_value is not None for contrast in self.contrasts)

    @property
    def comparable_means(self) -> dict[str, float]:
        """The means of the rows that have a score everywhere: another may be high because its folds were easy ones."""
        units = len(self.question.units)
        return {row.name: row.summary.mean for row in self.rows if row.summary and len(row.scores) == units}

    @property
    def highest(self) -> list[str]:
        """The row with the highest of these means, or the rows that share it, but for rounding."""
        means = self.comparable_means
        return [name for name, mean in means.items() if round(max(means.values()) - mean, 12) == 0]

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def runs_of(self, name: str) -> tuple[Record, ...]:
        """The records of a row."""
        keys = {run.key for run in self.question.rows[name]}
        return tuple(run for run in self.runs if run["key"] in keys)

    def to_json(self) -> dict[str, Any]:
        """All of it but the records, as strict JSON can hold it."""
        return {
            "asked": self.question.to_json(),
            "rows": [
                asdict(row) | {"scores": {str(unit): value for unit, value in row.scores.items()}} for row in self.rows
            ],
            "contrasts": [asdict(contrast) for contrast in self.contrasts],
            "matrix": [[None if cell is None else asdict(cell) for cell in cells] for cells in self.matrix],
            "failures": [asdict(failure) for failure in self.failures],
            "chance": self.chance,
            "notes": list(self.notes),
        }


def compare(
    question: Question,
    records: Records,
    correct: Callable[[Record], Correct | None] = lambda record: None,
) -> Comparison:
    """What the records answer to the question; `correct` tells which test images a recorded run classified right."""
    found: dict[str | None, Record] = {
        run["key"]: run for run in records.runs if score(run, question.score) is not None
    }
    failures = _failures(question, found, records)
    failed = {failure.run for failure in failures if failure.was_run}
    chance = _chance((*records.runs, *records.failed), question)

    def observed(run: Planned) -> float | None:
        return score(found[run.key], question.score) if run.key in found else None

    def filled(run: Planned) -> float | None:
        return chance if run in failed else observed(run)

    scores = _scores_by_row(question, observed)
    with_failures = _scores_by_row(question, filled)
    rows = tuple(_row(name, question, scores[name], found, failures) for name in question.rows)
    used = tuple(found[run.key] for runs in question.rows.values() for run in runs if run.key in found)
    kept = _Kept(correct)
    answers = zip(question.contrasts, _analyses(scores, question), _analyses(with_failures, question), strict=True)
    spoilt = {failure.row for failure in failures if failure.was_run}
    contrasts = tuple(
        _contrast(
            pair,
            question,
            scores,
            analyses,
            as_chance if spoilt & set(pair) else None,
            _bootstrap(pair, question, scores, found, kept),
        )
        for pair, analyses, as_chance in answers
    )
    about_data = dict.fromkeys(f"Note: {run['note']}." for run in used if run.get("note"))
    return Comparison(
        question=question,
        rows=rows,
        contrasts=contrasts,
        matrix=_matrix(scores, question),
        failures=failures,
        runs=used,
        chance=chance,
        notes=(*about_data, *_left_out(question, records), *kept.problems),
    )


class _Kept:
    """Which test images runs classified right, each run's read once; what cannot be read is named and done without."""

    def __init__(self, correct: Callable[[Record], Correct | None]) -> None:
        self._correct = correct
        self._known: dict[str, Correct | None] = {}
        self.problems: list[str] = []

    def __call__(self, run: Record) -> Correct | None:
        if run["key"] not in self._known:
            try:
                self._known[run["key"]] = self._correct(run)
            except FileError as error:
                self._known[run["key"]] = None
                self.problems.append(f"Left out: {error}")
        return self._known[run["key"]]


def _failures(question: Question, found: Mapping[str | None, Record], records: Records) -> tuple[Failure, ...]:
    errors: dict[str | None, str] = {run["key"]: run["error"] for run in records.failed}
    return tuple(
        Failure(name, run, run.error or errors.get(run.key, NOT_RUN))
        for name, runs in question.rows.items()
        for run in runs
        if run.key not in found
    )


def _chance(runs: Sequence[Record], question: Question) -> float:
    """The accuracy of guessing, as far as records of the question's runs know how many classes there are."""
    keys = {run.key for planned in question.rows.values() for run in planned}
    return next((1 / run["classes"] for run in runs if run["key"] in keys and run.get("classes")), 0.0)


def _left_out(question: Question, records: Records) -> list[str]:
    """How many records are of the same runs on other data, in words."""
    data = {(run.regulariser, run.fold, run.seed): run.fingerprint for runs in question.rows.values() for run in runs}
    others = [
        run
        for run in (*records.runs, *records.failed)
        if run["recipe"] == question.recipe and data.get(_place(run), run["fingerprint"]) != run["fingerprint"]
    ]
    return [f"{counted(len(others), 'record')} in this folder: of other data, and left out."] if others else []


def _place(run: Record) -> tuple[str, int | None, int]:
    config = run["config"]
    return config["regulariser"], config.get("fold"), config.get("seed", 0)


def _scores_by_row(question: Question, score_of: ScoreOf) -> dict[str, dict[int, float]]:
    return {name: _by_unit(question, runs, score_of) for name, runs in question.rows.items()}


def _by_unit(question: Question, runs: Sequence[Planned], score_of: ScoreOf) -> dict[int, float]:
    """The mean score per fold or seed, where all runs there have one."""
    scores: dict[int, list[float | None]] = {}
    for run in runs:
        scores.setdefault(question.unit(run), []).append(score_of(run))
    return {
        unit: float(np.mean([value for value in values if value is not None]))
        for unit, values in sorted(scores.items())
        if None not in values
    }


def _row(
    name: str,
    question: Question,
    scores: dict[int, float],
    found: Mapping[str | None, Record],
    failures: Sequence[Failure],
) -> Row:
    runs = question.rows[name]
    return Row(
        name=name,
        label=_label(name, question),
        scores=scores,
        summary=statistics.summary(list(scores.values())) if scores else None,
        planned=len(runs),
        done=sum(run.key in found for run in runs),
        failed=sum(failure.row == name and failure.was_run for failure in failures),
    )


def _label(name: str, question: Question) -> str:
    texts = {called(run, name, question) for run in question.rows[name] if run.error is None}
    return texts.pop() if len(texts) == 1 else name


def called(run: Planned, row: str, question: Question) -> str:
    """A run's regulariser with its numbers; but for factors of 1 that nobody named and that were not chosen."""
    try:
        given = [choice.row.name for choice in parse(row) if choice.value is not None]
        return brief(run.regulariser, (*given, *question.chosen.get(row, ())))
    except RegulariserError:  # a record may name one that this version does not know
        return run.regulariser


def _common(scores: Scores, pair: Pair) -> tuple[int, ...]:
    """The folds or seeds where both rows have a score."""
    first, second = (scores[name] for name in pair)
    return tuple(unit for unit in first if unit in second)


def _paired(scores: Scores, pair: Pair, question: Question) -> Difference | None:
    units = _common(scores, pair)
    first, second = ([scores[name][unit] for unit in units] for name in pair)
    return statistics.paired(first, second, question.design) if units else None


def _analyses(scores: Scores, question: Question) -> list[Analyses]:
    """Every contrast by both analyses, each of which is a family of its own."""
    paired = statistics.as_family([_paired(scores, pair, question) for pair in question.contrasts])
    pooled = statistics.as_family(statistics.pooled(scores, question.contrasts, question.design))
    return [Analyses(*both) for both in zip(paired, pooled, strict=True)]


def _contrast(
    pair: Pair,
    question: Question,
    scores: Scores,
    analyses: Analyses,
    as_chance: Analyses | None,
    resampled: Bootstrap | None,
) -> Contrast:
    decided: Difference | None = getattr(analyses, question.decide_by)
    with_failures: Difference | None = getattr(as_chance, question.decide_by, None)
    among_survivors = statistics.verdict(decided, question.rope)
    holds = as_chance is None or statistics.verdict(with_failures, question.rope) == among_survivors
    first, second = (list(scores[name].values()) for name in pair)
    return Contrast(
        first=pair[0],
        second=pair[1],
        pairs=_common(scores, pair),
        planned=len(question.units),
        analyses=analyses,
        decided=decided,
        among_survivors=among_survivors,
        failures_as_chance=as_chance,
        decided_with_failures=with_failures,
        verdict=among_survivors if holds else "inconclusive",
        equivalent=holds and decided is not None and statistics.equivalent(decided, question.rope),
        welch=statistics.welch(first, second) if first and second and not question.design.overlap else None,
        bootstrap=resampled,
    )


def _matrix(scores: Scores, question: Question) -> tuple[tuple[Cell | None, ...], ...]:
    cells: dict[Pair, Cell] = {}
    names = list(scores)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            test = _paired(scores, (first, second), question)
            if test is None:
                continue
            units = _common(scores, (first, second))
            differences = [round(scores[first][unit] - scores[second][unit], 12) for unit in units]
            wins, losses = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
            ties = len(differences) - wins - losses
            cells[first, second] = Cell(test.mean, wins, ties, losses, test.p_value)
            cells[second, first] = Cell(0.0 - test.mean, losses, ties, wins, test.p_value)
    return tuple(tuple(cells.get((first, second)) for second in names) for first in names)


def _bootstrap(
    pair: Pair,
    question: Question,
    scores: Scores,
    found: Mapping[str | None, Record],
    correct: Callable[[Record], Correct | None],
) -> Bootstrap | None:
    """The contrast with test images drawn anew, where all runs have the same ones and their predictions are there."""
    units = _common(scores, pair)
    if len(units) < 2 or question.over == "fold":
        return None
    differences = []
    for unit in units:
        shares = []
        for name in pair:
            runs = [correct(found[run.key]) for run in question.rows[name] if question.unit(run) == unit]
            known = [images for images in runs if images is not None]
            if len(known) < len(runs) or len({images.shape for images in known}) != 1:
                return None
            shares.append(np.mean(known, axis=0))
        if shares[0].shape != shares[1].shape:
            return None
        differences.append(shares[0] - shares[1])
    return bootstrap(differences)
