"""What records show: which runs can be compared, how the comparison ends, and that in words.

It follows from the records alone, whatever order they were written in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from maxgain.errors import RecordError

from ..compare import statistics
from ..compare.records import Record, Records
from ..compare.statistics import Row
from ..schema import score as score_of
from ..wording import unknown

VARIED = ("regulariser", "seed", "fold")
"""What the runs of one recipe may differ in and still be compared."""


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in their regulariser and in their fold or seed alone, and what the statistics make of them."""

    name: str
    runs: tuple[Record, ...]
    """In the order of the regularisers and then of the folds or seeds."""
    failed: tuple[Record, ...]
    over: str
    """What makes a pair of two runs: that they have the same 'fold', or the same 'seed'."""
    baseline: str
    score: str
    """What is compared: test_accuracy, or validation_accuracy where not all runs were tested."""
    scores: Mapping[str, Mapping[int, float]]
    """By regulariser, the baseline first, and by fold or seed."""
    pairs: tuple[int, ...]
    """The folds or seeds where every regulariser has a score: what the rows are about."""
    rows: tuple[Row, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The folds or seeds where any regulariser has a score."""
        return tuple(sorted(set().union(*self.scores.values())))

    @property
    def dataset(self) -> str:
        """What was trained on."""
        return str(self.runs[0]["config"].get("dataset", self.runs[0]["recipe"]))

    @property
    def test(self) -> str | None:
        """The name of the test, where one was made."""
        return next((row.test.method for row in self.rows if row.test), None)

    def of(self, regulariser: str) -> tuple[Record, ...]:
        """The runs of a regulariser."""
        return tuple(run for run in self.runs if run["regulariser"] == regulariser)


@dataclass(frozen=True)
class Words:
    """A comparison in honest sentences."""

    outcome: str
    """What is shown and what is not, first of all."""
    design: str
    """What was compared, and how it was tested."""
    gaps: tuple[str, ...]
    """What is missing, and what a reader has to know about the data."""


def comparisons(records: Records, baseline: str | None = None) -> list[Comparison]:
    """The records' comparisons, one for every recipe and every way of carrying it out.

    The baseline is the one named; where that was not run, it is 'none', or else the first in the alphabet.
    """
    known = {run["regulariser"] for run in records.runs}
    if baseline is not None and baseline not in known:
        raise RecordError(unknown("regulariser in the records called", baseline, sorted(known)))
    ways: dict[str, list[Record]] = {}
    for run in sorted(records.runs, key=_way):
        ways.setdefault(_way(run), []).append(run)
    designs = [(way, *design) for way, runs in ways.items() for design in _designs(runs)]
    return [
        _comparison(
            name=name,
            runs=runs,
            failed=[run for run in records.failed if _way(run) == way and _belongs(run, over, held)],
            over=over,
            baseline=baseline,
        )
        for name, (way, over, held, runs) in zip(_names(designs), designs, strict=True)
    ]


def in_words(comparison: Comparison) -> Words:
    """What a comparison shows, for somebody who reads nothing else."""
    return Words(_outcome(comparison), f"{_what(comparison)} {_how(comparison)}".strip(), tuple(_gaps(comparison)))


def _way(run: Record) -> str:
    """Runs that are the same in this, and have the same fold or seed, can be compared."""
    settings = {name: value for name, value in run["config"].items() if name not in VARIED and value is not None}
    return json.dumps([run["recipe"], settings], sort_keys=True)


Design = tuple[str, int | None, list[Record]]


def _designs(runs: Sequence[Record]) -> Iterator[Design]:
    """How runs can be paired: over the folds, with one seed; or over the seeds, on one fold or on all the data.

    Runs that have no others to be paired with are given as what they are, seeds of which there is one.
    """
    paired: set[str] = set()
    for over, held in (("fold", "seed"), ("seed", "fold")):
        for value in dict.fromkeys(run["config"].get(held) for run in runs):
            chosen = [run for run in runs if _belongs(run, over, value)]
            numbers = {run["config"].get(over) for run in chosen}
            alone = over == "seed" and any(run["key"] not in paired for run in chosen)
            if len(numbers) > 1 or alone:
                paired |= {run["key"] for run in chosen}
                yield over, value, chosen


def _belongs(run: Record, over: str, held: int | None) -> bool:
    config = run["config"]
    return config.get("seed" if over == "fold" else "fold") == held and config.get(over) is not None


def _names(designs: Sequence[tuple[str, str, int | None, list[Record]]]) -> list[str]:
    """The recipes' names, with whatever tells two comparisons of a recipe apart."""
    described = []
    for _, over, held, runs in designs:
        settings = {name: value for name, value in runs[0]["config"].items() if name not in VARIED}
        other = {} if held is None else {"seed" if over == "fold" else "fold": held}
        described.append((runs[0]["recipe"], settings | {"over": f"{over}s"} | other))
    names = []
    for recipe, settings in described:
        rivals = [other for name, other in described if name == recipe]
        telling = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if any(
            other.get(name) != value for other in rivals
        )]  # fmt: skip
        names.append(f"{recipe} ({', '.join(telling)})" if telling else recipe)
    return names


