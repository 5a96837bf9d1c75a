"""maxgain gains: the distribution of gains in every layer of a finished run, as the paper's Figures 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import maxgain
from maxgain.measure import Quantiles

from .. import files
from ..evaluate import gains
from ..files import expect_ours, write_json
from ..report import figures
from ..run_files import open_run
from ..runs import Place
from ..tables import Column, Table
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {"maxgain gains runs/digits-maxgain=2-seed0": "draw the gains of a run that 'maxgain train' has finished"}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Measure every image's gain in every layer of a finished run; draw and write the quantiles."""

    run: tyro.conf.Positional[Path]
    """the run's folder"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Writes gains.png, gains.svg and gains.json into the run's folder."""
    written = [options.run / f"gains.{kind}" for kind in ("png", "svg", "json")]
    opened = open_run(Place(options.run, options.data, options.device))
    expect_ours(*written)
    p, gamma = opened.recipe.p, opened.recipe.gamma
    reports = {part: gains(opened.model, split, p) for part, split in opened.parts.items()}
    bound = gamma if gamma is not None and math.isfinite(gamma) else None
    for part, report in reports.items():
        screen.show(gain_table(f"Gain by layer on the {part} set, p = {p:g}", report.quantiles()))
    drawn = figures.gain_boxes({part: report.quantiles() for part, report in reports.items()}, bound, opened.title)
    figures.save(drawn, options.run, "gains")
    told = {part: files.decode(report.to_json()) for part, report in reports.items()}
    content = {"maxgain": maxgain.__version__, "bound": bound} | told
    write_json(written[-1], content)
    steps = {typed("inspect", options.run): "the same gains beside operator norms"}
    screen.end(written, steps)
    return content


def gain_table(title: str, quantiles: Mapping[str, Quantiles]) -> Table:
    """One row per layer; the largest gain is what a bound is about, so it stays on the narrowest terminal."""
    columns = (
        Column("layer"),
        Column("min", spare=2),
        Column("lower quartile", spare=1),
        Column("median"),
        Column("upper quartile", spare=1),
        Column("max"),
    )
    return Table(title, columns, tuple((name, *row) for name, row in quantiles.items()))
