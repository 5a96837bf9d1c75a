"""Every constraint × every promise that all of them share. A new constraint is enrolled by its row."""

import contextlib
import copy
import inspect
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxgain
from explicit import same_bits
from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip
from maxgain.constraint import Constraint
from maxgain.errors import AttachError, BoundError, PatternError, StateError, UnsupportedLayerError
from small_net import grow

Make = Callable[..., Constraint]
# The bound is one that binds on the network below from its first step on.
ROWS: dict[str, tuple[Make, float]] = {
    "MaxGain": (MaxGain, 0.1),
    "MaxGain, p = 1": (partial(MaxGain, p=1), 0.1),
    "MaxGain, p = inf": (partial(MaxGain, p=math.inf), 0.1),
    "MaxGain, fresh": (partial(MaxGain, measure="fresh"), 0.1),
    "MaxGain, whole samples": (partial(MaxGain, instance="sample"), 0.1),
    "MaxGain, every=2": (partial(MaxGain, every=2), 0.1),
    "MaxGain, strength of the rate": (partial(MaxGain, strength="rate"), 0.1),
    "Lipschitz, p = 1": (partial(Lipschitz, p=1), 0.3),
    "Lipschitz, p = 2": (partial(Lipschitz, p=2), 0.3),
    "Lipschitz, p = inf": (partial(Lipschitz, p=math.inf), 0.3),
    "MaxNorm": (MaxNorm, 0.2),
    "WeightClip": (WeightClip, 0.05),
}
each = pytest.mark.parametrize(("make", "bound"), ROWS.values(), ids=ROWS)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def batch(step: int) -> Tensor:
    return torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimiser.zero_grad()
        model(batch(step)).square().mean().backward()
        optimiser.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_every_public_constraint_has_a_row() -> None:
    things = [getattr(maxgain, name) for name in dir(maxgain)]
    public = {thing for thing in things if inspect.isclass(thing) and issubclass(thing, Constraint)}
    assert public == {getattr(make, "func", make) for make, _ in ROWS.values()}


@each
def test_one_that_was_made_in_inference_mode_trains_the_same(make: Make, bound: float) -> None:
    def trained(mode: Any) -> list[Tensor]:
        model = net()
        optimiser = sgd(model)
        with mode:
            make(model, bound).attach(optimiser)
        train(model, optimiser, range(4))
        return weights(model)

    assert same_bits(trained(torch.inference_mode()), trained(contextlib.nullcontext()))


@each
def test_a_step_in_inference_mode_is_a_step(make: Make, bound: float) -> None:
    def trained(mode: Any) -> list[Tensor]:
        model = net()
        constraint = make(model, bound)
        for step in range(3):
            model(batch(step))
            with mode():
                constraint.step()
        return weights(model)

    assert same_bits(trained(torch.inference_mode), trained(contextlib.nullcontext))


@each
def test_promise_01_a_bound_of_inf_changes_nothing_bit_for_bit(make: Make, bound: float) -> None:
    model, plain = net(), net()
    optimiser = sgd(model)
    constraint = make(model, math.inf).attach(optimiser)
    train(model, optimiser, range(4))
    train(plain, sgd(plain), range(4))
    assert same_bits(weights(model), weights(plain))
    assert set(constraint.scales.values()) == {1.0}
    assert all(math.isfinite(gain) for gain in constraint.gains.values())


@each
def test_promise_01_a_layer_within_its_bound_keeps_its_bits_and_one_beyond_is_divided(make: Make, bound: float) -> None:
    model, plain = net(), net()
    optimiser = sgd(model)
    constraint = make(model, {"3": bound, "*": 1e9}).attach(optimiser)
    train(model, optimiser, range(1))
    train(plain, sgd(plain), range(1))
    assert constraint.scales["3"] < 1
    for name in ("0", "5"):
        assert torch.equal(model.get_submodule(name).weight, plain.get_submodule(name).weight)
    assert (model[3].weight.abs() <= plain[3].weight.abs()).all()
    assert torch.equal(model[3].bias, plain[3].bias), "biases are never scaled"


@each
def test_promise_06_evaluation_and_pauses_change_nothing(make: Make, bound: float) -> None:
    model, undisturbed = net(), net()
    for one in (model, undisturbed):
        optimiser = sgd(one)
        constraint = make(one, bound).attach(optimiser)
        for step in range(3):
            if one is model:
                one.eval()
                one(100 * batch(50 + step))
                one.train()
                with constraint.paused():
                    one(100 * batch(70 + step))
                    constraint.step()
            train(one, optimiser, range(step, step + 1))
    assert same_bits(weights(model), weights(undisturbed))


@each
def test_promise_07_what_is_not_finite_never_reaches_a_weight(make: Make, bound: float) -> None:
    model = net()
    constraint = make(model, bound)
    with torch.no_grad():
        model[3].weight[0, 0] = math.inf
    before = model[5].weight.detach().clone()
    with pytest.warns() if isinstance(constraint, MaxGain) else nullcontext():
        model(batch(0))
        constraint.step()
        constraint.gains  # noqa: B018 - where a MaxGain warns
    assert torch.isfinite(model[0].weight).all()
    assert torch.isfinite(model[5].weight).all()
    assert (model[5].weight.abs() <= before.abs()).all()


