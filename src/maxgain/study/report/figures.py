"""The study's figures, each a function from numbers to a matplotlib figure."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from maxgain.measure import Quantiles, draw_boxes

from ..files import is_text, write_bytes
from .drawing import is_wide

# Text stays text in SVG, so that a figure can be searched and read aloud, and the same numbers give the same bytes.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "maxgain"}

# By this a figure is known as the program's own, which may be replaced.
MADE_BY_US = {"png": {"Software": "maxgain"}, "svg": {"Creator": "maxgain", "Date": None}}

# Told apart by colour-blind eyes and, with the dashes, on grey paper too.
COLOURS = ("#0072b2", "#c2570c", "#00805e", "#a8488a", "#8a6a12", "#3a8fc0", "#6a6a6a", "#a3283a")
DASHES = ("-", "--", ":", "-.")
LONGEST = 400
"""Inches: no side of a picture can have more than 65,535 pixels, however many layers a network has."""
LONGEST_NAME = 60
"""How many letters of a name a figure shows."""
PANEL = (4.4, 2.75)
"""Inches: a panel that two fit beside each other on paper, and one on a telephone with its text still readable."""


def gain_boxes(parts: Mapping[str, Mapping[str, Sequence[float | None]]], bound: float | None, title: str) -> Figure:
    """The paper's Figures 1 and 2: the distribution of gains in each layer, one panel per part of the data."""
    layers = max(len(quantiles) for quantiles in parts.values())
    width = min(max(5.0, 1.5 + 0.45 * layers), LONGEST)
    figure = Figure(figsize=(width, 3.2 * len(parts)), layout="constrained")
    figure.suptitle(shown(title))
    panels = figure.subplots(len(parts), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, (part, quantiles) in zip(panels, parts.items(), strict=True):
        known = {layer: cast("Quantiles", np.array(row, float)) for layer, row in quantiles.items()}  # None is nan
        draw_boxes(panel, known, bound)
        panel.set_xticks(panel.get_xticks(), list(map(shown, quantiles)), rotation=60, ha="right", fontsize="small")
        panel.set_title(f"{shown(part)} set", loc="left", fontsize="medium")
        panel.set_ylabel("gain ‖Wx‖ / ‖x‖")
        panel.grid(axis="y", alpha=0.3)
        if bound is not None:  # beside the last layer's dashes
            panel.annotate(f"γ = {bound:g}", (1, bound), (4, 0), xycoords=panel.get_yaxis_transform(), va="center",
                           textcoords="offset points", annotation_clip=False)  # fmt: skip
    return figure


def series_style(index: int) -> dict[str, Any]:
    """The look of the index-th of several lines in a panel; different for the first 32."""
    rounds, colour = divmod(index, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": DASHES[(colour + rounds) % len(DASHES)]}


def gains_beside_norms(
    norms: Mapping[str, float],
    gains: Mapping[str, Mapping[str, float]],
    *,
    title: str = "",
    bound: float | None = None,
) -> Figure:
    """Each layer's operator norm as a bar and, as dots, the largest gain that each part of the data shows in it.

    `gains` is by part and layer.
    """
    figure, panel = _panel(PANEL[0] + 1, min(1.5 + 0.2 * len(norms), LONGEST))
    figure.suptitle(shown(title))
    places = range(len(norms))
    panel.barh(places, list(norms.values()), height=0.62, color=COLOURS[0], alpha=0.22, label="operator norm")
    for (part, values), marker, colour in zip(gains.items(), ("o", "^"), (COLOURS[0], COLOURS[1]), strict=False):
        known = [values.get(layer, float("nan")) for layer in norms]
        label = f"largest gain, {shown(part)} set"
        panel.plot(known, places, marker, color=colour, markersize=4, label=label, markerfacecolor="none")
    panel.set_yticks(places, list(map(shown, norms)))
    panel.invert_yaxis()  # the input at the top
    panel.set_xlim(0, 1.05 * max(norms.values(), default=1))
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("how much the layer amplifies, ‖Wx‖ / ‖x‖")
    if bound is not None:
        panel.axvline(bound, color="#444444", linestyle="--", linewidth=1, label=f"γ = {bound:g}")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8, handletextpad=0.3, columnspacing=1)
    return figure


def tuning_curve(
    curve: Sequence[Mapping[str, Any]],
    labels: Mapping[str, str],
    chosen: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """The paper's Figure 3: accuracy and log loss against the numbers tried, on the training and the validation part.

    `curve` holds what each trial came to, with its numbers under 'values'; those that did not come to an end are left
    out. `labels` says what each number is called, and each gets a column. With one number its trials are joined by a
    line. `chosen` is marked.
    """
    rows = [row for row in curve if row["status"] == "complete"]
    figure = Figure(figsize=(PANEL[0] * len(labels), 2 * PANEL[1]), layout="constrained")
    panels = figure.subplots(2, len(labels), sharex="col", sharey="row", squeeze=False)
    for column, (name, label) in enumerate(labels.items()):
        at = [row["values"][name] for row in rows]
        for panel, score in zip(panels[:, column], ("accuracy", "loss"), strict=True):
            for index, part in enumerate(("train", "validation")):
                style = series_style(index) if len(labels) == 1 else {"color": COLOURS[index], "linestyle": "none"}
                panel.plot(at, [row[f"{part}_{score}"] for row in rows], marker="o^"[index], label=part, **style)
            if chosen:
                panel.axvline(chosen[name], color="#444444", linewidth=0.8, linestyle=":", label="chosen")
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        panels[1, column].set_xlabel(shown(label))
        if is_wide(at):
            panels[1, column].set_xscale("log")
    panels[0, 0].set_ylabel("accuracy")
    panels[0, 0].yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    panels[1, 0].set_ylabel("log loss (nats)")
    losses = [row[f"{part}_loss"] for row in rows for part in ("train", "validation")]
    if is_wide(losses):
        panels[1, 0].set_yscale("log")
    figure.suptitle(shown(title))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def cost_ratios(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """What a step costs with each variant, as a ratio to the step without: one panel per network."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "sweep" not in row and row["variant"] != "without":
            panels.setdefault(row["network"], []).append(row)
    sizes = [len(here) for here in panels.values()] or [1]
    figure = Figure(figsize=(6.4, 0.6 + 0.45 * len(sizes) + 0.26 * sum(sizes)), layout="constrained")
    figure.suptitle("A training step with a constraint, over the same step without")
    axes = figure.subplots(len(sizes), 1, sharex=True, squeeze=False, height_ratios=[1 + size for size in sizes])[:, 0]
    for panel, (network, here) in zip(axes, panels.items(), strict=False):
        modes = {row["mode"] for row in here}
        for place, row in enumerate(here):
            ours = row["variant"].startswith("MaxGain")
            panel.plot([row["lowest"], row["highest"]], [place, place], color="#999999", linewidth=1)
            panel.plot(row["ratio"], place, "o", color=COLOURS[0 if ours else 1])
            panel.annotate(f"{row['ratio']:.2f}", (row["highest"], place), (5, 0), textcoords="offset points",
                           va="center", fontsize="small")  # fmt: skip
        panel.axvline(1, color="#333333", linewidth=0.8)
        names = [row["variant"] if len(modes) == 1 else f"{row['variant']}, {row['mode']}" for row in here]
        panel.set_yticks(range(len(here)), names, fontsize="small")
        panel.set_ylim(len(here) - 0.5, -0.5)
        panel.set_title(shown(network) + (f", {here[0]['mode']}" if len(modes) == 1 else ""),
                        loc="left", fontsize="medium")  # fmt: skip
        panel.grid(axis="x", alpha=0.3)
        panel.margins(x=0.1)
    axes[-1].set_xlabel("ratio (dot: median; line: least to largest turn)")
    return figure


def shown(name: str) -> str:
    """A name as matplotlib is to show it: a dollar sign begins no formula, and nothing breaks the SVG or the layout."""
    text = "".join(letter if is_text(letter) else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return (text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…").replace("$", r"\$")


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as the bytes of a PNG or SVG file."""
    buffer = io.BytesIO()
    with rc_context(SVG), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|constrained_layout not applied")  # odd names, shown as well as can be
        figure.savefig(buffer, format=kind, dpi=150, metadata=MADE_BY_US[kind])
    return buffer.getvalue()


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes the figure as PNG and as SVG."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        write_bytes(path, rendered(figure, path.suffix[1:]))
    return paths


def _panel(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    panel = figure.subplots()
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)
    return figure, panel
