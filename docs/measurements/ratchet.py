"""Why the training loss can rise when the learning rate falls under a tight γ, and what helps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.study.evaluate import evaluate

from .digits import LEARNING_RATE, Effort, data, largest_gains, learn, training_images
from .style import BLUE, FAINT, GREEN, ORANGE, markdown

GAMMA = 1.25
"""Tight for eight layers: the network just learns."""
LAYERS, WIDTH, RATE, BATCH = 8, 64, 0.2, 32
FAST, SLOW, LOOKS = 1200, 800, 20
"""Steps before and after the learning rate falls, and how often the network is looked at in all."""
FALL = 1000.0
"""What the learning rate is divided by: so much that the optimiser hardly moves a weight."""
SEEDS = 3
RELEASE, QUANTILE = 1.05, 0.9
WAYS = {
    "full": "as the paper does",
    "quantile": "the batch's 90 % quantile instead of its maximum",
    "release": "γ 5 % larger once the rate has fallen",
    "stop": "no projection once the rate has fallen",
    "rate": "`strength='rate'`",
}


@dataclass
class Run:
    """A network in training."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    seen: list[dict[str, float]]


def measure(effort: Effort) -> dict[str, Any]:
    """Every way on every seed: what the network looks like along the way."""
    steps = (FAST, SLOW) if effort.batches is None else (LOOKS, LOOKS)
    seeds = effort.seeds[:SEEDS]
    runs: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    for seed in seeds:
        before = _trained(_begun(seed), steps[0], sum(steps), lambda model, optimiser: _attached(model, optimiser))
        for way in WAYS:
            runs[way].append(_continued(before, way, steps, seed))
    about = {"steps": list(steps), "gamma": GAMMA, "fall": FALL, "dropout": RATE, "seeds": len(seeds)}
    return about | {"runs": runs}


def _begun(seed: int) -> Run:
    torch.manual_seed(seed)
    widths = [64] + [WIDTH] * (LAYERS - 1) + [10]
    layers: list[nn.Module] = [nn.Flatten()]
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [nn.Dropout(RATE)] if place else []
        layers += [nn.Linear(inputs, outputs)] + ([nn.ReLU()] if place < LAYERS - 1 else [])
        nn.init.kaiming_normal_(layers[-1 if place == LAYERS - 1 else -2].weight)  # type: ignore[arg-type]
    model = nn.Sequential(*layers)
    return Run(model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), _batches(seed), [])


def _batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order, images, labels = torch.Generator().manual_seed(seed), training_images(), data().train.labels
    while True:
        index = torch.randint(len(labels), (BATCH,), generator=order)
        yield images[index], labels[index]


def _attached(model: nn.Module, optimiser: torch.optim.Optimizer, gamma: float = GAMMA) -> MaxGain:
    return MaxGain(model, gamma, strength="rate").attach(optimiser)  # at a constant rate: the paper's, bit for bit


def _trained(
    run: Run, steps: int, total: int, constrain: Callable[[nn.Module, torch.optim.Optimizer], MaxGain | None]
) -> Run:
    """The run after so many more steps."""
    constraint = constrain(run.model, run.optimiser)
    for step in range(1, steps + 1):
        learn(run.model, run.optimiser, *next(run.batches))
        if step % max(1, total // LOOKS) == 0 or step == steps:
            run.seen.append(_look(run.model))
    if constraint is not None:
        constraint.detach()
    return run


def _look(model: nn.Module) -> dict[str, float]:
    train, held_out = (evaluate(model, split) for split in (data().train, data().validation))
    gains = largest_gains(model, training_images())
    weights = [layer.weight.detach().norm().item() for layer in model.modules() if isinstance(layer, nn.Linear)]
    return {
        "train_loss": train.loss,
        "validation_loss": held_out.loss,
        "validation_accuracy": 100 * held_out.accuracy,
        "weight": float(np.exp(np.mean(np.log(weights)))),
        "gain": float(np.exp(np.mean(np.log(list(gains.values()))))),
    }


def _continued(before: Run, way: str, steps: tuple[int, int], seed: int) -> list[dict[str, float]]:
    """What becomes of the run after the rate has fallen; with a quantile, from the beginning."""
    if way == "quantile":
        run = _begun(seed)
        handles = _quantile_projection(run.model, run.optimiser)
        _trained(run, steps[0], sum(steps), lambda model, optimiser: None)
    else:
        model = copy.deepcopy(before.model)
        optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        optimiser.load_state_dict(copy.deepcopy(before.optimiser.state_dict()))
        run, handles = Run(model, optimiser, _batches(seed + 1000), list(before.seen)), []
    run.optimiser.param_groups[0]["lr"] = LEARNING_RATE / FALL
    torch.manual_seed(seed + 1000)
    _trained(run, steps[1], sum(steps), _ways()[way])
    for handle in handles:
        handle.remove()
    return run.seen


def _ways() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer], MaxGain | None]]:
    def rate(model: nn.Module, optimiser: torch.optim.Optimizer) -> MaxGain:
        constraint = _attached(model, optimiser)
        peaks = {name: torch.full_like(peak, LEARNING_RATE) for name, peak in constraint.state_dict().items()}
        constraint.load_state_dict(
            constraint.state_dict() | {name: peak for name, peak in peaks.items() if name.endswith(".peak")}
        )
        return constraint

    return {
        "full": _attached,  # whose first rate is the low one, so that it is at full strength
        "release": lambda model, optimiser: _attached(model, optimiser, RELEASE * GAMMA),
        "stop": lambda model, optimiser: None,
        "quantile": lambda model, optimiser: None,
        "rate": rate,
    }


