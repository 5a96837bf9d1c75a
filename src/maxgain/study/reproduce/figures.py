"""The reproduction's figures, each a function from numbers to a figure; the paper's numbers are beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..comparing.comparison import Comparison
from ..report.figures import COLOURS, series_style
from ..schema import score
from . import paper
from .paper import Box
from .state import Curve, State

OURS, THEIRS, GREY = COLOURS[0], COLOURS[1], "#6a6a6a"


def rows(comparison: Comparison, published: paper.Table) -> Figure:
    """A dot for every run, the runs of a seed or fold joined, each row's mean, and the paper's value.

    A line is broken where a run failed, and its row says how many there are.
    """
    names = [row.name for row in comparison.rows]
    figure, panel = _panel(7.6, 1.3 + 0.34 * len(names))
    for unit in comparison.question.units:
        points = [(100 * row.scores.get(unit, math.nan), at) for at, row in enumerate(comparison.rows)]
        if any(unit in row.scores for row in comparison.rows):
            panel.plot(*zip(*points, strict=True), color=OURS, linewidth=0.5, alpha=0.35, zorder=1)
            panel.plot(*zip(*points, strict=True), "o", color=OURS, markersize=3.5, alpha=0.6, zorder=2)
    means = [(100 * row.summary.mean, at) for at, row in enumerate(comparison.rows) if row.summary]
    if means:
        panel.plot(
            *zip(*means, strict=True), "|", color=OURS, markersize=15, markeredgewidth=2, zorder=3, label="our mean"
        )
    theirs = [(published[name].accuracy, at) for at, name in enumerate(names) if name in published]
    if theirs:
        panel.plot(*zip(*theirs, strict=True), "D", color=THEIRS, markersize=5, zorder=4, label="the paper")
    panel.set_yticks(range(len(names)), [_counted(row.name, row.done, row.planned) for row in comparison.rows])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlabel(f"test accuracy, %; a dot per run, those of a {comparison.question.over} joined")
    _legend(figure, panel)
    return figure


def contrasts(comparison: Comparison, published: paper.Table) -> Figure:
    """Every contrast with its intervals, the region of equivalence that the narrow one is for, and the paper's."""
    names = [
        _counted(f"{contrast.first} : {contrast.second}", len(contrast.pairs), contrast.planned)
        for contrast in comparison.contrasts
    ]
    figure, panel = _panel(7.6, 1.3 + 0.36 * len(names))
    rope = 100 * (comparison.question.rope or 0)
    panel.axvspan(-rope, rope, color=GREY, alpha=0.15, linewidth=0, label=f"too small to matter, ±{rope:g}")
    panel.axvline(0, color=GREY, linewidth=0.8)
    for at, contrast in enumerate(comparison.contrasts):
        decided = contrast.decided
        if decided is not None:
            ends = ((decided.simultaneous_interval, 1.2, "95 % together"), (decided.interval_90, 3.5, "90 % alone"))
            for interval, width, label in ends:
                if interval is not None:
                    panel.plot([100 * end for end in interval], [at, at], color=OURS, linewidth=width, label=label)
            panel.plot([100 * decided.mean], [at], "o", color=OURS, markersize=6, label="ours")
        if contrast.first in published and contrast.second in published:
            difference = published[contrast.first].accuracy - published[contrast.second].accuracy
            panel.plot([difference], [at], "D", color=THEIRS, markersize=5, label="the paper")
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlabel("difference of test accuracies, points")
    _legend(figure, panel, columns=5)
    return figure


def _counted(name: str, done: int, planned: int) -> str:
    """The name, with how many there are below it where some are missing."""
    return name if done == planned else f"{name}\n{done} of {planned}"


