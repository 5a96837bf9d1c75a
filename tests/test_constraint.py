"""What users do with a constraint: bounds and patterns, attaching and detaching, pauses, states, and mistakes."""

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain import MaxGain, register_layer
from maxgain.errors import (
    AttachError,
    BoundError,
    MaxGainError,
    MeasurementWarning,
    NormError,
    NothingToConstrainError,
    NotMeasuredError,
    PatternError,
    StateError,
)
from maxgain.layers import KINDS

each_measure = pytest.mark.parametrize("measure", ["stale", "fresh"])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def one_step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    optimiser.zero_grad()
    model(torch.randn(5, 6) if x is None else x).square().mean().backward()
    optimiser.step()


@torch.no_grad()
def grow(model: nn.Module) -> None:
    """Puts every layer far above the bound that it was just projected to."""
    for parameter in model.parameters():
        parameter.mul_(16)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


# Mistakes, each answered with a named error that says what and where.


@pytest.mark.parametrize("gamma", [0, -1.0, math.nan, "2", None, torch.tensor(2.0), -math.inf])
def test_a_bound_is_a_positive_number(gamma: Any) -> None:
    with pytest.raises(BoundError, match="gamma must be a positive number"):
        MaxGain(net(), gamma=gamma)


@pytest.mark.parametrize("p", [0, 0.99, -2, math.nan, "2", None])
def test_p_names_a_norm(p: Any) -> None:
    with pytest.raises(NormError, match="p must be a number from 1 to inf"):
        MaxGain(net(), p=p)


MISTAKES: dict[str, tuple[Callable[[], Any], type[MaxGainError], str]] = {
    "instance": (
        lambda: MaxGain(net(), instance="row"),
        MaxGainError,
        "instance must be 'auto' or 'sample', not 'row'",
    ),  # type: ignore[arg-type]
    "measure": (lambda: MaxGain(net(), measure="new"), MaxGainError, "measure must be 'stale' or 'fresh', not 'new'"),  # type: ignore[arg-type]
    "bound of a pattern": (
        lambda: MaxGain(net(), {"0": -1.0, "*": 2.0}),
        BoundError,
        r"gamma\['0'\] must be a positive",
    ),
    "pattern of gamma": (
        lambda: MaxGain(net(), {"conv*": 1.0, "*": 2.0}),
        PatternError,
        "'conv\\*' of gamma matches no",
    ),
    "layer without bound": (lambda: MaxGain(net(), {"0": 1.0}), BoundError, "gamma says nothing about layer '2'.*inf"),
    "no bounds": (lambda: MaxGain(net(), {}), BoundError, "gamma says nothing about layer '0'"),
    "include": (
        lambda: MaxGain(net(), include="head"),
        PatternError,
        "'head' matches no layer; the layers are '0', '2'",
    ),
    "exclude": (lambda: MaxGain(net(), exclude="1"), PatternError, "'1' matches no layer; the layers are '0', '2'"),
    "type as pattern": (lambda: MaxGain(net(), include=[nn.Linear]), PatternError, "a glob over dotted layer names"),  # type: ignore[list-item]
    "type as key": (lambda: MaxGain(net(), {nn.Linear: 1.0}), PatternError, "a glob over dotted layer names"),  # type: ignore[dict-item]
    "nothing": (
        lambda: MaxGain(nn.Sequential(nn.ReLU())),
        NothingToConstrainError,
        "Sequential has no layer.*register_layer",
    ),
    "nothing left": (lambda: MaxGain(net(), exclude="*"), NothingToConstrainError, "that include and exclude leave"),
    "no optimiser": (
        lambda: MaxGain(net()).attach("adam"),
        AttachError,
        "takes a torch.optim.Optimizer or a wrapper that holds one, not str",
    ),  # type: ignore[arg-type]
    "another's optimiser": (
        lambda: MaxGain(net()).attach(sgd(net())),
        AttachError,
        r"this SGD holds none of the 2 constrained weights \('0', ...\)",
    ),
}


