"""Promise 16: a weight is scaled only where scaling it scales Wx, which is tried before it is touched."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip, measure_gains, operator_norms, register_layer
from maxgain.errors import UnsupportedLayerError
from odd_layers import (
    ActedOn,
    InFloat,
    InParts,
    InPlace,
    Noisy,
    OnePlus,
    OnePlusBatch,
    Pair,
    Same,
    Scaled,
    Shrinking,
    Squared,
    Standardised,
    StandardisedInside,
    each_constraint,
    train,
)

REFUSED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "standardised": (lambda: Standardised(3, 8, 3), (4, 3, 8, 8)),
    "standardised by what its forward calls": (lambda: StandardisedInside(3, 8, 3), (4, 3, 8, 8)),
    "squared": (lambda: Squared(6, 4), (4, 6)),
    "to the power of 1.2": (lambda: Shrinking(6, 4), (4, 6)),
}
USED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "padding for itself": (lambda: Same(3, 8, 3), (4, 3, 8, 8)),
    "scaled": (lambda: Scaled(6, 4), (4, 6)),
    "with state and noise": (lambda: Noisy(6, 4), (4, 6)),
    "changing its input in place": (lambda: InPlace(6, 4), (4, 6)),
}


@each_constraint
@pytest.mark.parametrize("name", REFUSED)
def test_promise_16_what_is_not_linear_in_its_weight_is_refused_before_its_weight_is_touched(constrain, name):
    make, shape = REFUSED[name]
    model = nn.Sequential(make())
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedLayerError) as error:
        train(model, torch.randn(shape), constraint=constrain(model, 0.05))
    assert torch.equal(model[0].weight, before)
    said = str(error.value)
    assert said.startswith(f"layer '0' ({type(model[0]).__name__}) cannot be constrained: halving its weight does not")
    assert "exclude='0'" in said
    assert "register_layer()" in said


@each_constraint
@pytest.mark.parametrize("name", USED)
def test_promise_16_what_is_linear_in_its_weight_is_used_without_a_word(constrain, name):
    make, shape = USED[name]
    model = nn.Sequential(make())
    constraint = constrain(model, 0.05)
    train(model, torch.randn(shape), constraint=constraint)
    assert all(gain <= 0.0501 for gain in constraint.gains.values())
    if name == "with state and noise":
        assert model[0].calls == 3, "trying changes no buffer"


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, WeightClip])
@pytest.mark.parametrize("layer", [OnePlus(8), OnePlusBatch(4)], ids=["layer norm", "batch norm"])
def test_promise_16_a_normalisation_that_adds_to_its_weight_is_refused(constrain, layer):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer)
    before = layer.weight.detach().clone()
    with pytest.raises(UnsupportedLayerError, match=r"^layer '1' .* halving its weight does not halve its Wx"):
        train(model, torch.randn(4, 3, 8, 8), constraint=constrain(model, 1e-3, include="1"))
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, WeightClip])
@pytest.mark.parametrize("make", [lambda: ActedOn(4), lambda: InFloat(2, 4)], ids=["activation", "cast"])
def test_promise_16_a_normalisation_with_a_forward_of_its_own_is_used(constrain, make):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), make())
    train(model, torch.randn(4, 3, 8, 8), constraint=constrain(model, 0.25, include="1"))
    assert model[1].weight.abs().max() < 0.9


def test_promise_16_a_batch_norm_of_parts_of_a_batch_is_tried_with_a_whole_one():
    model = nn.Sequential(nn.Linear(6, 4), InParts(4))
    train(model, torch.randn(8, 6), constraint=MaxGain(model, 0.25))
    assert model[1].weight.abs().max() < 0.9


def test_promise_16_trying_changes_no_random_number():
    drawn = []
    for constrained in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(Noisy(6, 4))
        x = torch.randn(4, 6)
        train(model, x, steps=2, constraint=MaxGain(model, 0.05) if constrained else None)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", USED | REFUSED)
def test_promise_16_rounding_decides_nothing(dtype, name):
    make, shape = (USED | REFUSED)[name]
    model = nn.Sequential(make()).to(dtype)
    with torch.no_grad():
        model[0].bias.add_(3)
    constraint = MaxGain(model, 0.05)
    if name in USED:
        train(model, torch.randn(shape).to(dtype), constraint=constraint)
    else:
        with pytest.raises(UnsupportedLayerError):
            train(model, torch.randn(shape).to(dtype), constraint=constraint)


def test_promise_16_a_layer_is_tried_under_autocast_too():
    for make, fine in ((Scaled, True), (Squared, False)):
        model = nn.Sequential(make(6, 4))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
        MaxGain(model, 0.05).attach(optimiser)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 6)).sum().backward()
        if fine:
            optimiser.step()
        else:
            with pytest.raises(UnsupportedLayerError, match="halving its weight"):
                optimiser.step()


@pytest.mark.parametrize("make", [Scaled, Squared])
def test_promise_16_a_layer_is_tried_under_torch_compile_too_and_not_recompiled(make):
    torch.compiler.reset()
    model = nn.Sequential(make(6, 4))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, 0.05).attach(optimiser)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(4, 6)).sum().backward()
    if make is Squared:
        with pytest.raises(UnsupportedLayerError, match="halving its weight"):
            optimiser.step()
        return
    optimiser.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            compiled(torch.randn(4, 6)).sum().backward()
            optimiser.step()
    assert constraint.gains["0"] <= 0.0501


def test_promise_16_a_forward_with_more_arguments_is_tried_with_those_of_its_first_call():
    model = Pair()
    constraint = MaxGain(model, 0.05)
    train(model, torch.randn(4, 6), constraint=constraint)
    assert constraint.scales["gated"] == pytest.approx(1, rel=1e-5)
    assert constraint.gains["gated"] <= 0.0501
    model = Pair()
    with pytest.raises(UnsupportedLayerError, match=r"^layer 'gated' \(Gated\) cannot be measured afresh: its forward"):
        train(model, torch.randn(4, 6), constraint=MaxGain(model, 0.05, measure="fresh"))


def test_promise_16_an_empty_batch_is_no_call_to_try_a_layer_by():
    """As an expert that no token went to at first."""
    model = nn.Sequential(Scaled(6, 4))
    constraint = MaxGain(model, 0.05)
    model(torch.zeros(0, 6))
    train(model, torch.randn(4, 6), constraint=constraint)
    assert constraint.gains["0"] == pytest.approx(0.05, rel=1e-4)


def test_promise_05_what_a_layer_was_given_besides_its_input_is_not_kept_beyond_the_first_step():
    model = Pair()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    MaxGain(model, 0.05).attach(optimiser)
    gate = torch.ones(4)
    model.gated(torch.randn(4, 6), gate=gate).sum().backward()
    kept, gate = weakref.ref(gate), None
    optimiser.step()
    optimiser.zero_grad()
    assert kept() is None


def test_promise_16_a_forward_that_is_only_transformed_is_not_the_first_call():
    model = Pair()
    constraint = MaxGain(model, 0.05)
    torch.func.vmap(lambda x: model.gated(x[None], gate=x[:1]))(torch.randn(4, 6))
    train(model, torch.randn(4, 6), constraint=constraint)
    assert constraint.gains["gated"] <= 0.0501


def test_promise_16_a_weight_of_zeros_is_tried_all_the_same():
    model = nn.Sequential(Squared(6, 4))
    nn.init.zeros_(model[0].weight)
    with pytest.raises(UnsupportedLayerError, match="halving its weight"):
        train(model, torch.randn(4, 6), constraint=MaxGain(model, 0.05))


@each_constraint
@pytest.mark.parametrize("standardise", [True, False])
def test_promise_16_a_layer_that_begins_with_a_scale_of_zero_is_tried_with_another(constrain, standardise):
    class SkipInit(nn.Linear):
        """As the last convolution of a block of NFNet: at first it returns zeros, whatever its weight is."""

        def __init__(self) -> None:
            super().__init__(6, 4)
            self.gain = nn.Parameter(torch.zeros(4))

        def forward(self, input: Tensor) -> Tensor:
            weight = self.weight / self.weight.std() if standardise else self.weight
            return F.linear(input, self.gain[:, None] * weight, self.bias)

    model = nn.Sequential(SkipInit())
    constraint = constrain(model, 0.05)
    if standardise:
        with pytest.raises(UnsupportedLayerError, match="halving its weight"):
            train(model, torch.randn(4, 6), steps=1, constraint=constraint)
    else:
        train(model, torch.randn(4, 6), steps=1, constraint=constraint)


def test_promise_16_a_layer_that_returns_zeros_whatever_it_holds_cannot_be_tried():
    class Zero(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 0 * F.linear(input, self.weight)

    model = nn.Sequential(Zero(6, 4, bias=False))
    with pytest.raises(UnsupportedLayerError, match=r"could not be tried .ValueError: its Wx is zero for any weight"):
        train(model, torch.randn(4, 6), constraint=MaxNorm(model, 0.05))


def test_promise_16_a_registered_type_is_taken_at_its_word():
    register_layer(Shrinking, instance_dims=1)
    model = nn.Sequential(Shrinking(6, 4))
    constraint = MaxGain(model, 0.05)
    train(model, torch.randn(4, 6), steps=1, constraint=constraint)
    assert constraint.scales["0"] < 1


def test_promise_16_plain_layers_are_not_tried_and_tried_ones_are_only_once():
    model = nn.Sequential(nn.Linear(6, 4), Noisy(4, 3))
    constraint = MaxGain(model, 0.05)
    assert list(constraint._proofs.open) == ["1"]
    train(model, torch.randn(4, 6), constraint=constraint)
    assert not constraint._proofs.open
    assert [len(module._forward_hooks) for module in model] == [1, 1]


def test_a_layer_that_is_not_linear_in_its_weight_can_be_measured():
    model = nn.Sequential(Standardised(3, 8, 3))
    assert len(measure_gains(model, [torch.randn(4, 3, 8, 8)]).gains["0"]) == 4
    assert operator_norms(model, torch.zeros(1, 3, 8, 8)).norms["0"] > 0


class Activated(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Amplified(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Dropping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5, self.training)


@pytest.mark.parametrize("kind", [Activated, Amplified, Dropping])
def test_promise_16_a_layer_that_does_something_to_its_bias_too_is_refused_before_it_is_divided(kind: Any) -> None:
    model = nn.Sequential(kind(6, 4))
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedLayerError, match=rf"^layer '0' \({kind.__name__}\) .* less its bias is not its Wx"):
        train(model, torch.randn(8, 6), constraint=MaxGain(model, 0.01))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("kind", [Activated, Amplified, Dropping])
def test_promise_16_without_a_bias_the_same_layers_are_held_to_their_bounds(kind: Any) -> None:
    model = nn.Sequential(kind(6, 4, bias=False))
    constraint = MaxGain(model, 0.01)
    train(model, torch.randn(8, 6), constraint=constraint)
    assert constraint.gains["0"] < 0.03  # dropping other units, a batch may show more than the last one


def test_what_a_layer_does_to_its_bias_matters_to_no_constraint_of_weights_alone() -> None:
    model = nn.Sequential(Activated(6, 4))
    train(model, torch.randn(8, 6), constraint=WeightClip(model, 0.01))
    assert model[0].weight.abs().max() <= 0.01


def test_a_report_of_gains_refuses_a_layer_whose_linear_part_cannot_be_seen() -> None:
    x = torch.randn(8, 6)
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' \(Activated\) cannot be measured: its output less"):
        measure_gains(nn.Sequential(Activated(6, 4)), [x])
    model = nn.Sequential(Dropping(6, 4))  # which does nothing in evaluation mode
    expected = (x @ model[0].weight.T).norm(dim=1) / x.norm(dim=1)
    torch.testing.assert_close(torch.from_numpy(measure_gains(model, [x]).gains["0"]), expected.detach())


class Factor(nn.Linear):
    """Its output is learned to be larger, bias and all; at first it is not."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__(*sizes, bias=bias)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.factor


