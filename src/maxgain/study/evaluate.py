"""How good a model is, and what its layers do to the data: loss, accuracy and gains over a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain.measure import GainReport, Quantiles, evaluating, measure_gains

from .data.splits import Split

BATCH = 500


@dataclass(frozen=True)
class Score:
    """Mean loss in nats, and accuracy as a fraction."""

    loss: float
    accuracy: float


def to_float(images: Tensor) -> Tensor:
    """Bytes to the interval [-1, 1] that the networks take."""
    return images.float().div_(127.5).sub_(1)


def batches(images: Tensor, size: int = BATCH) -> Iterator[Tensor]:
    """The images in order, as the networks take them."""
    for part in torch.split(images, size):
        yield to_float(part)


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> Score:
    """Loss and accuracy of the model in evaluation mode; the split lies where the model does."""
    loss = torch.zeros((), dtype=torch.float64, device=split.labels.device)
    hits = torch.zeros((), dtype=torch.int64, device=split.labels.device)
    with evaluating(model):
        for images, labels in zip(batches(split.images), torch.split(split.labels, BATCH), strict=True):
            logits = model(images)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            hits += (logits.argmax(dim=1) == labels).sum()
    return Score(loss.item() / len(split), hits.item() / len(split))


def gains(model: nn.Module, split: Split, p: float) -> GainReport:
    """Every instance's gain in every layer."""
    return measure_gains(model, batches(split.images), p)


def largest(quantiles: Mapping[str, Quantiles]) -> dict[str, float]:
    """The largest gain of each layer."""
    return {name: row[-1] for name, row in quantiles.items()}
