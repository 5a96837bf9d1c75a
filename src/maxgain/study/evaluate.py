"""How good a model is, and what its layers do to the data: loss, accuracy and gains over a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain.measure import GainReport, Quantiles, evaluating, measure_gains

from .data.splits import Split
from .predictions import Predictions
from .training import Score, to_float

BATCH = 500


def batches(images: Tensor, size: int = BATCH) -> Iterator[Tensor]:
    """The images in order, as the networks take them."""
    for part in torch.split(images, size):
        yield to_float(part)


@dataclass(frozen=True)
class Answers:
    """What a model says of every image of a split."""

    predicted: Tensor
    """The class that it takes it for."""
    labels: Tensor
    losses: Tensor

    @property
    def score(self) -> Score:
        """Their means."""
        hits = (self.predicted == self.labels).sum()
        return Score(self.losses.double().mean().item(), hits.item() / len(self.labels))

    @property
    def predictions(self) -> Predictions:
        """Small enough to be kept."""
        arrays = (self.predicted, self.labels, self.losses)
        return Predictions.of(*(tensor.cpu().numpy() for tensor in arrays))


@torch.no_grad()
def answers(model: nn.Module, split: Split) -> Answers:
    """What the model says in evaluation mode; the split lies where the model does."""
    predicted, losses = [], []
    with evaluating(model):
        for images, labels in zip(batches(split.images), torch.split(split.labels, BATCH), strict=True):
            logits = model(images).float()
            predicted.append(logits.argmax(dim=1))
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
    return Answers(torch.cat(predicted), split.labels, torch.cat(losses))


def evaluate(model: nn.Module, split: Split) -> Score:
    """Loss and accuracy of the model in evaluation mode."""
    return answers(model, split).score


def gains(model: nn.Module, split: Split, p: float) -> GainReport:
    """Every instance's gain in every layer."""
    return measure_gains(model, batches(split.images), p)


def largest(quantiles: Mapping[str, Quantiles]) -> dict[str, float]:
    """The largest gain of each layer."""
    return {name: row[-1] for name, row in quantiles.items()}
