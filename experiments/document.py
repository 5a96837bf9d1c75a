"""REPRODUCTION.md, its figures and the tables behind it, made from results/ alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from maxgain.study.comparison import Comparison, Contrast, Row, compare
from maxgain.study.recipe import Recipe
from maxgain.study.result import Result
from maxgain.study.sentences import listed, p_equals, p_value, percent
from maxgain.study.tuning import RULES

from . import early, figures
from .plan import EDGE, EXPERIMENTS, GAINS, GAMMA_CURVE, PAPER, Experiment
from .state import State, by_key, read

ROOT = Path(__file__).parents[1]
DETAILS = "results/DETAILS.md"
BEGIN, END = "<!-- what came out: made by `make reproduce`, do not edit -->", "<!-- end of what came out -->"
PREFACE = """\
<!-- Made by `make reproduce` from results/. Do not edit. -->

# What holds of the paper, run again

- **Before.** [PLAN.md](experiments/PLAN.md) fixed runs, tests and rules before any recorded run, but after single
  pilots had been scored on CIFAR-10's test images: [PILOTS.md](experiments/PILOTS.md) lists them. So what PLAN.md
  expected are targets. [PLAN-2.md](experiments/PLAN-2.md) fixes what is still to be run, before any of its scores.
- **Numbers.** Accuracies in per cent, mean ± standard error over seeds or folds. Differences in points; their intervals
  hold all at once with 95 % confidence; p is Holm's over the contrasts of a table. The paper's numbers for CIFAR and
  SVHN are of one run each. σ of the images is the error from the sample of test images alone; no verdict rests on it.
- **Verdicts.** *Established*: p < 0.05 in favour of the first row. *Reversed*: against it. *Equivalent*: two
  one-sided tests put the difference within the region given, Holm's p < 0.05. Otherwise *inconclusive*.
- **Choices.** [How numbers were chosen](results/DETAILS.md); [what the paper leaves open](experiments/LEFT-OPEN.md),
  such as bfloat16, inverted dropout, the last layer constrained. Records of the first edition name no commit."""
NEAR, BEST, OFF = 0.4, 92.5, 0.10
"""PLAN.md's targets: points below the paper that a row may be, accuracy of the best row, deviation of median gains."""
ALSO = (("maxgain", "dropout"), ("maxgain", "batchnorm"), ("maxgain+batchnorm+dropout", "maxgain+batchnorm"))
"""What the paper says too: better than dropout, like batch norm; and what dropout adds on top of both."""
BRIDGE_T = 2.78
"""Student's t of the bridge's limits, by PLAN-2.md."""
Drawn = dict[str, Callable[[], Figure]]
"""What draws each figure that a page links to."""
Gains = NDArray[np.float64]
"""Gains by run, layer and quantile."""


def build(root: Path = ROOT) -> list[Path]:
    """Write both pages, their figures and the passage of docs/choosing-gamma.md; return what was written."""
    states, drawn = read(root / "results"), Drawn()
    pages = {root / "REPRODUCTION.md": document(states, drawn), root / DETAILS: details(states, drawn)}
    if (path := root / "docs" / "choosing-gamma.md").exists():
        pages[path] = with_passage(path.read_text(encoding="utf-8"), early_test(states))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    pictures = root / "results" / "figures"
    pictures.mkdir(exist_ok=True)
    for name, draw in drawn.items():
        (pictures / f"{name}.svg").write_bytes(figures.svg(draw()))
    return [*pages, *(pictures / f"{name}.svg" for name in drawn)]


# REPRODUCTION.md


def document(states: Mapping[str, State], drawn: Drawn) -> str:
    """The page, one table per experiment, each contrast once; adds what draws its figures."""
    parts, waiting = [PREFACE], []
    for name, state in states.items():
        if state.comparison is not None:
            parts += section(state, state.comparison, drawn)
        else:
            command = f"`python -m experiments run {name} --data DIR`"
            waiting.append((state.experiment.title, state.progress, command))
        if name == "cifar10":
            parts += gains(state, drawn)
        if name == "svhn":
            parts += gamma_curve(state, drawn)
    if waiting:
        parts += ["## Still to be run", "By [PLAN-2.md](experiments/PLAN-2.md)."]
        parts += [table(("what", "state", "command"), waiting)]
    return "\n\n".join(parts) + "\n"


