"""REPRODUCTION.md and its figures, made from the records alone: what the paper says, what came out, and what holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from ..comparing.comparison import Comparison, Contrast
from ..comparing.jobs import Job
from ..comparing.records import Record
from ..comparing.sentences import in_words, p_value
from ..comparing.statistics import Difference
from ..comparing.tuning_rule import RULE
from ..files import expect_ours, marked, write_bytes, write_text
from ..report.figures import rendered
from ..schema import score
from ..wording import counted, listed, percent, signed
from . import figures, paper, readme
from .claims import beside_paper, claims, mean, progress, published_difference
from .experiments import EXPERIMENTS
from .running import Recorded
from .state import Boxes, State, device_and_hours, look

Draw = Callable[[], Figure]
Show = Callable[[str, Draw, str], str]
"""Takes a figure's name, what draws it and a description, and returns the link to it."""

MARK = "<!-- Made by `maxgain reproduce` from the records in results/. Do not edit. -->"
"""The first line, by which `files` knows that the document is ours."""
PREFACE = """\
The plan, [experiments/PLAN.md](experiments/PLAN.md), fixed the runs, the tests and the rules before there was any
score. Test scores of a table are looked at when all its runs are done.

- **Accuracies** are in per cent: the mean ± standard error over seeds or folds, and how many of the planned runs it is
  of. The paper's numbers for CIFAR and SVHN are of one run each.
- **Differences** are in points of accuracy. *95 % together*: the intervals of a table hold all at once with 95 %
  confidence. *90 % alone*: each holds by itself. p-values are Holm-corrected over the contrasts of a table, unless it
  says otherwise.
- **Verdicts**: *established*, p < 0.05 in favour of the first row named; *reversed*, p < 0.05 against it; *equivalent*,
  the 90 % interval lies within ±0.5 points; otherwise *inconclusive*. Where runs failed, a verdict must also hold with
  them counted as guessing."""


def build(results: Path, document: Path) -> list[Path]:
    """Write the document, its figures into a folder of the results, and the passage of a README beside it.

    Returns what was written.
    """
    recorded = Recorded.read(results)
    states = {name: look(experiment, recorded) for name, experiment in EXPERIMENTS.items()}
    pictures = results / "figures"
    linked = Path(os.path.relpath(str(pictures), str(document.parent))).as_posix()
    text, drawn = written(states, linked)
    expect_own(document)
    write_text(document, text, replace=True)
    for name, draw in drawn.items():
        write_bytes(pictures / f"{name}.svg", rendered(draw(), "svg"))
    beside = document.parent / "README.md"
    told = readme.update(beside, readme.passage(states, document.name, linked))
    return [document, *([beside] if told else []), *(pictures / f"{name}.svg" for name in drawn)]


def expect_own(document: Path) -> None:
    """`RunError` if the document could not be written, as somebody else wrote it; its mark tells, whatever its name."""
    if not (document.is_file() and marked(document, ".md")):
        expect_ours(document)


def written(states: Mapping[str, State], pictures: str) -> tuple[str, dict[str, Draw]]:
    """The document's text, and what draws its figures, by name; `pictures` is where the text says that they are."""
    drawn: dict[str, Draw] = {}

    def show(name: str, draw: Draw, alternative: str) -> str:
        drawn[name] = draw
        return f"![{alternative}]({pictures}/{name}.svg)"

    summary = _table(
        ("claim", "command", "the paper", "ours", "verdict"),
        [(claim.text, f"`{claim.command}`", claim.paper, claim.ours, claim.verdict) for claim in claims(states)],
    )
    parts = [MARK, "# What holds of the paper, run again", PREFACE, "## In short", summary, *_doubts(states)]
    for state in states.values():
        parts += _section(state, show)
    return "\n\n".join(parts) + "\n", drawn


def _doubts(states: Mapping[str, State]) -> Iterator[str]:
    """What is wrong with the records, if anything is: numbers that rest on them are not to be read without it."""
    stages = [stage for state in states.values() for stage in (state.tuning, state.certain)]
    warnings = dict.fromkeys(warning for stage in stages for warning in stage.known.warnings)
    if warnings:
        yield "About the records:"
        yield _bullets(f"{warning}." for warning in warnings)


