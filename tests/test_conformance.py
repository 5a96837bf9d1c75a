"""What every constraint does, whatever its estimate is: one row per constraint and way to use it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip
from maxgain.constraint import Constraint

Make = Callable[[nn.Module, Any], Constraint]
ROWS: dict[str, tuple[Make, float]] = {
    "maxgain": (MaxGain, 0.5),
    "maxgain, p = 1": (lambda model, bound: MaxGain(model, bound, p=1), 0.5),
    "maxgain, fresh": (lambda model, bound: MaxGain(model, bound, measure="fresh"), 0.5),
    "maxgain, strength of the rate": (lambda model, bound: MaxGain(model, bound, strength="rate"), 0.5),
    "maxgain, every second step": (lambda model, bound: MaxGain(model, bound, every=2), 0.5),
    "lipschitz, p = 1": (lambda model, bound: Lipschitz(model, bound, p=1), 0.8),
    "lipschitz, p = 2": (lambda model, bound: Lipschitz(model, bound, p=2), 0.8),
    "lipschitz, p = inf": (lambda model, bound: Lipschitz(model, bound, p=float("inf")), 0.8),
    "maxnorm": (MaxNorm, 0.4),
    "weightclip": (WeightClip, 0.05),
}
"""What makes the constraint, and a bound that binds in the network below."""
each_constraint = pytest.mark.parametrize(("make", "bound"), ROWS.values(), ids=ROWS.keys())
RATES = (0.05, 0.05, 0.01, 0.01)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def images(step: int) -> Tensor:
    return torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimiser.param_groups:
            group["lr"] = RATES[step]
        optimiser.zero_grad()
        (model(images(step)) - 1).square().mean().backward()
        optimiser.step()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATES[0], momentum=0.9)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@each_constraint
def test_a_bound_that_never_binds_changes_no_bit(make: Make, bound: float) -> None:
    free, model = net(), net()
    train(free, momentum(free), range(4))
    optimiser = momentum(model)
    make(model, float("inf")).attach(optimiser)
    train(model, optimiser, range(4))
    assert same(model, free)


@each_constraint
def test_a_bound_that_binds_shrinks_weights_and_says_by_how_much(make: Make, bound: float) -> None:
    free, model = net(), net()
    train(free, momentum(free), range(1))
    optimiser = momentum(model)
    constraint = make(model, bound).attach(optimiser)
    train(model, optimiser, range(1))
    shrunk = [name for name, scale in constraint.scales.items() if scale < 1]
    assert shrunk
    for name in shrunk:
        own, other = (one.get_parameter(f"{name}.weight") for one in (model, free))
        assert own.abs().max() < other.abs().max()
        assert torch.equal(model.get_parameter(f"{name}.bias"), free.get_parameter(f"{name}.bias"))


@each_constraint
def test_the_optimisers_memory_is_not_touched(make: Make, bound: float) -> None:
    free, model = net(), net()
    optimisers = momentum(free), momentum(model)
    make(model, bound).attach(optimisers[1])
    for one, optimiser in zip((free, model), optimisers, strict=True):
        train(one, optimiser, range(1))
    states = [[value["momentum_buffer"] for value in optimiser.state.values()] for optimiser in optimisers]
    assert all(map(torch.equal, *states))


@each_constraint
def test_a_frozen_weight_is_left_alone(make: Make, bound: float) -> None:
    model = net()
    model[3].weight.requires_grad_(False)
    before = model[3].weight.clone()
    optimiser = momentum(model)
    make(model, bound).attach(optimiser)
    train(model, optimiser, range(2))
    assert torch.equal(model[3].weight, before)


@each_constraint
def test_a_run_goes_on_to_the_same_bits_from_its_state(make: Make, bound: float) -> None:
    model = net()
    optimiser = momentum(model)
    constraint = make(model, bound).attach(optimiser)
    train(model, optimiser, range(3))
    other = copy.deepcopy(model)
    resumed = momentum(other)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))  # or both would share its tensors
    again = make(other, bound).attach(resumed)
    again.load_state_dict(constraint.state_dict())
    train(model, optimiser, range(3, 4))
    train(other, resumed, range(3, 4))
    assert same(model, other)


@each_constraint
def test_a_copy_watches_the_copied_model_with_the_same_options(make: Make, bound: float) -> None:
    model = net()
    optimiser = momentum(model)
    constraint = make(model, bound).attach(optimiser)
    train(model, optimiser, range(1))
    _, copied = copy.deepcopy((model, constraint))
    if not isinstance(make, type):  # a function of this file cannot be pickled, but the constraint can
        copied = pickle.loads(pickle.dumps(constraint))
    assert copied.model is not model
    assert repr(copied) == repr(constraint)
    assert copied._options() == constraint._options()


@each_constraint
def test_within_paused_nothing_is_projected(make: Make, bound: float) -> None:
    free, model = net(), net()
    optimisers = momentum(free), momentum(model)
    constraint = make(model, bound).attach(optimisers[1])
    train(free, optimisers[0], range(2))
    with constraint.paused():
        train(model, optimisers[1], range(2))
    assert same(model, free)
    for one, optimiser in zip((free, model), optimisers, strict=True):
        train(one, optimiser, range(2, 4))
    assert not same(model, free)
