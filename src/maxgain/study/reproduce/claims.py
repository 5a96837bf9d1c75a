"""The paper's claims and the plan's expectations, each with the paper's number, ours, and what may be said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..comparing.comparison import Comparison, Contrast, Row
from ..comparing.sentences import p_value
from ..schema import score
from ..wording import listed, signed, told_apart
from . import paper
from .experiments import Experiment
from .state import Curve, State, deviation

NEAR = 0.4
"""How far a row's mean may be below the paper's number, in points: expected beforehand."""
BEST_ROW, BEST_ACCURACY = "maxgain+batchnorm+dropout", 92.5
"""A row, and how many per cent the plan expects of it on CIFAR-10 at least."""
DECIMALS = 9
"""To which points of accuracy are compared, as binary numbers lose what is below: a mean of 92.5 % reaches 92.5."""
SURE = 0.001
"""The p-value below which the plan expects MaxGain alone against nothing to be."""
SAME_GAINS = 0.1
"""How far medians of gains may be from the paper's, averaged over layers: expected beforehand."""


@dataclass(frozen=True)
class Claim:
    """One line of the summary."""

    text: str
    command: str
    paper: str
    ours: str
    verdict: str
    brief: str = ""
    """Ours in a word, where there is one."""


def claims(states: Mapping[str, State]) -> Iterator[Claim]:
    """All claims, in the order of the experiments."""
    for state in states.values():
        if state.experiment.name == "gains":
            yield from _of_gains(state)
        elif state.experiment.name == "gamma-curve":
            yield _of_curve(state)
        else:
            yield from _of_contrasts(state)
        if state.experiment.name == "cifar10":
            yield from _expectations(state)


def progress(state: State) -> str:
    """How far an experiment is, in words."""
    tried, to_try = len(state.tuning.jobs) - len(state.tuning.missing), len(state.tuning.jobs)
    if state.is_complete:
        done, planned = (state.done, state.planned) if state.planned else (len(state.tuning.recorded), to_try)
        return f"{done} of {planned} runs" + (f"; {planned - done} failed" if done < planned else "")
    if not tried and not state.done:
        return "not run"
    if tried < to_try:
        return f"{'choosing numbers: ' if state.planned else ''}{tried} of {to_try} runs done"
    return f"{state.done} of {state.planned} runs done; scores are looked at when all are"


def mean(row: Row, limit: float | None = None) -> str:
    """A row's mean accuracy in per cent, not rounded across a limit, with its error and how many runs it is of."""
    if row.summary is None:
        return f"no score, 0 of {row.planned} runs"
    error = "" if row.summary.standard_error is None else f" ± {100 * row.summary.standard_error:.2f}"
    value = round(100 * row.summary.mean, DECIMALS)
    shown = f"{value:.2f}" if limit is None else told_apart(value, limit, _ever_more_exact(value, 2))
    return f"{shown}{error} ({row.done} of {row.planned})"


def _ever_more_exact(value: float, decimals: int) -> list[str]:
    """A number as text, with these decimals and then with more and more."""
    return [f"{value:.{count}f}" for count in range(decimals, DECIMALS + 1)]


def published_difference(experiment: Experiment, contrast: Contrast | tuple[str, str]) -> float | None:
    """The difference of the paper's numbers, in points, where it has both."""
    first, second = contrast if isinstance(contrast, tuple) else (contrast.first, contrast.second)
    table = experiment.published
    return table[first].accuracy - table[second].accuracy if first in table and second in table else None


def beside_paper(row: Row, published: paper.Table) -> float | None:
    """By how many points a row's mean is above the paper's number."""
    if row.summary is None or row.name not in published:
        return None
    return round(100 * row.summary.mean - published[row.name].accuracy, DECIMALS)