def section(state: State, comparison: Comparison, drawn: Drawn) -> Iterator[str]:
    """One experiment."""
    experiment = state.experiment
    yield f"## {experiment.title}"
    yield f"*{experiment.claim}*"
    yield " ".join((*experiment.remarks, effort(state, comparison)))
    heads = ("row", "the paper", "ours", "above the paper")[: 4 if experiment.same_data else 3]
    yield table(heads, [row_texts(experiment, row)[: len(heads)] for row in comparison.rows])
    yield figure(drawn, f"{experiment.name}-rows", "Accuracy of every run", figures.rows, state)
    if not comparison.contrasts:
        return
    other = "paired" if comparison.plan.decide_by == "pooled" else "pooled"
    heads = ("contrast", "the paper", "ours (95 % CI)", "90 % alone", "p", f"p, {other}", "σ of the images", "verdict")
    yield table(heads, [contrast_texts(state, contrast) for contrast in comparison.contrasts])
    yield figure(drawn, f"{experiment.name}-contrasts", "Differences with their intervals", figures.contrasts, state)
    if experiment.same_data:
        yield from beside_the_paper(state, comparison)
    if experiment.name == "cifar10":
        yield targets(experiment, comparison)


def effort(state: State, comparison: Comparison) -> str:
    """How many runs it took, for how long and on what."""
    runs = [result for results in comparison.results.values() for result in results]
    tuning = [state.tuned[key] for key in {recipe.key for recipe in state.searched} if key in state.tuned]
    hours = sum(result.seconds for result in (*runs, *tuning)) / 3600
    decided = "pooled over rows" if comparison.plan.decide_by == "pooled" else "paired"
    devices = listed(sorted({result.device for result in runs}))
    return (
        f"{len(runs)} runs and {len(tuning)} that chose numbers, {hours:.1f} hours on {devices}, runs "
        f"side by side counted in full. Tests are {decided}."
    )


def row_texts(experiment: Experiment, row: Row) -> tuple[str, ...]:
    """A row's cells; 'above the paper' is the last."""
    theirs = experiment.published.get(row.name)
    error = PAPER["standard_errors"].get(experiment.name, {}).get(row.name)
    done = "" if row.done == row.planned else f" ({row.done} of {row.planned})"
    above = None if theirs is None or row.mean is None else 100 * row.mean - theirs
    return (
        row.label,
        "–" if theirs is None else f"{theirs:.2f}" + ("" if error is None else f" ± {error:.2f}"),
        percent(row.mean, row.standard_error) + done,
        "–" if above is None else signed(above),
    )


def contrast_texts(state: State, contrast: Contrast) -> tuple[str, ...]:
    """A contrast's cells."""
    theirs = state.experiment.published_difference((contrast.first, contrast.second))
    p = PAPER["p_values"].get(state.experiment.name, {}).get(contrast.first)
    ours, narrow, within = "–", "–", ""
    verdict, region = state.verdict(contrast), state.region_of(contrast)
    if verdict == "equivalent":
        within = f" (±{region:.2g})"
    if (difference := contrast.difference) is not None:
        ours = f"{signed(100 * difference.mean)} ({ends(difference.interval)})"
        narrow = ends(difference.interval_at(0.10))
        if verdict == "established" and state.experiment.region is None and 100 * difference.mean < region:
            within = f", but small (within ±{region:.2g})"  # as PLAN-2.md wants it said
    return (
        f"{contrast.first} : {contrast.second}",
        "–" if theirs is None else signed(theirs) + ("" if p is None else f", p = {p:g}"),
        ours,
        narrow,
        p_value(difference.p_holm if difference else None),
        p_value(contrast.check.p_holm if contrast.check else None),
        "–" if contrast.sampling_error is None else f"{100 * contrast.sampling_error:.2f}",
        f"**{verdict}**{within}",
    )


