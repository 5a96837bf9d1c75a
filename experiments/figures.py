"""The reproduction's figures: ours beside the paper's numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maxgain.study.comparison import Comparison
from maxgain.study.report.figures import SERIES, SOFT, STYLE, panels
from maxgain.study.result import Result

from . import paper
from .plan import Experiment

OURS, THEIRS = SERIES[:2]


def rows(comparison: Comparison, published: Mapping[str, paper.Number]) -> Figure:
    """A dot per run, the runs of a seed or fold joined, each row's mean, and the paper's number."""
    figure, (axis,) = panels(1, 1, (7.6, 1.3 + 0.34 * len(comparison.rows)))
    for unit in comparison.plan.units:
        points = [(100 * row.scores.get(unit, float("nan")), at) for at, row in enumerate(comparison.rows)]
        axis.plot(*zip(*points, strict=True), "o-", color=OURS, linewidth=0.5, markersize=3.5, alpha=0.5)
    means = [(100 * row.mean, at) for at, row in enumerate(comparison.rows) if row.mean is not None]
    axis.plot(*zip(*means, strict=True), "|", color=OURS, markersize=15, markeredgewidth=2, label="our mean")
    theirs = [(published[row.name].accuracy, at) for at, row in enumerate(comparison.rows) if row.name in published]
    if theirs:
        axis.plot(*zip(*theirs, strict=True), "D", color=THEIRS, markersize=5, label="the paper")
    axis.set_yticks(range(len(comparison.rows)), [row.label for row in comparison.rows])
    axis.set_ylim(len(comparison.rows) - 0.5, -0.5)
    axis.set_xlabel(f"test accuracy (%); a dot per run, those of a {comparison.plan.over} joined")
    return _with_legend(figure, axis)


def contrasts(experiment: Experiment, comparison: Comparison) -> Figure:
    """Every contrast with its simultaneous 95 % and its own 90 % interval, the region of equivalence, the paper's."""
    figure, (axis,) = panels(1, 1, (7.6, 1.3 + 0.36 * len(comparison.contrasts)))
    axis.axvline(0, color=SOFT, linewidth=0.8)
    for at, contrast in enumerate(comparison.contrasts):
        region, difference = experiment.region_of(comparison, contrast), contrast.difference
        axis.fill_betweenx([at - 0.4, at + 0.4], -region, region, color=SOFT, alpha=0.15, label="region of equivalence")
        if difference is not None:
            ends = ((difference.interval, 1.2, "95 %, all at once"), (difference.interval_at(0.10), 3.5, "90 % alone"))
            for interval, width, label in ends:
                if interval is not None:
                    line = [100 * end for end in interval]
                    axis.plot(line, [at, at], color=OURS, linewidth=width, label=label, solid_capstyle="butt")
            axis.plot([100 * difference.mean], [at], "o", color=OURS, markersize=6, label="ours")
        theirs = published_difference(experiment, contrast.first, contrast.second)
        if theirs is not None:
            axis.plot([theirs], [at], "D", color=THEIRS, markersize=5, label="the paper")
    names = [f"{contrast.first} : {contrast.second}" for contrast in comparison.contrasts]
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("difference of test accuracy (points)")
    return _with_legend(figure, axis, 5)


def published_difference(experiment: Experiment, first: str, second: str) -> float | None:
    """The difference of the paper's numbers in points, where it has both."""
    table = experiment.published
    return table[first].accuracy - table[second].accuracy if first in table and second in table else None


def boxes(ours: Mapping[str, Sequence[paper.Box]], theirs: Mapping[str, Sequence[paper.Box]], title: str) -> Figure:
    """The gains in each layer, a panel per part of the data, our boxes on the left of the paper's."""
    figure, axes = panels(len(ours), 1, (9, 2.5 * len(ours) + 0.5))
    for axis, part in zip(axes, ours, strict=True):
        for shift, colour, quantiles in ((-0.19, OURS, ours[part]), (0.19, THEIRS, theirs[part])):
            keys = ("whislo", "q1", "med", "q3", "whishi")
            axis.bxp(
                [dict(zip(keys, box, strict=True)) for box in quantiles],
                showfliers=False, patch_artist=True, widths=0.3,
                positions=[place + shift for place in range(1, len(quantiles) + 1)],
                boxprops={"facecolor": colour, "alpha": 0.5, "linewidth": 0}, medianprops={"color": colour},
                whiskerprops={"color": colour}, capprops={"color": colour},
            )  # fmt: skip
        axis.set_title(f"{title}, {part} images: ours on the left, the paper's on the right", loc="left", fontsize=9)
        axis.set_ylabel("gain ‖Wx‖ / ‖x‖")
        axis.set_ylim(bottom=0)
        if "maxgain" in title:
            axis.axhline(paper.GAINS_GAMMA, color=SOFT, linestyle="--", linewidth=0.8)
        layers = range(1, len(ours[part]) + 1)
        axis.set_xticks(layers, list(map(str, layers)))
    axes[-1].set_xlabel("layer, from the input on")
    return figure


