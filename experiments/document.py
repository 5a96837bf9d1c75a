"""REPRODUCTION.md, its figures and the tables behind it, made from results/ alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from maxgain.study.comparison import Comparison, Contrast, Row
from maxgain.study.plan import Plan
from maxgain.study.result import Result
from maxgain.study.sentences import listed, p_equals, p_value, percent
from maxgain.study.tuning import RULES, numbers_of

from . import early, figures, paper
from .figures import published_difference
from .plan import EDGE, EXPERIMENTS, GAINS, GAMMA_CURVE, Experiment, by_key
from .state import State, read

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
TARGETS = (0.4, 92.5, 0.10)
"""PLAN.md's: points that a row may be below the paper, accuracy of the best row, deviation of medians of gains."""
ALSO = (("maxgain", "dropout"), ("maxgain", "batchnorm"), ("maxgain+batchnorm+dropout", "maxgain+batchnorm"))
"""What the paper says too: better than dropout, like batch norm; and what dropout adds on top of both."""

BRIDGE_T = 2.78
"""Student's t of the bridge's limits, by PLAN-2.md."""
Draw = Callable[[], Figure]


def build(root: Path = ROOT) -> list[Path]:
    """Write both pages, their figures and the passage of docs/choosing-gamma.md; return what was written."""
    states = read(root / "results")
    drawn: dict[str, Draw] = {}
    pages = {
        root / "REPRODUCTION.md": document(states, drawn),
        root / DETAILS: details(states, drawn),
    }
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


def document(states: Mapping[str, State], drawn: dict[str, Draw]) -> str:
    """The page, one table per experiment, each contrast once; adds what draws its figures."""
    parts = [PREFACE]
    for state in states.values():
        if state.comparison is not None:
            parts += section(state, state.comparison, drawn)
        if state.experiment.name == "cifar10":
            parts += targets(state)
            parts += gains(state, drawn)
        if state.experiment.name == "svhn":
            parts += gamma_curve(state, drawn)
    if waiting := [state for state in states.values() if state.comparison is None]:
        command = "`python -m experiments run {} --data DIR`"
        rows = [(one.experiment.title, one.progress, command.format(one.experiment.name)) for one in waiting]
        parts += ["## Still to be run", "By [PLAN-2.md](experiments/PLAN-2.md)."]
        parts += [table(("what", "state", "command"), rows)]
    return "\n\n".join(parts) + "\n"


def section(state: State, comparison: Comparison, drawn: dict[str, Draw]) -> Iterator[str]:
    """One experiment."""
    experiment = state.experiment
    yield f"## {experiment.title}"
    yield f"*{experiment.claim}*"
    yield " ".join((*experiment.remarks, _took(state, comparison)))
    yield table(
        ("row", "the paper", "ours", *(["above the paper"] * experiment.same_data)),
        [row_texts(experiment, row) for row in comparison.rows],
    )
    published = experiment.published if experiment.same_data else {}
    yield _figure(
        drawn, f"{experiment.name}-rows", partial(figures.rows, comparison, published), "Accuracy of every run"
    )
    if not comparison.contrasts:
        return
    other = "paired" if comparison.plan.decide_by == "pooled" else "pooled"
    heads = ("contrast", "the paper", "ours (95 % CI)", "90 % alone", "p", f"p, {other}", "σ of the images", "verdict")
    yield table(heads, [contrast_texts(experiment, comparison, contrast) for contrast in comparison.contrasts])
    draw = partial(figures.contrasts, experiment, comparison)
    yield _figure(drawn, f"{experiment.name}-contrasts", draw, "Differences with their intervals")
    if experiment.same_data:
        yield from in_size(experiment, comparison)