def beside_the_paper(state: State, comparison: Comparison) -> Iterator[str]:
    """What the same analysis says of other pairs, and where we differ from the paper by more than chance."""
    pairs = tuple(pair for pair in ALSO if {*pair} <= {*comparison.plan.rows})
    others = compare(replace(comparison.plan, contrasts=pairs), state.results).contrasts
    also = [
        f"{one.first} : {one.second} {signed(100 * test.mean)} ({ends(test.interval_at(0.10))})"
        for one in others
        if (test := one.difference) is not None
    ]
    if also:
        yield f"Not planned, without correction, 90 % intervals: {listed(also)}."
    sigma, runs, degrees = scatter(comparison)
    error, published = sigma * math.sqrt(1 + 1 / runs), state.experiment.published
    beside = [(row.label, row.mean, published.get(row.name), error) for row in comparison.rows]
    beside += [
        (f"{one.first} : {one.second}", one.difference.mean, theirs, error * math.sqrt(2))
        for one in comparison.contrasts
        if one.difference and (theirs := state.experiment.published_difference((one.first, one.second))) is not None
    ]
    beyond = []
    for name, ours, theirs, scale in beside:
        if ours is not None and theirs is not None:
            above = 100 * ours - theirs
            p = float(2 * stats.t.sf(abs(above) / scale, degrees))
            beyond += [f"{name} ({signed(above)}, {p_equals(p)})"] if p < 0.05 else []
    if beyond:
        yield (
            f"**In size we are not the paper everywhere.** If its single runs scatter as ours do (σ = {sigma:.3f}), "
            f"these differ from it by more than chance: {listed(beyond)}. γ is the likeliest reason: PLAN-2.md, part 9."
        )


def scatter(comparison: Comparison) -> tuple[float, int, int]:
    """The pooled standard deviation of a run in points, the runs of a row, and the degrees of freedom."""
    by_model = comparison.plan.decide_by == "pooled"
    first = comparison.contrasts[0]
    test = first.difference if by_model else first.check
    assert test is not None
    return 100 * (test.standard_error or math.nan) * math.sqrt(test.n / 2), test.n, test.degrees or 0


def targets(experiment: Experiment, comparison: Comparison) -> str:
    """PLAN.md's targets for the CIFAR-10 table."""
    means = {row.name: 100 * (row.mean or 0.0) for row in comparison.rows}
    above = {row: mean - experiment.published[row] for row, mean in means.items()}
    worst, top = min(above, key=above.__getitem__), max(means, key=means.__getitem__)
    return (
        f"Targets, set when pilots had been scored: every row at most {NEAR} below the paper's (the lowest, {worst}, "
        f"is {signed(above[worst])}: {reached(above[worst] >= -NEAR)}); {BEST} % for the best row ({top}, "
        f"{means[top]:.2f}: {reached(means[top] >= BEST)})."
    )


def gains(state: State, drawn: Drawn) -> Iterator[str]:
    """Figures 1 and 2."""
    yield "## Figures 1 and 2: gains by layer, VGG-19 on CIFAR-10"
    yield "*A bound on gains of training images also holds on test images; without it they are larger and differ more.*"
    lines = []
    for recipe, ours, theirs in layer_gains(state.results):
        row, name = recipe.regulariser, recipe.regulariser.partition("=")[0]
        means = {part: runs.mean(axis=0) for part, runs in ours.items()}
        for part, runs in ours.items():
            medians, largest = theirs[part][:, 2], theirs[part][:, 4].max()
            off = abs(means[part][:, 2] / medians - 1).mean()
            single = 100 * abs(runs[:, :, 2] / medians - 1).mean(axis=1)
            lines.append((
                row, part, span(medians), span(means[part][:, 2]), f"{100 * off:.1f} % ({reached(off <= OFF)}: 10 %)",
                f"{single.min():.1f} to {single.max():.1f} %", f"{largest:.3f}", f"{runs[:, :, 4].max():.3f}",
            ))  # fmt: skip
        alternative = f"Gains by layer of {row}, ours beside the paper's"
        yield figure(drawn, f"gains-{name}", alternative, figures.boxes, means, theirs, row, recipe.gamma)
    heads = ("row", "images", "medians, paper", "ours", "off, mean of five runs", "off, single runs",
             "largest, paper", "ours")  # fmt: skip
    yield table(heads, lines)


