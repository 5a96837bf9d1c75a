"""How the pages' tables and figures look: these on a white card, and on a dark one for readers who prefer that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from maxgain.study.report.figures import COLOURS, rendered

BLUE, ORANGE, GREEN = COLOURS[:3]
INK, FAINT, CARD = "#24292f", "#8c959f", "#ffffff"

DARK = {
    INK: "#e6edf3",
    FAINT: "#7d8590",
    CARD: "#161b22",
    BLUE: "#58a6e8",
    ORANGE: "#f0883e",
    GREEN: "#3fb98a",
}
FONTS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "figure.facecolor": CARD,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.facecolor": "none",
    "grid.color": FAINT,
    "grid.alpha": 0.25,
}


def styled() -> AbstractContextManager[None]:
    """The context in which figures are made."""
    return rc_context(SETTINGS)


def beside(width_ratios: tuple[float, float], height: float) -> tuple[Figure, SubFigure, SubFigure]:
    """A figure of two parts beside each other."""
    figure = Figure(figsize=(8, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.06))
    left, right = figure.subfigures(1, 2, width_ratios=width_ratios, squeeze=False)[0]
    return figure, left, right


def guide(panel: Axes, height: float, label: str, *, along: str = "x") -> None:
    """A dashed line at a bound."""
    draw = panel.axhline if along == "x" else panel.axvline
    draw(height, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=label, zorder=1)


def svg(figure: Figure) -> bytes:
    """The figure as SVG that swaps its colours where the reader's surroundings are dark."""
    text = rendered(figure, "svg").decode()
    text = re.sub(r"font-family: [^;\"]+|(?<=px )'DejaVu Sans'[^;\"]*", lambda found: _fonts(found[0]), text)
    # Coordinates to a hundredth of a point: nobody sees more.
    text = re.sub(r'\b(d|x|y|transform|points|clip)="[^"]*"', _rounded, text)
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    return text.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1).encode()


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute[0])


def _fonts(found: str) -> str:
    return f"font-family: {FONTS}" if found.startswith("font-family") else FONTS


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table of so many columns of text and, right of them, numbers."""
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
