"""What batch norm does to the gains of convolutions, and what bounding both does to the two together."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from maxgain import MaxGain
from maxgain.functional import gain

from .digits import (
    GAMMA,
    LEARNING_RATE,
    Effort,
    batches,
    drop_rate,
    largest_gains,
    learn,
    network,
    trained,
    training_images,
)
from .style import BLUE, FAINT, GREEN, INK, ORANGE, guide, markdown

PLACES = ("1_1", "1_2", "2_1", "2_2")
KINDS = {
    "plain": (False, None),
    "plain, all bounded": (False, lambda model: MaxGain(model, GAMMA)),
    "batch norm": (True, None),
    "batch norm, its scales not bounded": (True, lambda model: MaxGain(model, GAMMA, exclude="features.norm*")),
    "batch norm, all bounded": (True, lambda model: MaxGain(model, GAMMA)),
}


def measure(effort: Effort) -> dict[str, Any]:
    """The largest gains of convolutions, of batch norms and of the two together, over all training images."""
    numbers: dict[str, Any] = {"networks": {}}
    for kind, (batchnorm, constrain) in KINDS.items():
        runs = [_gains(trained(effort, seed, constrain, batchnorm=batchnorm)) for seed in effort.seeds]
        numbers["networks"][kind] = {
            part: {place: [run[part][place] for run in runs] for place in PLACES} for part in runs[0]
        }
    spreads = [_spread(effort, seed) for seed in effort.seeds]
    numbers["spread"] = {
        which: {place: float(np.mean([run[place][which] for run in spreads])) for place in PLACES}
        for which in ("running", "batch")
    }
    return numbers


def _gains(model: nn.Module) -> dict[str, dict[str, float]]:
    gains = largest_gains(model, training_images())
    parts = {"conv": {place: gains[f"features.conv{place}"] for place in PLACES}}
    if "features.norm1_1" in gains:
        together = largest_gains(folded(model), training_images())
        parts["norm"] = {place: gains[f"features.norm{place}"] for place in PLACES}
        parts["both"] = {place: together[f"features.conv{place}"] for place in PLACES}
    return parts


def folded(model: nn.Module) -> nn.Module:
    """The same function with each batch norm multiplied into the convolution before it."""
    model = copy.deepcopy(model).eval()
    features = model.get_submodule("features")
    for place in PLACES:
        convolution, norm = getattr(features, f"conv{place}"), getattr(features, f"norm{place}")
        setattr(features, f"conv{place}", fuse_conv_bn_eval(convolution, norm))
        setattr(features, f"norm{place}", nn.Identity())
    return model


def _spread(effort: Effort, seed: int) -> dict[str, dict[str, float]]:
    """How much the estimate of a batch norm's largest gain varies from step to step of the last epoch.

    As its standard deviation in per cent of its mean, with the running variance and with the batch's own.
    """
    model = network(seed, batchnorm=True)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    seen: dict[str, dict[str, list[float]]] = {place: {"running": [], "batch": []} for place in PLACES}

    def look(place: str, norm: Any, x: Tensor) -> None:
        variances = {"running": norm.running_var, "batch": x.var(dim=(0, 2, 3), unbiased=False)}
        for which, variance in variances.items():
            scale = norm.weight * torch.rsqrt(variance + norm.eps)
            seen[place][which].append(gain(x * scale.view(-1, 1, 1), x).max().item())

    for place in PLACES:
        norm = model.get_submodule(f"features.norm{place}")
        norm.register_forward_hook(lambda module, args, output, place=place: look(place, module, args[0].detach()))
    for epoch, images, labels in batches(effort, seed):
        drop_rate(optimiser, effort, epoch)
        learn(model, optimiser, images, labels)
    return {place: {which: _variation(gains, effort.epochs) for which, gains in seen[place].items()} for place in seen}


def _variation(gains: list[float], epochs: int) -> float:
    last = gains[-(len(gains) // epochs) :]
    return 100 * float(np.std(last) / np.mean(last))


def table(numbers: dict[str, Any]) -> str:
    """The gains as Markdown: means over seeds."""
    said = {"conv": "convolution", "norm": "batch norm", "both": "the two together"}
    rows = [
        [kind, said[part], *(f"{np.mean(gains[place]):.2f}" for place in PLACES)]
        for kind, parts in numbers["networks"].items()
        for part, gains in parts.items()
    ]
    return markdown(["network", "largest gain of", *(f"conv{place}" for place in PLACES)], rows, texts=2)


def draw(numbers: dict[str, Any]) -> Figure:
    """Gains as bars from 1, on a logarithmic axis, so that those of two layers in a row add up."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    titles = {
        "batch norm": "nothing bounded",
        "batch norm, its scales not bounded": "all but batch norm bounded",
        "batch norm, all bounded": "all bounded",
    }
    panels = figure.subplots(1, len(titles), sharey=True)
    for panel, (kind, title) in zip(panels, titles.items(), strict=True):
        _bars(panel, numbers["networks"][kind])
        guide(panel, GAMMA, "γ = 2")
        panel.set_title(title)
        panel.set_xticks(range(len(PLACES)), [f"conv{place}" for place in PLACES], fontsize=8)
        panel.tick_params(axis="x", length=0)
    panels[0].set_ylabel("largest gain")
    panels[0].set_ylim(0.8, 10)
    line, *bars = zip(*panels[0].get_legend_handles_labels(), strict=True)
    figure.legend(*zip(*bars, line, strict=True), loc="outside lower center", ncols=4)
    return figure


def _bars(panel: Axes, parts: dict[str, dict[str, list[float]]]) -> None:
    looks = {"conv": ("convolution", BLUE), "norm": ("its batch norm", ORANGE), "both": ("the two together", GREEN)}
    panel.set_yscale("log")
    for offset, (part, (label, colour)) in zip((-0.27, 0, 0.27), looks.items(), strict=True):
        means = np.array([np.mean(parts[part][place]) for place in PLACES])
        places = np.arange(len(PLACES)) + offset
        panel.bar(places, means - 1, 0.24, bottom=1, color=colour, label=label)
        for place, values in zip(places, parts[part].values(), strict=True):
            panel.vlines(place, min(values), max(values), color=INK, linewidth=1)
    panel.axhline(1, color=FAINT, linewidth=0.8)
    panel.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(axis="y")
    panel.set_axisbelow(True)