def _took(state: State, comparison: Comparison) -> str:
    runs = [result for results in comparison.results.values() for result in results]
    keys = {recipe.key for recipe in state.searched}
    tuning = [result for key, result in state.tuned.items() if key in keys]
    hours = sum(result.seconds for result in (*runs, *tuning)) / 3600
    decided = "pooled over rows" if comparison.plan.decide_by == "pooled" else "paired"
    devices = listed(sorted({result.device for result in runs}))
    return (
        f"{len(runs)} runs and {len(tuning)} that chose numbers, {hours:.1f} hours on {devices}, runs "
        f"side by side counted in full. Tests are {decided}."
    )


def row_texts(experiment: Experiment, row: Row) -> tuple[str, ...]:
    """A row's cells."""
    theirs = experiment.published.get(row.name)
    ours = percent(row.mean, row.standard_error)
    cells = (
        row.label,
        str(theirs or "–"),
        ours if row.done == row.planned else f"{ours} ({row.done} of {row.planned})",
    )
    if not experiment.same_data:
        return cells
    above = None if theirs is None or row.mean is None else 100 * row.mean - theirs.accuracy
    return (*cells, "–" if above is None else signed(above))


def contrast_texts(experiment: Experiment, comparison: Comparison, contrast: Contrast) -> tuple[str, ...]:
    """A contrast's cells."""
    theirs = published_difference(experiment, contrast.first, contrast.second)
    p = paper.SINS10_P_VALUES.get((contrast.first, contrast.second)) if experiment.name == "sins10" else None
    ours, narrow = "–", "–"
    if (difference := contrast.difference) is not None:
        ours = f"{signed(100 * difference.mean)} ({_ends(difference.interval)})"
        narrow = _ends(difference.interval_at(0.10))
    verdict = experiment.verdict(comparison, contrast)
    region = f" (±{experiment.region_of(comparison, contrast):.2g})" if verdict == "equivalent" else ""
    return (
        f"{contrast.first} : {contrast.second}",
        "–" if theirs is None else signed(theirs) + ("" if p is None else f", p = {p:g}"),
        ours,
        narrow,
        p_value(difference.p_holm if difference else None),
        p_value(contrast.check.p_holm if contrast.check else None),
        "–" if contrast.sampling_error is None else f"{100 * contrast.sampling_error:.2f}",
        f"**{verdict}**{region}",
    )


def in_size(experiment: Experiment, comparison: Comparison) -> Iterator[str]:
    """What the same model says of other pairs, and where we differ from the paper by more than chance."""
    first = comparison.contrasts[0].difference
    if comparison.plan.decide_by != "pooled" or first is None or first.standard_error is None or not first.n:
        return
    sigma = 100 * first.standard_error * math.sqrt(first.n / 2)
    means = {row.name: 100 * row.mean for row in comparison.rows if row.mean is not None}
    width = float(stats.t.isf(0.05, first.degrees)) * sigma * math.sqrt(2 / first.n)
    also = [
        f"{one} : {other} {signed(means[one] - means[other])} ({signed(means[one] - means[other] - width)} to "
        f"{signed(means[one] - means[other] + width)})"
        for one, other in ALSO
        if one in means and other in means
    ]
    if also:
        yield f"Not planned, without correction, 90 % intervals: {listed(also)}."
    error = sigma * math.sqrt(1 + 1 / first.n)
    beside = [(row.label, means[row.name] - experiment.published[row.name].accuracy, error)
              for row in comparison.rows if row.name in means and row.name in experiment.published]  # fmt: skip
    beside += [
        (f"{one.first} : {one.second}", 100 * one.difference.mean - theirs, error * math.sqrt(2))
        for one in comparison.contrasts
        if one.difference and (theirs := published_difference(experiment, one.first, one.second)) is not None
    ]
    tested = [(name, above, float(2 * stats.t.sf(abs(above) / scale, first.degrees))) for name, above, scale in beside]
    if beyond := [f"{name} ({signed(above)}, {p_equals(p)})" for name, above, p in tested if p < 0.05]:
        yield (
            f"**In size we are not the paper everywhere.** If its single runs scatter as ours do (σ = {sigma:.3f}), "
            f"these differ from it by more than chance: {listed(beyond)}. γ is the likeliest reason: PLAN-2.md, part 9."
        )


