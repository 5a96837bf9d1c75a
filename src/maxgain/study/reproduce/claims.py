"""The paper's claims and the plan's expectations, each with the paper's number, ours, and what may be said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..comparing.comparison import Comparison, Contrast, Row
from ..comparing.sentences import p_value, points
from ..schema import score
from . import paper
from .experiments import Experiment
from .state import Curve, State, deviation

NEAR = 0.4
"""How far a row's mean may be below the paper's number, in points: expected beforehand."""
BEST_ROW, BEST_ACCURACY = "maxgain+batchnorm+dropout", 92.5
"""The row of which the plan expects at least so many per cent on CIFAR-10."""
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
        return f"{state.done} of {state.planned} runs" if state.planned else f"{tried} of {to_try} runs"
    if not tried and not state.done:
        return "not run"
    if tried < to_try:
        return f"choosing numbers: {tried} of {to_try} runs done"
    return f"{state.done} of {state.planned} runs done; scores are looked at when all are"


def mean(row: Row) -> str:
    """A row's mean accuracy in per cent, with its standard error and how many runs it is of."""
    if row.summary is None:
        return f"no score, 0 of {row.planned} runs"
    error = "" if row.summary.standard_error is None else f" ± {100 * row.summary.standard_error:.2f}"
    return f"{100 * row.summary.mean:.2f}{error} ({row.done} of {row.planned})"


def published_difference(experiment: Experiment, contrast: Contrast | tuple[str, str]) -> float | None:
    """The difference of the paper's numbers, in points, where it has both."""
    first, second = contrast if isinstance(contrast, tuple) else (contrast.first, contrast.second)
    table = experiment.published
    return table[first].accuracy - table[second].accuracy if first in table and second in table else None


def beside_paper(row: Row, published: paper.Table) -> float | None:
    """By how many points a row's mean is above the paper's number."""
    if row.summary is None or row.name not in published:
        return None
    return 100 * row.summary.mean - published[row.name].accuracy


def _of_contrasts(state: State) -> Iterator[Claim]:
    experiment, comparison = state.experiment, state.comparison
    question = experiment.question((), None)
    hypotheses = experiment.name == "cifar10"
    for number, pair in enumerate(question.contrasts):
        name = f"H{number + 1}: " if hypotheses else ""
        difference = published_difference(experiment, pair)
        p = paper.SINS10_P_VALUES.get(pair) if experiment.name == "sins10" else None
        theirs = "–" if difference is None else f"{difference:+.2f}" + ("" if p is None else f", p = {p:g}")
        text = f"{name}{experiment.title.partition(',')[0]}: {pair[0]} against {pair[1]}"
        if comparison is None:
            verdict = "not run" if progress(state) == "not run" else "open"
            yield Claim(text, experiment.command, theirs, progress(state), verdict)
            continue
        contrast = comparison.contrasts[number]
        yield Claim(text, experiment.command, theirs, _ours(contrast), _verdict(contrast))


def _ours(contrast: Contrast) -> str:
    decided = contrast.decided
    pairs = f"{len(contrast.pairs)} of {contrast.planned} pairs"
    if decided is None:
        return pairs
    low, high = decided.simultaneous_interval or (float("nan"), float("nan"))
    return f"{points(decided.mean)} ({points(low)} to {points(high)}), {pairs}"


def _verdict(contrast: Contrast) -> str:
    p = None if contrast.decided is None else contrast.decided.adjusted_p
    text = p_value(p)
    return f"**{contrast.verdict}**, p {text if text.startswith('<') else f'= {text}'}"


