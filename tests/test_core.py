"""Every constraint × what all of them promise. A new constraint is enrolled by its row."""

import copy
import gc
import inspect
import math
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxgain
from explicit import same_bits
from maxgain import Lipschitz, MaxGain, kernels
from maxgain.constraint import Constraint
from maxgain.errors import AttachError, BoundError, PatternError, UnsupportedLayerError
from maxgain.functional import project_
from maxgain.weights import MaxNorm, WeightClip
from nets import conv_net, frozen_sgd, hooks, images, sgd, train, values

Make = Callable[..., Constraint]
# The bound is one that binds on the network below from its first step on.
ROWS: dict[str, tuple[Make, float]] = {
    "MaxGain": (MaxGain, 0.1),
    "MaxGain, p = 1": (partial(MaxGain, p=1), 0.05),
    "MaxGain, p = inf": (partial(MaxGain, p=math.inf), 0.1),
    "MaxGain, whole samples": (partial(MaxGain, instance="sample"), 0.1),
    "MaxGain, every=2": (partial(MaxGain, every=2), 0.1),
    "Lipschitz, p = 1": (partial(Lipschitz, p=1), 0.3),
    "Lipschitz, p = 2": (partial(Lipschitz, p=2), 0.3),
    "Lipschitz, p = inf": (partial(Lipschitz, p=math.inf), 0.3),
    "MaxNorm": (MaxNorm, 0.2),
    "WeightClip": (WeightClip, 0.05),
}
each = pytest.mark.parametrize(("make", "bound"), ROWS.values(), ids=ROWS)


def made(make: Make, bound: Any) -> tuple[Any, torch.optim.SGD, Any]:
    """A network and the optimizer that a constraint on it is attached to."""
    model = conv_net()
    optimizer = sgd(model)
    return model, optimizer, make(model, bound).attach(optimizer)


def trained(make: Make, bound: Any, steps: int = 4) -> Any:
    """A network after a training under a constraint."""
    model, optimizer, _ = made(make, bound)
    train(model, optimizer, map(images, range(steps)))
    return model


def plain(steps: int = 4) -> tuple[Any, torch.optim.SGD]:
    """The network, and its optimizer, after the same training without one."""
    model = conv_net()
    optimizer = sgd(model)
    train(model, optimizer, map(images, range(steps)))
    return model, optimizer


def test_every_public_constraint_has_a_row() -> None:
    things = [getattr(maxgain, name) for name in dir(maxgain)]
    public = {thing for thing in things if inspect.isclass(thing) and issubclass(thing, Constraint)}
    assert public <= {getattr(make, "func", make) for make, _ in ROWS.values()}


@each
def test_promise_01_inf_changes_nothing_bit_for_bit(make: Make, bound: float) -> None:
    model, optimizer, constraint = made(make, math.inf)
    train(model, optimizer, map(images, range(4)))
    expected, other = plain()
    assert same_bits(values(model), values(expected))
    assert same_bits(optimizer.state_dict(), other.state_dict())
    assert set(constraint.scales.values()) == {1.0}
    assert all(math.isfinite(gain) for gain in constraint.gains.values())


@each
def test_promise_01_a_layer_within_its_bound_keeps_its_bits(make: Make, bound: float) -> None:
    model, optimizer, constraint = made(make, {"4": bound, "*": 1e9})
    train(model, optimizer, [images()])
    before, _ = plain(1)
    assert constraint.scales["4"] < 1
    assert torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[4].bias, before[4].bias), "biases are never scaled"
    assert (model[4].weight.abs() <= before[4].weight.abs()).all()
    assert not torch.equal(model[4].weight, before[4].weight)


@each
def test_promise_06_evaluation_and_pauses_change_nothing(make: Make, bound: float) -> None:
    found = []
    for is_disturbed in (True, False):
        model, optimizer, constraint = made(make, bound)
        for step in range(3):
            if is_disturbed:
                model.eval()
                model(100 * images(50 + step))
                model.train()
                before = values(model[1])
                with constraint.paused():
                    model(100 * images(70 + step))
                    constraint.step()
                model[1].load_state_dict(dict(zip(model[1].state_dict(), before, strict=True)))
            train(model, optimizer, [images(step)])
        found.append((values(model), constraint.gains))
    assert same_bits(*found)


@each
def test_promise_06_a_step_that_gradscaler_skips_is_accumulation(make: Make, bound: float) -> None:
    model, optimizer, constraint = made(make, bound)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(images()).square().mean() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same_bits([p.detach() for p in model.parameters()], before), "neither updated nor divided"
    optimizer.zero_grad()
    scaler.scale(model(images(1)).square().mean()).backward()
    scaler.step(optimizer)
    assert min(constraint.scales.values()) < 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


