"""How far gains get past the bound if only every k-th step measures and projects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from maxgain import MaxGain

from .digits import GAMMA, LEARNING_RATE, Effort, batches, drop_rate, learn, network, validation_accuracy
from .style import BLUE, GREEN, ORANGE, beside, markdown

EVERY = (1, 2, 4, 8, 16)
DRAWN = {1: BLUE, 4: GREEN, 16: ORANGE}
"""Which of them are drawn step by step, and in which colours."""
STEPS_SHOWN = 96


def measure(effort: Effort) -> dict[str, Any]:
    """Trains with each k and keeps the excess over γ after each step, in per cent, and the accuracy reached."""
    numbers: dict[str, Any] = {"drop": effort.drop}
    for k in EVERY:
        runs = [_run(effort, seed, k) for seed in effort.seeds]
        excess = np.stack([steps for steps, _ in runs]).clip(min=0)
        before = effort.drop * excess.shape[1] // effort.epochs
        numbers[str(k)] = {
            "mean": [float(excess[:, :before].mean()), float(excess[:, before:].mean())],
            "largest": [float(excess[:, :before].max()), float(excess[:, before:].max())],
            "validation_accuracy": 100 * float(np.mean([accuracy for _, accuracy in runs])),
            "steps": excess[0, :STEPS_SHOWN].tolist(),
        }
    return numbers


def _run(effort: Effort, seed: int, k: int) -> tuple[np.ndarray, float]:
    """After each step, by how much the largest gain of any layer on the batch exceeds γ; and the accuracy reached."""
    model = network(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    MaxGain(model, GAMMA, every=k).attach(optimiser)
    after = MaxGain(model, math.inf, measure="fresh").attach(optimiser)
    excess = []
    for epoch, images, labels in batches(effort, seed):
        drop_rate(optimiser, effort, epoch)
        learn(model, optimiser, images, labels)
        excess.append(100 * (max(after.gains.values()) / GAMMA - 1))
    return np.array(excess), validation_accuracy(model)


def table(numbers: dict[str, Any]) -> str:
    """One row per k as Markdown."""
    rows = []
    for k in EVERY:
        row = numbers[str(k)]
        mean, largest = (" → ".join(f"{value:.2f} %" for value in row[key]) for key in ("mean", "largest"))
        rows.append([f"{k}", mean, largest, f"{row['validation_accuracy']:.1f} %"])
    return markdown(["k", "mean excess", "largest excess", "validation accuracy"], rows)


def draw(numbers: dict[str, Any]) -> Figure:
    """Left, the excess step by step for some k; right, the largest one against k."""
    figure, left, right = beside((1.35, 1), height=3)
    steps, sizes = left.subplots(), right.subplots()
    for k, colour in reversed(DRAWN.items()):
        shown = numbers[str(k)]["steps"]
        steps.plot(range(1, len(shown) + 1), shown, color=colour, linewidth=1.3, label=f"k = {k}")
    steps.set_title("excess on the batch after each step")
    steps.set_xlabel("step")
    for key, colour, marker in (("largest", ORANGE, "o"), ("mean", BLUE, "s")):
        values = [numbers[str(k)][key][0] for k in EVERY]
        sizes.plot(EVERY, values, color=colour, marker=marker, markersize=4, linewidth=1.4, label=key)
    sizes.set_title("before the learning rate drops")
    sizes.set_xlabel("k")
    sizes.set_xscale("log", base=2)
    sizes.set_xticks(EVERY, [str(k) for k in EVERY])
    for panel in (steps, sizes):
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        panel.legend()
    return figure
