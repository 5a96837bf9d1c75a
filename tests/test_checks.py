"""Promise 10: what is trained and not bounded is never silent. Each mistake is answered once, at the user's line."""

import math
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune

from maxgain import MaxGain, watch
from maxgain.errors import MeasurementWarning
from maxgain.weights import WeightClip
from nets import conv_net, images, mlp, rows, sgd, train, training

STEPS = 20


def messages(action: Callable[[], Any]) -> list[str]:
    """What an action warns of; each warning must be ours, and point to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(one.category is MeasurementWarning for one in caught), [str(one.message) for one in caught]
    assert {Path(one.filename).name for one in caught} <= {"test_checks.py", "nets.py"}
    return [str(one.message) for one in caught]


def run(model: Callable[[Tensor], Tensor], optimizer: Any, steps: int = STEPS, batch: Any = rows) -> None:
    train(model, optimizer, map(batch, range(steps)))


# --- Mistakes: each is answered with one warning, which the pattern finds. --------------------------------------------


def changed(change: Callable[[Any, Any], Any], make: Callable[[], Any] = mlp, batch: Any = rows) -> None:
    """Something is done to a model that is trained already."""
    model = make()
    _, optimizer = training(model)
    run(model, optimizer, 5, batch)
    change(model, optimizer)
    run(model, optimizer, batch=batch)


def replaced_head(model: Any, optimizer: Any) -> None:
    model[2] = nn.Linear(8, 3)  # which the optimizer does not hold, either


def added_layer(model: Any, optimizer: Any) -> None:
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": model[3].parameters()})


def forgotten_attach() -> None:
    model = mlp()
    MaxGain(model, 0.5)
    run(model, sgd(model))


def replaced_optimizer() -> None:
    model = mlp()
    MaxGain(model, 0.5).attach(torch.optim.Adam(model.parameters(), lr=1e-3))
    run(model, sgd(model))


def head_replaced_after_the_constraint() -> None:
    model = mlp()
    constraint = MaxGain(model, 0.5)
    model[2] = nn.Linear(8, 3)
    optimizer = sgd(model)
    constraint.attach(optimizer)
    run(model, optimizer)


def head_replaced_after_the_optimizer() -> None:
    model = mlp()
    optimizer = sgd(model)
    model[2] = nn.Linear(8, 3)
    MaxGain(model, 0.5).attach(optimizer)
    run(model, optimizer)


def weight_without_its_layer() -> None:
    model = mlp()
    _, optimizer = training(model)
    run(lambda x: F.linear(model[1](model[0](x)), model[2].weight), optimizer)


def maml() -> None:
    model = mlp()
    _, optimizer = training(model)
    for step in range(STEPS):
        fast = {name: p - 0.1 * p.detach().sign() for name, p in model.named_parameters()}
        functional_call(model, fast, (rows(step),)).square().mean().backward()
        optimizer.step()


def discriminator_in_evaluation_mode() -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    critic.eval()
    theirs, ours = sgd(critic, 0.01), sgd(generator, 0.01)
    MaxGain([generator, critic], 0.5).attach(theirs).attach(ours)
    for step in range(10):
        critic(generator(rows(step)).detach()).mean().backward()
        theirs.step()
        theirs.zero_grad()
        critic(generator(rows(step))).mean().neg().backward()
        ours.step()
        ours.zero_grad()


def gamma_far_too_small() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    MaxGain(model, 0.02).attach(optimizer)
    for step in range(70):
        F.mse_loss(model(rows(step, 32)), rows(step, 32)[:, :3]).backward()
        optimizer.step()
        optimizer.zero_grad()


def made_twice() -> None:
    model = mlp()
    MaxGain(model, 0.5)
    MaxGain(model, 4.0)


def lbfgs() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    MaxGain(model, 0.5).attach(optimizer)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(rows(0)).square().mean()
        value.backward()
        return value

    optimizer.step(loss)  # updates the weights many times


def watched_without_attach() -> None:
    model = mlp()
    watching, optimizer = watch(MaxGain(model, math.inf)), sgd(model)
    for step in range(STEPS):
        run(model, optimizer, steps=1)
        watching.log(step)


def watched_before_any_forward() -> None:
    watch(mlp()).log(0)


def unknown_type() -> None:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.dense = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 2)

    MaxGain(Mix())


MISTAKES: dict[Callable[[], None], str] = {
    forgotten_attach: r"attached to none.*Call attach\(optimizer\)",
    replaced_optimizer: "attached to Adam, which does not step",
    head_replaced_after_the_constraint: "'2' .*added.*again",
    head_replaced_after_the_optimizer: "'2' .*no attached optimizer holds",
    weight_without_its_layer: "'2' .*no training forward.*used directly",
    maml: "'0', '2' .*no training forward.*functional_call",
    discriminator_in_evaluation_mode: "'1.0', '1.2' .*eval mode",
    gamma_far_too_small: "gamma is probably too small",
    made_twice: r"Another MaxGain \(gamma=0.5\).*detach\(\)",
    lbfgs: "LBFGS",
    watched_without_attach: r"no gains to log. Call attach\(optimizer\)",
    watched_before_any_forward: "^Not measured: '0', '2' .*Call the model",
    unknown_type: "75% of the weights have no bound: 'matrix' .*register_layer",
    partial(changed, replaced_head): "'2' .*added.*again",
    partial(changed, added_layer): "'3' .*added.*again",
    partial(changed, lambda model, _: model.eval()): r"'0', '2' .*eval mode.*Call model.train\(\)",
    partial(changed, lambda model, _: model[1].eval(), conv_net, images): "'1' .*eval mode.*exclude",
    partial(changed, lambda model, _: model[0]._forward_hooks.clear()): "'0' .*hook.*again",
    partial(changed, lambda model, _: prune.l1_unstructured(model[0], "weight", 0.5)): "'0' .*again",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: getattr(mistake, "__name__", MISTAKES[mistake]))
def test_promise_10_a_mistake_is_said_once_in_one_warning_at_the_users_line(mistake: Callable[[], None]) -> None:
    found = messages(mistake)
    assert len(found) == 1, found
    assert re.search(MISTAKES[mistake], found[0]), found[0]
    assert len(found[0]) < 400


# --- What is right is not warned of. ----------------------------------------------------------------------------------


def layer_drop(model: Any, x: Tensor) -> Tensor:
    """Half of the steps leave a layer out."""
    return model[2](model[1](model[0](x))) if torch.rand(()) < 0.5 else model[2](F.pad(x, (0, 2)))


def frozen(model: Any, x: Tensor) -> Tensor:
    """A backbone that is not trained."""
    model[0].requires_grad_(False)
    return model(x)


def frozen_in_eval(model: Any, x: Tensor) -> Tensor:
    model[0].requires_grad_(False)
    model[0].eval()
    return model(x)


@pytest.mark.parametrize("forward", [nn.Sequential.__call__, layer_drop, frozen, frozen_in_eval])
@pytest.mark.parametrize("options", [{}, {"every": 3}, {"gamma": math.inf}, {"p": 1}], ids=str)
def test_promise_10_ordinary_training_is_not_warned_of(forward: Any, options: Any) -> None:
    def action() -> None:
        torch.manual_seed(0)
        model = mlp()
        constraint, optimizer = training(model, **{"gamma": 0.5, **options})
        run(lambda x: forward(model, x), optimizer)
        model.eval()
        model(rows())
        model.train()
        with constraint.paused():
            run(model, optimizer, 3)

    assert messages(action) == []


def test_promise_10_clipping_hard_in_every_step_is_not_warned_of() -> None:
    def action() -> None:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        constraint = WeightClip(model, 0.01).attach(optimizer)
        for _ in range(130):
            optimizer.zero_grad()
            model(rows()).sum().neg().backward()
            optimizer.step()
        assert min(constraint.scales.values()) < 0.9

    assert messages(action) == []


def test_promise_10_exclude_silences_what_it_names() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 2)})
    assert messages(lambda: MaxGain(model, exclude="attention")) == []
    model = conv_net()
    model[1].eval()
    assert messages(lambda: run(model, training(model, exclude="1")[1], batch=images)) == []


def test_promise_10_accumulation_and_an_optimizer_without_bounded_weights_are_not_warned_of() -> None:
    model = mlp()
    weights, biases = [m.weight for m in (model[0], model[2])], [m.bias for m in (model[0], model[2])]
    optimizers = torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)
    constraint = MaxGain(model, 0.5)

    def action() -> None:
        for optimizer in optimizers:
            constraint.attach(optimizer)
        for step in range(12):
            model(rows(step)).square().mean().backward()
            if step % 3 == 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    assert messages(action) == []
    assert all(gain > 0 for gain in constraint.gains.values())


def test_an_optimizer_for_each_parameter_is_right_and_silent() -> None:
    """As the optimizer-in-backward recipe does: each steps as soon as its gradient is there."""
    model, plain = mlp(), mlp()
    constraint = MaxGain(model, 0.2)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        constraint.attach(own)

        def step(p: Tensor, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    _, optimizer = training(plain, 0.2, lr=0.1)
    for number in range(5):
        assert messages(lambda number=number: model(rows(number)).square().mean().backward()) == []
        train(plain, optimizer, [rows(number)])
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])


def calls_of_a_step(layers: int) -> int:
    """How many functions of ours an ordinary step calls with an optimizer for each parameter."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    constraint = MaxGain(model, 0.2)
    for optimizer in optimizers:
        constraint.attach(optimizer)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("maxgain")

    for step in range(6):  # the first, second and fourth are checked, and what they find is said
        model(rows(step)[:, :4]).square().mean().backward()
        sys.setprofile(count if step == 5 else None)
        try:
            for optimizer in optimizers:
                optimizer.step()
        finally:
            sys.setprofile(None)
    return calls


def test_an_optimizer_for_each_parameter_costs_no_more_for_each_layer_where_there_are_more() -> None:
    assert 0 < calls_of_a_step(24) <= 2.1 * calls_of_a_step(12)