def _section(state: State, show: Show) -> Iterator[str]:
    """What there is to say of one experiment."""
    experiment = state.experiment
    yield f"## {experiment.title}"
    yield f"The paper's claim: {experiment.claim}"
    yield f"Run it with `{experiment.command} --data DIR`. {_state_of(state)}"
    yield from experiment.remarks
    if experiment.name == "gains":
        yield from _gains(state, show)
    elif experiment.name == "gamma-curve":
        yield from _gamma_curve(state, show)
    else:
        yield from _rows_and_contrasts(state, show)
        yield from _choices(state, show)


def _state_of(state: State) -> str:
    """How far it is, on what, and how long that took."""
    recorded = (*state.tuning.recorded, *state.runs)
    if not recorded:
        possible = "" if state.experiment.obtainable else " Its data could not be obtained here."
        return f"**Not run.**{possible}"
    notes = dict.fromkeys(run["note"] for run in recorded if run.get("note"))
    about = "".join(f" Note: {note}." for note in notes)
    choosing = len(state.tuning.recorded) if state.planned else 0
    return f"State: {progress(state)}.{_took(recorded, choosing)}{about}"


def _took(recorded: Sequence[Record], choosing: int) -> str:
    """On what runs were trained and how long, as far as their records say so."""
    runs = [run for run in recorded if "seconds" in run and "device" in run]
    if not runs:
        return ""
    devices, hours = device_and_hours(runs)
    took = f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
    parts = f", of which {choosing} choose numbers," if 0 < choosing < len(recorded) else ""
    known = "" if len(runs) == len(recorded) else f" (as {len(runs)} of them tell)"
    return (
        f" Added up, its {counted(len(recorded), 'recorded run')}{parts} took {took} on {devices}{known}; runs that "
        "shared a device at the same time count in full."
    )


# Tables


def _rows_and_contrasts(state: State, show: Show) -> Iterator[str]:
    experiment, comparison = state.experiment, state.comparison
    if comparison is None:
        yield _table(
            ("row", "the paper", "runs done"),
            [
                (
                    row,
                    str(experiment.published.get(row, "–")),
                    f"{state.done_of(row)} of {len(experiment.pairing.units)}",
                )
                for row in experiment.rows
            ],
        )
        return
    published = experiment.published if experiment.same_data else {}
    yield _row_table(comparison, state)
    yield show(
        f"{experiment.name}-rows", partial(figures.rows, comparison, published), "Accuracies of every run, row by row"
    )
    yield _contrast_table(comparison, state)
    forest = partial(figures.contrasts, comparison, experiment.published)
    yield show(f"{experiment.name}-contrasts", forest, "Differences with their intervals and the region of equivalence")
    words = in_words(comparison)
    yield words.design
    yield _bullets(
        f"**{_named(pair)}**: {text}." for pair, text in zip(comparison.contrasts, words.contrasts, strict=True)
    )
    yield from _sampling(comparison, words.sampling)
    gaps = [sentence for sentence in words.gaps if not sentence.startswith("Note: ")]  # which the state tells
    if gaps:
        yield _bullets(gaps)


def _sampling(comparison: Comparison, sentences: Sequence[str]) -> Iterator[str]:
    """What other test images might have changed, and for which contrasts nobody can tell."""
    if comparison.question.over == "fold":
        yield (
            "Every fold has test images of its own, so what other images might have changed is in the spread that the "
            "tests above go by."
        )
        return
    if sentences:
        yield (
            "The tests above take the test images as given. They are a sample too: a bootstrap that draws runs and "
            "test images anew, with replacement, shows how far off a difference may be, and errs on the cautious side. "
            "No verdict rests on it."
        )
        yield _bullets(f"{sentence}." for sentence in sentences)
    without = [_named(pair) for pair in comparison.contrasts if pair.bootstrap is None]
    if without:
        yield f"No bootstrap for {listed(without)}: it takes two pairs of runs, and the predictions of all of them."


