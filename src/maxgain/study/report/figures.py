"""The study's figures, each a function from results to a matplotlib figure."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..comparison import Comparison
from ..recipe import Chosen
from ..result import Result
from ..tuning import early_losses, numbers_of

INK, SOFT, RULE = "#1f2328", "#5b636d", "#dcdcd6"
SERIES = ("#0072b2", "#c2570c", "#00805e", "#a8488a", "#8a6a12", "#3d5a80", "#6a6a69", "#a3283a")
"""Distinguishable by colour-blind readers and, with the dashes, in grey."""
DASHES = ("-", "--", ":", "-.")
PANEL = (4.4, 2.75)
"""Inches; fits a phone with its text still readable."""
STYLE = {
    "font.size": 9, "axes.edgecolor": SOFT, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.grid": True, "grid.color": RULE, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "text.parse_math": False,
    "svg.fonttype": "none", "svg.hashsalt": "maxgain",
}  # fmt: skip
METRICS = {
    "train_loss": "training loss (nats)",
    "validation_loss": "validation loss (nats)",
    "train_accuracy": "training accuracy (%)",
    "validation_accuracy": "validation accuracy (%)",
}
SYMBOLS = {"gamma": "γ", "lambda": "λ"}


@rc_context(STYLE)
def forest(comparison: Comparison) -> Figure | None:
    """Every contrast's difference with its simultaneous 95 % interval, and the region of equivalence; None without."""
    tested = [
        (contrast, test.mean, test.interval)
        for contrast in comparison.contrasts
        if (test := contrast.difference) is not None and test.interval is not None
    ]
    if not tested:
        return None
    figure, (axis,) = panels(1, 1, (PANEL[0], 0.7 + 0.42 * len(tested)))
    if comparison.plan.rope is not None:
        axis.axvspan(-comparison.plan.rope, comparison.plan.rope, color=SERIES[2], alpha=0.15, linewidth=0)
    for place, (contrast, mean, interval) in enumerate(tested):
        low, high = (100 * end for end in interval)
        axis.vlines(0, place - 0.18, place + 0.38, color=SOFT, linewidth=1)  # ends below the next label
        axis.plot([low, high], [place, place], color=SERIES[0], solid_capstyle="butt")
        filled = SERIES[0] if contrast.verdict != "inconclusive" else "none"
        axis.plot(100 * mean, place, "o", color=SERIES[0], markerfacecolor=filled, markersize=6)
        axis.text(
            0, place - 0.22, contrast.label, transform=axis.get_yaxis_transform(), va="bottom", fontsize=8, color=INK
        )
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.set_ylim(len(tested) - 0.6, -0.8)
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("difference of accuracy in points, 95 % CI")
    return figure


@rc_context(STYLE)
def gain_boxes(results: Mapping[str, Result], top: float | None = None) -> Figure:
    """Distribution of gains in each layer, one panel per named result, all on the same axis up to `top`."""
    parts = {name: gains_of(result) for name, result in results.items()}
    layers = max(len(quantiles) for _, quantiles in parts.values())
    figure, axes = panels(1, len(parts), (len(parts) * max(4.0, 0.9 + 0.26 * layers), 3.1), sharey=True)
    for axis, (name, (part, quantiles)), result in zip(axes, parts.items(), results.values(), strict=True):
        known = {layer: row for layer, row in quantiles.items() if None not in row}
        keys = ("whislo", "q1", "med", "q3", "whishi")
        axis.bxp(
            [dict(zip(keys, row, strict=True)) for row in known.values()], showfliers=False, patch_artist=True,
            widths=0.6, boxprops={"facecolor": "none", "edgecolor": SERIES[0]}, whiskerprops={"color": SERIES[0]},
            medianprops={"color": SERIES[1], "linewidth": 1.6}, capprops={"color": SERIES[0]},
        )  # fmt: skip
        bound = ""
        if (gamma := result.recipe.gamma) is not None and math.isfinite(gamma):
            axis.axhline(gamma, color=INK, linestyle="--", linewidth=1)
            bound = f", dashes: γ = {gamma:g}" if top is None or gamma < 1.05 * top else f", γ = {gamma:g}"
        axis.set_xticks(range(1, len(known) + 1), list(known), rotation=45, ha="right", fontsize=8,
                        rotation_mode="anchor")  # fmt: skip
        axis.set_title(f"{name}, {part} images{bound}", loc="left", fontsize=9)
        axis.grid(visible=False, axis="x")
        axis.set_ylim(0, None if top is None else 1.05 * top)
    p = {result.recipe.p for result in results.values()}
    axes[0].set_ylabel(f"gain ‖Wx‖ / ‖x‖, p = {', '.join('∞' if math.isinf(one) else f'{one:g}' for one in p)}")
    return figure


def largest_gain(result: Result) -> float:
    """The largest gain of any layer, on the images that `gain_boxes` shows."""
    return max((row[-1] for row in gains_of(result)[1].values() if row[-1] is not None), default=0.0)


