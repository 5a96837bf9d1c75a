"""Promise 16 in the long run: a weight that shrinks while its gain stays is named, and no other."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, register_layer
from maxgain.errors import UnsupportedLayerError
from odd_layers import Scaled, Standardised, train


class Turncoat(nn.Linear):
    """Linear in its weight while it is tried, and standardised afterwards."""

    tried = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.tried:
            return F.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight / self.weight.std(), self.bias)


@pytest.mark.parametrize("excess", [1.1, 3.0, 100.0])
@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz])
def test_promise_16_a_weight_that_shrinks_step_by_step_while_its_gain_stays_is_named(constrain, excess):
    register_layer(Standardised, instance_dims=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), Standardised(3, 8, 3, bias=False))
    x = torch.randn(4, 3, 8, 8)
    free = constrain(model, float("inf"))
    train(model, x, steps=1, constraint=free)
    size = free.gains["1"]
    free.detach()
    constraint = constrain(model, {"0": 0.01, "1": size / excess})
    with pytest.raises(
        UnsupportedLayerError, match=r"^layer '1' \(Standardised\) cannot be constrained: its weight has"
    ):
        train(model, x, steps=300, constraint=constraint)
    assert model[1].weight.norm() > 1e-12, "it is noticed while there is something left"


def test_promise_16_a_forward_that_changes_after_it_was_tried_is_named():
    model = nn.Sequential(Turncoat(6, 4))
    constraint = MaxGain(model, 0.05)
    train(model, torch.randn(4, 6), steps=3, constraint=constraint)
    constraint.detach()
    model[0].tried = True
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' \(Turncoat\) .* its gain has not come down"):
        train(model, torch.randn(4, 6), steps=300, constraint=constraint)


HARSH: dict[str, dict[str, Any]] = {
    "a learning rate that is far too high": {"lr": 1.0},
    "momentum": {"lr": 1.0, "momentum": 0.99},
    "weight decay": {"lr": 0.1, "weight_decay": 1.0},
    "no learning at all": {"lr": 0.0},
}


@pytest.mark.parametrize("gamma", [1e-3, 1.0])
@pytest.mark.parametrize("name", HARSH)
def test_promise_16_no_harsh_training_is_taken_for_a_weight_that_slips(name, gamma):
    torch.manual_seed(0)
    batch_norm = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(batch_norm, nn.Linear(96, 32), nn.Tanh(), Scaled(32, 16), nn.Linear(16, 2))
    optimiser = torch.optim.SGD(model.parameters(), **HARSH[name])
    constraint = MaxGain(model, gamma).attach(optimiser)
    for _ in range(130):
        optimiser.zero_grad()
        # Batches whose largest gain is noisy: some are a thousand times larger, some nearly all zeros.
        x = torch.randn(8, 2, 6, 6) * 10.0 ** torch.randint(-3, 4, (8, 1, 1, 1)) * (torch.rand(8, 2, 6, 6) < 0.1)
        F.cross_entropy(model(x), torch.randint(2, (8,))).backward()
        optimiser.step()
    assert all(math.isfinite(gain) for gain in constraint.gains.values())


def test_promise_16_inputs_that_come_to_show_more_are_not_taken_for_a_weight_that_slips():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight -= layer.weight.mean(1, keepdim=True)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.0)
    constraint = MaxGain(layer, 0.1).attach(optimiser)
    for step in range(40):
        layer(torch.ones(4, 8) if step < 6 else torch.randn(4, 8)).sum().backward()  # at first it shows next to nothing
        optimiser.step()
        with torch.no_grad():
            layer.weight *= 1.3
    assert constraint.gains[""] < 0.2
