"""What a comparison shows, in words that claim no more than it does: for the terminal, the JSON and the page alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..wording import counted, listed, signed
from .comparison import Comparison, Contrast, called
from .statistics import ALPHA, ONE_SPLIT, Difference, Verdict

RULES = {"established": "better", "reversed": "worse"}


@dataclass(frozen=True)
class Words:
    """A comparison in sentences."""

    outcome: str
    """What is shown and what is not: the headline."""
    design: str
    """What was compared, on what, and how it was tested."""
    contrasts: tuple[str, ...]
    """One sentence per contrast."""
    choices: tuple[str, ...]
    """Which numbers were chosen, per row that had any to choose."""
    sampling: tuple[str, ...]
    """What the test set's own sampling error adds over seeds on one split, per contrast that it is known for."""
    matrix: tuple[str, ...]
    """What the matrix of all rows shows."""
    gaps: tuple[str, ...]
    """What is missing, and what a reader has to know."""


def in_words(comparison: Comparison) -> Words:
    """What a comparison shows, for somebody who reads nothing else."""
    return Words(
        outcome=outcome(comparison),
        design=f"{_compared(comparison)} {_tested(comparison)}".strip(),
        contrasts=tuple(contrast_sentence(comparison, contrast) for contrast in comparison.contrasts),
        choices=tuple(_choice(comparison, name) for name in comparison.question.tuning_runs),
        sampling=tuple(_sampling(contrast) for contrast in comparison.contrasts if contrast.bootstrap),
        matrix=tuple(_matrix(comparison)),
        gaps=tuple(gaps(comparison)),
    )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison for machines, with the same words that people see."""
    return comparison.to_json() | {"in_words": asdict(in_words(comparison))}


# Numbers


def p_value(value: float | None) -> str:
    """Three decimals, or as many as it takes not to round across the threshold; never 0, and a dash for undefined."""
    if value is None:
        return "–"
    if value < 0.001:
        return "< 0.001"
    return _on_its_side(value, [f"{value:.{decimals}f}" for decimals in range(3, 18)])


def _on_its_side(p: float, texts: Sequence[str]) -> str:
    """The first of the texts, each more exact than the one before, that is not rounded across the threshold."""
    return next((text for text in texts if (float(text) < ALPHA) == (p < ALPHA)), repr(p))


def points(difference: float) -> str:
    """A difference of accuracies in percentage points, to the first decimal that shows it, but at most three."""
    texts = [f"{100 * difference:+.{decimals}f}" for decimals in (1, 2, 3)]
    return next((text for text in texts if float(text)), "0.0")


# Contrasts


def contrast_sentence(comparison: Comparison, contrast: Contrast) -> str:
    """What a contrast shows: the verdict first, then what it rests on."""
    count, planned = len(contrast.pairs), contrast.planned
    over = comparison.question.over
    partly = f"on the {count} of {planned} {over}s where both have a score, "
    if comparison.question.decide_by == "pooled":  # which also uses runs whose pair is missing
        partly = f"with a score of both on {count} of {planned} {over}s, "
    is_partial = count < planned and contrast.decided is not None
    return (
        f"{contrast.verdict}: {partly if is_partial else ''}{_finding(comparison, contrast)}"
        f"{_failures(comparison, contrast)}{_caveat(comparison, contrast)}"
    )


def _finding(comparison: Comparison, contrast: Contrast) -> str:
    first, second, decided = contrast.first, contrast.second, contrast.decided
    over = comparison.question.over
    if decided is None:
        return f"no {over} has a score of both {first} and {second}"
    if decided.p_value is None:
        return _undefined(decided, over)
    evidence = f"{_p(decided)}{_corrected(comparison)}"
    size = points(abs(decided.mean)).removeprefix("+")
    if contrast.among_survivors in RULES:
        negligible = f", which is within ±{_rope(comparison)} points" if contrast.equivalent else ""
        how = RULES[contrast.among_survivors]
        return f"{first} is {how} than {second} by {size} points{negligible} ({evidence}){_wide(decided)}"
    if contrast.among_survivors == "equivalent":
        low, high = decided.interval_90 or (0.0, 0.0)
        return (
            f"{first} differs from {second} by {_inside(comparison, decided.mean)} points, and by less than "
            f"{_rope(comparison)} either way (90 % interval {_inside(comparison, low)} to {_inside(comparison, high)})"
        )
    low, high = (max(-1.0, min(1.0, end)) for end in decided.simultaneous_interval or (0.0, 0.0))
    mean = points(decided.mean)
    seen = (
        f"differs from {second} by {mean} points, which may be chance"
        if float(mean)
        else f"is on average like {second}"
    )
    return f"{first} {seen} ({evidence}); anything from {points(low)} to {points(high)} points is possible"


def _wide(decided: Difference) -> str:
    """Why an interval may reach over zero though Holm's p-value is below the threshold."""
    low, high = decided.simultaneous_interval or (1.0, 1.0)
    return (
        f"; the interval from {points(low)} to {points(high)} is wider, as it holds together with the others"
        if low <= 0 <= high
        else ""
    )


