"""The small network that most tests of a constraint train, and a step of its training."""

import pytest
import torch
from torch import Tensor, nn

each_measure = pytest.mark.parametrize("measure", ["stale", "fresh"])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def one_step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    optimiser.zero_grad()
    model(torch.randn(5, 6) if x is None else x).square().mean().backward()
    optimiser.step()


@torch.no_grad()
def grow(model: nn.Module) -> None:
    """Puts every layer far above the bound that it was just projected to."""
    for parameter in model.parameters():
        parameter.mul_(16)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())
