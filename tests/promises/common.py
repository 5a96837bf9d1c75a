"""What tests of several promises train, and how."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

compiling = [
    pytest.mark.usefixtures("nothing_compiled"),
    # What torch says to itself while it compiles.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
"""For tests that compile: each begins with nothing compiled and nothing counted."""

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )


def images(batches: int, size: int = 6) -> list[Tensor]:
    return list(torch.randn(batches, size, 3, 8, 8))


def frozen_in_time(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimiser whose steps change nothing, so that what a step changes is the projection's doing."""
    return torch.optim.SGD(parameters, lr=0.0)


def forget_compiled_code() -> None:
    from torch._dynamo.utils import counters  # which takes seconds, and most tests compile nothing

    torch._dynamo.reset()
    counters.clear()
