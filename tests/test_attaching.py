"""Attaching, detaching and pausing a constraint, and several on one model."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from maxgain import MaxGain
from small_net import each_measure, grow, hooks, net, one_step, sgd


@each_measure
def test_detach_leaves_no_trace(measure: Any) -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=0.1, measure=measure).attach(optimiser)
    assert hooks(model) == 2
    one_step(model, optimiser)
    model(torch.randn(5, 6))
    constraint.detach()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_hooks_with_kwargs
    assert not optimiser._optimizer_step_post_hooks
    plain = net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 6)
    one_step(plain, sgd(plain), x)
    one_step(model, optimiser, x)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


@each_measure
@pytest.mark.parametrize("change", ["replaced", "parametrised"])
def test_a_constraint_can_be_detached_whatever_became_of_its_layers(change: str, measure: Any) -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=0.1, measure=measure).attach(optimiser)
    one_step(model, optimiser)
    model(torch.randn(5, 6))
    layer = model[0]
    if change == "replaced":
        model[0] = nn.Linear(layer.in_features, layer.out_features)
    else:
        nn.utils.parametrizations.weight_norm(layer)
    constraint.discard()
    constraint.detach()
    assert not layer._forward_hooks
    assert not optimiser._optimizer_step_post_hooks
    MaxGain(model, gamma=0.1, include=["2"]).attach(sgd(model))


@each_measure
def test_attach_works_again_after_detach(measure: Any) -> None:
    model = net()
    first, second = sgd(model), sgd(model)
    constraint = MaxGain(model, gamma=0.01, measure=measure).attach(first)
    one_step(model, first)
    gains = constraint.gains
    model(torch.randn(5, 6))
    constraint.detach()
    assert constraint.gains == gains, "what no step ended is forgotten"
    model(torch.randn(5, 6))
    assert constraint.gains == gains, "a detached constraint does not watch"
    constraint.attach(second)
    assert hooks(model) == 2
    grow(model)
    one_step(model, second)
    assert all(scale < 1 for scale in constraint.scales.values())


def test_pauses_neither_measure_nor_project_and_may_be_nested() -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=1e-3).attach(optimiser)
    one_step(model, optimiser)
    gains, scales = constraint.gains, constraint.scales
    plain = net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 6)
    with constraint.paused():
        with constraint.paused():
            model(x)
        one_step(model, optimiser, x)
    assert (constraint.gains, constraint.scales) == (gains, scales)
    one_step(plain, sgd(plain), x)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    with pytest.raises(ZeroDivisionError), constraint.paused():
        1 / 0  # noqa: B018
    one_step(model, optimiser)
    assert constraint.gains != gains


def test_two_constraints_on_different_layers_of_one_model_leave_each_other_alone() -> None:
    model = net()
    optimiser = sgd(model, lr=0.0)
    first = MaxGain(model, gamma=0.1, include="0").attach(optimiser)
    second = MaxGain(model, gamma=0.2, p=1, include="2").attach(optimiser)
    one_step(model, optimiser)
    assert list(first.scales) == ["0"]
    assert list(second.scales) == ["2"]
    assert max(first.scales["0"], second.scales["2"]) < 1
    first.detach()
    assert hooks(model) == 1
    before = model[0].weight.detach().clone()
    one_step(model, optimiser)
    assert torch.equal(model[0].weight, before)


def test_two_constraints_on_the_same_layer_both_hold() -> None:
    model = nn.Linear(6, 4, bias=False)
    optimiser = sgd(model, lr=0.0)
    x = torch.randn(5, 6)
    for p, gamma in ((2, 0.3), (math.inf, 0.2)):
        MaxGain(model, gamma=gamma, p=p).attach(optimiser)
    watching = [MaxGain(model, gamma=math.inf, p=p) for p in (2, math.inf)]
    one_step(model, optimiser, x)
    for constraint in watching:
        constraint.step()
    model(x)
    assert watching[0].gains[""] <= 0.3 * (1 + 1e-6)
    assert watching[1].gains[""] <= 0.2 * (1 + 1e-6)


def test_nothing_is_kept_alive_by_a_constraint_that_nobody_detached() -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model).attach(optimiser)
    references = [weakref.ref(thing) for thing in (model, optimiser, constraint)]
    del model, optimiser, constraint
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