@each
def test_promise_07_what_is_not_finite_never_reaches_a_weight(make: Make, bound: float) -> None:
    model = conv_net()
    constraint = make(model, bound)
    with torch.no_grad():
        model[4].weight[0, 0] = math.inf
    with pytest.warns() if isinstance(constraint, MaxGain) else nullcontext():
        model(images())
        constraint.step()
    assert torch.isfinite(model[0].weight).all()
    assert torch.isfinite(model[1].weight).all()
    assert not torch.isnan(model[4].weight).any()


@each
def test_promise_08_a_tied_weight_is_divided_once(make: Make, bound: float) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    constraint = make(model, {"0": bound, "2": bound / 4})
    model(torch.randn(8, 6))
    constraint.step()
    largest, factor = constraint.gains["0"], constraint.scales["0"]
    assert constraint.gains["2"] == largest
    assert constraint.scales["2"] == factor == pytest.approx(bound / 4 / largest, rel=1e-3), (
        "the smallest of its bounds"
    )
    ratio = model[0].weight / before
    assert ratio.min().item() == pytest.approx(factor, rel=1e-4), "and not twice"


@each
def test_promise_09_frozen_weights_and_optimizer_state_are_left_alone(make: Make, bound: float) -> None:
    found = []
    for one in (make, lambda model, _: make(model, math.inf)):
        model = conv_net()
        frozen = model[4].weight.requires_grad_(False).clone()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, 0.9)
        one(model, bound).attach(optimizer)
        train(model, optimizer, [images()])
        assert torch.equal(model[4].weight, frozen)
        found.append(optimizer.state_dict())
    assert same_bits(*found)


@each
def test_promise_09_each_of_two_optimizers_projects_what_it_holds(make: Make, bound: float) -> None:
    model = conv_net()
    first, second = frozen_sgd(model[:2]), frozen_sgd(model[2:])
    make(model, bound).attach(first).attach(second)
    before = [model[i].weight.detach().clone() for i in (0, 4)]
    model(images()).sum().backward()
    first.step()
    assert not torch.equal(model[0].weight, before[0])
    assert torch.equal(model[4].weight, before[1])
    second.step()
    assert not torch.equal(model[4].weight, before[1])


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_promise_12_a_model_may_have_or_change_to_another_dtype(make: Make, bound: float, dtype: torch.dtype) -> None:
    wide = trained(make, bound, steps=2)
    model = conv_net()
    make(model, bound).detach()
    model.to(dtype)
    optimizer = sgd(model)
    constraint = make(model, bound).attach(optimizer)
    train(model, optimizer, (images(step).to(dtype) for step in range(2)))
    assert {p.dtype for p in model.parameters()} == {dtype}
    for one, other in zip(model.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.1, atol=0.03)
    model.to(torch.float32)
    train(model, optimizer, [images(2)])
    assert all(math.isfinite(gain) for gain in constraint.gains.values())


@each
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_promise_12_a_copy_is_a_plain_module(make: Make, bound: float, copied: Any) -> None:
    model = conv_net()
    constraint = make(model, bound)
    twin = copied(model)
    assert same_bits(values(twin), values(model))
    train(twin, sgd(twin), map(images, range(2)))
    assert same_bits(values(twin), values(plain(2)[0]))
    assert all(math.isnan(gain) for gain in constraint.gains.values()), "a copy's forwards are not the model's"


@each
def test_detach_leaves_nothing_behind(make: Make, bound: float) -> None:
    model, optimizer, constraint = made(make, bound)
    constraint.detach()
    assert str(constraint).count("not attached") == len(constraint.gains)
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    for one, other in zip(model.modules(), conv_net().modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert type(one._parameters) is type(other._parameters)
    train(model, optimizer, map(images, range(4)))
    assert same_bits(values(model), values(plain()[0]))
    constraint.attach(optimizer)
    train(model, optimizer, [images()])
    assert min(constraint.scales.values()) < 1, "and it can be attached again"


def test_models_that_are_let_go_of_are_freed_with_their_constraints() -> None:
    kept = {name: weakref.ref(trained(make, bound, steps=2)) for name, (make, bound) in ROWS.items()}
    gc.collect()
    assert [name for name, model in kept.items() if model() is not None] == []


@each
def test_step_projects_for_those_who_update_weights_themselves(make: Make, bound: float) -> None:
    found = []
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad):
        model = conv_net()
        with mode():
            constraint = make(model, bound)
        model(images()).sum().backward()
        before = model[0].weight.detach().clone()
        with mode():
            constraint.step()
        assert constraint.scales["0"] < 1
        assert not torch.equal(model[0].weight, before)
        found.append(values(model))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


