"""Promise 16 for layers that are measured and whose weights nobody divides, as yet: they need not be linear in them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from maxgain import Lipschitz, MaxGain
from maxgain.errors import UnsupportedLayerError
from odd_layers import Standardised


def without_a_bound(model: nn.Module, optimiser: torch.optim.Optimizer, constraint: Any) -> None:
    constraint.bounds["0"] = 1e-3


def frozen(model: nn.Module, optimiser: torch.optim.Optimizer, constraint: Any) -> None:
    model.requires_grad_(True)


def of_no_optimiser(model: Any, optimiser: torch.optim.Optimizer, constraint: Any) -> None:
    optimiser.add_param_group({"params": list(model[0].parameters())})


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz])
@pytest.mark.parametrize("change", [without_a_bound, frozen, of_no_optimiser])
def test_promise_16_a_layer_is_tried_when_its_weight_is_to_be_divided_and_not_before(
    constrain: Any, change: Any
) -> None:
    model = nn.Sequential(Standardised(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    model[0].requires_grad_(change is not frozen)
    bound = math.inf if change is without_a_bound else 1e-3
    constraint = constrain(model, {"0": bound, "2": 1e-3})
    optimiser = torch.optim.SGD((model[2] if change is of_no_optimiser else model).parameters(), lr=0.0)
    constraint.attach(optimiser)

    def step() -> None:
        model(torch.randn(4, 3, 8, 8)).sum().backward()
        optimiser.step()

    before = model[0].weight.detach().clone()
    for _ in range(3):
        step()
    assert constraint.gains["0"] > 1e-3
    assert constraint.scales["0"] == 1
    change(model, optimiser, constraint)
    with pytest.raises(
        UnsupportedLayerError, match=r"^layer '0' \(Standardised\) .* halving its weight does not halve"
    ):
        step()
    assert torch.equal(model[0].weight, before)
