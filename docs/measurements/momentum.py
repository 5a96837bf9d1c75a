"""How far a step carries gains past the bound, by optimiser, learning rate and momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from maxgain import MaxGain

from .digits import GAMMA, Effort, batches, learn, network, validation_accuracy
from .style import BLUE, GREEN, INK, ORANGE, beside, guide, markdown

Parameters = Iterable[nn.Parameter]

OPTIMISERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD, learning rate 0.01": lambda parameters: SGD(parameters, lr=0.01),
    "SGD, 0.01, Nesterov momentum 0.9": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "Adam, learning rate 0.001": lambda parameters: Adam(parameters, lr=0.001),
}
MOMENTA = (0.0, 0.5, 0.9)
REACHES = (0.01, 0.02, 0.05, 0.1)
"""Learning rate / (1 - momentum): how far a gradient moves a weight in the end."""
EPOCHS = 5
"""At a learning rate that stays what it is; by then the excess is no longer at its largest."""
STEPS_SHOWN = 200


def measure(effort: Effort) -> dict[str, Any]:
    """Runs every optimiser as it is and with its buffers rescaled, then SGD over learning rates and momenta."""
    effort = replace(effort, epochs=min(effort.epochs, EPOCHS))
    numbers: dict[str, Any] = {"epochs": effort.epochs, "optimisers": {}, "rescaled": {}, "sweep": []}
    for name, make in OPTIMISERS.items():
        runs = [_run(effort, seed, make) for seed in effort.seeds]
        numbers["optimisers"][name] = _summed_up(runs) | {"gain_over_gamma": (runs[0][0] + 1)[:STEPS_SHOWN].tolist()}
        if name != "SGD, learning rate 0.01":  # which remembers nothing
            rescaled = [_run(effort, seed, make, rescale=True) for seed in effort.seeds]
            numbers["rescaled"][name] = _summed_up(rescaled)
    for momentum in MOMENTA:
        for reach in REACHES:
            rate = reach * (1 - momentum)
            make = _sgd(rate, momentum)
            largest = [100 * float(_run(effort, seed, make)[0].max()) for seed in effort.seeds]
            row = {"momentum": momentum, "learning_rate": rate, "reach": reach, "largest": largest}
            numbers["sweep"].append(row | {"median_largest": float(np.median(largest))})
    numbers["largest_over_reach"] = float(np.median([row["median_largest"] / row["reach"] for row in numbers["sweep"]]))
    return numbers


def _sgd(rate: float, momentum: float) -> Callable[[Parameters], Optimizer]:
    return lambda parameters: SGD(parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)


def _run(
    effort: Effort, seed: int, make: Callable[[Parameters], Optimizer], *, rescale: bool = False
) -> tuple[np.ndarray, float]:
    """After each step, by how much the largest gain of any layer exceeds γ, as a fraction; and the accuracy reached."""
    model = network(seed)
    optimiser = make(model.parameters())
    constraint = MaxGain(model, GAMMA).attach(optimiser)
    after = MaxGain(model, math.inf, measure="fresh").attach(optimiser)
    over = []
    for _, images, labels in batches(effort, seed):
        learn(model, optimiser, images, labels)
        if rescale:
            rescale_buffers(model, optimiser, constraint)
        over.append(max(after.gains.values()) / GAMMA - 1)
    return np.array(over), validation_accuracy(model)


def rescale_buffers(model: nn.Module, optimiser: Optimizer, constraint: MaxGain) -> None:
    """Scales momentum and moments as their weights were scaled: what the paper does not do."""
    powers = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2}
    for name, scale in constraint.scales.items():
        state = optimiser.state[model.get_parameter(f"{name}.weight")]
        for buffer in powers.keys() & state.keys():
            state[buffer].mul_(scale ** powers[buffer])


def _summed_up(runs: list[tuple[np.ndarray, float]]) -> dict[str, Any]:
    over = np.stack([steps for steps, _ in runs])
    exceeding = over[over > torch.finfo(torch.float32).eps]
    return {
        "share_of_steps_over": float(len(exceeding) / over.size),
        "mean_where_over": 100 * float(exceeding.mean()) if len(exceeding) else 0.0,
        "largest": 100 * float(over.max()),
        "validation_accuracy": 100 * float(np.mean([accuracy for _, accuracy in runs])),
    }


def table(numbers: dict[str, Any]) -> str:
    """The optimisers as Markdown."""
    named = dict(numbers["optimisers"])
    named |= {f"{name}, buffers rescaled": row for name, row in numbers["rescaled"].items()}
    rows = [
        [
            name,
            f"{100 * row['share_of_steps_over']:.0f} %",
            f"{row['mean_where_over']:.2f} %",
            f"{row['largest']:.2f} %",
            f"{row['validation_accuracy']:.1f} %",
        ]
        for name, row in named.items()
    ]
    header = ["optimiser", "steps that end over γ", "mean excess of those", "largest excess", "validation accuracy"]
    return markdown(header, rows)


def draw(numbers: dict[str, Any]) -> Figure:
    """Left, the largest gain after each step of each optimiser; right, the largest excess against the reach."""
    figure, left, right = beside((1.35, 1), height=3.7)
    panels = left.subplots(3, 1, sharex=True, sharey=True)
    for panel, colour, (name, row) in zip(panels, (BLUE, ORANGE, GREEN), numbers["optimisers"].items(), strict=True):
        _strip(panel, row["gain_over_gamma"], colour)
        panel.set_title(name)
    panels[1].set_ylabel("largest gain after the step / γ")
    panels[2].set_xlabel("step")
    _sweep(right.subplots(), numbers["sweep"], numbers["largest_over_reach"])
    return figure


def _strip(panel: Axes, ratios: list[float], colour: str) -> None:
    values = np.array(ratios)
    steps = np.arange(1, len(values) + 1)
    guide(panel, 1, "γ")
    panel.plot(steps, values, color=colour, linewidth=0.6, alpha=0.6)
    panel.fill_between(steps, 1, values, where=values > 1, interpolate=True, color=colour, linewidth=0)
    panel.set_xlim(0, len(values) + 1)
    panel.set_ylim(0.975, 1.025)
    panel.set_yticks([0.98, 1, 1.02])


def _sweep(panel: Axes, sweep: list[dict[str, Any]], slope: float) -> None:
    for momentum, marker, colour, shift in zip(MOMENTA, "osD", (BLUE, GREEN, ORANGE), (0.93, 1.0, 1.075), strict=True):
        rows = [row for row in sweep if row["momentum"] == momentum]
        reaches = shift * np.array([row["reach"] for row in rows])
        medians = [row["median_largest"] for row in rows]
        panel.vlines(
            reaches,
            [min(row["largest"]) for row in rows],
            [max(row["largest"]) for row in rows],
            color=colour,
            linewidth=1,
        )
        label = "no momentum" if momentum == 0 else f"momentum {momentum:g}"
        panel.plot(reaches, medians, marker, color=colour, markersize=5, label=label)
    ends = np.array([0.008, 0.125])
    panel.plot(ends, slope * ends, color=INK, linewidth=0.8, linestyle=":", zorder=1, label="in proportion")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(REACHES, [f"{reach:g}" for reach in REACHES])
    panel.minorticks_off()
    percentages = (0.2, 0.5, 1, 2, 5, 10, 20)
    panel.set_yticks(percentages, [f"{percentage:g} %" for percentage in percentages])
    panel.set_xlabel("learning rate / (1 − momentum)")
    panel.set_title("largest excess over γ, SGD")
    panel.legend(loc="upper left", handletextpad=0.4)
