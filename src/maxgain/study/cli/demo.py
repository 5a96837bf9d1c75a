"""maxgain demo: the whole story on real data that needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compare import records
from ..compare.records import Records
from ..recipes import recipe_named
from ..report import figures, page
from . import compare
from .terminal import Common, Screen

EXAMPLES = {
    "maxgain demo": "a few minutes on a CPU, nothing to download",
    "maxgain demo --out elsewhere": "into another folder",
}

GAMMA = 3.0
"""Chosen on the folds' validation parts alone, by experiments/demo_settings.py; LOG.md has the numbers."""
FOLDS = 10


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Train with and without MaxGain on ten disjoint folds of digits, test the difference, and make a page of it.

    1,797 scanned digits come with the program, in ten folds of about 180 images that share none. What is left behind:
    the records of twenty runs, box plots of the layers' gains, and report.html, which opens offline.
    """

    out: Path = Path("maxgain-demo")
    """where everything goes"""
    jobs: int | None = None
    """runs at a time (default: one per core)"""
    device: str = "cpu"
    """cpu, cuda, or auto: a GPU where there is one; networks this small are no faster there"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Compares, draws the gains of one fold, and writes the page."""
    screen.show(
        "Does bounding each layer's gain help a small network that has seen about a hundred images?\n"
        f"Ten folds of scanned digits that share no image, each trained on with no regulariser and with MaxGain, "
        f"γ = {GAMMA:g}."
    )
    bounded = f"maxgain={GAMMA:g}"
    comparison = compare.run(
        compare.Options(
            recipe=recipe_named("digits"),
            regularisers=("none", bounded),
            folds=FOLDS,
            out=options.out,
            jobs=options.jobs,
            device=options.device,
        ),
        screen,
    )
    found = records.read(options.out / "results")
    drawn = [_draw_gains(found, regulariser, options.out) for regulariser in ("none", bounded)]
    report = options.out / "report.html"
    page.write(options.out, report)
    screen.show(f"gains by layer: {', '.join(map(str, drawn))}")
    screen.show(f"the page to look at: {report.absolute().as_uri()}")
    return {"comparison": comparison, "figures": [str(path) for path in drawn], "page": str(report)}


def _draw_gains(found: Records, regulariser: str, folder: Path) -> Path:
    """The box plots of the first fold's run."""
    first = min(found.where(regulariser=regulariser).runs, key=lambda record: record["fold"] or 0)
    name = regulariser.partition("=")[0]
    title = f"digits, fold {first['fold']}, {regulariser}"
    png, _ = figures.save(figures.gain_boxes(first["gain_quantiles"], first["gamma"], title), folder, f"gains-{name}")
    return png