def boxes(
    ours: Mapping[str, Sequence[Box]], theirs: Mapping[str, Sequence[Box]], bound: float | None, title: str
) -> Figure:
    """The gains in each layer, a panel per part of the data, our boxes beside the paper's."""
    figure = Figure(figsize=(9, 2.5 * len(ours) + 0.5), layout="constrained")
    panels = figure.subplots(len(ours), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, part in zip(panels, ours, strict=True):
        _boxes(panel, ours[part], -0.19, OURS)
        _boxes(panel, theirs[part], 0.19, THEIRS)
        if bound is not None:
            panel.axhline(bound, color=GREY, linestyle="--", linewidth=0.8, label=f"γ = {bound:g}")
        panel.set_title(f"{title}, {part} set", loc="left", fontsize=10)
        panel.set_ylabel("gain ‖Wx‖ / ‖x‖")
        panel.set_ylim(bottom=0)
        _plain(panel)
    panels[-1].set_xticks(range(1, len(next(iter(ours.values()))) + 1))
    panels[-1].set_xticklabels(range(1, len(next(iter(ours.values()))) + 1))
    panels[-1].set_xlabel("layer, from the input on")
    kinds = [
        Patch(color=OURS, alpha=0.5, label="ours, on the left"),
        Patch(color=THEIRS, alpha=0.5, label="the paper, on the right"),
    ]
    bounds, _ = panels[-1].get_legend_handles_labels()
    figure.legend(handles=[*kinds, *bounds], loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _boxes(panel: Axes, quantiles: Sequence[Box], shift: float, colour: str) -> None:
    keys = ("whislo", "q1", "med", "q3", "whishi")
    panel.bxp(
        [dict(zip(keys, box, strict=True)) for box in quantiles],
        positions=[place + shift for place in range(1, len(quantiles) + 1)],
        widths=0.3,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": colour, "alpha": 0.5, "linewidth": 0},
        medianprops={"color": colour, "linewidth": 1.5},
        whiskerprops={"color": colour, "linewidth": 0.8},
        capprops={"color": colour, "linewidth": 0.8},
    )


def choices(state: State) -> Figure:
    """What every number that was tried came to on the validation part, a line per row; the chosen ones are marked.

    Where numbers are chosen on every fold, thin lines are folds and the thick one is their mean.
    """
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    panels = figure.subplots(1, 2)
    styles = {row: series_style(index) for index, row in enumerate(state.curves)}
    begun = {row: folds for row, folds in state.curves.items() if any(folds.values())}
    for row, folds in begun.items():
        style = styles[row]
        for panel, name, unit in zip(panels, ("validation_accuracy", "validation_loss"), (100, 1), strict=True):
            for fold, curve in folds.items():
                thin = {"linewidth": 0.5, "alpha": 0.4} if len(folds) > 1 else {"linewidth": 1.4, "label": row}
                at, values = _values(curve, name, unit)
                panel.plot(at, values, marker="o", markersize=3, **style, **thin)
                won = state.chosen(row, fold)
                if won in at:
                    panel.plot(
                        [won], [values[at.index(won)]], "o", color=style["color"], markersize=8, fillstyle="none"
                    )
            if len(folds) > 1:
                panel.plot(*_mean(list(folds.values()), name, unit), linewidth=1.6, label=row, **style)
    symbols = dict.fromkeys("γ" if "maxgain" in row else "λ" for row in begun)
    by_fold = any(len(folds) > 1 for folds in begun.values())
    lines = "; thin: folds, thick: their mean; ring: chosen" if by_fold else "; a ring marks what was chosen"
    for panel, title in zip(panels, ("validation accuracy, %", "validation loss, nats"), strict=True):
        _plain(panel)
        panel.set_xscale("log")
        ticks = sorted({value for folds in begun.values() for curve in folds.values() for value, _ in curve})
        panel.set_xticks(ticks, _uncrowded(ticks))
        panel.minorticks_off()
        panel.set_xlabel(" or ".join(symbols) + lines)
        panel.set_title(title, loc="left", fontsize=10)
    _legend(figure, panels[0], columns=4)
    return figure


def gamma_curve(curve: Curve, published: paper.Curve) -> Figure:
    """The paper's Figure 3: accuracy and log loss against γ, on training images and on others."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    for panel, what, unit in zip(figure.subplots(1, 2), ("accuracy", "loss"), (100, 1), strict=True):
        panel.plot(*_values(curve, f"train_{what}", unit), "o--", color=OURS, markersize=4, label="ours, training")
        panel.plot(
            *_values(curve, f"validation_{what}", unit), "o-", color=OURS, markersize=4, label="ours, validation"
        )
        theirs = getattr(published, f"train_{what}"), getattr(published, f"test_{what}")
        panel.plot(published.gammas, theirs[0], "D--", color=THEIRS, markersize=4, label="the paper, training")
        panel.plot(published.gammas, theirs[1], "D-", color=THEIRS, markersize=4, label="the paper, test")
        panel.set_xlabel("γ")
        panel.set_title({"accuracy": "accuracy, %", "loss": "log loss, nats"}[what], loc="left", fontsize=10)
        _plain(panel)
    _legend(figure, panel, columns=4)
    return figure


def _uncrowded(ticks: Sequence[float]) -> list[str]:
    """The ticks of a logarithmic axis as text, without those that would run into the one before."""
    texts, last = [], 0.0
    for tick in ticks:
        has_room = not last or math.log(tick / last) > 0.05 * math.log(ticks[-1] / ticks[0])
        texts.append(f"{tick:g}" if has_room else "")
        last = tick if has_room else last
    return texts


def _values(curve: Curve, name: str, unit: float) -> tuple[list[float], list[float]]:
    """The numbers that were tried, and their scores."""
    known = [(value, score(record, name)) for value, record in curve]
    return [value for value, _ in known], [float("nan") if found is None else unit * found for _, found in known]


def _mean(curves: Sequence[Curve], name: str, unit: float) -> tuple[list[float], list[float]]:
    """The mean score of every number that was tried on all folds."""
    tried = [dict(zip(*_values(curve, name, unit), strict=True)) for curve in curves]
    common = sorted(set.intersection(*(set(points) for points in tried)))
    return common, [sum(points[value] for points in tried) / len(tried) for value in common]


def _panel(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    panel = figure.subplots()
    _plain(panel)
    return figure, panel


def _plain(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6))


def _legend(figure: Figure, panel: Axes, columns: int = 3) -> None:
    """Below the panel, what is drawn in it, each kind once."""
    by_label = {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        by_label.values(), by_label.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