@each
def test_a_default_device_of_the_users_changes_nothing(make: Make, bound: float) -> None:
    """As ``torch.set_default_device("cuda")`` does; the meta device has no numbers, and shows whatever lands there."""
    expected, model = trained(make, bound, 2), conv_net()
    batches, optimizer = [images(0), images(1)], sgd(model)
    with torch.device("meta"):
        constraint = make(model, bound).attach(optimizer)
        train(model, optimizer, batches)
        assert all(gain == gain for gain in constraint.gains.values())
    assert same_bits(values(model), values(expected))


@each
def test_the_bound_can_be_read_and_set(make: Make, bound: float) -> None:
    model, optimizer, constraint = made(make, math.inf)
    train(model, optimizer, [images(0)])
    assert set(constraint.scales.values()) == {1.0}
    constraint.bound = {"0": bound, "*": math.inf}
    assert constraint.bound == {"0": bound, "*": math.inf}
    seen = []
    for step in (2, 3):
        train(model, optimizer, [images(step)])
        seen.append(constraint.scales)
    assert min(scales["0"] for scales in seen) < 1
    assert {scales["4"] for scales in seen} == {1.0}
    constraint.bound = 1e9
    train(model, optimizer, [images(4), images(5)])
    assert set(constraint.scales.values()) == {1.0}
    with pytest.raises(BoundError):
        constraint.bound = -1.0
    assert constraint.bound == 1e9


@each
def test_printing_shows_every_layer_and_why_it_is_not_held(make: Make, bound: float) -> None:
    model = conv_net()
    model[4].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    constraint = make(model, bound).attach(optimizer)
    assert "frozen" in str(constraint)
    train(model, optimizer, [images()])
    lines = {line.split()[0]: line for line in str(constraint).splitlines() if line.strip()}
    assert "frozen" in lines["4"]
    assert "100%" in lines["0"]
    assert "\n" not in repr(constraint)


@each
def test_what_makes_no_sense_is_refused_by_name(make: Make, bound: float) -> None:
    model = conv_net()
    for senseless in (0, -1.0, math.nan, "2", None, True):
        with pytest.raises(BoundError, match="must be a positive number"):
            make(model, senseless)
    with pytest.raises(PatternError, match="'nowhere'"):
        make(model, {"nowhere": 1.0, "*": 2.0})
    with pytest.raises(BoundError, match="has no pattern for layer"):
        make(model, {"0": 1.0})
    with pytest.raises(AttachError, match="holds no parameter"):
        make(conv_net(), bound).attach(sgd(conv_net()))
    with pytest.raises(AttachError, match="already"):
        make(model, bound).attach(optimizer := sgd(model)).attach(optimizer)
    with pytest.raises(AttachError, match="not str"):
        make(conv_net(), bound).attach("adam")
    for no_model in (5, nn.Linear, []):
        with pytest.raises(UnsupportedLayerError):
            make(no_model, bound)
    with pytest.raises(PatternError, match="not 0"):
        make(model, {0: 1.0, "*": 2.0})
    with pytest.raises(TypeError, match="item assignment"):  # an entry that is set would be ignored
        make(conv_net(), {"0": 1.0, "*": 2.0}).bound["0"] = 3.0
    for pattern in (5, [5], 0.5, nn.Linear):
        with pytest.raises(PatternError):
            make(model, bound, include=pattern)


class Emulated:
    """What the fused projection does on a GPU, on the CPU: it uses the sizes up."""

    def __init__(self, weights, places, count, device):
        self.weights, self.places = weights, torch.tensor(places)

    def __call__(self, sizes, bounds, gains, scales, counts, resting, every):
        done = project_(self.weights, sizes[self.places], bounds[self.places])
        gains.copy_(torch.where(sizes >= 0, sizes, gains))
        scales.fill_(1.0)[self.places] = done
        counts += torch.stack([sizes >= 0, scales < 1, scales < 0.9]).int()
        sizes.fill_(-1.0)


@each
def test_a_fused_projection_takes_the_same_steps_and_is_checked_before_it_uses_the_sizes_up(monkeypatch, make, bound):
    def run():
        model, optimizer, constraint = made(make, bound)
        train(model, optimizer, map(images, range(9)))
        return model[4].weight, constraint.gains, str(constraint)

    expected = run()
    monkeypatch.setattr(kernels, "can_fuse", lambda *given: True)
    monkeypatch.setattr(kernels, "FusedProjection", Emulated)
    for one, other in zip(expected, run(), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
