"""How well the bound holds when gains are taken before the update, and when they are taken after it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from maxgain import MaxGain
from maxgain.gain import Measure

from .digits import (
    BATCH,
    GAMMA,
    LEARNING_RATE,
    Effort,
    batches,
    data,
    drop_rate,
    largest_gains,
    learn,
    network,
    training_images,
    validation_accuracy,
)
from .style import BLUE, FAINT, INK, ORANGE, beside, markdown

Step = Callable[[], None]
MEASURES: tuple[Measure, ...] = ("stale", "fresh")
SMALL, LARGE = BATCH, 32 * BATCH
"""Batch sizes: one at which a step is mostly the calling of small operations, one at which it is arithmetic."""


def measure(effort: Effort) -> dict[str, Any]:
    """Trains with either estimate and keeps, in per cent of γ, by how much gains exceed it, and what each costs."""
    numbers: dict[str, Any] = {}
    for how in MEASURES:
        runs = [_run(effort, seed, how) for seed in effort.seeds]
        kept, again, whole = (np.stack([run[i] for run in runs]).clip(min=0) for i in range(3))
        before = effort.drop * kept.shape[1] // effort.epochs
        numbers[how] = {
            "batch_kept_largest": [float(kept[:, :before].max()), float(kept[:, before:].max())],
            "batch_again_largest": [float(again[:, :before].max()), float(again[:, before:].max())],
            "whole_mean": [float(whole[:, : effort.drop].mean()), float(whole[:, effort.drop :].mean())],
            "whole_largest": [float(whole[:, : effort.drop].max()), float(whole[:, effort.drop :].max())],
            "whole_at_the_end": float(whole[:, -1].mean()),
            "validation_accuracy": 100 * float(np.mean([run[3] for run in runs])),
            "steps": {"kept": kept[0].tolist(), "again": again[0].tolist()},
            "epochs": whole.tolist(),
        }
    numbers["cost"] = _cost(effort)
    numbers["drop"] = effort.drop
    return numbers


def _run(effort: Effort, seed: int, how: Measure) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """By how much the largest gain of any layer exceeds γ, and the accuracy reached.

    The excess is taken after each step on the batch's inputs as the layers had them, then on the batch put through
    again, and after each epoch on all training images.
    """
    model = network(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    MaxGain(model, GAMMA, measure=how).attach(optimiser)
    after = MaxGain(model, math.inf, measure="fresh").attach(optimiser)
    kept, again, whole = [], [], []
    last = 0
    for epoch, images, labels in batches(effort, seed):
        if epoch > last:
            whole.append(_excess(model, training_images()))
            last = epoch
        drop_rate(optimiser, effort, epoch)
        learn(model, optimiser, images, labels)
        kept.append(100 * (max(after.gains.values()) / GAMMA - 1))
        again.append(_excess(model, images))
    whole.append(_excess(model, training_images()))
    return np.array(kept), np.array(again), np.array(whole), validation_accuracy(model)


def _excess(model: nn.Module, images: Tensor) -> float:
    return 100 * (max(largest_gains(model, images).values()) / GAMMA - 1)


def _cost(effort: Effort) -> dict[str, Any]:
    """What a step costs, as ratios to the same step without a constraint: arithmetic as counted, time as in this run.

    The variants take turns, so that a machine that slows down slows all of them.
    """
    cost: dict[str, Any] = {"arithmetic": {}, "time": {}}
    for batch in (SMALL, LARGE):
        steps = {how: _step_of(how, batch) for how in (None, *MEASURES)}
        operations = {how: _operations(step) for how, step in steps.items()}
        turns = [
            {how: _seconds(step) for how, step in steps.items()} for _ in range(30 if effort.batches is None else 1)
        ]
        seconds = {how: statistics.median(turn[how] for turn in turns) for how in steps}
        cost["arithmetic"][str(batch)] = {how: operations[how] / operations[None] for how in MEASURES}
        cost["time"][str(batch)] = {how: seconds[how] / seconds[None] for how in MEASURES}
    return cost


def _step_of(how: Measure | None, batch: int) -> Step:
    model = network(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    if how is not None:
        MaxGain(model, GAMMA, measure=how).attach(optimiser)
    images, labels = training_images()[:batch], data().train.labels[:batch]
    return lambda: learn(model, optimiser, images, labels)


def _operations(step: Step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    for _ in range(3):
        step()
    return time.perf_counter() - began


def table(numbers: dict[str, Any]) -> str:
    """Both estimates as Markdown."""
    percentages = {
        "largest excess on the batch, each layer's own inputs": "batch_kept_largest",
        "largest excess on the batch, put through again": "batch_again_largest",
        "mean excess on all training images": "whole_mean",
        "largest excess on all training images": "whole_largest",
    }
    rows = [
        [what, *(" → ".join(f"{value:.2f} %" for value in numbers[how][key]) for how in MEASURES)]
        for what, key in percentages.items()
    ]
    rows.append(["validation accuracy", *(f"{numbers[how]['validation_accuracy']:.1f} %" for how in MEASURES)])
    for what, key, batch in (
        ("arithmetic of a step", "arithmetic", SMALL),
        (f"time of a step, batch of {SMALL}", "time", SMALL),
        (f"time of a step, batch of {LARGE}", "time", LARGE),
    ):
        rows.append([what, *(f"{numbers['cost'][key][str(batch)][how]:.2f} ×" for how in MEASURES)])
    return markdown(["", *MEASURES], rows)


def draw(numbers: dict[str, Any]) -> Figure:
    """Left, the excess on the batch after each step; right, that on all training images after each epoch."""
    figure, left, right = beside((1.35, 1), height=3.6)
    strips = left.subplots(2, 1, sharex=True, sharey=True)
    for strip, how, colour in zip(strips, MEASURES, (ORANGE, BLUE), strict=True):
        _strip(strip, numbers[how]["steps"], colour, numbers["drop"] / len(numbers[how]["epochs"][0]))
        strip.set_title(f"{how}: excess on the batch after each step")
    strips[0].legend(loc="upper center", handlelength=1, bbox_to_anchor=(0.4, 1))
    strips[1].set_xlabel("step")
    panel = right.subplots()
    for how, colour, marker in zip(MEASURES, (ORANGE, BLUE), "os", strict=True):
        runs = np.array(numbers[how]["epochs"])
        epochs = np.arange(1, runs.shape[1] + 1)
        panel.fill_between(epochs, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        panel.plot(epochs, runs.mean(axis=0), color=colour, marker=marker, markersize=4, linewidth=1.4, label=how)
    _mark_drop(panel, numbers["drop"] + 0.5)
    panel.set_title("excess on all training images")
    panel.set_xlabel("epoch")
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    panel.legend(loc="upper left")
    return figure


def _strip(panel: Axes, steps: dict[str, list[float]], colour: str, drop: float) -> None:
    kept, again = np.array(steps["kept"]), np.array(steps["again"])
    _needles(panel, again, FAINT, "put through again")
    _needles(panel, kept, colour, "the layers' own inputs")
    _mark_drop(panel, drop * len(kept))
    panel.set_xlim(0, len(kept) + 1)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _needles(panel: Axes, values: np.ndarray, colour: str, label: str) -> None:
    """A line up to each value above 0, all of them in one path, which keeps the file small."""
    places = np.flatnonzero(values)
    gaps = np.full(len(places), np.nan)
    heights = np.stack([np.zeros(len(places)), values[places], gaps], axis=1).flatten()
    panel.plot(np.repeat(places + 1, 3), heights, color=colour, linewidth=0.9, label=label)


def _mark_drop(panel: Axes, place: float) -> None:
    panel.axvline(place, color=INK, linewidth=0.8, linestyle=":")
    panel.annotate("learning rate ÷ 10", (place, 1), (3, -2), xycoords=("data", "axes fraction"),
                   textcoords="offset points", rotation=90, va="top", fontsize=7.5)  # fmt: skip