def _named(contrast: Contrast) -> str:
    return f"{contrast.first} : {contrast.second}"


def _row_table(comparison: Comparison, state: State) -> str:
    published, comparable = state.experiment.published, state.experiment.same_data
    heads = ("row", "the paper", "ours (runs)", *(("above the paper",) if comparable else ()))
    rows = []
    for row in comparison.rows:
        above = beside_paper(row, published)
        beside = ("–" if above is None else signed(above),) if comparable else ()
        rows.append((row.label, str(published.get(row.name, "–")), mean(row), *beside))
    return _table(heads, rows)


def _contrast_table(comparison: Comparison, state: State) -> str:
    other = "paired" if comparison.question.decide_by == "pooled" else "pooled"
    checks = (f"p (Holm), {other}", "p (alone), Welch")
    heads = ("contrast", "the paper", "ours (pairs)", "90 % alone", "95 % together", "p (Holm)", *checks, "verdict")
    return _table(heads, [_contrast(contrast, state, other) for contrast in comparison.contrasts])


def _contrast(contrast: Contrast, state: State, other: str) -> tuple[str, ...]:
    decided, theirs = contrast.decided, published_difference(state.experiment, contrast)
    second: Difference | None = getattr(contrast.analyses, other)
    return (
        _named(contrast),
        "–" if theirs is None else signed(theirs),
        f"{'–' if decided is None else signed(100 * decided.mean)} ({len(contrast.pairs)} of {contrast.planned})",
        _interval(None if decided is None else decided.interval_90),
        _interval(None if decided is None else decided.simultaneous_interval),
        p_value(None if decided is None else decided.adjusted_p),
        p_value(None if second is None else second.adjusted_p),
        p_value(None if contrast.welch is None else contrast.welch.p_value),
        contrast.verdict,
    )


