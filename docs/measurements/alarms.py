"""Are healthy runs silent, and faults noticed? `python docs/measurements/alarms.py` prints the tables of watching.md.

A small GPT, ViT and VGG are trained with the defaults of `watch`, several seeds each, and again with a fault put into a
layer chosen at random: an input that is nan in one step, a weight times three, a weight that grows by 0.5 % per step.
Six minutes on one core.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from maxgain import watch
from maxgain.alarms import Alarm

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "watch_gpt.py"))
STEPS, FAULT, LAST = 650, 350, 800
SEEDS = range(3)
Batch = tuple[Tensor, Tensor]


class Block(EXAMPLE["Block"]):  # type: ignore[misc]
    """A block in which every patch attends to all."""

    is_causal = False


class ViT(nn.Module):
    """Sixteen patches of two by two pixels."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        for inputs in (before, after):
            layers += [nn.Conv2d(inputs, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))


def texts() -> Iterator[Batch]:
    text = EXAMPLE["standard_library"]()
    while True:
        pieces = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(65)]
        yield pieces[:, :-1], pieces[:, 1:]


def digits() -> Iterator[Batch]:
    found = load_digits()
    images, labels = torch.tensor(found.images[:, None] / 16, dtype=torch.float32), torch.tensor(found.target)
    while True:
        chosen = torch.randint(len(images), (64,))
        yield images[chosen], labels[chosen]


def adam(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


MODELS = {
    "GPT": (lambda: EXAMPLE["GPT"](depth=2), texts, adam(3e-3)),
    "ViT": (ViT, digits, adam(2e-3)),
    "VGG": (vgg, digits, sgd),
}


def constant(step: int) -> float:
    return 1.0


def cosine(step: int) -> float:
    return min(1, (step + 1) / 65) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def train(
    name: str, seed: int, rate: Callable[[int], float], fault: str = "", every: int = 8
) -> tuple[str, list[Alarm]]:
    """Return the layer with the fault, and the alarms; a run with a fault ends with the first."""
    torch.manual_seed(seed)
    make, source, optimise = MODELS[name]
    model, batches, alarms = make(), source(), list[Alarm]()
    optimizer = optimise(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    watching = watch(model, every=every, on_alarm=alarms.append)
    layers = list(watching.constraint._slots)
    layer = layers[int(torch.randint(len(layers), (), generator=torch.Generator().manual_seed(seed)))]
    spoilt = layer.module.register_forward_pre_hook(
        lambda module, args: (args[0] * math.nan,) if fault == "nan" and step == FAULT else None
    )
    for step in range(LAST if fault else STEPS):
        with torch.no_grad():
            if fault == "jump" and step == FAULT:
                layer.parameter.mul_(3)
            if fault == "growth" and step >= FAULT:
                layer.parameter.mul_(1.005)
        x, labels = next(batches)
        nn.functional.cross_entropy(model(x).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        watching.log(step)
        if fault and alarms:
            break
    spoilt.remove()
    watching.close()
    return layer.name, alarms


def main() -> None:
    torch.set_num_threads(1)
    print("| | healthy runs | alarms |\n|---|---:|---:|")
    for name in MODELS:
        alarms = [len(train(name, seed, rate)[1]) for seed in SEEDS for rate in (constant, cosine)]
        print(f"| {name} | {len(alarms)} | {sum(alarms)} |", flush=True)
    print("\n| fault | every | runs | noticed | as | its layer named first | steps until then |")
    print("|---|---:|---:|---:|---|---:|---:|")
    for fault, every in (("nan", 8), ("nan", 1), ("jump", 8), ("growth", 8)):
        runs = [train(name, seed, constant, fault, every) for name in MODELS for seed in SEEDS]
        heard = [(layer, alarms[0]) for layer, alarms in runs if alarms]
        right = sum(layer == alarm.layer for layer, alarm in heard)
        delays = sorted(alarm.step - FAULT for _, alarm in heard)
        kinds = ", ".join(sorted({alarm.kind for _, alarm in heard}))
        waited = f"{delays[0]} to {delays[-1]}" if delays else ""
        print(f"| {fault} | {every} | {len(runs)} | {len(heard)} | {kinds} | {right} | {waited} |", flush=True)


if __name__ == "__main__":
    main()