def _of_contrasts(state: State) -> Iterator[Claim]:
    experiment, comparison = state.experiment, state.comparison
    question = experiment.question(())
    hypotheses = experiment.name == "cifar10"
    for number, pair in enumerate(question.contrasts):
        name = f"H{number + 1}: " if hypotheses else ""
        difference = published_difference(experiment, pair)
        p = paper.SINS10_P_VALUES.get(pair) if experiment.name == "sins10" else None
        theirs = "–" if difference is None else signed(difference) + ("" if p is None else f", p = {p:g}")
        text = f"{name}{experiment.title.partition(',')[0]}: {pair[0]} against {pair[1]}"
        if comparison is None:
            verdict = "not run" if progress(state) == "not run" else "open"
            yield Claim(text, experiment.command, theirs, progress(state), verdict)
            continue
        contrast = comparison.contrasts[number]
        brief = "" if contrast.decided is None else signed(100 * contrast.decided.mean)
        yield Claim(text, experiment.command, theirs, _ours(contrast), _verdict(contrast), brief)


def _ours(contrast: Contrast) -> str:
    decided = contrast.decided
    pairs = f"{len(contrast.pairs)} of {contrast.planned} pairs"
    if decided is None:
        return pairs
    interval = decided.simultaneous_interval
    around = "" if interval is None else f" ({signed(100 * interval[0])} to {signed(100 * interval[1])})"
    return f"{signed(100 * decided.mean)}{around}, {pairs}"


def _verdict(contrast: Contrast) -> str:
    """The verdict and its p-value; where failed runs are why it is none, what the others alone would have shown."""
    p = None if contrast.decided is None else contrast.decided.adjusted_p
    if p is None:
        return f"**{contrast.verdict}**, no test"
    if contrast.verdict != contrast.among_survivors:
        return f"**{contrast.verdict}**, as runs failed (without them {contrast.among_survivors}, {_p(p)})"
    return f"**{contrast.verdict}**, {_p(p)}"


def _p(value: float | None) -> str:
    text = p_value(value)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


UNSETTLED = "**not settled**, as runs failed"


def _holds(holds: bool | None) -> str:
    """Whether something is as expected; None where runs failed, and those that are left cannot tell."""
    return {None: UNSETTLED, True: "**holds**", False: "**does not hold**"}[holds]


def _expectations(state: State) -> Iterator[Claim]:
    """What the plan expects of the CIFAR-10 table."""
    experiment, comparison = state.experiment, state.comparison
    texts = (
        (f"every CIFAR-10 row's mean is within {NEAR:g} points of the paper's, or above it", "eight numbers"),
        (f"H1 is established at p < {SURE:g}", "–"),
        (f"{BEST_ROW} reaches {BEST_ACCURACY:g} %", str(experiment.published[BEST_ROW])),
    )
    if comparison is None:
        so_far = progress(state)
        found = [(so_far, "not run" if so_far == "not run" else "open")] * len(texts)
    else:
        found = [_near_paper(comparison, experiment.published), _sure(comparison.contrasts[0]), _best(comparison)]
    for (text, theirs), (ours, verdict) in zip(texts, found, strict=True):
        yield Claim(f"expected: {text}", experiment.command, theirs, ours, verdict)


def _near_paper(comparison: Comparison, published: paper.Table) -> tuple[str, str]:
    """Whether no row's mean is further below the paper's number than expected."""
    beside = {row.name: above for row in comparison.rows if (above := beside_paper(row, published)) is not None}
    lost = [row.name for row in comparison.rows if row.done < row.planned]
    near = [name for name, above in beside.items() if above >= -NEAR and name not in lost]
    worst = min(beside, key=lambda name: beside[name], default=None)
    lowest = "" if worst is None else f"; the lowest is {worst}, {_told_from_limit(beside[worst])} from the paper's"
    failed = f"; runs failed in {listed(lost)}" if lost else ""
    is_low = len(near) + len(lost) < len(comparison.rows)
    return f"{len(near)} of {len(comparison.rows)} rows{lowest}{failed}", _holds(
        False if is_low else None if lost else True
    )


def _told_from_limit(above: float) -> str:
    return told_apart(above, -NEAR, (signed(above), *_ever_more_exact(above, 3)))