def _undefined(decided: Difference, over: str) -> str:
    if not decided.n:
        return f"runs without a pair cannot tell a difference of {points(decided.mean)} points from chance"
    if decided.n < 2:
        return f"one {over} cannot tell a difference of {points(decided.mean)} points from chance"
    if not decided.mean:
        return f"both have the same score on every {over}, so there is no spread to judge by"
    return f"all {decided.n} pairs differ by the same {points(decided.mean)} points, so there is no spread to judge by"


def _failures(comparison: Comparison, contrast: Contrast) -> str:
    """How many runs the verdict rests on, and what counting the failed ones as guessing does to it."""
    lost = [
        f"{row.failed} of {row.planned} runs of {row.name} failed"
        for row in map(comparison.row, (contrast.first, contrast.second))
        if row.failed
    ]
    if not lost:
        return ""
    with_failures = contrast.decided_with_failures
    guessing = f"failures counted as guessing ({100 * comparison.chance:.3g} %)"
    if with_failures is None or with_failures.p_value is None:
        return f"; {listed(lost)}"
    difference = f"the difference is {points(with_failures.mean)} points ({_p(with_failures)})"
    if contrast.among_survivors == "inconclusive":
        return f"; {listed(lost)}: with {guessing} {difference}"
    agrees = "so it holds" if contrast.verdict == contrast.among_survivors else "so nothing is settled"
    return f"; but {listed(lost)}: with {guessing} {difference}, {agrees}"


def _caveat(comparison: Comparison, contrast: Contrast) -> str:
    settled = contrast.verdict != "inconclusive"
    return (
        "; this says nothing about other data"
        if settled and comparison.question.design.paired_method == ONE_SPLIT
        else ""
    )


def _sampling(contrast: Contrast) -> str:
    assert contrast.bootstrap is not None
    low, high = contrast.bootstrap.interval
    return (
        f"{contrast.first} against {contrast.second}, runs and {contrast.bootstrap.images:,} test images drawn anew: "
        f"standard error {100 * contrast.bootstrap.standard_error:.2f} points "
        f"({100 * contrast.bootstrap.images_alone:.2f} from the images alone), "
        f"95 % of the draws from {signed(100 * low)} to {signed(100 * high)}"
    )


def _p(difference: Difference) -> str:
    p = difference.decisive_p
    if p is None:
        return "p undefined"
    return "p < 0.001" if p < 0.001 else f"p = {_on_its_side(p, [f'{p:.{digits}g}' for digits in range(2, 18)])}"


def _corrected(comparison: Comparison) -> str:
    return f", Holm-corrected over {comparison.tested} contrasts" if comparison.tested > 1 else ""


def _rope(comparison: Comparison) -> str:
    return f"{100 * (comparison.question.rope or 0):g}"


def _inside(comparison: Comparison, difference: float) -> str:
    """A difference in points, to as many decimals as it takes not to round to the end of the region of equivalence."""
    end = 100 * (comparison.question.rope or 0)
    texts = (points(difference), *(f"{100 * difference:+.{decimals}f}" for decimals in range(2, 16)))
    return next((text for text in texts if abs(float(text)) < end), texts[-1])


# The whole