class Branch(nn.Linear):
    """It learns a second matrix, which is 0 at first."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.other = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(input, self.other)


@pytest.mark.filterwarnings("ignore:.*have no bound:maxgain.errors.MeasurementWarning")
@pytest.mark.parametrize("make", [Factor, Branch])
def test_promise_16_what_other_parameters_will_do_is_seen_before_they_do_it(make: Any) -> None:
    layer = make(4, 4)
    constraint = MaxGain(layer, 0.1)
    layer(torch.randn(3, 4))
    with pytest.raises(UnsupportedLayerError):
        constraint.step()


def test_promise_16_other_parameters_may_do_as_they_like_to_wx_alone_or_beside_a_frozen_weight() -> None:
    frozen = Branch(4, 4).requires_grad_(False)
    for layer in (Factor(4, 4, bias=False), frozen):
        constraint = MaxGain(layer, 0.1)
        layer(torch.randn(3, 4))
        constraint.step()


class Hungry(nn.Linear):
    """Runs out of memory in all calls after some."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("use", ["measuring", "norms", "training"])
def test_running_out_of_memory_is_left_to_those_who_ask_for_less_then(use: str, calls: int) -> None:
    layer, x = Hungry(6, 4), torch.randn(4, 6)
    layer.calls = calls
    constraint = MaxGain(layer)
    with pytest.raises(torch.OutOfMemoryError):  # noqa: PT012 - in the forward or in the step
        if use == "training":
            layer(x)
            constraint.step()
        else:
            (measure_gains if use == "measuring" else operator_norms)(layer, [x])