@each
def test_promise_09_a_weight_that_two_layers_share_is_divided_once(make: Make, bound: float) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    constraint = make(model, bound / 4)
    model(x)
    constraint.step()
    assert constraint.scales["0"] == pytest.approx(constraint.scales["2"])
    ratio = model[0].weight / before
    assert ratio.min().item() == pytest.approx(constraint.scales["0"], rel=1e-4), "by the largest factor, and not twice"


@each
def test_promise_10_frozen_weights_and_optimiser_state_are_left_alone(make: Make, bound: float) -> None:
    model, plain = net(), net()
    model[3].weight.requires_grad_(False)
    plain[3].weight.requires_grad_(False)
    frozen = model[3].weight.clone()
    optimiser, other = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.05, 0.9) for m in (model, plain)
    )
    make(model, bound).attach(optimiser)
    train(model, optimiser, range(1))
    train(plain, other, range(1))
    assert torch.equal(model[3].weight, frozen)
    for mine, theirs in zip(optimiser.state.values(), other.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])


@each
def test_promise_10_each_of_two_optimisers_projects_what_it_steps(make: Make, bound: float) -> None:
    model = net()
    first, second = torch.optim.SGD(model[:3].parameters(), 0.0), torch.optim.SGD(model[3:].parameters(), 0.0)
    make(model, bound).attach(first).attach(second)
    before = [model.get_submodule(name).weight.detach().clone() for name in ("0", "3")]
    model(batch(0)).sum().backward()
    first.step()
    assert not torch.equal(model[0].weight, before[0])
    assert torch.equal(model[3].weight, before[1])
    second.step()
    assert not torch.equal(model[3].weight, before[1])


@each
def test_promise_12_a_copy_by_deepcopy_or_pickle_goes_on_as_the_original(make: Make, bound: float) -> None:
    model = net()
    optimiser = sgd(model)
    constraint = make(model, {"3": bound, "*": 2 * bound}).attach(optimiser)
    train(model, optimiser, range(3))
    twins = copy.deepcopy(constraint), pickle.loads(pickle.dumps(constraint))
    for one in (constraint, *twins):
        assert one.bounds == constraint.bounds
        assert one.gains == constraint.gains
        grow(one.model)
    for one in (constraint, *twins):
        for step in (8, 9):
            one.model(batch(step))
            one.step()
    for twin in twins:
        assert twin.model[3].weight is not model[3].weight
        assert same_bits(weights(twin.model), weights(model))


@each
def test_promise_14_a_saved_state_goes_on_to_the_same_bits(make: Make, bound: float) -> None:
    model = net()
    optimiser = sgd(model)
    constraint = make(model, bound).attach(optimiser)
    train(model, optimiser, range(3))
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict(), constraint.state_dict()))
    train(model, optimiser, range(3, 6))
    again = net()
    resumed = sgd(again)
    other = make(again, bound).attach(resumed)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    train(again, resumed, range(3, 6))
    assert same_bits(weights(model), weights(again))
    assert other.gains == constraint.gains


@each
def test_a_state_is_taken_whole_or_refused_with_nothing_changed(make: Make, bound: float) -> None:
    model = net()
    constraint = make(model, bound)
    model(batch(0))
    constraint.step()
    good = constraint.state_dict()
    name = next(key for key in good if key.endswith(".scale"))
    bad: list[dict[str, Any]] = [
        {key: value for key, value in good.items() if key != name},
        good | {"stranger": torch.zeros(())},
        good | {name: torch.zeros(2)},
        good | {name: torch.tensor(math.nan)},
        good | {name: "0.5"},
    ]
    for state in bad:
        with pytest.raises(StateError):
            constraint.load_state_dict(state)
        after = constraint.state_dict()
        assert all(torch.equal(after[key], good[key]) for key in good)


@each
def test_detaching_leaves_model_and_optimiser_as_they_were(make: Make, bound: float) -> None:
    model, plain = net(), net()
    optimiser = sgd(model)
    constraint = make(model, bound).attach(optimiser)
    constraint.detach()
    train(model, optimiser, range(3))
    train(plain, sgd(plain), range(3))
    assert same_bits(weights(model), weights(plain))
    assert not any(module._forward_hooks for module in model.modules())


@each
def test_what_makes_no_sense_is_refused_by_name(make: Make, bound: float) -> None:
    model = net()
    for senseless in (0, -1.0, math.nan, "2", None, 10**400):
        with pytest.raises(BoundError):
            make(model, senseless)
    with pytest.raises(PatternError, match="'nowhere'"):
        make(model, {"nowhere": 1.0, "*": 2.0})
    with pytest.raises(BoundError, match="layer '3'"):
        make(model, {"0": 1.0})
    with pytest.raises(AttachError, match="holds none"):
        make(model, bound).attach(sgd(net()))
    for no_model in (5, net, [net()]):
        with pytest.raises(UnsupportedLayerError, match=r"the model must be a torch\.nn\.Module, not "):
            make(no_model, bound)
    for pattern in (5, [5], 0.5):
        with pytest.raises(PatternError, match="glob over dotted layer names"):
            make(model, bound, include=pattern)
        with pytest.raises(PatternError, match="glob over dotted layer names"):
            make(model, bound, exclude=pattern)