def tuning(curves: Mapping[str, Sequence[tuple[float, float]]], chosen: Mapping[str, float], symbol: str) -> Figure:
    """Validation accuracy against the numbers that were tried, a line per row, or its mean over folds."""
    figure, (axis,) = panels(1, 1, (7.6, 3.2))
    for index, (row, points) in enumerate(curves.items()):
        colour = SERIES[index % len(SERIES)]
        axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3.5, label=row)
        known = dict(points)
        if chosen.get(row) in known:
            axis.plot([chosen[row]], [known[chosen[row]]], "o", color=colour, markersize=9, fillstyle="none")
    ticks = sorted({value for points in curves.values() for value, _ in points})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(f"{symbol}; a ring marks the choice" if chosen else f"{symbol}; means over folds")
    axis.set_ylabel("validation accuracy (%)")
    return _with_legend(figure, axis, 2)


def searches(cases: Mapping[tuple[str, str], tuple[float, Mapping[float, float]]], deepest: float = 10) -> Figure:
    """Points lost against γ, a line per search and a colour per data set; a ring is the early rule's choice."""
    figure, (axis,) = panels(1, 1, (7.6, 3.2))
    colours = dict(zip(dict.fromkeys(data for data, _ in cases), SERIES, strict=False))
    for (data, _), (rule, lost) in cases.items():
        points = sorted(lost.items())
        axis.plot(*zip(*points, strict=True), "o-", color=colours[data], markersize=3.5, label=data)
        axis.plot([rule], [lost[rule]], "o", color=colours[data], markersize=10, fillstyle="none")
    ticks = sorted({gamma for _, lost in cases.values() for gamma in lost if gamma in (0.75, 1, 1.5, 2, 3, 4, 6)})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(deepest, -0.5)
    axis.set_xlabel("γ; a ring marks the early rule's choice")
    axis.set_ylabel("points of validation\naccuracy below the best")
    return _with_legend(figure, axis, 5)


def gamma_curve(curve: Sequence[tuple[float, Result]]) -> Figure:
    """The paper's Figure 3: accuracy and log loss against γ, on training images and on others."""
    figure, axes = panels(1, 2, (9, 3.1))
    published, gammas = paper.GAMMA_CURVE, [gamma for gamma, _ in curve]
    for axis, what, unit in zip(axes, ("accuracy", "loss"), (100, 1), strict=True):
        for part, line in (("train", "o--"), ("validation", "o-")):
            values = [unit * (getattr(result, f"{part}_{what}") or float("nan")) for _, result in curve]
            axis.plot(gammas, values, line, color=OURS, markersize=4, label=f"ours, {part}")
        for part, line in (("train", "D--"), ("test", "D-")):
            theirs = getattr(published, f"{part}_{what}")
            axis.plot(published.gammas, theirs, line, color=THEIRS, markersize=4, label=f"the paper, {part}")
        axis.set_xlabel("γ")
        axis.set_title({"accuracy": "accuracy (%)", "loss": "log loss (nats)"}[what], loc="left", fontsize=9)
    return _with_legend(figure, axes[0], 4)


def svg(figure: Figure) -> bytes:
    """The figure as a file that is the same every time."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    # Clip paths are named by the last bits of their corners, in which machines differ: number them.
    numbers: dict[bytes, int] = {}
    return re.sub(
        rb"\bp[0-9a-f]{10}\b", lambda found: b"clip%d" % numbers.setdefault(found[0], len(numbers)), buffer.getvalue()
    )


def _with_legend(figure: Figure, axis: Axes, columns: int = 3) -> Figure:
    """Below the panel, what is drawn in it, each kind once."""
    by_label = {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=columns, fontsize=8)
    return figure