def _sure(contrast: Contrast) -> tuple[str, str]:
    """Whether a contrast is established, and surely: where runs failed, with these counted as guessing too."""
    tests = [contrast.decided, *([contrast.decided_with_failures] if contrast.failures_as_chance else [])]
    p_values = [None if test is None else test.adjusted_p for test in tests]
    is_sure = contrast.verdict == "established" and all(p is not None and p < SURE for p in p_values)
    is_open = contrast.failures_as_chance is not None and contrast.verdict in ("established", "inconclusive")
    why = "no test" if p_values[0] is None else _p(p_values[0])
    if contrast.verdict != contrast.among_survivors:
        why = "as runs failed"
    return f"{contrast.verdict}, {why}", UNSETTLED if is_open and not is_sure else _holds(is_sure)


def _best(comparison: Comparison) -> tuple[str, str]:
    """Whether the row that should be best is as good as expected."""
    row = comparison.row(BEST_ROW)
    if row.done < row.planned:
        return mean(row), UNSETTLED
    reached = row.summary is not None and round(100 * row.summary.mean, DECIMALS) >= BEST_ACCURACY
    return mean(row, BEST_ACCURACY), _holds(reached)


def _of_gains(state: State) -> Iterator[Claim]:
    planned, near = len(state.experiment.pairing.units), f"{100 * SAME_GAINS:g} %"
    for row in state.experiment.rows:
        name = row.partition("=")[0]
        for part in ("train", "test"):
            theirs, off = paper.GAINS[name][part], ""
            figure = f"Figure {paper.GAINS_FIGURES[name]}, {row}"
            text = f"{figure}: median gains on the {part} set are within {near} of the paper's"
            about = f"medians {min(box[2] for box in theirs):.2f} to {max(box[2] for box in theirs):.2f}"
            ours, done = state.gains(row, part), len(state.measured(row, part))
            if not state.is_complete:
                found, verdict = progress(state), "not run" if progress(state) == "not run" else "open"
            elif ours is None:
                found, verdict = f"no gains, 0 of {planned} runs", UNSETTLED
            else:
                percent = round(100 * deviation(ours, theirs), DECIMALS)
                off = told_apart(percent, 100 * SAME_GAINS, _ever_more_exact(percent, 1))
                medians = f"{min(box[2] for box in ours):.2f} to {max(box[2] for box in ours):.2f}"
                found = f"medians {medians}; {off} % off, averaged over layers ({done} of {planned} runs)"
                verdict = _holds(percent <= 100 * SAME_GAINS)
            if state.is_complete and done < planned:
                verdict = UNSETTLED if state.done_of(row) < planned else "**not settled**, as records lack gains"
            yield Claim(text, state.experiment.command, about, found, verdict, off)


def _of_curve(state: State) -> Claim:
    published = paper.GAMMA_CURVE
    at = published.gammas[published.test_loss.index(min(published.test_loss))]
    theirs = (
        f"test loss least at γ = {at:g}, training loss {published.train_loss[0]:.3f} at γ = {published.gammas[0]:g}, "
        f"{published.train_loss[-1]:.3f} at {published.gammas[-1]:g}"
    )
    text = "Figure 3: a small γ underfits, a large one overfits"
    curve = state.curves["maxgain"][None]
    if state.tuning.missing:
        verdict = "open" if curve else "not run"
        return Claim(text, state.experiment.command, theirs, progress(state), verdict)
    ours, seen = curve_shape(curve)
    if len(curve) < len(state.tuning.jobs):  # where the least loss is, a run that failed might have told
        seen = UNSETTLED
    return Claim(text, state.experiment.command, theirs, f"{ours} ({progress(state)})", seen)


def curve_shape(curve: Curve) -> tuple[str, str]:
    """What the γ curve shows, and whether that is what the paper describes; one run per γ proves nothing."""
    validation = {value: loss for value, run in curve if (loss := score(run, "validation_loss")) is not None}
    training = {value: loss for value, run in curve if (loss := score(run, "train_loss")) is not None}
    if len(validation) < 3 or len(training) < 2:
        return "too few losses that are numbers", "**not settled**"
    least = min(validation, key=lambda value: validation[value])
    first, last = min(training), max(training)
    text = (
        f"validation loss least at γ = {least:g}, training loss {training[first]:.3f} at γ = {first:g}, "
        f"{training[last]:.3f} at {last:g}"
    )
    is_inside = min(validation) < least < max(validation)
    return text, f"**{'seen' if is_inside and training[first] > training[last] else 'not seen'}**, one run per γ"