@rc_context(STYLE)
def learning_curve(rows: Mapping[str, Sequence[Result]], metric: str) -> Figure | None:
    """A metric by epoch, the mean over each row's runs that have all of it; None where no run has two epochs."""
    factor = 100 if "accuracy" in metric else 1
    lines = {}
    for row, runs in rows.items():
        whole = [column for run in runs if (column := getattr(run.history, metric)) and None not in column]
        if whole and len(whole[0]) > 1:
            lines[row] = factor * np.mean([column for column in whole if len(column) == len(whole[0])], axis=0)
    if not lines:
        return None
    figure, (axis,) = panels(1, 1, PANEL)
    for index, row in enumerate(rows):
        if row in lines:
            axis.plot(range(1, len(lines[row]) + 1), lines[row], label=row, **_style(index))
    axis.set_title(METRICS[metric], loc="left", fontsize=9)
    axis.set_xlabel("epoch")
    axis.locator_params(axis="x", integer=True)
    low, high = min(map(np.min, lines.values())), max(map(np.max, lines.values()))
    if "loss" in metric and low > 0 and high > 20 * low:
        _logarithmic(axis)
    if len(rows) > 1:
        _legend(figure, axis)
    return figure


@rc_context(STYLE)
def tuning_curves(results: Sequence[Result], chosen: Mapping[str, float] | None = None) -> Figure:
    """Accuracy and log loss against the numbers tried, a column per number; means over folds or seeds as lines."""
    parts = varied(results) or [choice for choice in results[0].recipe.chosen if choice.row.parameter]
    size = PANEL[0] * len(parts), 1.7 * PANEL[1]
    figure, axes = panels(2, len(parts), size, sharex="col", sharey="row")
    for axis, (score, part) in zip(axes, product(("accuracy", "loss"), parts), strict=True):
        name, factor = part.row.name, 100 if score == "accuracy" else 1
        for index, of in enumerate(("train", "validation")):
            known = [
                (numbers_of(result.recipe, parts)[name], factor * at)
                for result in results
                if (at := getattr(result, f"{of}_{score}")) is not None
            ]
            axis.plot(*zip(*known, strict=True), "o^"[index], color=SERIES[index], markersize=3.5, alpha=0.6)
            ticks = sorted({value for value, _ in known}) if len(parts) == 1 else []
            means = [np.mean([at for value, at in known if value == tick]) for tick in ticks]
            axis.plot(ticks, means, label=of, **_style(index))
        if chosen and name in chosen:
            axis.axvline(chosen[name], color=SOFT, linewidth=0.8, linestyle=":", label="chosen")
        if score == "loss":
            axis.set_xlabel(f"{SYMBOLS.get(part.row.parameter or '', part.row.parameter)} of {name}")
    axes[0].set_ylabel("accuracy (%)")
    axes[len(parts)].set_ylabel("log loss (nats)")
    _legend(figure, axes[0])
    return figure


@rc_context(STYLE)
def early_curve(results: Sequence[Result], chosen: float) -> Figure:
    """Training loss against γ, with the early rule's tolerance and its choice."""
    losses = {gamma: loss for gamma, loss in sorted(early_losses(results).items()) if math.isfinite(loss)}
    lowest = min(losses.values())
    figure, (axis,) = panels(1, 1, (PANEL[0], 1.15 * PANEL[1]))
    axis.plot(list(losses), list(losses.values()), "o-", color=SERIES[0], markersize=4)
    axis.axhspan(lowest, 1.1 * lowest, color=SERIES[2], alpha=0.25, linewidth=0, label="within 10 % of the lowest")
    label = f"chosen: γ = {chosen:g}"
    axis.plot([chosen], [losses[chosen]], "o", color=SERIES[1], markersize=11, fillstyle="none", label=label)
    axis.set(xscale="log", xlabel="γ", ylabel=f"training loss after {results[0].recipe.epochs} epochs (nats)")
    axis.set_xticks(list(losses), [f"{gamma:g}" for gamma in losses])
    axis.xaxis.minorticks_off()
    if max(losses.values()) > 3 * lowest > 0:
        _logarithmic(axis)
    _legend(figure, axis)
    return figure


def varied(results: Sequence[Result]) -> list[Chosen]:
    """The regularisers whose numbers differ between runs."""
    parts = [choice for choice in results[0].recipe.chosen if choice.row.parameter]
    values = [numbers_of(result.recipe, parts) for result in results]
    return [part for part in parts if len({value[part.row.name] for value in values}) > 1]


def svg(figure: Figure, label: str) -> str:
    """The figure as an inline SVG whose colours follow the page's, light or dark."""
    buffer, width = io.StringIO(), figure.get_figwidth()
    with rc_context(STYLE):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    size = f"width:{width:.2f}in;min-width:{0.75 * width:.2f}in"
    text = re.sub(r'<g id="[^"]*"', "<g", buffer.getvalue().partition("<svg")[2])
    text = f'<svg role="img" aria-label="{escape(label)}" style="{size}"{text}'
    colours = {INK: "currentColor", SOFT: "var(--soft)", RULE: "var(--rule)"}
    colours |= {colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)}
    for colour, variable in colours.items():
        text = text.replace(colour, variable)
    return text


def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of that size in inches, and its axes."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def _logarithmic(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")  # matplotlib's own is TeX
    axis.yaxis.minorticks_off()


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) > 15 else 3
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=8, labelcolor=INK)


def _style(index: int) -> dict[str, Any]:
    rounds, colour = divmod(index, len(SERIES))
    return {"color": SERIES[colour], "linestyle": DASHES[(colour + rounds) % len(DASHES)]}


def gains_of(result: Result) -> tuple[str, Mapping[str, Sequence[float | None]]]:
    """The part of the data that gains are shown of, and its quantiles by layer."""
    part = next(part for part in ("test", "validation", "train") if part in result.gains)
    return part, result.gains[part]