def outcome(comparison: Comparison) -> str:
    """The headline: every contrast by its verdict, with how many runs failed."""
    if not comparison.runs:
        return f"No run succeeded: all {sum(row.planned for row in comparison.rows)} failed or were not run."
    if len(comparison.rows) < 2:
        return "One regulariser alone: there is nothing to compare it with."
    if not any(contrast.decided for contrast in comparison.contrasts):
        return f"Nothing can be compared: no {comparison.question.over} has a score of both rows of a contrast."
    if not comparison.tested:
        return "Nothing was tested: " + _untested(comparison)
    by_verdict: dict[Verdict, list[str]] = {}
    for contrast in comparison.contrasts:
        by_verdict.setdefault(contrast.verdict, []).append(_short(comparison, contrast))
    how = {
        "established": "Established: {}.",
        "reversed": "Reversed: {}.",
        "equivalent": f"Equivalent within ±{_rope(comparison)} points: {{}}.",
        "inconclusive": "Inconclusive: {}.",
    }
    return " ".join(text.format(listed(by_verdict[word])) for word, text in how.items() if word in by_verdict)


def _untested(comparison: Comparison) -> str:
    if all(contrast.decided is None or contrast.decided.n < 2 for contrast in comparison.contrasts):
        return "one run each cannot tell a difference from chance."
    return "the differences have no spread to judge them by."


def _short(comparison: Comparison, contrast: Contrast) -> str:
    """The contrast in a few words, with how many of the runs there are."""
    names = [
        row.name if row.done == row.planned else f"{row.name} ({row.done} of {row.planned} runs)"
        for row in map(comparison.row, (contrast.first, contrast.second))
    ]
    if contrast.verdict in RULES:
        return f"{names[0]} is {RULES[contrast.verdict]} than {names[1]}"
    return f"{names[0]} and {names[1]}" if contrast.verdict == "equivalent" else f"{names[0]} against {names[1]}"


def _compared(comparison: Comparison) -> str:
    question = comparison.question
    trained = (
        "the training and the validation part" if question.train_on == "train+validation" else "the training part alone"
    )
    part = "test" if question.score == "test_accuracy" else "validation"
    names = [row.name for row in comparison.rows]
    many = f"{len(names)} regularisers" if len(names) > 1 else f"The regulariser {names[0]}"
    return (
        f"{many} on {question.dataset}, {_units(comparison)}; trained on {trained}; the score is the {part} accuracy."
        f"{_tuning(comparison)}"
    )


def _units(comparison: Comparison) -> str:
    """The folds or seeds that were compared on, and how often."""
    question = comparison.question
    by_row = [Counter(map(question.unit, runs)) for runs in question.rows.values()]
    count, cut = len(question.units), question.cross_validation
    folds = "disjoint folds" if cut is None else "folds of cross-validation, whose training parts overlap"
    units = f"{count} {folds}" if question.over == "fold" else f"{count} seeds on one split"
    if any(runs.keys() != by_row[0].keys() for runs in by_row):
        on = f"{units}, of which some rows lack some"
    elif count < 2:
        on = f"one {question.over} each"
    else:
        on = ("the same " if len(by_row) > 1 else "") + units + (_seeds(comparison) if question.over == "fold" else "")
    repeats = {runs for row in by_row for runs in row.values()}
    if max(repeats, default=1) == 1:
        return on
    several = f"the {max(repeats)} seeds per fold" if len(repeats) == 1 else "the seeds of a row on one fold"
    return f"{on}; {several} are averaged before pairing"


def _seeds(comparison: Comparison) -> str:
    """Which seeds the folds were trained with, as far as it is simple to say."""
    question = comparison.question
    by_row = [{(question.unit(run), run.seed) for run in runs} for runs in question.rows.values()]
    if any(seeds != by_row[0] for seeds in by_row):
        return ", with seeds that differ between the rows"
    distinct = {seed for _, seed in by_row[0]}
    if len(distinct) == 1:
        return f", all with seed {min(distinct)}, so that the result is about one initialisation"
    own = "seed" if len(by_row[0]) == len(question.units) else "seeds"
    shared = ", which all rows share" if len(by_row) > 1 else ""
    return f", each with its own {own}{shared}" if len(distinct) == len(by_row[0]) else ""