def targets(state: State) -> Iterator[str]:
    """PLAN.md's targets for the CIFAR-10 table."""
    if state.comparison is None:
        return
    near, best, _ = TARGETS
    means = {row.name: 100 * row.mean for row in state.comparison.rows if row.mean is not None}
    above = {row: means[row] - state.experiment.published[row].accuracy for row in means}
    worst, top = min(above, key=above.__getitem__), max(means, key=means.__getitem__)
    yield (
        f"Targets, set when pilots had been scored: every row at most {near} below the paper's (the lowest, {worst}, "
        f"is {signed(above[worst])}: {_reached(above[worst] >= -near)}); {best} % for the best row ({top}, "
        f"{means[top]:.2f}: {_reached(means[top] >= best)})."
    )


def gains(state: State, drawn: dict[str, Draw]) -> Iterator[str]:
    """Figures 1 and 2."""
    yield "## Figures 1 and 2: gains by layer, VGG-19 on CIFAR-10"
    yield "*A bound on gains of training images also holds on test images; without it they are larger and differ more.*"
    lines = []
    for recipe in GAINS:
        row, name = recipe.regulariser, recipe.regulariser.partition("=")[0]
        ours = {part: gain_boxes(state.results, row, part) for part in paper.GAINS[name]}
        means = {part: np.mean(runs, axis=0).tolist() for part, runs in ours.items() if runs}
        for part, mean in means.items():
            theirs, runs = paper.GAINS[name][part], ours[part]
            off, single = deviation(mean, theirs), [100 * deviation(run, theirs) for run in runs]
            reached = _reached(off <= TARGETS[2])
            lines.append((row, part, _medians(theirs), _medians(mean), f"{100 * off:.1f} % ({reached}: 10 %)",
                          f"{min(single):.1f} to {max(single):.1f} %", f"{max(box[4] for box in theirs):.3f}",
                          f"{max(box[4] for run in runs for box in run):.3f}"))  # fmt: skip
        if means.keys() == ours.keys():
            draw = partial(figures.boxes, means, paper.GAINS[name], row)
            yield _figure(drawn, f"gains-{name}", draw, f"Gains by layer of {row}, ours beside the paper's")
    heads = ("row", "images", "medians, paper", "ours", "off, mean of five runs", "off, single runs",
             "largest, paper", "ours")  # fmt: skip
    yield table(heads, lines)


def _medians(boxes: Sequence[paper.Box]) -> str:
    return f"{min(box[2] for box in boxes):.2f} to {max(box[2] for box in boxes):.2f}"


def gain_boxes(results: Sequence[Result], regulariser: str, part: str) -> list[list[paper.Box]]:
    """The quantiles of each layer's gains of the table's runs of a row."""
    table = EXPERIMENTS["cifar10"]
    runs = [
        result
        for result in results
        if result.recipe.regulariser == regulariser and result.recipe.seed in table.units
        and result.recipe.dataset == table.recipe.dataset and part in result.gains and not result.recipe.include
    ]  # fmt: skip
    return [[tuple(float(end or 0) for end in box) for box in run.gains[part].values()] for run in runs]


def deviation(ours: Sequence[Sequence[float]], theirs: Sequence[paper.Box]) -> float:
    """Relative deviations of medians from the paper's, without sign, averaged over layers."""
    return float(np.mean([abs(own[2] / other[2] - 1) for own, other in zip(ours, theirs, strict=True)]))


def gamma_curve(state: State, drawn: dict[str, Draw]) -> Iterator[str]:
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
    yield _figure(drawn, "gamma-curve", partial(figures.gamma_curve, curve), "Accuracy and log loss against γ")


# Details


