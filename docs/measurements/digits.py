"""The one experiment that every page looks at: a small convolutional network that learns handwritten digits.

It is the study's own network and data set, trained by the plainest loop there is, so that a page can watch any step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain import measure_gains
from maxgain.constraint import Constraint
from maxgain.study.data import table as datasets
from maxgain.study.data.splits import Dataset
from maxgain.study.evaluate import evaluate
from maxgain.study.models import NETWORKS
from maxgain.study.training import to_float

GAMMA = 2.0
BATCH = 16
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Effort:
    """How much is trained: less for a test that only asks whether the script runs."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: int = 12
    drop: int = 8
    """The epoch after which the learning rate is divided by ten, where a page lets it drop."""
    batches: int | None = None
    """Of an epoch; None for all."""


QUICK = Effort(seeds=(0,), epochs=2, drop=1, batches=3)


@cache
def data() -> Dataset:
    """All of the digits, no fold of them."""
    return datasets.load("digits")


@cache
def training_images() -> Tensor:
    """The training part, as the network takes it."""
    return to_float(data().train.images)


def network(seed: int, *, batchnorm: bool = False) -> nn.Module:
    """The network, with the weights that the seed gives it; those of its layers are the same with batch norm."""
    torch.manual_seed(seed)
    return NETWORKS["cnn"](data().shape, len(data().classes), batchnorm=batchnorm)


def batches(effort: Effort, seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Epoch (from 0), images and labels of every step; the order follows from the seed alone."""
    order = torch.Generator().manual_seed(seed)
    images, labels = training_images(), data().train.labels
    for epoch in range(effort.epochs):
        shuffled = torch.randperm(len(labels), generator=order)
        whole = [index for index in torch.split(shuffled, BATCH) if len(index) == BATCH]
        for index in whole[: effort.batches]:
            yield epoch, images[index], labels[index]


def learn(model: nn.Module, optimiser: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """One step."""
    optimiser.zero_grad()
    F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def drop_rate(optimiser: torch.optim.Optimizer, effort: Effort, epoch: int) -> None:
    """The learning rate of an epoch: a tenth of the first one from the drop on."""
    for group in optimiser.param_groups:
        group["lr"] = LEARNING_RATE if epoch < effort.drop else LEARNING_RATE / 10


def trained(
    effort: Effort, seed: int, constrain: Callable[[nn.Module], Constraint] | None, *, batchnorm: bool = False
) -> nn.Module:
    """The network after Adam, free or constrained."""
    model = network(seed, batchnorm=batchnorm)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    constraint = constrain(model).attach(optimiser) if constrain else None
    for epoch, images, labels in batches(effort, seed):
        drop_rate(optimiser, effort, epoch)
        learn(model, optimiser, images, labels)
    if constraint is not None:
        constraint.detach()
    return model.eval()


def largest_gains(model: nn.Module, images: Tensor) -> dict[str, float]:
    """The largest gain of each layer over some images."""
    return {layer: float(gains.max()) for layer, gains in measure_gains(model, [images]).gains.items()}


def validation_accuracy(model: nn.Module) -> float:
    """The share of the held-out images that the model gets right."""
    return evaluate(model, data().validation).accuracy


def short(layer: str) -> str:
    """A layer's name without the part of the network that it is in."""
    return layer.rpartition(".")[2]


def summary(effort: Effort) -> dict[str, object]:
    """What a reader must know of all the numbers."""
    return {
        "seeds": list(effort.seeds),
        "epochs": effort.epochs,
        "learning_rate_divided_by_10_after_epoch": effort.drop,
        "batch_size": BATCH,
        "learning_rate": LEARNING_RATE,
        "gamma": GAMMA,
        "training_images": len(data().train),
        "validation_images": len(data().validation),
    }
