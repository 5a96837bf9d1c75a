"""maxgain demo: the whole story on real data that needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comparing.comparison import Comparison
from ..comparing.sentences import points
from ..recipes import recipe_named
from ..report import figures, page
from . import compare
from .terminal import Common, Screen, typed

EXAMPLES = {
    "maxgain demo": "a few minutes on a CPU, nothing to download",
    "maxgain demo --out elsewhere": "into another folder",
}

GAMMA = 2.5
"""Chosen on the folds' validation parts alone, by experiments/demo_settings.py; LOG.md has the numbers."""
FOLDS = 10
FREE, BOUNDED = "none", f"maxgain={GAMMA:g}"
NEXT = {
    typed("list"): "regularisers, networks and recipes to try",
    typed("train", "digits", "--regulariser", "maxgain=2", "--out", "runs/first"): "one run by itself",
    typed("tune", "digits", "--regulariser", "maxgain", "--grid", "gamma=1.25:3:0.25"): "choose the bound",
}


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
        "Does bounding each layer's gain help a small network that has seen about 140 images?\n"
        f"Ten folds of scanned digits that share no image, each trained on with no regulariser and with MaxGain, "
        f"γ = {GAMMA:g}."
    )
    comparison, place = compare.compared(
        compare.Options(
            recipe=recipe_named("digits"),
            regularisers=(FREE, BOUNDED),
            folds=FOLDS,
            out=options.out,
            jobs=options.jobs,
            device=options.device,
        ),
        screen,
    )
    content = compare.conclude(comparison, place, screen)
    drawn = [_draw_gains(comparison, regulariser, options.out) for regulariser in (FREE, BOUNDED)]
    report = options.out / "report.html"
    page.write(options.out, report)
    screen.show(_what_it_did(comparison))
    screen.show("Folds this small show large differences only. On CIFAR-10 MaxGain helps: see REPRODUCTION.md.")
    screen.end([*drawn, report], NEXT)
    screen.show(f"the page to look at: {report.absolute().as_uri()}")
    compare.show_gaps(comparison, screen)
    return {"comparison": content, "figures": [str(path) for path in drawn], "page": str(report)}


def _what_it_did(comparison: Comparison) -> str:
    """The gains before the accuracy: the bound acts on those, and what it does to accuracy is what was asked."""
    gain, layer = max(_gains(comparison, FREE))
    held, _ = max(_gains(comparison, BOUNDED))
    said = (
        f"What MaxGain did: the largest gain of any layer on a training image, over all folds, is {held:.2f}; "
        f"without it, {gain:.2f} (in {layer})."
    )
    free, bounded = (comparison.row(name).summary for name in (FREE, BOUNDED))
    if free is None or bounded is None:
        return said
    decided = comparison.contrasts[0].decided
    if decided is None or decided.interval is None:
        difference = ""
    else:
        low, high = map(points, decided.interval)
        difference = f", a difference of {points(decided.mean)} points (95 % interval {low} to {high})"
    return f"{said} Test accuracy: {free.mean:.1%} without and {bounded.mean:.1%} with it{difference}."


def _gains(comparison: Comparison, regulariser: str) -> list[tuple[float, str]]:
    """The largest gain of every layer in every run, over the images that it was trained on."""
    layers = [run["max_gain"]["train"] for run in comparison.runs_of(regulariser)]
    return [(gain, layer) for gains in layers for layer, gain in gains.items() if gain is not None]


def _draw_gains(comparison: Comparison, regulariser: str, folder: Path) -> Path:
    """The box plots of the first fold's run."""
    first = min(comparison.runs_of(regulariser), key=lambda record: record["fold"] or 0)
    name = regulariser.partition("=")[0]
    title = f"digits, fold {first['fold']}, {regulariser}"
    png, _ = figures.save(figures.gain_boxes(first["gain_quantiles"], first["gamma"], title), folder, f"gains-{name}")
    return png