def _tuning(comparison: Comparison) -> str:
    runs = comparison.question.tuning_runs
    if not runs:
        return ""
    same = len(set(runs.values())) == 1
    spent = (
        f"the same budget of {next(iter(runs.values()))} runs each"
        if same
        else "budgets that differ: " + ", ".join(f"{name} {count}" for name, count in runs.items())
    )
    images = comparison.question.validation_images
    worth = f", of which one image is worth {100 / images:.2g} points," if images else ","
    where = "on every fold" if comparison.question.over == "fold" else "once"
    untuned = [row.name for row in comparison.rows if row.name not in runs]
    nothing = f"; nothing was chosen for {listed(untuned)}" if untuned else ""
    return f" Numbers were chosen {where}, on the validation part{worth} with {spent}{nothing}."


def _choice(comparison: Comparison, name: str) -> str:
    question = comparison.question
    runs = question.rows[name]
    texts = {question.unit(run): "nothing" if run.error else called(run, name, question) for run in runs}
    if len(set(texts.values())) == 1:
        return f"{name}, chosen: {texts.popitem()[1]}"
    return f"{name}, chosen by {question.over}: {'; '.join(texts.values())}"


def _tested(comparison: Comparison) -> str:
    question = comparison.question
    if not comparison.tested and all(
        not test or test.n < 2 for test in (pair.decided for pair in comparison.contrasts)
    ):
        return ""
    ways = {"paired": question.design.paired_method, "pooled": f"model {question.design.pooled_method}"}
    other = next(way for way in ways if way != question.decide_by)
    count = len(comparison.contrasts)
    family = f"{count} contrasts, one family: " if count > 1 else "One contrast: "
    corrected = (
        " p-values are Holm-corrected, and the intervals hold all at once with 95 % confidence (Bonferroni)."
        if count > 1
        else ""
    )
    rope = f"; 'equivalent', that the 90 % interval is inside ±{_rope(comparison)} points" if question.rope else ""
    return (
        f"{family}verdicts follow the {ways[question.decide_by]}; the other analysis is the {ways[other]}.{corrected} "
        f"'Established' means p < {ALPHA:g} in the expected direction; 'reversed', in the other{rope}; "
        "'inconclusive' is no evidence of equality."
    )


def _matrix(comparison: Comparison) -> Iterator[str]:
    means = comparison.comparable_means
    if len(means) < 3:
        return
    names = [row.name for row in comparison.rows]
    among = "" if len(means) == len(names) else f" of the rows that have a score on every {comparison.question.over}"
    best, *equals = comparison.highest
    if equals:
        yield f"The rows {listed([best, *equals])} have the highest mean{among}."
        return
    beside = zip(names, comparison.matrix[names.index(best)], strict=True)
    cells = {name: cell for name, cell in beside if cell and name in means}
    always = [name for name, cell in cells.items() if not cell.losses and not cell.ties]
    apart = [name for name, cell in cells.items() if cell.p_value is not None and cell.p_value < ALPHA]
    yield f"The row {best} has the highest mean{among}" + (
        f", and is ahead of {listed(always)} on every {comparison.question.over}." if always else "."
    )
    yield (
        f"Taken one by one, without correction, it differs from {listed(apart)} at p < {ALPHA:g}."
        if apart
        else f"Taken one by one, even without correction, it differs from no other row at p < {ALPHA:g}."
    )


def gaps(comparison: Comparison) -> Iterator[str]:
    """What is missing, row by row, and what else a reader has to know."""
    for row in comparison.rows:
        if row.failed == row.planned:
            yield f"{row.name} is not compared: all of its {row.planned} runs failed."
        elif row.failed:
            yield f"{row.name}: {row.failed} of {row.planned} runs failed and have no score."
        waiting = row.planned - row.done - row.failed
        if waiting:
            yield f"{row.name}: {waiting} of {row.planned} runs have not been run."
    for name, failed in comparison.question.tuning_failures.items():
        yield f"{name}: {counted(failed, 'tuning run')} failed and had no say in its numbers."
    yield from comparison.notes