def _expectations(state: State) -> Iterator[Claim]:
    """What the plan expects of the CIFAR-10 table."""
    experiment, comparison = state.experiment, state.comparison
    texts = (
        ("every CIFAR-10 row's mean is within 0.4 points of the paper's, or above it", "eight numbers"),
        (f"H1 at p < {SURE:g}", "–"),
        (f"{BEST_ROW} reaches {BEST_ACCURACY:g} %", str(experiment.published[BEST_ROW])),
    )
    found = [(progress(state), None)] * 3 if comparison is None else _found(comparison, experiment.published)
    for (text, theirs), (ours, holds) in zip(texts, found, strict=True):
        verdict = {None: "not run" if ours == "not run" else "open", True: "**holds**", False: "**does not hold**"}[
            holds
        ]
        yield Claim(f"expected: {text}", experiment.command, theirs, ours, verdict)


def _found(comparison: Comparison, published: paper.Table) -> list[tuple[str, bool | None]]:
    beside = {row.name: beside_paper(row, published) for row in comparison.rows}
    low = {name: above for name, above in beside.items() if above is None or above < -NEAR}
    worst = min((above for above in beside.values() if above is not None), default=None)
    first, best = comparison.contrasts[0].decided, comparison.row(BEST_ROW)
    p = None if first is None else first.adjusted_p
    reached = best.summary is not None and 100 * best.summary.mean >= BEST_ACCURACY
    return [
        (
            f"{len(beside) - len(low)} of {len(beside)} rows" + ("" if worst is None else f"; lowest {worst:+.2f}"),
            not low,
        ),
        (f"p {p_value(p)}" if p is not None and p < SURE else f"p = {p_value(p)}", p is not None and p < SURE),
        (mean(best), reached and best.done == best.planned),
    ]


def _of_gains(state: State) -> Iterator[Claim]:
    for row in state.experiment.rows:
        name = row.partition("=")[0]
        for part in ("train", "test"):
            theirs = paper.GAINS[name][part]
            ours = state.gains(row, part) if state.is_complete else None
            text = f"Figure {paper.GAINS_FIGURES[name]}, {row}: gains on the {part} set"
            about = f"medians {min(box[2] for box in theirs):.2f} to {max(box[2] for box in theirs):.2f}"
            if ours is None:
                verdict = "not run" if progress(state) == "not run" else "open"
                yield Claim(text, state.experiment.command, about, progress(state), verdict)
                continue
            off = deviation(ours, theirs)
            medians = f"{min(box[2] for box in ours):.2f} to {max(box[2] for box in ours):.2f}"
            found = f"medians {medians}; {100 * off:.1f} % off on average ({progress(state)})"
            verdict = "**holds**" if off <= SAME_GAINS else "**does not hold**"
            yield Claim(text, state.experiment.command, about, found, f"{verdict} (within 10 %)")


def _of_curve(state: State) -> Claim:
    published = paper.GAMMA_CURVE
    at = published.gammas[published.test_loss.index(min(published.test_loss))]
    theirs = (
        f"test loss least at γ = {at:g}, training loss {published.train_loss[0]:.3f} to {published.train_loss[-1]:.3f}"
    )
    text = "Figure 3: a small γ underfits, a large one overfits"
    curve = state.curves["maxgain"][None]
    if state.tuning.missing:
        verdict = "open" if curve else "not run"
        return Claim(text, state.experiment.command, theirs, progress(state), verdict)
    ours, seen = curve_shape(curve)
    return Claim(text, state.experiment.command, theirs, f"{ours} ({progress(state)})", seen)


def curve_shape(curve: Curve) -> tuple[str, str]:
    """What the γ curve shows, and whether that is what the paper describes; one run per γ proves nothing."""
    losses = {value: score(record, "validation_loss") for value, record in curve}
    trained = {value: score(record, "train_loss") for value, record in curve}
    known = {value: loss for value, loss in losses.items() if loss is not None}
    least, (first, *_, last) = min(known, key=lambda value: known[value]), sorted(known)
    before, after = trained[first] or 0.0, trained[last] or 0.0
    text = f"validation loss least at γ = {least:g}, training loss {before:.3f} to {after:.3f}"
    inside = first < least < last and before > after
    return text, "**seen**, one run per γ" if inside else "**not seen**, one run per γ"