def _quantile_projection(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[Any]:
    """The paper's projection with a quantile of the batch's gains; taken off by removing the handles."""
    gains: dict[nn.Linear, Tensor] = {}

    def observe(layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if layer.training:
            with torch.no_grad():
                gains[layer] = (output - layer.bias).norm(dim=1) / inputs[0].norm(dim=1).clamp_min(1e-12)

    def project(*_: Any) -> None:
        with torch.no_grad():
            for layer, seen in gains.items():
                layer.weight /= max(1.0, float(seen.quantile(QUANTILE)) / GAMMA)

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return [*(layer.register_forward_hook(observe) for layer in layers), optimiser.register_step_post_hook(project)]


def table(numbers: dict[str, Any]) -> str:
    """Just before the rate falls and at the end, way by way: means over seeds."""
    fallen = _fallen(numbers)
    rows = []
    for way, runs in numbers["runs"].items():
        first, last = (_mean(runs, place) for place in (fallen, -1))
        rows.append(
            [
                WAYS[way],
                f"{first['gain']:.3f} → {last['gain']:.3f}",
                f"{100 * (last['weight'] / first['weight'] - 1):+.1f} %",
                f"{first['train_loss']:.3f} → {last['train_loss']:.3f}",
                f"{first['validation_loss']:.3f} → {last['validation_loss']:.3f}",
                f"{first['validation_accuracy']:.1f} % → {last['validation_accuracy']:.1f} %",
            ]
        )
    header = ["what", "largest gain", "weights", "training loss", "validation loss", "validation accuracy"]
    return markdown(header, rows)


def _fallen(numbers: dict[str, Any]) -> int:
    """The last look before the rate falls."""
    looks, (fast, slow) = len(numbers["runs"]["full"][0]), numbers["steps"]
    return round(looks * fast / (fast + slow)) - 1


def _mean(runs: list[list[dict[str, float]]], place: int) -> dict[str, float]:
    return {name: float(np.mean([run[place][name] for run in runs])) for name in runs[0][place]}


def draw(numbers: dict[str, Any]) -> Figure:
    """Training loss, and the largest gain over all training images, along the way."""
    figure = Figure(figsize=(8, 3.1), layout="constrained")
    panels = figure.subplots(1, 2)
    looks = len(numbers["runs"]["full"][0])
    steps = np.arange(1, looks + 1) * sum(numbers["steps"]) / looks
    fallen = _fallen(numbers)
    for panel, what, title in zip(
        panels, ("train_loss", "gain"), ("training loss", "largest gain, mean of layers"), strict=True
    ):
        for way, colour in (("full", ORANGE), ("stop", GREEN), ("rate", BLUE)):
            runs = numbers["runs"][way]
            start = 0 if way == "full" else fallen
            values = [_mean(runs, place)[what] for place in range(start, looks)]
            panel.plot(steps[start:], values, color=colour, label=WAYS[way].replace("`", ""))
        panel.axvline(numbers["steps"][0], color=FAINT, linewidth=0.9, linestyle=":")
        panel.set_title(title)
        panel.set_xlabel("step; the rate falls at the dotted line")
    panels[0].set_ylim(0, 3 * _mean(numbers["runs"]["full"], fallen)["train_loss"])
    panels[1].axhline(numbers["gamma"], color=FAINT, linewidth=0.9, linestyle="--")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
