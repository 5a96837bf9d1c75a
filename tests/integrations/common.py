"""The training that every framework does on two ranks, and the same one on one rank, in a loop."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxgain import MaxGain

GAMMA = 0.6
STEPS = 12
ROWS = 96
BATCH = 16
"""Over all ranks."""


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    x = torch.randn(ROWS, 6)
    return x, x[:, :3].argmax(dim=1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def ended(net: nn.Module, constraint: MaxGain | None) -> dict[str, Any]:
    """What a rank has in the end: whole weights, wherever they lie, and gains by the layer's place in the network."""
    assert constraint is not None
    parameters = list(net.parameters())
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "sharded": isinstance(parameters[0], DTensor),
        "weights": [weight.detach().clone() for weight in weights],
        "gains": {name.rpartition(".")[2]: gain for name, gain in constraint.gains.items()},
    }


def alone() -> dict[str, Any]:
    net = Net()
    optimizer = sgd(net.parameters())
    constraint = MaxGain(net, GAMMA).attach(optimizer)
    x, labels = data()
    for step in range(STEPS):
        start = BATCH * step % ROWS
        nn.functional.cross_entropy(net(x[start : start + BATCH]), labels[start : start + BATCH]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ended(net, constraint)


def expect_as_alone(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both ranks have the same bits, which are those of a single rank but for rounding."""
    expected = alone()
    assert max(expected["gains"].values()) > GAMMA, "else nothing was constrained"
    assert all(map(torch.equal, one["weights"], other["weights"]))
    assert one["gains"] == other["gains"]
    torch.testing.assert_close(one["gains"], expected["gains"], rtol=1e-4, atol=0)
    torch.testing.assert_close(one["weights"], expected["weights"], rtol=1e-4, atol=1e-6)
