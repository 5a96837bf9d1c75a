"""Promises 3 and 5 to 7: which instances and which forwards count, when a gain is taken, and what is not finite."""

import gc
import math
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import update_bn

from explicit import largest_gain, same_bits
from maxgain import MaxGain
from maxgain.errors import MeasurementWarning
from nets import conv_net, frozen_sgd, images, mlp, rows, sgd, train, training, values


@pytest.mark.parametrize("instance", ["auto", "sample"])
def test_promise_03_a_token_is_an_instance_and_an_argument_makes_it_a_sample(instance: Any) -> None:
    layer, x = nn.Linear(6, 4).double(), torch.randn(3, 5, 7, 6, dtype=torch.float64)
    constraint = MaxGain(layer, math.inf, instance=instance)
    z = layer(x) - layer.bias
    constraint.step()
    expected = largest_gain(z.flatten(0, 2), x.flatten(0, 2)) if instance == "auto" else largest_gain(z, x)
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-9)


def test_promise_05_no_activation_is_kept_alive() -> None:
    layer = nn.Linear(6, 4)
    constraint = MaxGain(layer, math.inf)
    x = rows()
    z = layer(x)
    kept = weakref.ref(x), weakref.ref(z)
    del x, z
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    constraint.step()
    assert constraint.gains[""] > 0


@pytest.mark.parametrize("spoil", [torch.Tensor.zero_, torch.relu_, lambda z: z.mul_(100)])
def test_promise_05_what_happens_to_an_output_in_place_does_not_matter(spoil: Any) -> None:
    layer, x = nn.Linear(6, 4), rows()
    expected = largest_gain(F.linear(x, layer.weight), x)
    constraint = MaxGain(layer, math.inf)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        spoil(layer(x))
    x.zero_()
    constraint.step()
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)


MANY = torch.randn(300, 6, generator=torch.Generator().manual_seed(99))
"""So many that the largest gain is among them."""


def transformed(model: nn.Module) -> None:
    """Per-sample gradients by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda p: functional_call(model, p, (MANY,)).sum())(parameters)


CASES: dict[str, Callable[[nn.Module], Any]] = {
    "a target network": torch.no_grad()(lambda model: model(MANY)),
    "a rollout": torch.inference_mode()(lambda model: [model(state[None]) for state in MANY]),
    "stochastic weight averaging": lambda model: update_bn([MANY], model),
    "torch.func": transformed,
}


@pytest.mark.parametrize("disturb", CASES.values(), ids=CASES)
def test_promise_06_forwards_that_train_nothing_do_not_count(disturb: Callable[[nn.Module], None]) -> None:
    found = []
    for is_disturbed in (True, False):
        model = mlp()
        constraint, optimizer = training(model, 0.2)
        history = []
        for step in range(4):
            if is_disturbed:
                disturb(model)
            train(model, optimizer, [rows(step)])
            history.append((constraint.gains, constraint.scales))
        assert min(history[0][1].values()) < 1
        found.append((values(model), history))
    assert same_bits(*found)


def test_promise_06_the_maximum_runs_over_all_microbatches_since_the_last_step() -> None:
    layer = nn.Linear(6, 4, bias=False)
    constraint, optimizer = training(layer, math.inf, lr=0.0)
    windows = []
    for step in range(3):
        batches = [rows(10 * step + i) for i in range(3)]
        windows.append(max(largest_gain(F.linear(x, layer.weight), x) for x in batches))
        train(layer, optimizer, batches, microbatches=3)
        assert constraint.gains[""] == pytest.approx(windows[-1], rel=1e-6)
    assert len(set(windows)) == 3


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_measures_and_projects_in_every_kth_step_alone(every: int, microbatches: int) -> None:
    model, plain = mlp(), mlp()
    optimizer, other = sgd(model), sgd(plain)
    constraint = MaxGain(model, 0.2, every=every).attach(optimizer)
    by_hand = MaxGain(plain, 0.2)
    history = []
    for step in range(7):
        batches = [rows(10 * step + i) for i in range(microbatches)]
        train(model, optimizer, batches, microbatches)
        if step % every:
            with by_hand.paused():
                train(plain, other, batches, microbatches)
        else:
            train(plain, other, batches, microbatches)
            by_hand.step()
        history.append(constraint.gains)
    assert same_bits(values(model), values(plain))
    assert [one == other for one, other in pairwise(history)] == [step % every != 0 for step in range(1, 7)]


def test_every_counts_the_steps_of_each_optimizer_by_itself() -> None:
    model = mlp()
    first, second = frozen_sgd(model[0]), frozen_sgd(model[2])
    constraint = MaxGain(model, math.inf, every=2).attach(first).attach(second)
    steps: dict[str, list[bool]] = {"0": [], "2": []}
    before = constraint.gains
    for step in range(6):
        model(rows(step)).sum().backward()
        first.step()
        if step % 2:
            second.step()
        for name, found in steps.items():
            found.append(not same_bits(constraint.gains[name], before[name]) and constraint.gains[name] > 0)
        before = constraint.gains
    assert steps["0"] == [True, False, True, False, True, False]
    assert steps["2"] == [False, True, False, False, False, True]


def test_a_pause_ends_where_it_began_with_every() -> None:
    model = mlp()
    constraint, optimizer = training(model, math.inf, lr=0.0, every=2)
    train(model, optimizer, [rows(0)])
    first = constraint.gains
    with constraint.paused():
        train(model, optimizer, [rows(1)])
    train(model, optimizer, [rows(2)])
    assert constraint.gains == first, "this step rests"
    train(model, optimizer, [rows(3)])
    assert constraint.gains != first


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_promise_07_instances_that_are_not_finite_are_dropped_counted_and_reported(bad: float) -> None:
    model, x = mlp(), rows(count=8)
    expected = largest_gain(F.linear(x[2:], model[0].weight), x[2:])
    x[0, 0], x[1, 3] = bad, bad
    constraint, optimizer = training(model, 0.1, lr=0.0)
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    optimizer.zero_grad()
    with pytest.warns(MeasurementWarning, match="'0'"):
        optimizer.step()
    assert constraint.gains["0"] == pytest.approx(expected, rel=1e-5)
    assert constraint.dropped["0"] == 2
    torch.testing.assert_close(model[0].weight.detach(), before * 0.1 / expected)


@pytest.mark.parametrize(("make", "batch"), [(mlp, rows), (conv_net, images)])
def test_promise_07_a_batch_without_a_finite_instance_divides_nothing_and_is_not_zero(make: Any, batch: Any) -> None:
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    constraint = MaxGain(model, 1e-3)
    model(math.nan * batch())
    with pytest.warns(MeasurementWarning, match="not finite"):
        constraint.step()
    assert all(math.isnan(gain) for gain in constraint.gains.values())
    assert same_bits([p.detach() for p in model.parameters()], before)


def test_layers_may_be_called_by_keyword() -> None:
    dense, up = nn.Linear(6, 3), nn.ConvTranspose2d(2, 3, 3, stride=2, bias=False)
    constraint = MaxGain(nn.ModuleDict({"dense": dense, "up": up}), math.inf)
    dense(input=rows())
    image = torch.randn(2, 2, 4, 4)
    z = up(output_size=[10, 10], input=image)
    constraint.step()
    assert constraint.gains["up"] == pytest.approx(largest_gain(z, image), rel=1e-5)
    assert constraint.gains["dense"] == pytest.approx(largest_gain(F.linear(rows(), dense.weight), rows()), rel=1e-5)
