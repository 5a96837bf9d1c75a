"""Models that `maxgain inspect --model` may be pointed at, most of them mistakes."""

import sys

import torch
from torch import nn


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.ReLU(), nn.Linear(4, 2))


def raises() -> nn.Module:
    raise KeyError("a function of the user's own fails")


def exits() -> nn.Module:
    sys.exit(3)


def nothing() -> None:
    return None


def not_a_number() -> nn.Module:
    model = small()
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    return model


def greedy() -> nn.Module:
    return nn.Linear(2**40, 2**20)


def needs_arguments(size: int) -> nn.Module:
    return nn.Linear(size, size)


class Odd(nn.Module):
    """Raises what nobody expects of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("forward of the user's own fails")


def odd() -> nn.Module:
    return Odd()
