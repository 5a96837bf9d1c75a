"""Largest measured gain beside operator norm, layer by layer, when neither, the one or the other is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, measure_gains, operator_norms
from maxgain.lipschitz.norms import NormReport

from .digits import GAMMA, Effort, short, trained, training_images, validation_accuracy
from .style import BLUE, FAINT, ORANGE, guide, markdown

KINDS = {
    "no bound": None,
    "MaxGain, γ = 2": lambda model: MaxGain(model, GAMMA),
    "Lipschitz, λ = 2": lambda model: Lipschitz(model, GAMMA, p=2),
}


def measure(effort: Effort) -> dict[str, Any]:
    """For each kind and layer, one entry per seed: quantiles of the gains over all training images, and the norm."""
    numbers: dict[str, Any] = {}
    for kind, constrain in KINDS.items():
        models = [trained(effort, seed, constrain) for seed in effort.seeds]
        quantiles = [measure_gains(model, [training_images()]).quantiles() for model in models]
        reports = [operator_norms(model, training_images()[:1]) for model in models]
        numbers[kind] = {
            "gain": {short(layer): [list(run[layer]) for run in quantiles] for layer in quantiles[0]},
            "norm": {short(layer): [report.norms[layer] for report in reports] for layer in quantiles[0]},
            "product_of_gains": float(np.mean([np.prod([row[-1] for row in run.values()]) for run in quantiles])),
            "product_of_norms": float(np.mean([report.product for report in reports])),
            "cosine": _means([_cosines(model, report) for model, report in zip(models, reports, strict=True)]),
            "validation_accuracy": 100 * float(np.mean([validation_accuracy(model) for model in models])),
        }
        numbers[kind]["share"] = {
            layer: float(np.mean([row[-1] for row in rows]) / np.mean(numbers[kind]["norm"][layer]))
            for layer, rows in numbers[kind]["gain"].items()
        }
    return numbers


def _cosines(model: nn.Module, report: NormReport) -> dict[str, float]:
    """By layer, the median cosine between its inputs and the direction that it amplifies most."""
    found: dict[str, float] = {}

    def look(layer: str, inputs: Tensor) -> None:
        direction = report.layers[layer].vector
        assert direction is not None
        cosines = F.cosine_similarity(inputs.flatten(1), direction.flatten().to(inputs), dim=1)
        found[short(layer)] = cosines.abs().median().item()

    handles = [
        model.get_submodule(layer).register_forward_hook(lambda module, args, output, layer=layer: look(layer, args[0]))
        for layer in report.layers
    ]
    with torch.no_grad():
        model(training_images())
    for handle in handles:
        handle.remove()
    return found


def _means(runs: list[dict[str, float]]) -> dict[str, float]:
    return {layer: float(np.mean([run[layer] for run in runs])) for layer in runs[0]}


def table(numbers: dict[str, Any]) -> str:
    """Largest gain / operator norm by layer, as Markdown: means over seeds."""
    kinds = list(numbers.values())
    rows = [[layer, *(_both(kind, layer) for kind in kinds)] for layer in kinds[0]["norm"]]
    rows.append(
        [
            "product of all layers",
            *(f"{kind['product_of_gains']:.0f} / {kind['product_of_norms']:.0f}" for kind in kinds),
        ]
    )
    rows.append(["validation accuracy", *(f"{kind['validation_accuracy']:.1f} %" for kind in kinds)])
    return markdown(["", *numbers], rows)


def _both(kind: dict[str, Any], layer: str) -> str:
    largest = np.mean([row[-1] for row in kind["gain"][layer]])
    return f"{largest:.2f} / {np.mean(kind['norm'][layer]):.2f} = {kind['share'][layer]:.2f}"


def draw(numbers: dict[str, Any]) -> Figure:
    """One panel per kind, one row per layer: the gains' range, their largest, and the operator norm beyond them."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(numbers), sharey=True, sharex=True)
    for panel, (kind, row) in zip(panels, numbers.items(), strict=True):
        _rows(panel, row)
        if kind != "no bound":
            guide(panel, GAMMA, "bound", along="y")
        panel.set_title(kind)
    panels[0].invert_yaxis()  # the input at the top
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _rows(panel: Axes, numbers: dict[str, Any]) -> None:
    layers = list(numbers["norm"])
    places = np.arange(len(layers))
    gains = np.array([np.mean(numbers["gain"][layer], axis=0) for layer in layers])
    norms = np.array([np.mean(numbers["norm"][layer]) for layer in layers])
    panel.hlines(places, gains[:, -1], norms, color=FAINT, linewidth=1.2, linestyle=":")
    panel.hlines(places, gains[:, 0], gains[:, -1], color=BLUE, linewidth=5, alpha=0.45, label="gains, all images")
    panel.plot(gains[:, -1], places, "o", color=BLUE, markersize=6, label="largest gain")
    panel.plot(norms, places, "D", color=ORANGE, markersize=6, label="operator norm")
    for place, layer in zip(places, layers, strict=True):
        panel.plot(numbers["norm"][layer], [place] * len(numbers["norm"][layer]), "|", color=ORANGE, markersize=11)
        panel.plot([row[-1] for row in numbers["gain"][layer]], [place] * len(numbers["gain"][layer]), "|",
                   color=BLUE, markersize=11)  # fmt: skip
    panel.set_xscale("log")
    panel.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_yticks(places, layers)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(axis="x")
    panel.set_axisbelow(True)
