"""A gain is that of the linear part (promise 2), also where the bias is so large that the output hardly shows it."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import MaxGain, measure_gains


def exact_gain(layer: nn.Module, x: Tensor) -> float:
    """The largest gain in float64, without the bias."""
    weight = layer.weight.detach().double()
    z = nn.functional.linear(x.double(), weight) if weight.dim() == 2 else nn.functional.conv2d(x.double(), weight)
    return largest_gain(z, x)


def few_steps(model: nn.Module, x: Tensor, constraint: MaxGain, around: Any = None) -> None:
    """Six steps, and one more forward to see what they came to."""
    for step in range(7):
        if step:
            constraint.step()
        with around or nullcontext():
            model(x)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dense": (nn.Linear(32, 24), (16, 32)),
    "convolution": (nn.Conv2d(3, 8, 3), (4, 3, 8, 8)),
}


@pytest.mark.parametrize("ratio", [1.0, 30.0, 300.0, 3000.0])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [True, False])
def test_promise_02_a_bias_in_bfloat16_that_is_much_larger_than_wx_does_not_change_the_gain(autocast, name, ratio):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    x = torch.randn(shape)
    with torch.no_grad():
        layer.bias.uniform_(0.5, 1.0).mul_(ratio)
    layer = layer.float() if autocast else layer.bfloat16()
    x = x if autocast else x.bfloat16()
    constraint = MaxGain(layer, float("inf"))
    few_steps(layer, x, constraint, torch.autocast("cpu", torch.bfloat16) if autocast else None)
    assert constraint.gains[""] == pytest.approx(exact_gain(layer, x), rel=0.02)


def test_promise_02_rows_near_zero_show_no_rounding_as_a_gain():
    torch.manual_seed(0)
    layer = nn.Linear(32, 24).bfloat16()
    x = torch.randn(16, 32).bfloat16()
    x[3] *= 1e-4
    constraint = MaxGain(layer, float("inf"))
    few_steps(layer, x, constraint)
    assert constraint.gains[""] == pytest.approx(exact_gain(layer, x), rel=0.02)


def test_promise_02_weights_that_begin_near_zero_next_to_a_bias_of_one():
    """As the gates of gMLP."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 24)
    nn.init.normal_(layer.weight, std=1e-8)
    nn.init.ones_(layer.bias)
    x = torch.randn(16, 32)
    constraint = MaxGain(layer, float("inf"))
    few_steps(layer, x, constraint)
    assert constraint.gains[""] == pytest.approx(exact_gain(layer, x), rel=0.02)


def test_a_layer_is_run_once_more_only_if_its_bias_is_that_large():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].bias.fill_(1e9)
    constraint = MaxGain(model, float("inf"))
    few_steps(model, torch.randn(4, 8), constraint)
    rounding = constraint._rounding
    assert rounding is not None
    assert rounding.without_bias == {"1"}
    assert model[1].bias.eq(1e9).all(), "the bias is as it was"


def test_transforms_between_steps_are_not_looked_at():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    constraint = MaxGain(model, float("inf"))
    x = torch.randn(4, 8)
    for _ in range(9):
        model(x)
        constraint.step()
        torch.func.vmap(model)(x)
    assert constraint._rounding is not None
    assert constraint._rounding.without_bias == set()


def biased(gamma: float = 0.2) -> tuple[nn.Sequential, torch.optim.Optimizer, MaxGain]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
    with torch.no_grad():
        model[0].bias.uniform_(150, 300)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-7)
    return model, optimiser, MaxGain(model, gamma).attach(optimiser)


def learn(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor) -> None:
    with torch.no_grad():
        model[0].weight *= 1.25
    model(x).square().mean().backward()
    optimiser.step()


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_promise_14_a_resumed_run_knows_which_layers_are_measured_without_their_bias(steps):
    batches = torch.randn(9, 8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    model, optimiser, constraint = biased()
    for x in batches[:steps]:
        learn(model, optimiser, x)
    resumed, other, again = biased()
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(constraint.state_dict())
    for x in batches[steps:]:
        optimiser.zero_grad()
        other.zero_grad()
        learn(model, optimiser, x)
        learn(resumed, other, x)
        assert constraint.gains == again.gains
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    assert list(again._rounding.without_bias) == ["0"]


def test_promise_06_an_evaluation_does_not_take_the_place_of_what_was_to_be_looked_at():
    model, optimiser, constraint = biased()
    for _ in range(3):
        learn(model, optimiser, torch.randn(8, 16).bfloat16())
        model.eval()
        model(torch.randn(8, 16).bfloat16())
        model.train()
    assert list(constraint._rounding.without_bias) == ["0"]


def test_a_constraint_that_is_attached_again_looks_again():
    model, optimiser, constraint = biased()
    for _ in range(20):
        learn(model, optimiser, torch.randn(8, 16).bfloat16())
    constraint.detach()
    constraint.attach(optimiser)
    for _ in range(3):
        learn(model, optimiser, torch.randn(8, 16).bfloat16())
    assert list(constraint._rounding.without_bias) == ["0"]


FAINT: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dense": (nn.Linear(6, 5), (8, 6)),
    "convolution": (nn.Conv2d(3, 4, 3), (8, 3, 6, 6)),
}


@pytest.mark.parametrize("name", FAINT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("faint", [1e-6, 1e-12, 1e-20])
def test_promise_02_a_first_batch_with_an_instance_near_zero_does_not_shrink_the_weight(faint, dtype, name):
    torch.manual_seed(0)
    layer, shape = FAINT[name]
    layer = copy.deepcopy(layer).to(dtype)
    x = torch.randn(shape).to(dtype)
    x[3] *= faint
    exact = exact_gain(layer, x)
    assert max(measure_gains(layer, [x]).gains[""]) == pytest.approx(exact, rel=0.02)
    constraint = MaxGain(layer, exact / 2)
    layer(x)
    constraint.step()
    assert constraint.gains[""] == pytest.approx(exact, rel=0.02)
    assert constraint.scales[""] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("p", "faint", "bias"), [(20.0, 1e-18, 1.0), (3.0, 3e-24, 1e-17), (2.0, 3e18, 1e25)])
def test_promise_04_a_bias_does_not_hide_wx_where_powers_leave_the_range_of_numbers(p, faint, bias):
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    nn.init.constant_(layer.bias, bias)
    x = torch.randn(8, 6)
    exact = (x @ layer.weight.T.detach()).norm(p, dim=1) / x.norm(p, dim=1)
    assert max(measure_gains(layer, [x * faint], p).gains[""]) == pytest.approx(exact.amax().item(), rel=0.04)


def test_an_instance_of_zeros_makes_no_layer_run_again(monkeypatch):
    layer, x = nn.Linear(6, 5), torch.randn(8, 6)
    x[3] = 0
    constraint = MaxGain(layer, 0.1)
    output = layer(x)
    monkeypatch.setattr(layer, "forward", None)
    constraint._maxima[0].see(constraint._layers[0], x, output)
    assert constraint.gains[""] == pytest.approx(exact_gain(layer, x[x.any(1)]), rel=1e-4)
