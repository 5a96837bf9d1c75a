"""Promise 16: a weight is scaled only where scaling it scales Wx."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip, measure_gains, operator_norms, register_layer
from maxgain.errors import UnsupportedLayerError
from maxgain.layers import KINDS

each_constraint = pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm, WeightClip])


class Standardised(nn.Conv2d):
    """As timm's StdConv2d: the same Wx, however small the weight is."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-8)
        return self._conv_forward(input, weight, self.bias)


class Squared(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.square(), self.bias)


class Shrinking(nn.Linear):
    """Nearly what it should be."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.sign() * self.weight.abs() ** 1.2, self.bias)


class Same(nn.Conv2d):
    """As timm's Conv2dSame: it pads for itself, and is linear all the same."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.in_features**0.5, self.bias)


class Noisy(nn.Linear):
    """It draws random numbers and keeps count, as layers with noise, quantisation or statistics do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(F.dropout(input, 0.5, training=False) + 0 * torch.rand(()), self.weight, self.bias)


class Gated(nn.Linear):
    """Its forward takes more than an input."""

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        return gate[:, None] * F.linear(input, self.weight)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gated(x, gate=torch.ones(len(x)))
        return out


class OnePlus(nn.LayerNorm):
    """As the layer norm of Nemotron."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, 1 + self.weight, self.bias)


class OnePlusBatch(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, 1 + self.weight, self.bias, self.training)