def details(states: Mapping[str, State], drawn: dict[str, Draw]) -> str:
    """How numbers were chosen, and the gains of every layer."""
    parts = ["<!-- Made by `make reproduce` from results/. Do not edit. -->", "# How numbers were chosen"]
    parts.append(f"On validation images, seed 1000 or each fold's own: {RULES['grid']}. No test image was loaded.")
    for state in states.values():
        parts += choices(state, drawn)
    parts.append("# The early rule")
    parts.append(
        "Smallest γ whose training loss after 14 % of the run is within 10 % of the lowest, one seed per γ, means over "
        "folds; points of validation accuracy lost against the best γ of the grid. Both numbers were picked on the "
        "rows that are marked; the others test it."
    )
    parts.append(early_table(states))
    searched = {(case.experiment.recipe.name, case.row): (case.rule, case.lost) for case in early.cases(states)}
    parts.append(_figure(drawn, "gamma-searches", partial(figures.searches, searched), "Points lost against γ"))
    parts += repeats(next(iter(states.values())))
    parts.append("# Figure 3, in numbers")
    parts.append(curve_table(next(iter(states.values()))))
    parts.append("# Gains of every layer")
    parts += gain_tables(next(iter(states.values())))
    return "\n\n".join(parts).replace("](results/", "](") + "\n"


def choices(state: State, drawn: dict[str, Draw]) -> Iterator[str]:
    """What was tried for an experiment's rows, and what was chosen."""
    means: dict[str, list[tuple[float, float]]] = {}
    for (row, _), recipes in (state.settled.tuning() if state.settled else {}).items():
        parts = state.experiment.searched(row)
        known = [state.tuned[recipe.key] for recipe in recipes if recipe.key in state.tuned]
        means.setdefault(row, []).extend(
            (*numbers_of(one.recipe, parts).values(), 100 * (one.validation_accuracy or math.nan)) for one in known
        )
    if not any(means.values()):
        return
    yield f"## {state.experiment.title}"
    rows = []
    for row, points in means.items():
        values = sorted({value for value, _ in points})
        means[row] = [(value, float(np.mean([at for one, at in points if one == value]))) for value in values]
        chosen = "not yet" if state.plan is None else ", ".join(_chosen(state.plan, row))
        rows.append((row, ", ".join(f"{value:g}: {mean:.2f}" for value, mean in means[row]) or "–", chosen))
    over_folds = state.experiment.over == "fold"
    kind = "validation accuracy, mean over folds" if over_folds else "validation accuracy"
    yield table(("row", kind, "chosen, by fold" if over_folds else "chosen"), rows)
    curves = {row: points for row, points in means.items() if points}
    rings = {} if state.plan is None or over_folds else {row: float(_chosen(state.plan, row)[0]) for row in curves}
    symbol = "γ" if all("maxgain" in row for row in curves) else "number"
    draw = partial(figures.tuning, curves, rings, symbol)
    yield _figure(drawn, f"{state.experiment.name}-tuning", draw, "Validation accuracy")


def early_table(states: Mapping[str, State]) -> str:
    """All cases, those first that the rule was made on."""
    lines = {(*case.line, "" if case.is_test else "picked on"): None for case in early.cases(states)}
    return table((*early.HEADS, ""), lines)


def early_test(states: Mapping[str, State]) -> str:
    """The test of the early rule on what it was not made on, and its outcome by PLAN-2.md."""
    cases = [case for case in early.cases(states) if case.is_test]
    return f"{table(early.HEADS, [case.line for case in cases])}\n\n{early.outcome(cases)}"


