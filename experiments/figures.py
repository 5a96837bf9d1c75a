"""The reproduction's figures: ours beside the paper's numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maxgain.study.report.figures import SERIES, SOFT, STYLE, panels
from maxgain.study.result import Result

from .early import Case
from .plan import PAPER
from .state import State

Box = Sequence[float]
"""Of a layer's gains: the least, the lower quartile, the median, the upper quartile and the largest."""
OURS, THEIRS = SERIES[:2]


def rows(state: State) -> Figure:
    """A dot per run, the runs of a seed or fold joined, each row's mean, and the paper's number."""
    comparison, experiment = state.so_far, state.experiment
    assert comparison is not None
    published = experiment.published if experiment.same_data else {}
    figure, (axis,) = panels(1, 1, (7.6, 1.3 + 0.34 * len(comparison.rows)))
    for unit in experiment.units:
        points = [(100 * row.scores.get(unit, float("nan")), at) for at, row in enumerate(comparison.rows)]
        axis.plot(*zip(*points, strict=True), "o-", color=OURS, linewidth=0.5, markersize=3.5, alpha=0.5)
    means = [(100 * row.mean, at) for at, row in enumerate(comparison.rows) if row.mean is not None]
    axis.plot(*zip(*means, strict=True), "|", color=OURS, markersize=15, markeredgewidth=2, label="our mean")
    theirs = [(published[row.name], at) for at, row in enumerate(comparison.rows) if row.name in published]
    if theirs:
        axis.plot(*zip(*theirs, strict=True), "D", color=THEIRS, markersize=5, label="the paper")
    axis.set_yticks(range(len(comparison.rows)), [row.label for row in comparison.rows])
    axis.set_ylim(len(comparison.rows) - 0.5, -0.5)
    axis.set_xlabel(f"test accuracy (%); a dot per run, those of a {experiment.over} joined")
    return _with_legend(figure, axis)


def contrasts(state: State) -> Figure:
    """Every contrast with its simultaneous 95 % and its own 90 % interval, the region of equivalence, the paper's."""
    assert state.so_far is not None
    family = state.so_far.contrasts
    figure, (axis,) = panels(1, 1, (7.6, 1.3 + 0.36 * len(family)))
    axis.axvline(0, color=SOFT, linewidth=0.8)
    for at, contrast in enumerate(family):
        region, difference = state.region_of(contrast), contrast.difference
        axis.fill_betweenx([at - 0.4, at + 0.4], -region, region, color=SOFT, alpha=0.15, label="region of equivalence")
        if difference is not None:
            ends = ((difference.interval, 1.2, "95 %, all at once"), (difference.interval_at(0.10), 3.5, "90 % alone"))
            for interval, width, label in ends:
                if interval is not None:
                    line = [100 * end for end in interval]
                    axis.plot(line, [at, at], color=OURS, linewidth=width, label=label, solid_capstyle="butt")
            axis.plot([100 * difference.mean], [at], "o", color=OURS, markersize=6, label="ours")
        theirs = state.experiment.published_difference((contrast.first, contrast.second))
        if theirs is not None:
            axis.plot([theirs], [at], "D", color=THEIRS, markersize=5, label="the paper")
    axis.set_yticks(range(len(family)), [f"{contrast.first} : {contrast.second}" for contrast in family])
    axis.set_ylim(len(family) - 0.5, -0.5)
    axis.set_xlabel("difference of test accuracy (points)")
    return _with_legend(figure, axis, 5)


def boxes(ours: Mapping[str, Sequence[Box]], theirs: Mapping[str, Sequence[Box]], title: str, bound: float) -> Figure:
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
        if bound:
            axis.axhline(bound, color=SOFT, linestyle="--", linewidth=0.8)
        layers = range(1, len(ours[part]) + 1)
        axis.set_xticks(layers, list(map(str, layers)))
    axes[-1].set_xlabel("layer, from the input on")
    return figure


def tuning(curves: Mapping[str, Mapping[float, float]], chosen: Mapping[str, float], symbol: str) -> Figure:
    """Validation accuracy against the numbers that were tried, a line per row, or its mean over folds."""
    figure, (axis,) = panels(1, 1, (7.6, 3.2))
    for index, (row, points) in enumerate(curves.items()):
        colour = SERIES[index % len(SERIES)]
        axis.plot(*zip(*points.items(), strict=True), "o-", color=colour, markersize=3.5, label=row)
        if chosen.get(row) in points:
            axis.plot([chosen[row]], [points[chosen[row]]], "o", color=colour, markersize=9, fillstyle="none")
    ticks = sorted({value for points in curves.values() for value in points})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(f"{symbol}; a ring marks the choice" if chosen else f"{symbol}; means over folds")
    axis.set_ylabel("validation accuracy (%)")
    return _with_legend(figure, axis, 2)


def searches(cases: Sequence[Case], deepest: float = 10) -> Figure:
    """Points lost against γ, a line per search and a colour per data set; a ring is the early rule's choice."""
    figure, (axis,) = panels(1, 1, (7.6, 3.2))
    by_search = {(case.experiment.recipe.name, case.row): case for case in cases}
    colours = dict(zip(dict.fromkeys(data for data, _ in by_search), SERIES, strict=False))
    for (data, _), case in by_search.items():
        axis.plot(*zip(*case.lost.items(), strict=True), "o-", color=colours[data], markersize=3.5, label=data)
        axis.plot([case.rule], [case.regret], "o", color=colours[data], markersize=10, fillstyle="none")
    ticks = sorted({gamma for case in cases for gamma in case.lost if gamma in (0.75, 1, 1.5, 2, 3, 4, 6)})
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
    published, gammas = PAPER["gamma_curve"], [gamma for gamma, _ in curve]
    for axis, what, unit in zip(axes, ("accuracy", "loss"), (100, 1), strict=True):
        for part, line in (("train", "o--"), ("validation", "o-")):
            values = [unit * (getattr(result, f"{part}_{what}") or float("nan")) for _, result in curve]
            axis.plot(gammas, values, line, color=OURS, markersize=4, label=f"ours, {part}")
        for part, line in (("train", "D--"), ("test", "D-")):
            theirs = published[f"{part}_{what}"]
            axis.plot(published["gammas"], theirs, line, color=THEIRS, markersize=4, label=f"the paper, {part}")
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
