"""The study's figures, each a function from numbers to a matplotlib figure."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from maxgain.report import Quantiles, draw_boxes

from .files import write_bytes

# Text stays text in SVG, so that a figure can be searched and read aloud, and the same numbers give the same bytes.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "maxgain"}


def gain_boxes(parts: Mapping[str, Mapping[str, Quantiles]], bound: float | None, title: str) -> Figure:
    """The paper's Figures 1 and 2: the distribution of gains in each layer, one panel a part of the data."""
    layers = max(len(quantiles) for quantiles in parts.values())
    figure = Figure(figsize=(max(5.0, 1.5 + 0.45 * layers), 3.2 * len(parts)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(parts), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, (part, quantiles) in zip(panels, parts.items(), strict=True):
        draw_boxes(panel, quantiles, bound)
        panel.set_title(f"{part} set", loc="left", fontsize="medium")
        panel.grid(axis="y", alpha=0.3)
    return figure


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as the bytes of a PNG or SVG file."""
    buffer = io.BytesIO()
    with rc_context(SVG):
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes the figure as PNG and as SVG."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        write_bytes(path, rendered(figure, path.suffix[1:]))
    return paths