@pytest.mark.parametrize(("mistake", "error", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_promise_15_mistakes_are_answered_in_words(
    mistake: Callable[[], Any], error: type[MaxGainError], text: str
) -> None:
    with pytest.raises(error, match=text):
        mistake()


def test_a_constraint_that_could_not_be_made_leaves_no_hooks() -> None:
    model = net()
    with pytest.raises(MaxGainError):
        MaxGain(model, {"0": 1.0})
    assert hooks(model) == 0


def test_an_optimiser_is_attached_once() -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model).attach(optimiser)
    with pytest.raises(AttachError, match="this SGD is attached to this MaxGain already"):
        constraint.attach(optimiser)


def test_what_a_step_that_is_left_out_showed_can_be_discarded() -> None:
    model = nn.Linear(3, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, gamma=1e-3).attach(optimizer)
    model(torch.randn(4, 3))
    constraint.discard()
    with pytest.raises(NotMeasuredError):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_step_without_any_forward_says_so_unless_it_is_paused() -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model).attach(optimiser)
    with constraint.paused():
        optimiser.step()
    with pytest.raises(NotMeasuredError, match=r"none of the 2 layers was measured.*paused\(\)"):
        optimiser.step()


# Bounds and patterns.


def test_the_first_glob_that_matches_gives_the_bound() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    assert MaxGain(model, {"blocks.1": 3, "blocks.*": 2, "*": math.inf}).bounds == {
        "stem": math.inf,
        "blocks.0": 2.0,
        "blocks.1": 3.0,
    }


def test_each_layer_is_held_to_its_own_bound() -> None:
    model = net()
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model, {"0": 0.5, "2": 0.1}, measure="fresh").attach(optimiser)
    x = torch.randn(5, 6)
    one_step(model, optimiser, x)
    assert constraint.scales == pytest.approx(
        {name: constraint.bounds[name] / g for name, g in constraint.gains.items()}
    )


def test_include_and_exclude_choose_layers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.LayerNorm(4), nn.GroupNorm(1, 1), nn.Linear(4, 4))
    assert list(MaxGain(model).bounds) == ["0", "1", "4"], "the scales of layer and group norms are left alone ..."
    assert list(MaxGain(model, include="*").bounds) == ["0", "1", "2", "3", "4"], "... unless they are asked for"
    assert list(MaxGain(model, include=["2", "4"]).bounds) == ["2", "4"]
    assert list(MaxGain(model, exclude=["1", "4"]).bounds) == ["0"]
    assert list(MaxGain(model, include="[0-2]", exclude="1").bounds) == ["0", "2"]


def test_what_is_inside_an_excluded_layer_may_be_excluded_too() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "dense": nn.Linear(4, 4)})
    for exclude in ("attention", "attention*", ["attention", "*.out_proj"]):
        assert list(MaxGain(model, exclude=exclude).bounds) == ["dense"]


def test_a_layer_norm_that_is_included_is_constrained() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(2, 6))
    optimiser = sgd(model, lr=0.0)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(3)  # type: ignore[union-attr]
    constraint = MaxGain(model, gamma=2.0, include="*").attach(optimiser)
    one_step(model, optimiser)
    assert constraint.gains == pytest.approx({"0": 3.0, "1": 3.0, "2": 3.0})
    for layer in model:
        torch.testing.assert_close(layer.weight, torch.full((6,), 2.0))


def test_a_quantisable_model_that_is_not_quantised_can_be_constrained() -> None:
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "add": torch.ao.nn.quantized.FloatFunctional()})
    assert list(MaxGain(model).bounds) == ["dense"]


@pytest.fixture
def scale_layer() -> Iterator[type[nn.Module]]:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.full((3,), 4.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    yield Scale
    KINDS.pop(Scale, None)


def test_a_layer_type_of_the_users_own(scale_layer: type[nn.Module]) -> None:
    model = nn.Sequential(scale_layer())
    with pytest.raises(NothingToConstrainError):
        MaxGain(model)
    register_layer(scale_layer, instance_dims=1, weight="factor")
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model, gamma=2.0).attach(optimiser)
    one_step(model, optimiser, torch.randn(2, 3))
    assert constraint.gains == {"0": 4.0}
    assert model[0].factor.tolist() == [2.0, 2.0, 2.0]


@each_measure
def test_a_layer_type_that_says_what_its_linear_part_is(scale_layer: type[nn.Module], measure: Any) -> None:
    class Shifted(scale_layer):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 100

    register_layer(Shifted, 1, lambda layer, x, output: (x, output - 100), weight="factor")
    try:
        model = Shifted()
        constraint = MaxGain(model, gamma=2.0, measure=measure)
        model(torch.randn(2, 3))
        constraint.step()
        assert constraint.gains[""] == pytest.approx(4.0, rel=1e-4)
    finally:
        KINDS.pop(Shifted)


# Ways to call and to change a model.


def test_a_model_may_be_a_single_layer() -> None:
    model = nn.Linear(6, 3)
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    one_step(model, optimiser)
    assert list(constraint.scales) == [""]
    assert constraint.scales[""] < 1
    assert "gamma=0.1" in repr(constraint)