def layer_gains(results: Sequence[Result]) -> Iterator[tuple[Recipe, dict[str, Gains], dict[str, Gains]]]:
    """For Figures 1 and 2, the recipe, our gains by part of the data, and the paper's, which is of one run."""
    for recipe in GAINS:
        keys = {replace(recipe, seed=seed).key for seed in EXPERIMENTS["cifar10"].units}
        runs = [result for result in results if result.recipe.key in keys]
        theirs = {part: np.array(boxes) for part, boxes in PAPER["gains"][recipe.regulariser.partition("=")[0]].items()}
        if runs:
            yield (
                recipe,
                {part: np.array([[*run.gains[part].values()] for run in runs], float) for part in theirs},
                theirs,
            )


def gamma_curve(state: State, drawn: Drawn) -> Iterator[str]:
    """Figure 3."""
    curve = [(recipe.gamma or 0.0, state.tuned[recipe.key]) for recipe in GAMMA_CURVE if recipe.key in state.tuned]
    yield "## Figure 3: γ from 1.25 to 3, SVHN"
    yield "*A small γ underfits; as γ grows the training loss goes to zero, and that on other images falls and rises.*"
    if len(curve) < len(GAMMA_CURVE):
        yield f"**{len(curve)} of {len(GAMMA_CURVE)} runs.**"
        return
    losses = {gamma: result.validation_loss or math.inf for gamma, result in curve}
    least = min(losses, key=losses.__getitem__)
    inside = min(losses) < least < max(losses)
    yield (
        f"{'Seen' if inside else 'Partly seen'}, on validation images and with one run per γ. The smallest γ "
        f"underfits, the training loss goes to zero; the validation loss is least at γ = {least:g}"
        f"{'' if inside else ', an end of the range: its minimum is not bracketed'}."
    )
    yield figure(drawn, "gamma-curve", "Accuracy and log loss against γ", figures.gamma_curve, curve)


# Details


def details(states: Mapping[str, State], drawn: Drawn) -> str:
    """How numbers were chosen, and the gains of every layer."""
    parts = ["<!-- Made by `make reproduce` from results/. Do not edit. -->", "# How numbers were chosen"]
    parts.append(f"On validation images, seed 1000 or each fold's own: {RULES['grid']}. No test image was loaded.")
    for state in states.values():
        parts += choices(state, drawn)
    found = list(early.cases(states))
    marked = {(*case.line, "" if case.is_test else "picked on"): None for case in found}
    parts += [
        "# The early rule",
        "Smallest γ whose training loss after 14 % of the run is within 10 % of the lowest, one seed per γ, means over "
        "folds; points of validation accuracy lost against the best γ of the grid. Both numbers were picked on the "
        "rows that are marked; the others test it.",
        table((*early.HEADS, ""), marked),
        figure(drawn, "gamma-searches", "Points lost against γ", figures.searches, found),
    ]
    parts += [*repeats(states["cifar10"]), *in_numbers(states["cifar10"])]
    return "\n\n".join(parts).replace("](results/", "](") + "\n"


def choices(state: State, drawn: Drawn) -> Iterator[str]:
    """What was tried for an experiment's rows, and what was chosen."""
    if not any(state.points.values()):
        return
    yield f"## {state.experiment.title}"
    over_folds, plan = state.experiment.over == "fold", state.plan
    curves: dict[str, dict[float, float]] = {}
    chosen: dict[str, list[float]] = {}
    lines = []
    for row, points in state.points.items():
        means = {
            value: 100 * float(np.mean([one.validation_accuracy or math.nan for one in results]))
            for value, results in sorted(points.items())
        }
        if means:
            curves[row] = means
        if plan is not None:
            found = [value for numbers in plan.numbers[row].values() for value in numbers.values()]
            chosen[row] = found if over_folds else found[:1]
        said = ", ".join(f"{value:g}" for value in chosen[row]) if plan else "not yet"
        lines.append((row, ", ".join(f"{value:g}: {mean:.2f}" for value, mean in means.items()) or "–", said))
    kind, by = (
        ("validation accuracy, mean over folds", "chosen, by fold") if over_folds else ("validation accuracy", "chosen")
    )
    yield table(("row", kind, by), lines)
    rings = {} if over_folds else {row: values[0] for row, values in chosen.items()}
    symbol = "γ" if all("maxgain" in row for row in curves) else "number"
    yield figure(drawn, f"{state.experiment.name}-tuning", "Validation accuracy", figures.tuning, curves, rings, symbol)