def repeats(state: State) -> Iterator[str]:
    """PLAN-2.md, part 11: runs made again beside the recorded ones, and seeds at the edge of what can be trained."""
    bridge = [result for result in state.again if result.test_accuracy is not None]
    if bridge and (first := state.comparison and state.comparison.contrasts[0].difference):
        sigma = 100 * (first.standard_error or math.nan) * math.sqrt(first.n / 2)
        lines = []
        for result in bridge:
            alike = {replace(result.recipe, seed=seed).key for seed in EXPERIMENTS["cifar10"].units}
            others = [100 * (one.test_accuracy or math.nan) for one in state.results if one.recipe.key in alike]
            mean, width = float(np.mean(others)), BRIDGE_T * sigma * math.sqrt(1 + 1 / len(others))
            accuracy = 100 * (result.test_accuracy or math.nan)
            inside = "inside" if abs(accuracy - mean) <= width else "**outside**"
            limits = f"{mean - width:.2f} to {mean + width:.2f}"
            lines.append((result.recipe.title, f"{accuracy:.2f}", limits, inside, result.commit[:12]))
        yield "# Runs made again"
        yield table(("run", "accuracy", "where a sixth run of the recorded five is expected", "", "commit"), lines)
    tuned = {**state.tuned, **by_key(state.again)}
    edge = [tuned[recipe.key] for recipe in EDGE if recipe.key in tuned]
    if len(edge) == len(EDGE):
        yield "# The edge: maxgain=1.5 on validation images, by seed"
        rows = [
            (
                str(run.recipe.seed),
                percent(run.validation_accuracy),
                *(f"{run.history.train_loss[epoch - 1] or math.nan:.4f}" for epoch in (100, 140)),
                run.commit[:12] or "unknown",
            )
            for run in edge
        ]
        yield table(("seed", "validation accuracy", "training loss, epoch 100", "epoch 140", "commit"), rows)


def _chosen(plan: Plan, row: str) -> list[str]:
    found = [f"{value:g}" for numbers in plan.numbers[row].values() for value in numbers.values()]
    return found[:1] if plan.over == "seed" else found


def curve_table(state: State) -> str:
    """What every γ of Figure 3 came to."""
    names = ("train_accuracy", "validation_accuracy", "train_loss", "validation_loss")
    lines = []
    for recipe in GAMMA_CURVE:
        if (result := state.tuned.get(recipe.key)) is not None:
            values = [getattr(result, name) for name in names]
            lines.append((f"{recipe.gamma:g}", *map(percent, values[:2]), *(f"{value:.4f}" for value in values[2:])))
    return table(("γ", *(name.replace("_", " ") for name in names)), lines)


def gain_tables(state: State) -> Iterator[str]:
    """Medians and largest gains of every layer, the mean of our runs beside the paper's."""
    for recipe in GAINS:
        theirs = paper.GAINS[recipe.regulariser.partition("=")[0]]
        ours = {part: gain_boxes(state.results, recipe.regulariser, part) for part in theirs}
        if not all(ours.values()):
            continue
        mean = {part: np.mean(runs, axis=0) for part, runs in ours.items()}
        whats = ("median, ours", "median, paper", "largest, ours", "largest, paper")
        heads = ("layer", *(f"{part} {what}" for part in theirs for what in whats))
        lines = []
        for layer in range(len(theirs["train"])):
            boxes = [(mean[part][layer], theirs[part][layer]) for part in theirs]
            lines.append((str(layer + 1), *(f"{box[at]:.3f}" for pair in boxes for at in (2, 4) for box in pair)))
        yield f"`{recipe.regulariser}`, the mean of {len(ours['train'])} runs:"
        yield table(heads, lines)


def with_passage(text: str, content: str) -> str:
    """A page with this passage, if it has a place for one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}" if end else text


# Words


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))


def signed(value: float) -> str:
    """+1.25 or -1.25; what rounds to zero has no sign."""
    text = f"{value:+.2f}"
    return text if float(text) else text[1:]


def _ends(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else " to ".join(signed(100 * end) for end in interval)


def _reached(is_reached: bool) -> str:
    return "reached" if is_reached else "not reached"


def _figure(drawn: dict[str, Draw], name: str, draw: Draw, alternative: str) -> str:
    drawn[name] = draw
    return f"![{alternative}](results/figures/{name}.svg)"
