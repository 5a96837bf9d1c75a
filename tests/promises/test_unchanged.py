"""Promise 1: gamma=inf changes nothing, bit for bit, and a layer under its bound is not touched."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from explicit import bits, same_bits
from maxgain import MaxGain
from odd_layers import each_constraint
from promises.common import OPTIMISERS, conv_net, images
from small_net import each_measure


@pytest.mark.parametrize("make_optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
@each_measure
def test_promise_01_inf_gamma_changes_nothing_bit_for_bit(
    make_optimiser: Callable[[Any], torch.optim.Optimizer], measure: Any
) -> None:
    data = images(20)

    def train(constrained: bool) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = conv_net()
        optimiser = make_optimiser(model.parameters())
        if constrained:
            MaxGain(model, gamma=math.inf, measure=measure).attach(optimiser)
        for batch in data:
            optimiser.zero_grad()
            model(batch).square().mean().backward()
            optimiser.step()
        return model.state_dict(), optimiser.state_dict(), torch.get_rng_state()

    assert same_bits(train(constrained=True), train(constrained=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promise_01_a_layer_under_its_bound_keeps_its_bits(dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 64, bias=False, dtype=dtype)
    with torch.no_grad():
        tiny = torch.finfo(dtype).tiny
        layer.weight[0, :4] = torch.tensor([-0.0, tiny, tiny / 2, -tiny / 4], dtype=dtype)
    before = bits(layer.weight)
    constraint = MaxGain(layer, gamma=2.0)
    layer(torch.randn(8, 64, dtype=dtype))
    constraint.step()
    assert 0 < constraint.gains[""] < 2.0
    assert constraint.scales == {"": 1.0}
    assert torch.equal(bits(layer.weight), before)


@each_constraint
def test_promise_01_a_layer_under_its_bound_may_still_be_waiting_for_its_backward(constrain: Any) -> None:
    model = nn.ModuleDict({"trunk": nn.Linear(4, 4), "first": nn.Linear(4, 1), "second": nn.Linear(4, 1)})
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    constrain(model, 100.0).attach(optimiser)
    features = model["trunk"](torch.randn(8, 4))
    first, second = model["first"](features.detach()).mean(), model["second"](features).mean()
    for loss in (first, second):
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def test_promise_01_only_the_layer_above_its_bound_changes() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    with torch.no_grad():
        model[1].weight.mul_(100)
    before = copy.deepcopy(model.state_dict())
    constraint = MaxGain(model, gamma=2.0)
    model(torch.randn(4, 5))
    constraint.step()
    changed = {name for name, tensor in model.state_dict().items() if not same_bits(tensor, before[name])}
    assert changed == {"1.weight"}
