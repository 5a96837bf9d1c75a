"""The small networks that tests of the constraints train, and how."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain

compiling = [
    pytest.mark.usefixtures("nothing_compiled"),
    # What torch says to itself while it compiles.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
"""For tests that compile."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def mlp() -> nn.Sequential:
    """Two dense layers, 6 → 8 → 3."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def conv_net() -> nn.Sequential:
    """A convolution, batch norm, in-place ReLU and a dense layer, for images of 3 × 6 × 6."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5)
    )  # fmt: skip


def rows(step: int = 0, count: int = 5) -> Tensor:
    """A batch for ``mlp``."""
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(step))


def images(step: int = 0, count: int = 5) -> Tensor:
    """A batch for ``conv_net``."""
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """SGD with momentum on the whole model."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def frozen_sgd(model: nn.Module) -> torch.optim.SGD:
    """An optimizer whose steps change nothing, so that what a step changes is the projection's doing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def training(model: Any, gamma: Any = 0.5, lr: float = 0.05, **options: Any) -> tuple[MaxGain, torch.optim.SGD]:
    """A constraint that is attached to SGD; with a learning rate of 0 what a step changes is the projection's doing."""
    optimizer = sgd(model, lr)
    return MaxGain(model, gamma, **options).attach(optimizer), optimizer


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    microbatches: int = 1,
) -> None:
    """Take a step for each so many batches."""
    optimizer.zero_grad()
    for number, batch in enumerate(batches, 1):
        model(batch).float().square().mean().backward()
        if number % microbatches == 0:
            optimizer.step()
            optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers, copied."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def hooks(model: nn.Module) -> int:
    """How many forward hooks a model has."""
    return sum(len(module._forward_hooks) for module in model.modules())


class StopError(Exception):
    """What ``stop`` raises."""


def stop(alarm: Any) -> None:
    """Stop a run at an alarm."""
    raise StopError(alarm)
