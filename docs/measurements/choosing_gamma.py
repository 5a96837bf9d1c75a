"""Which γ: what a bound does to gains, to the fit and to held-out images, from hardly any to far too small a one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import nn

from maxgain import MaxGain
from maxgain.study.evaluate import evaluate

from .digits import Effort, data, largest_gains, trained, training_images
from .style import BLUE, FAINT, ORANGE, markdown

GAMMAS = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0, math.inf)
FREE = "none"


def measure(effort: Effort) -> dict[str, Any]:
    """Of every γ and seed: the layers' largest gains over all training images, and the accuracies, in per cent."""
    return {_name(gamma): [_look(_network(effort, seed, gamma)) for seed in effort.seeds] for gamma in GAMMAS}


def _network(effort: Effort, seed: int, gamma: float) -> nn.Module:
    return trained(effort, seed, (lambda model: MaxGain(model, gamma)) if math.isfinite(gamma) else None)


def _look(model: nn.Module) -> dict[str, Any]:
    return {
        "gains": list(largest_gains(model, training_images()).values()),
        "train": 100 * evaluate(model, data().train).accuracy,
        "validation": 100 * evaluate(model, data().validation).accuracy,
    }


def _name(gamma: float) -> str:
    return f"{gamma:g}" if math.isfinite(gamma) else FREE


def _typical(runs: list[dict[str, Any]]) -> float:
    """The median over the layers of their largest gains: what the advice starts from."""
    return float(np.mean([np.median(run["gains"]) for run in runs]))


def table(numbers: dict[str, Any]) -> str:
    """One row per γ, as Markdown: means over seeds."""
    rows = []
    for gamma, runs in numbers.items():
        held = "" if gamma == FREE else f"{np.mean([_held(run, float(gamma)) for run in runs]):.1f}"
        validation = [run["validation"] for run in runs]
        spread = f"{min(validation):.1f} to {max(validation):.1f}"
        fit = f"{np.mean([run['train'] for run in runs]):.1f} %"
        rows.append([gamma, held, f"{_typical(runs):.2f}", fit, f"{np.mean(validation):.1f} %", spread])
    header = [
        "γ",
        "layers at the bound",
        "median largest gain",
        "training accuracy",
        "validation accuracy",
        "its range",
    ]
    return markdown(header, rows)


def _held(run: dict[str, Any], gamma: float) -> int:
    """How many layers come within five per cent of the bound."""
    return sum(gain > 0.95 * gamma for gain in run["gains"])


def draw(numbers: dict[str, Any]) -> Figure:
    """Accuracy on what was trained on and on what was held out, against γ."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panel = figure.subplots()
    names = list(numbers)
    places = np.arange(len(names))
    for what, label, colour in (("train", "training images", ORANGE), ("validation", "held-out images", BLUE)):
        values = np.array([[run[what] for run in runs] for runs in numbers.values()])
        panel.plot(places, values.mean(axis=1), "o-", color=colour, label=label)
        panel.vlines(places, values.min(axis=1), values.max(axis=1), color=colour, linewidth=1.2)
    start = _typical(numbers[FREE])
    finite = [float(name) for name in names if name != FREE]
    at = float(np.interp(start, finite, places[: len(finite)]))
    panel.axvline(at, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), label="where the advice starts")
    panel.set_xticks(places, names)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("γ")
    panel.set_ylabel("accuracy, %")
    panel.grid(axis="y")
    panel.set_axisbelow(True)
    panel.legend(loc="lower right")
    return figure
