"""Promises 6 and 7: which forwards count, and what is not finite."""

import math
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
from nets import conv_net, frozen_sgd, images, mlp, rows, sgd, train, values

MANY = torch.randn(300, 6, generator=torch.Generator().manual_seed(99))
"""So many that the largest gain is among them."""


@torch.no_grad()
def target_values(model: nn.Module) -> None:
    """As DQN: the value of the next state, by the network that is trained."""
    model(MANY)


@torch.inference_mode()
def rollout(model: nn.Module) -> None:
    """As PPO: the policy acts."""
    for state in MANY:
        model(state[None])


@torch.no_grad()
def generate(model: nn.Module) -> None:
    """As RLHF: the model writes, token after token."""
    state = MANY[:20]
    for _ in range(10):
        state = F.pad(model(state), (0, 3), value=0.1)


@torch.no_grad()
def validate(model: nn.Module) -> None:
    """Without eval()."""
    F.mse_loss(model(MANY), torch.zeros(300, 3))


def update_statistics(model: nn.Module) -> None:
    """As stochastic weight averaging does for batch norm."""
    update_bn([MANY], model)


def evaluate(model: nn.Module) -> None:
    """In evaluation mode, with gradients."""
    model.eval()
    model(MANY)
    model.train()


def other_weights(model: nn.Module) -> None:
    """As MAML's inner loop, hypernetworks and weight noise: with weights that are not the module's own."""
    functional_call(model, {name: 3 * p for name, p in model.named_parameters()}, (MANY,))


def transformed(model: nn.Module) -> None:
    """Per-sample gradients by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda p: functional_call(model, p, (MANY,)).sum())(parameters)


CASES: list[Callable[[nn.Module], None]] = [
    target_values, rollout, generate, validate, update_statistics, evaluate, other_weights, transformed,
]  # fmt: skip


@pytest.mark.parametrize("disturb", CASES, ids=lambda case: case.__name__)
def test_promise_06_forwards_that_train_nothing_do_not_count(disturb: Callable[[nn.Module], None]) -> None:
    found = []
    for is_disturbed in (True, False):
        model = mlp()
        optimizer = sgd(model)
        constraint = MaxGain(model, 0.2).attach(optimizer)
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
    optimizer = frozen_sgd(layer)
    constraint = MaxGain(layer, math.inf).attach(optimizer)
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
    optimizer = frozen_sgd(model)
    constraint = MaxGain(model, math.inf, every=2).attach(optimizer)
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
    optimizer = frozen_sgd(model)
    constraint = MaxGain(model, 0.1).attach(optimizer)
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    optimizer.zero_grad()
    with pytest.warns(MeasurementWarning, match="'0'"):
        optimizer.step()
    assert constraint.gains["0"] == pytest.approx(expected, rel=1e-5)
    assert constraint.dropped["0"] == 2
    torch.testing.assert_close(model[0].weight.detach(), before * 0.1 / expected)


@pytest.mark.parametrize("form", ["dense", "convolution", "batch norm"])
def test_promise_07_a_batch_without_a_finite_instance_divides_nothing_and_is_not_zero(form: str) -> None:
    model: Any = conv_net() if form != "dense" else mlp()
    x = torch.full_like(images() if form != "dense" else rows(), math.nan)
    before = values(model)
    constraint = MaxGain(model, 1e-3)
    model(x)
    with pytest.warns(MeasurementWarning, match="not finite"):
        constraint.step()
    assert all(math.isnan(gain) for gain in constraint.gains.values())
    weights = [value for value, name in zip(values(model), model.state_dict(), strict=True) if "running" not in name]
    assert same_bits(
        [w for w in weights if w.is_floating_point()],
        [v for v, n in zip(before, model.state_dict(), strict=True) if "running" not in n and v.is_floating_point()],
    )


def test_promise_07_zeros_have_no_gain_and_an_empty_batch_shows_nothing() -> None:
    model = nn.Linear(6, 3)
    constraint = MaxGain(model, 1e-3)
    model(torch.zeros(4, 6))
    constraint.step()
    assert constraint.gains == {"": 0.0}
    model(rows())
    constraint.step()
    gains, before = constraint.gains, values(model)
    model(torch.empty(0, 6))
    constraint.step()
    assert constraint.gains == gains
    assert same_bits(values(model), before)


def test_layers_may_be_called_by_keyword_with_jagged_and_sparse_inputs() -> None:
    dense, up = nn.Linear(6, 3), nn.ConvTranspose2d(2, 3, 3, stride=2, bias=False)
    constraint = MaxGain(nn.ModuleDict({"dense": dense, "up": up}), math.inf)
    dense(input=rows())
    image = torch.randn(2, 2, 4, 4)
    z = up(output_size=[10, 10], input=image)
    constraint.step()
    assert constraint.gains["up"] == pytest.approx(largest_gain(z, image), rel=1e-5)
    assert constraint.gains["dense"] == pytest.approx(largest_gain(F.linear(rows(), dense.weight), rows()), rel=1e-5)
    parts = [torch.randn(2, 6), torch.randn(3, 6)]
    dense(torch.nested.nested_tensor(parts, layout=torch.jagged))
    constraint.step()
    x = torch.cat(parts)
    assert constraint.gains["dense"] == pytest.approx(largest_gain(F.linear(x, dense.weight), x), rel=1e-5)