def test_layers_may_be_called_by_keyword() -> None:
    dense, up = nn.Linear(6, 3), nn.ConvTranspose2d(2, 3, 3, stride=2, bias=False)
    constraint = MaxGain(nn.ModuleDict({"dense": dense, "up": up}))
    x, image = torch.randn(5, 6), torch.randn(2, 2, 4, 4)
    dense(input=x)
    z = up(output_size=[10, 10], input=image)
    expected = (z.flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)).max().item()
    assert constraint.gains["up"] == pytest.approx(expected, rel=1e-5)
    expected = (F.linear(x, dense.weight).norm(dim=1) / x.norm(dim=1)).max().item()
    assert constraint.gains["dense"] == pytest.approx(expected, rel=1e-5)


@each_measure
def test_an_empty_batch_says_nothing(measure: Any) -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1, measure=measure)
    model(torch.randn(4, 6))
    model(torch.empty(0, 6))
    constraint.step()
    assert all(scale < 1 for scale in constraint.scales.values())
    before = copy.deepcopy(model.state_dict())
    model(torch.empty(0, 6))
    constraint.step()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@each_measure
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_model_may_change_its_dtype_after_the_constraint_was_made(dtype: torch.dtype, measure: Any) -> None:
    model = net()
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model, gamma=0.1, measure=measure).attach(optimiser)
    one_step(model, optimiser)
    model.to(dtype)
    grow(model)
    x = torch.randn(5, 6).to(dtype)
    before = model[0].weight.detach().double().clone()
    expected = (F.linear(x.double(), before).norm(dim=1) / x.double().norm(dim=1)).max().item()
    one_step(model, optimiser, x)
    accuracy = 1e-6 if dtype == torch.float64 else 0.02
    assert constraint.gains["0"] == pytest.approx(expected, rel=accuracy)
    torch.testing.assert_close(model[0].weight.double(), before * (0.1 / expected), rtol=accuracy, atol=1e-4)
    assert all(parameter.dtype == dtype for parameter in model.parameters())


def test_a_model_may_be_given_its_memory_after_the_constraint_was_made() -> None:
    with torch.device("meta"):
        model = net()
    constraint = MaxGain(model, gamma=0.1)
    model.to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    optimiser = sgd(model)
    constraint.attach(optimiser)
    one_step(model, optimiser)
    assert all(scale < 1 for scale in constraint.scales.values())


def test_parameters_may_be_added_to_the_optimiser_later() -> None:
    model = net()
    optimiser = sgd(model[2])
    constraint = MaxGain(model, gamma=0.01).attach(optimiser)
    one_step(model, optimiser)
    assert [scale < 1 for scale in constraint.scales.values()] == [False, True]
    optimiser.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    one_step(model, optimiser)
    assert constraint.scales["0"] < 1


def test_an_optimiser_that_evaluates_the_model_itself() -> None:
    model = net()
    optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    x = torch.randn(5, 6)
    seen: list[float] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        seen.append((F.linear(x, model[0].weight).norm(dim=1) / x.norm(dim=1)).max().item())
        return loss

    optimiser.step(closure)
    assert len(seen) > 1
    assert constraint.gains["0"] == pytest.approx(max(seen), rel=1e-5)
    assert all(scale < 1 for scale in constraint.scales.values())


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_a_learning_rate_schedule(scheduler_first: bool) -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=0.01)
    if not scheduler_first:
        constraint.attach(optimiser)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
    if scheduler_first:
        constraint.attach(optimiser)
    for _ in range(3):
        grow(model)
        one_step(model, optimiser)
        scheduler.step()
        assert constraint.scales["0"] < 1
    assert optimiser.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_step_projects_for_those_who_update_weights_themselves() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1)
    model(torch.randn(5, 6)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    constraint.step()
    for name, scale in constraint.scales.items():
        assert scale < 1
        torch.testing.assert_close(model.state_dict()[f"{name}.weight"], before[f"{name}.weight"] * scale)


# Attaching, detaching, pausing.


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


def test_two_constraints_on_different_layers_of_one_model() -> None:
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


# State.


@each_measure
def test_promise_14_a_run_goes_on_from_its_state_to_the_same_bits(measure: Any) -> None:
    data = torch.randn(8, 5, 6)

    def start() -> tuple[nn.Module, torch.optim.Optimizer, MaxGain]:
        model = net()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimiser, MaxGain(model, gamma=0.3, measure=measure).attach(optimiser)

    straight = start()
    for x in data:
        one_step(straight[0], straight[1], x)
    first = start()
    for x in data[:4]:
        one_step(first[0], first[1], x)
    saved = [copy.deepcopy(part.state_dict()) for part in first]
    second = start()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)  # type: ignore[arg-type]
    assert second[2].gains == first[2].gains
    assert second[2].scales == first[2].scales
    for x in data[4:]:
        one_step(second[0], second[1], x)
    assert all(map(torch.equal, second[0].parameters(), straight[0].parameters()))
    assert second[2].gains == straight[2].gains


