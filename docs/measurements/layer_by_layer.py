"""What MaxGain does, layer by layer: the gains of all training images without it and with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator
from torch import nn

from maxgain import MaxGain, measure_gains

from .digits import Effort, short, trained, training_images, validation_accuracy
from .style import BLUE, INK, ORANGE, guide, markdown

GAMMA = 1.5
KINDS = {"without": None, "with": lambda model: MaxGain(model, GAMMA)}


def measure(effort: Effort) -> dict[str, Any]:
    """The five quantiles of every layer's gains, and the validation accuracy, of every seed."""
    numbers: dict[str, Any] = {"gamma": GAMMA}
    for kind, constrain in KINDS.items():
        networks = [trained(effort, seed, constrain) for seed in effort.seeds]
        quantiles = [_quantiles(network) for network in networks]
        numbers[kind] = {
            "quantiles": {layer: [run[layer] for run in quantiles] for layer in quantiles[0]},
            "validation_accuracy": 100 * float(np.mean([validation_accuracy(network) for network in networks])),
        }
    return numbers


def _quantiles(model: nn.Module) -> dict[str, tuple[float, ...]]:
    return {short(name): row for name, row in measure_gains(model, [training_images()]).quantiles().items()}


def table(numbers: dict[str, Any]) -> str:
    """Largest gains by layer and the accuracy, as Markdown: means over seeds."""
    layers = numbers["without"]["quantiles"]
    rows = [[layer, *(f"{np.mean(_largest(numbers[kind], layer)):.2f}" for kind in KINDS)] for layer in layers]
    rows.append(["validation accuracy", *(f"{numbers[kind]['validation_accuracy']:.1f} %" for kind in KINDS)])
    return markdown(["largest gain over all training images", "without", f"γ = {numbers['gamma']:g}"], rows)


def _largest(kind: dict[str, Any], layer: str) -> list[float]:
    return [row[-1] for row in kind["quantiles"][layer]]


def draw(numbers: dict[str, Any]) -> Figure:
    """Two boxes per layer, from the input on the left to the output on the right; the first seed's."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panel = figure.subplots()
    guide(panel, numbers["gamma"], f"γ = {numbers['gamma']:g}")
    handles = panel.get_legend_handles_labels()[0]
    for kind, offset, colour in (("without", -0.19, ORANGE), ("with", 0.19, BLUE)):
        _boxes(panel, [rows[0] for rows in numbers[kind]["quantiles"].values()], offset, colour)
        handles.insert(0, Patch(color=colour, label=f"{kind} MaxGain"))
    layers = list(numbers["without"]["quantiles"])
    panel.set_yscale("log")
    panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("gain ‖Wx‖ / ‖x‖")
    panel.set_xticks(range(len(layers)), layers)
    panel.tick_params(axis="x", length=0)
    panel.grid(axis="y")
    panel.set_axisbelow(True)
    panel.legend(handles=[handles[1], handles[0], handles[2]], loc="upper right", ncols=3)
    return figure


def _boxes(panel: Axes, rows: list[list[float]], offset: float, colour: str) -> None:
    boxes = [dict(zip(("whislo", "q1", "med", "q3", "whishi"), row, strict=True)) for row in rows]
    panel.bxp(
        boxes,
        positions=np.arange(len(rows)) + offset,
        widths=0.3,
        showfliers=False,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": colour, "edgecolor": colour},
        medianprops={"color": INK, "linewidth": 1.4},
        whiskerprops={"color": colour, "linewidth": 1.4},
        capprops={"color": colour, "linewidth": 1.4},
    )
