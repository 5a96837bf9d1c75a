"""Layers with a forward of their own, linear in their weight or not, and a training that is projection alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip

each_constraint = pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm, WeightClip])


class Standardised(nn.Conv2d):
    """As timm's StdConv2d: the same Wx, however small the weight is."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-8)
        return self._conv_forward(input, weight, self.bias)


class StandardisedInside(nn.Conv2d):
    """The same by what the usual forward calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight / weight.std((1, 2, 3), keepdim=True), bias)


class Squared(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.square(), self.bias)


class Shrinking(nn.Linear):
    """Nearly what it should be."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.sign() * self.weight.abs() ** 1.2, self.bias)


class Same(nn.Conv2d):
    """As timm's Conv2dSame: it pads for itself, and is linear all the same."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.in_features**0.5, self.bias)


class Noisy(nn.Linear):
    """It draws random numbers and keeps count, as layers with noise, quantisation or statistics do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(F.dropout(input, 0.5, training=False) + 0 * torch.rand(()), self.weight, self.bias)


class InPlace(nn.Linear):
    """It overwrites its input, as an in-place dropout does."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.dropout(input, 0.5, inplace=True), self.weight, self.bias)


class Gated(nn.Linear):
    """Its forward takes more than an input."""

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        return gate[:, None] * F.linear(input, self.weight)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gated(x, gate=torch.ones(len(x)))
        return out


class OnePlus(nn.LayerNorm):
    """As the layer norm of Nemotron."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, 1 + self.weight, self.bias)


class OnePlusBatch(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, 1 + self.weight, self.bias, self.training)


class ActedOn(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(torch.sigmoid(super().forward(input)), 0.5)


class InParts(nn.BatchNorm1d):
    """As ghost batch norm: it takes the statistics of each part of a batch, which must be two instances at least."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(InParts, self).forward(part) for part in input.chunk(2)])


class InFloat(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


def train(model: nn.Module, x: Tensor, steps: int = 3, constraint: Any = None) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    if constraint is not None:
        constraint.attach(optimiser)
    for _ in range(steps):
        model(x).sum().backward()
        optimiser.step()
