"""maxgain gains: the distribution of gains in every layer of a finished run, as the paper's Figures 1 and 2."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..evaluate import gains
from ..files import write_json
from ..regularisers import chosen_for, numbers
from ..report import figures
from ..runs import chosen_device, load_data, load_model, read_config
from ..train import trained_on
from .terminal import Common, DataFolder, Screen


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Measure every image's gain in every layer of a finished run; draw and write the quantiles."""

    run: tyro.conf.Positional[Path]
    """the run's folder"""
    data: DataFolder = None
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Writes gains.png, gains.svg and gains.json into the run's folder."""
    recipe = read_config(options.run)
    device = chosen_device(options.device)
    dataset = load_data(recipe, options.data)
    model = load_model(options.run, dataset, device)
    reports = {
        part: gains(model, split.to(device), recipe.p)
        for part, split in (("train", trained_on(recipe, dataset)), ("test", dataset.test))
    }
    gamma = numbers(chosen_for(recipe)).get("maxgain")
    bound = gamma if gamma is not None and math.isfinite(gamma) else None
    title = f"{recipe.name}, {recipe.regulariser}"
    drawn = figures.gain_boxes({part: report.quantiles() for part, report in reports.items()}, bound, title)
    paths = figures.save(drawn, options.run, "gains")
    content = {"bound": bound} | {part: json.loads(report.to_json()) for part, report in reports.items()}
    write_json(options.run / "gains.json", content)
    for part, report in reports.items():
        screen.show(report.table(f"gain by layer on the {part} set, p = {recipe.p:g}"))
    screen.show(f"written: {', '.join(map(str, [*paths, options.run / 'gains.json']))}")
    return content
