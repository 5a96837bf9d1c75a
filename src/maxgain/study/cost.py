"""How long training will take on a CPU, roughly and before it begins: arithmetic to be done over arithmetic per second.

A forward and a backward pass take about three times the arithmetic of the forward pass alone. What this processor does
per second, with what else it has to do, is measured in a fraction of a second. An estimate is right within a factor of
about two, which is enough to warn somebody who is about to wait for days.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from maxgain.measure import evaluating

from .data.splits import Dataset
from .recipes import Recipe
from .training import build_model, to_float, trained_on

LONG = 3600.0
"""Seconds of training that somebody should be told of beforehand."""
SLOW = 1e9
"""Multiplications and additions per second of a slow processor: what that has done soon need not be estimated."""
STEP_OVERHEAD = 2e-3
"""Seconds that a step takes however small the network is."""


def forward_arithmetic(model: nn.Module, image: Tensor) -> int:
    """Multiplications and additions of one forward pass, which counts as evaluation."""
    with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return int(counter.get_total_flops())


def speed() -> float:
    """Multiplications and additions per second that a middle-sized convolution gets here and now."""
    images, weight = torch.zeros(16, 64, 16, 16), torch.zeros(64, 64, 3, 3)
    arithmetic = 2 * images[:, 0].numel() * weight.numel()
    took = []
    with torch.no_grad():
        for _ in range(4):
            began = time.perf_counter()
            F.conv2d(images, weight, padding=1)
            took.append(time.perf_counter() - began)
    return arithmetic / min(took[1:])


def run_seconds(recipe: Recipe, dataset: Dataset) -> float:
    """About how long a run of the recipe takes on a CPU."""
    images = len(trained_on(recipe, dataset))
    model = build_model(recipe, dataset, torch.device("cpu"))
    steps = recipe.epochs * (images // recipe.batch_size)
    return training_seconds(model, to_float(dataset.train.images[:1]), recipe.epochs * images, steps)


def training_seconds(model: nn.Module, image: Tensor, images: int, steps: int) -> float:
    """About how long it takes to train on this many images, one after the other, in this many steps."""
    return 3 * forward_arithmetic(model, image) * images / speed() + steps * STEP_OVERHEAD