def test_measurements_of_an_unfinished_step_are_part_of_the_state() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1)
    model(torch.randn(5, 6))
    twin = net()
    resumed = MaxGain(twin, gamma=0.1)
    resumed.load_state_dict(constraint.state_dict())
    constraint.step()
    resumed.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert resumed.scales["0"] < 1


def test_a_state_is_tensors_alone_and_a_copy() -> None:
    constraint = MaxGain(net())
    state = constraint.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    before = {name: value.clone() for name, value in state.items()}
    constraint.model(torch.randn(5, 6))
    constraint.step()
    for name, value in state.items():
        torch.testing.assert_close(value, before[name], equal_nan=True)


def test_what_was_dropped_before_a_resume_is_not_warned_about_again() -> None:
    model = net()
    constraint = MaxGain(model)
    x = torch.ones(2, 6)
    x[0] = math.nan
    model(x)
    with pytest.warns(MeasurementWarning):
        constraint.step()
    resumed = MaxGain(net())
    resumed.load_state_dict(constraint.state_dict())
    assert resumed.dropped == constraint.dropped == {"0": 1, "2": 1}
    resumed.model(torch.ones(2, 6))
    resumed.step()


def test_a_state_of_another_constraint_is_refused() -> None:
    state = MaxGain(net()).state_dict()
    with pytest.raises(StateError, match=r"the state belongs to another MaxGain, .*: it has '2\.dropped'"):
        MaxGain(net(), include="0").load_state_dict(state)
    with pytest.raises(StateError, match=r"the state belongs to another MaxGain, .*: it lacks '2\.dropped'"):
        MaxGain(net()).load_state_dict(MaxGain(net(), include="0").state_dict())


def test_gains_are_nan_until_something_was_measured() -> None:
    model = net()
    constraint = MaxGain(model)
    assert all(map(math.isnan, constraint.gains.values()))
    assert constraint.scales == {"0": 1.0, "2": 1.0}
    model(torch.randn(5, 6))
    since = constraint.gains
    assert all(gain > 0 for gain in since.values())
    constraint.step()
    assert constraint.gains == since


# Fresh gains.


def linear_part(layer: nn.Module, x: Tensor, size: torch.Size) -> Tensor:
    """Wx with the weight as it is now, in float64."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, layer.weight.double())
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(x, layer.weight.double(), None, layer.stride, layer.padding, layer.dilation, layer.groups)
    if isinstance(layer, nn.ConvTranspose2d):
        twin = copy.deepcopy(layer).double()
        twin.bias = None
        return twin.forward(x, output_size=list(size))
    assert isinstance(layer, nn.BatchNorm2d)
    assert layer.running_var is not None
    scale = layer.weight.double() / (layer.running_var.double() + layer.eps).sqrt()
    return x * scale.view(-1, 1, 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.up, self.head = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1), nn.Linear(4 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.down(x)))
        out: Tensor = self.head(self.up(y, output_size=x.shape[-2:]).flatten(1))
        return out


def test_fresh_gains_hold_the_bound_exactly_on_the_steps_batches() -> None:
    model = UNet()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    constraint = MaxGain(model, gamma=0.5, measure="fresh").attach(optimiser)
    seen: dict[str, list[tuple[Tensor, torch.Size]]] = {name: [] for name in constraint.bounds}
    for name, records in seen.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, records=records: records.append((args[0].detach().double(), output.shape))
        )
    buffer = torch.empty(4, 3, 8, 8)
    for _ in range(3):
        optimiser.zero_grad()
        for _ in range(2):
            buffer.copy_(torch.randn(4, 3, 8, 8))  # as a loader does that reuses its memory
            model(buffer).square().mean().backward()
        buffer.zero_()
        optimiser.step()
        for name, records in seen.items():
            layer = model.get_submodule(name)
            largest = max(
                (linear_part(layer, x, shape).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).max().item()
                for x, shape in records
            )
            assert largest <= 0.5 * (1 + 1e-5)
            if constraint.scales[name] < 1:
                assert largest == pytest.approx(0.5, rel=1e-5)
            records.clear()
        assert any(scale < 1 for scale in constraint.scales.values())