def _interval(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{signed(100 * ends[0])} to {signed(100 * ends[1])}"


# Choices


def _choices(state: State, show: Show) -> Iterator[str]:
    """What was tried, what it came to on validation images, and what was chosen."""
    if not any(curve for folds in state.curves.values() for curve in folds.values()):
        return
    rule = f"Numbers are chosen on validation images: {RULE}."
    yield f"### How numbers were chosen\n\n{rule}"
    yield from _by_fold(state) if state.experiment.pairing.over == "fold" else [_by_value(state)]
    yield show(
        f"{state.experiment.name}-tuning",
        partial(figures.choices, state),
        "Validation accuracy and loss against the numbers",
    )


def _by_value(state: State) -> str:
    rows = []
    for row, folds in state.curves.items():
        known, missing = dict(folds[None]), {*_numbers(state.tuning.missing, row)}
        tried = ", ".join(
            f"{value:g}: {percent(score(known[value], 'validation_accuracy')) if value in known else 'failed'}"
            for value in state.grid(row)
            if value not in missing
        )
        rows.append((row, tried or "–", _choice(state, row)))
    return _table(("row", "validation accuracy", "chosen"), rows)


def _numbers(jobs: Sequence[Job], row: str) -> list[float]:
    return [value for job in jobs if job.row == row for value in job.chosen.values()]


def _choice(state: State, row: str) -> str:
    """The number that was chosen for a row, and why where accuracies do not tell; or why there is none."""
    won, leading = state.chosen(row), state.leading(row)
    if won is None:
        lead = "" if leading is None else f" ({leading:g} leads)"
        return f"not yet{lead}" if row in state.searching else "none, as all runs failed"
    tie = _tie(dict(state.curves[row][None]), won)
    end = {state.grid(row)[0]: ", smallest tried", state.grid(row)[-1]: ", largest tried"}.get(won, "")
    return f"{won:g}{f', {tie}' if tie else ''}{end}"


def _tie(curve: Mapping[float, Record], won: float) -> str:
    """What told the number that was chosen from others of the same accuracy, if there are any."""
    equals = {value: run for value, run in curve.items() if _accuracy(run) == _accuracy(curve[won])}
    losses = [score(run, "validation_loss") for value, run in equals.items() if value != won]
    return "" if not losses else "smallest of equals" if score(curve[won], "validation_loss") in losses else "by loss"


def _accuracy(run: Record) -> float | None:
    return score(run, "validation_accuracy")


def _by_fold(state: State) -> Iterator[str]:
    units = state.experiment.pairing.units
    won = {row: [state.chosen(row, fold) or state.leading(row, fold) for fold in units] for row in state.curves}
    chosen = "chosen" if state.final is not None else "leading so far"
    yield _table((f"{chosen} on fold", *map(str, units)), [(row, *map(_text, values)) for row, values in won.items()])
    if state.final is None:
        return

    def where(which: Callable[[str, int, float], bool]) -> str:
        """On how many folds something is so of the number that was chosen, by row."""
        counts = {
            row: sum(value is not None and which(row, fold, value) for fold, value in zip(units, values, strict=True))
            for row, values in won.items()
        }
        told = [f"{row} on {count} of {len(units)} folds" for row, count in counts.items() if count]
        return listed(told) if told else ""

    if ends := where(lambda row, fold, value: value in (state.grid(row, fold)[0], state.grid(row, fold)[-1])):
        yield f"An end of what was tried was chosen for {ends}: a better number may lie outside."
    if ties := where(lambda row, fold, value: bool(_tie(dict(state.curves[row][fold]), value))):
        yield f"Accuracy alone did not decide for {ties}: another number had the same."


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


# Figures of the paper


_GAIN_HEADS = ("median, ours", "median, paper", "largest, ours", "largest, paper")


def _gains(state: State, show: Show) -> Iterator[str]:
    if not state.is_complete:
        return
    for row in state.experiment.rows:
        name = row.partition("=")[0]
        theirs = paper.GAINS[name]
        ours = {part: state.gains(row, part) for part in theirs}
        known = {part: boxes for part, boxes in ours.items() if boxes is not None}
        if not known:
            continue
        bound = paper.GAINS_GAMMA if name == "maxgain" else None
        figure = partial(figures.boxes, known, theirs, bound, row)
        count = counted(max(len(state.measured(row, part)) for part in known), "run")
        yield f"`{row}`: ours is the mean of {count}, of medians and of largest gains alike; the paper's is one run."
        yield show(f"gains-{name}", figure, f"Gains by layer of {row}, ours beside the paper's")
        largest = listed(f"{_largest(state.measured(row, part)):.3f} on the {part} set" for part in known)
        published = listed(f"{_largest([theirs[part]]):.3f}" for part in known)
        yield f"The largest gain in any layer of any run is {largest}; the paper's: {published}."
        heads = ("layer", *(f"{part} {what}" for part in known for what in _GAIN_HEADS))
        yield _table(
            heads,
            [
                (
                    str(layer + 1),
                    *(
                        f"{box[place]:.3f}"
                        for part, boxes in known.items()
                        for place in (2, 4)
                        for box in (boxes[layer], theirs[part][layer])
                    ),
                )
                for layer in range(len(theirs["train"]))
            ],
        )


def _largest(runs: Sequence[Boxes]) -> float:
    return max(box[-1] for boxes in runs for box in boxes)


def _gamma_curve(state: State, show: Show) -> Iterator[str]:
    curve = state.curves["maxgain"][None]
    if not curve:
        return
    yield show("gamma-curve", partial(figures.gamma_curve, curve, paper.GAMMA_CURVE), "Accuracy and log loss against γ")
    names = ("train_accuracy", "validation_accuracy", "train_loss", "validation_loss")
    yield _table(
        ("γ", *(f"{name.replace('_', ' ')}, {'%' if 'accuracy' in name else 'nats'}" for name in names)),
        [
            (
                f"{value:g}",
                *(percent(score(run, name)) for name in names[:2]),
                *(_loss(score(run, name)) for name in names[2:]),
            )
            for value, run in curve
        ],
    )


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


# Markdown


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |" for line in lines)


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