def early_test(states: Mapping[str, State]) -> str:
    """The test of the early rule on what it was not made on, and its outcome by PLAN-2.md."""
    cases = [case for case in early.cases(states) if case.is_test]
    return f"{table(early.HEADS, [case.line for case in cases])}\n\n{early.outcome(cases)}"


def repeats(state: State) -> Iterator[str]:
    """PLAN-2.md, part 11: runs made again beside the recorded ones, and seeds at the edge of what can be trained."""
    bridge = [result for result in state.again if result.test_accuracy is not None]
    if bridge and state.comparison:
        sigma, runs, _ = scatter(state.comparison)
        width, lines = BRIDGE_T * sigma * math.sqrt(1 + 1 / runs), []
        for result in bridge:
            alike = {replace(result.recipe, seed=seed).key for seed in state.experiment.units}
            mean = 100 * float(np.mean([one.test_accuracy for one in state.results if one.recipe.key in alike]))
            accuracy = 100 * (result.test_accuracy or math.nan)
            inside = "inside" if abs(accuracy - mean) <= width else "**outside**"
            limits = f"{mean - width:.2f} to {mean + width:.2f}"
            lines.append((result.recipe.title, f"{accuracy:.2f}", limits, inside, result.commit[:12]))
        yield "# Runs made again"
        yield table(("run", "accuracy", "where a sixth run of the recorded five is expected", "", "commit"), lines)
    tuned = {**state.tuned, **by_key(state.again)}
    if all(recipe.key in tuned for recipe in EDGE):
        yield "# The edge: maxgain=1.5 on validation images, by seed"
        rows = []
        for run in (tuned[recipe.key] for recipe in EDGE):
            losses = [f"{run.history.train_loss[epoch - 1] or math.nan:.4f}" for epoch in (100, 140)]
            rows.append((str(run.recipe.seed), percent(run.validation_accuracy), *losses, run.commit[:12] or "unknown"))
        yield table(("seed", "validation accuracy", "training loss, epoch 100", "epoch 140", "commit"), rows)


def in_numbers(state: State) -> Iterator[str]:
    """What every γ of Figure 3 came to; medians and largest gains of every layer, ours beside the paper's."""
    yield "# Figure 3, in numbers"
    names = ("train_accuracy", "validation_accuracy", "train_loss", "validation_loss")
    lines = []
    for recipe in GAMMA_CURVE:
        if (result := state.tuned.get(recipe.key)) is not None:
            values = [getattr(result, name) for name in names]
            lines.append((f"{recipe.gamma:g}", *map(percent, values[:2]), *(f"{value:.4f}" for value in values[2:])))
    yield table(("γ", *(name.replace("_", " ") for name in names)), lines)
    yield "# Gains of every layer"
    for recipe, ours, theirs in layer_gains(state.results):
        yield f"`{recipe.regulariser}`, the mean of {len(ours['train'])} runs:"
        whats = ("median, ours", "median, paper", "largest, ours", "largest, paper")
        columns = [
            boxes[:, at] for part in theirs for at in (2, 4) for boxes in (ours[part].mean(axis=0), theirs[part])
        ]
        lines = [
            (str(layer), *(f"{value:.3f}" for value in row))
            for layer, row in enumerate(zip(*columns, strict=True), start=1)
        ]
        yield table(("layer", *(f"{part} {what}" for part in theirs for what in whats)), lines)


def with_passage(text: str, content: str) -> str:
    """A page with this passage, if it has a place for one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}" if end else text


# Words


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))


def figure(drawn: Drawn, name: str, alternative: str, draw: Callable[..., Figure], *arguments: Any) -> str:
    """A link to a figure, which is drawn by this function of these arguments."""
    drawn[name] = partial(draw, *arguments)
    return f"![{alternative}](results/figures/{name}.svg)"


def signed(value: float) -> str:
    """+1.25 or -1.25; what rounds to zero has no sign."""
    text = f"{value:+.2f}"
    return text if float(text) else text[1:]


def ends(interval: tuple[float, float] | None) -> str:
    """The ends of an interval, in points."""
    return "–" if interval is None else " to ".join(signed(100 * end) for end in interval)


def span(values: NDArray[np.float64]) -> str:
    """The least and the largest."""
    return f"{values.min():.2f} to {values.max():.2f}"


def reached(is_reached: bool) -> str:
    """Whether a target is reached."""
    return "reached" if is_reached else "not reached"