class ActedOn(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(torch.sigmoid(super().forward(input)), 0.5)


class InParts(nn.BatchNorm1d):
    """As ghost batch norm: it takes the statistics of each part of a batch, which must be two instances at least."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(InParts, self).forward(part) for part in input.chunk(2)])


class InFloat(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


REFUSED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "standardised": (lambda: Standardised(3, 8, 3), (4, 3, 8, 8)),
    "squared": (lambda: Squared(6, 4), (4, 6)),
    "to the power of 1.2": (lambda: Shrinking(6, 4), (4, 6)),
}
USED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "padding for itself": (lambda: Same(3, 8, 3), (4, 3, 8, 8)),
    "scaled": (lambda: Scaled(6, 4), (4, 6)),
    "with state and noise": (lambda: Noisy(6, 4), (4, 6)),
}


def train(model: nn.Module, x: Tensor, steps: int = 3, constraint: Any = None) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    if constraint is not None:
        constraint.attach(optimiser)
    for _ in range(steps):
        model(x).sum().backward()
        optimiser.step()


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


def test_promise_16_under_autocast():
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
def test_promise_16_under_torch_compile(make):
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


def test_promise_16_a_registered_type_is_taken_at_its_word(monkeypatch):
    monkeypatch.setattr("maxgain.layers.KINDS", dict(KINDS))
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
    assert constraint._proofs is None
    assert [len(module._forward_hooks) for module in model] == [1, 1]


def test_a_layer_that_is_not_linear_in_its_weight_can_be_measured():
    model = nn.Sequential(Standardised(3, 8, 3))
    assert len(measure_gains(model, [torch.randn(4, 3, 8, 8)]).gains["0"]) == 4
    assert operator_norms(model, torch.zeros(1, 3, 8, 8)).norms["0"] > 0


# What becomes of a layer after the constraint was made.

CHANGES = {
    "parametrised": lambda model: parametrizations.weight_norm(model[0]),
    "pruned": lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),
    "replaced": lambda model: model.__setitem__(0, nn.Linear(6, 4)),
}


@each_constraint
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_was_changed_since_is_named_when_an_optimiser_is_attached_next(constrain, change):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    constraint = constrain(model, 0.05)
    train(model, torch.randn(4, 6), constraint=constraint)
    constraint.detach()
    CHANGES[change](model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' \(\w+\) cannot be constrained: since the"):
        constraint.attach(optimiser)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
def test_quantisation_aware_training_after_the_constraint_was_made_is_named():
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    model.qconfig = get_default_qat_qconfig("x86")
    constraint = MaxGain(model, 0.05)
    prepare_qat(model, inplace=True)
    with pytest.raises(UnsupportedLayerError, match=r"layer '0' \(Linear\) cannot be constrained: since the"):
        train(model, torch.randn(4, 6), constraint=constraint)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
def test_quantisation_aware_training_of_a_plain_layer_works_and_of_a_fused_one_is_refused():
    from torch.ao.nn.intrinsic.qat import ConvBn2d
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(6, 4))
    model.qconfig = get_default_qat_qconfig("x86")
    prepare_qat(model, inplace=True)
    constraint = MaxGain(model, 0.05)
    train(model, torch.randn(4, 6), constraint=constraint)
    assert constraint.gains["0"] <= 0.051
    fused = nn.Sequential(ConvBn2d(3, 4, 3, qconfig=get_default_qat_qconfig("x86")))
    with pytest.raises(UnsupportedLayerError, match=r"layer '0' \(ConvBn2d\)"):
        train(fused, torch.randn(4, 3, 8, 8), constraint=MaxGain(fused, 0.05, exclude="0.bn"))


# What only shows later.


class Turncoat(nn.Linear):
    """Linear in its weight while it is tried, and standardised afterwards."""

    tried = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.tried:
            return F.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight / self.weight.std(), self.bias)


@pytest.mark.parametrize("excess", [1.1, 3.0, 100.0])
@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz])
def test_promise_16_a_weight_that_shrinks_step_by_step_while_its_gain_stays_is_named(monkeypatch, constrain, excess):
    monkeypatch.setattr("maxgain.layers.KINDS", dict(KINDS))
    register_layer(Standardised, instance_dims=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), Standardised(3, 8, 3, bias=False))
    x = torch.randn(4, 3, 8, 8)
    free = constrain(model, float("inf"))
    train(model, x, steps=1, constraint=free)
    size = free.gains["1"]
    free.detach()
    constraint = constrain(model, {"0": 0.01, "1": size / excess})
    with pytest.raises(
        UnsupportedLayerError, match=r"^layer '1' \(Standardised\) cannot be constrained: its weight has"
    ):
        train(model, x, steps=300, constraint=constraint)
    assert model[1].weight.norm() > 1e-12, "it is noticed while there is something left"


def test_promise_16_a_forward_that_changes_after_it_was_tried_is_named():
    model = nn.Sequential(Turncoat(6, 4))
    constraint = MaxGain(model, 0.05)
    train(model, torch.randn(4, 6), steps=3, constraint=constraint)
    constraint.detach()
    model[0].tried = True
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' \(Turncoat\) .* its gain has not come down"):
        train(model, torch.randn(4, 6), steps=300, constraint=constraint)


HARSH: dict[str, dict[str, Any]] = {
    "a learning rate that is far too high": {"lr": 1.0},
    "momentum": {"lr": 1.0, "momentum": 0.99},
    "weight decay": {"lr": 0.1, "weight_decay": 1.0},
    "no learning at all": {"lr": 0.0},
}


@pytest.mark.parametrize("gamma", [1e-3, 1.0])
@pytest.mark.parametrize("name", HARSH)
def test_promise_16_no_harsh_training_is_taken_for_a_weight_that_slips(name, gamma):
    torch.manual_seed(0)
    batch_norm = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(batch_norm, nn.Linear(96, 32), nn.Tanh(), Scaled(32, 16), nn.Linear(16, 2))
    optimiser = torch.optim.SGD(model.parameters(), **HARSH[name])
    constraint = MaxGain(model, gamma).attach(optimiser)
    for _ in range(130):
        optimiser.zero_grad()
        # Batches whose largest gain is noisy: some are a thousand times larger, some nearly all zeros.
        x = torch.randn(8, 2, 6, 6) * 10.0 ** torch.randint(-3, 4, (8, 1, 1, 1)) * (torch.rand(8, 2, 6, 6) < 0.1)
        F.cross_entropy(model(x), torch.randint(2, (8,))).backward()
        optimiser.step()
    assert all(math.isfinite(gain) for gain in constraint.gains.values())


def test_promise_16_inputs_that_come_to_show_more_are_not_taken_for_a_weight_that_slips():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight -= layer.weight.mean(1, keepdim=True)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.0)
    constraint = MaxGain(layer, 0.1).attach(optimiser)
    for step in range(40):
        layer(torch.ones(4, 8) if step < 6 else torch.randn(4, 8)).sum().backward()  # at first it shows next to nothing
        optimiser.step()
        with torch.no_grad():
            layer.weight *= 1.3
    assert constraint.gains[""] < 0.2
