"""Dropout as the paper's authors have it, not inverted: a row for PLAN-2.md, part 9, that only this folder needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from maxgain.study.regularisers import REGULARISERS


class PlainDropout(nn.Module):
    """Zeroes each activation with a rate in training, and multiplies all by 1 - rate otherwise."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand_like(x, dtype=torch.float32) >= self.rate
        return x * kept if self.training else x * (1 - self.rate)


REGULARISERS["plaindropout"] = replace(
    REGULARISERS["dropout"],
    name="plaindropout",
    noise=PlainDropout,
    about="Bernoulli dropout whose kept activations are not scaled in training; all are times 1 - rate for prediction.",
)