def _comparison(
    name: str, runs: Sequence[Record], failed: Sequence[Record], over: str, baseline: str | None
) -> Comparison:
    newest = {(run["regulariser"], run["config"][over]): run for run in runs}  # a search may have chosen anew
    runs = list(newest.values())
    score = "test_accuracy" if all(run.get("test_accuracy") is not None for run in runs) else "validation_accuracy"
    regularisers = sorted({run["regulariser"] for run in runs})
    usual = "none" if "none" in regularisers else regularisers[0]
    against = baseline if baseline is not None and baseline in regularisers else usual
    regularisers.sort(key=lambda regulariser: regulariser != against)
    ordered = sorted(runs, key=lambda run: (regularisers.index(run["regulariser"]), run["config"][over]))
    scores: dict[str, dict[int, float]] = {regulariser: {} for regulariser in regularisers}
    for run in ordered:
        if (value := score_of(run, score)) is not None:
            scores[run["regulariser"]][run["config"][over]] = value
    pairs, rows = statistics.compare_pairs(scores, against, statistics.overlap(over, runs[0]["config"]))
    return Comparison(name, tuple(ordered), tuple(failed), over, against, score, scores, pairs, tuple(rows))


# Words


def _outcome(comparison: Comparison) -> str:
    if len(comparison.scores) < 2:
        return "One regulariser alone: there is nothing to compare it with."
    if not comparison.pairs:
        return f"Nothing can be compared: no {comparison.over} has a score of every regulariser."
    if comparison.test is None:
        return "One run each cannot tell a difference from chance: nothing was tested."
    # Differences without any spread are significant in form only, as their verdict says, and no finding.
    tests = {row.regulariser: row.test for row in comparison.rows if row.significant and row.test}
    sizes = {name: test.mean_difference for name, test in tests.items() if test.standard_error > 0}
    better = [name for name, size in sizes.items() if size > 0]
    worse = [name for name, size in sizes.items() if size < 0]
    found = [
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} significantly {how} than {comparison.baseline}"
        for names, how in ((better, "better"), (worse, "worse"))
        if names
    ]
    if not found:
        return f"No regulariser differs significantly from {comparison.baseline}: the order in the table may be chance."
    rest = len(comparison.rows) - 1 - len(sizes)
    return f"{', and '.join(found)}{'; no other difference is significant' if rest else ''}."


def _what(comparison: Comparison) -> str:
    part = "test set" if comparison.score == "test_accuracy" else "validation set, for not all runs were tested"
    count = len(comparison.pairs)
    cut = comparison.runs[0]["config"].get("cross_validation")
    folds = "disjoint folds" if cut is None else "folds of cross-validation, whose training parts overlap"
    where = {"fold": f"the same {count} {folds}", "seed": f"the same {count} seeds on one split"}
    names = list(comparison.scores)
    many = f"{len(names)} regularisers" if len(names) > 1 else f"The regulariser {names[0]}"
    on = where[comparison.over] if count > 1 else "one run each"
    return f"{many} on {comparison.dataset}, {on}; the score is the accuracy on the {part}."


def _how(comparison: Comparison) -> str:
    if comparison.test is None:
        return ""
    count = next(row.comparisons for row in comparison.rows if row.test)
    corrected = f", with Holm's correction over {count} comparisons" if count > 1 else ""
    return (
        f"Each is tested against {comparison.baseline}: {comparison.test}{corrected}. "
        f"Significant means p < {statistics.ALPHA:g}."
    )


def _gaps(comparison: Comparison) -> Iterator[str]:
    for number in comparison.numbers:
        missing = [name for name, values in comparison.scores.items() if number not in values]
        if missing:
            yield (
                f"Left out for all, so that every difference is paired: {comparison.over} {number}, "
                f"where there is no score of {_listed(missing)}."
            )
    if comparison.failed:
        tried = len(comparison.runs) + len(comparison.failed)
        yield f"{len(comparison.failed)} of {tried} runs failed and have no score."
    for note in dict.fromkeys(run["note"] for run in comparison.runs if run.get("note")):
        yield f"Note: {note}."


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
