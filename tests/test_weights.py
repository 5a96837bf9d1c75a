"""MaxNorm and WeightClip: what they bound, against weights found by gradients and against clamp."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import maxgain
from maxgain import MaxNorm, WeightClip
from maxgain.errors import NothingToConstrainError, UnsupportedLayerError
from maxgain.layers import KINDS, kind_of

LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3), padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (4, 2, 2)),
    "transposed in groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 3)),
    "transposed in three dimensions": (lambda: nn.ConvTranspose3d(2, 2, 2), (2, 2, 2, 2)),
    "transposed matrix": (lambda: Conv1D(4, 5), (5,)),
}


def test_every_row_with_units_is_tried():
    tried = {kind_of(make()) for make, _ in LAYERS.values()}
    missing = {key for key, kind in KINDS.items() if kind.units is not None and kind not in tried}
    assert missing == set()


def incoming(layer: nn.Module, shape: tuple[int, ...], p: float) -> list[float]:
    """The norm of what comes into each unit, found by asking which weights its outputs depend on."""
    norms = []
    for unit in range(layer(torch.zeros(1, *shape)).shape[1]):
        layer.zero_grad()
        layer(torch.randn(8, *shape)).abs()[:, unit].sum().backward()
        weights = layer.weight[layer.weight.grad != 0]
        norms.append(torch.linalg.vector_norm(weights, p).item())
    layer.zero_grad(set_to_none=True)
    return norms


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_every_unit_is_bounded_by_itself(name, p):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    before = incoming(layer, shape, p)
    bound = sum(before) / len(before)  # some units are above it and some below
    constraint = MaxNorm(layer, bound, p=p)
    constraint.step()
    after = incoming(layer, shape, p)
    assert after == pytest.approx([min(norm, bound) for norm in before], rel=1e-5)
    assert constraint.gains[""] == pytest.approx(max(before), rel=1e-5)
    assert constraint.scales[""] == pytest.approx(bound / max(before), rel=1e-5)


@pytest.mark.parametrize(("p", "entry"), [(2, 1e20), (2, 1e-25), (20, 100.0), (20, 1e-3)])
def test_units_are_bounded_whose_powers_are_beyond_the_type(p, entry):
    layer = nn.Linear(8, 4)
    nn.init.constant_(layer.weight, entry)
    MaxNorm(layer, entry / 10, p=p).step()
    assert torch.linalg.vector_norm(layer.weight[0].double(), p).item() == pytest.approx(entry / 10, rel=1e-5, abs=0)


def test_units_within_the_bound_keep_their_bits():
    layer = nn.Linear(50, 50)
    before = layer.weight.detach().clone()
    norms = torch.linalg.vector_norm(before, dim=1)
    MaxNorm(layer, norms.median().item() * 1.000001).step()
    within = norms <= norms.median()
    assert torch.equal(layer.weight[within], before[within])
    assert not (layer.weight[~within] == before[~within]).all(1).any()


def test_normalisation_layers_are_left_alone_and_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(MaxNorm(model).bounds) == ["0"]
    assert list(MaxNorm(model, include="*", exclude="1").bounds) == ["0"]
    with pytest.raises(UnsupportedLayerError, match=r"layer '1' \(BatchNorm1d\) has no units"):
        MaxNorm(model, include="*")
    with pytest.raises(NothingToConstrainError):
        MaxNorm(nn.BatchNorm1d(2))
    assert list(MaxNorm(model).unconstrained) == ["0.bias", "1.weight", "1.bias"]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.0, -4.0]))

    def forward(self, x):
        return x * self.factor


def test_a_type_of_ones_own_has_its_units_along_the_first_dimension():
    maxgain.register_layer(Scale, instance_dims=1, weight="factor")
    layer = Scale()
    MaxNorm(layer, 2.0).step()
    assert layer.factor.tolist() == [1.0, -2.0]


def test_clipping_is_what_clamp_does():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    before = copy.deepcopy(model)
    constraint = WeightClip(model, {"1": 0.5, "*": 0.05})
    constraint.step()
    for name, bound in {"0": 0.05, "1": 0.5, "3": 0.05}.items():
        was = before.get_submodule(name).weight
        torch.testing.assert_close(model.get_submodule(name).weight, was.clamp(-bound, bound), rtol=1e-6, atol=0)
        assert torch.equal(model.get_submodule(name).bias, before.get_submodule(name).bias)
        assert constraint.gains[name] == was.abs().max()
    within = before[3].weight.abs() <= 0.05
    assert torch.equal(model[3].weight[within], before[3].weight[within])


each = pytest.mark.parametrize("make", [MaxNorm, WeightClip])


def train(model, optimiser):
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        optimiser.zero_grad()
        (model(torch.randn(8, 6, generator=generator)) - 1).square().mean().backward()
        optimiser.step()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


@each
def test_the_bound_holds_after_training_and_inf_changes_nothing(make):
    plain, free, bound = net(), net(), net()
    for model, limit in ((plain, None), (free, math.inf), (bound, 0.1)):
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        if limit is not None:
            make(model, limit).attach(optimiser)
        train(model, optimiser)
    assert all(map(torch.equal, plain.parameters(), free.parameters()))
    for layer in (bound[0], bound[2]):
        largest = layer.weight.abs().max() if make is WeightClip else layer.weight.norm(dim=1).max()
        assert largest <= 0.1 * (1 + 1e-6)


@each
def test_no_forward_is_watched_and_no_forward_is_needed(make):
    model = net()
    make(model, 0.1).step()
    assert not any(module._forward_hooks for module in model.modules())


@each
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_copies_keep_their_bounds_and_states(make, how):
    model = net()
    constraint = make(model, {"0": 0.1, "*": 0.2})
    constraint.step()
    twin, other = how((model, constraint))
    assert other.bounds == constraint.bounds
    assert other.state_dict() == constraint.state_dict()
    with torch.no_grad():
        twin[0].weight.mul_(9)
    other.step()
    assert other.gains["0"] == pytest.approx(0.9, rel=1e-5)


@each
def test_a_shared_weight_is_bounded_for_both_and_a_frozen_one_is_left_alone(make):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    before = model[2].weight.clone()
    constraint = make(model, {"0": 0.2, "*": 0.1})
    constraint.step()
    assert constraint.scales["0"] == constraint.scales["1"] < 1
    assert constraint.scales["2"] == 1
    constraint.step()
    assert max(constraint.gains["0"], constraint.gains["1"]) <= 0.1 * (1 + 1e-6)
    assert torch.equal(model[2].weight, before)


@each
def test_weights_that_are_not_finite_spoil_no_others(make):
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    make(layer, 0.01).step()
    assert layer.weight.isfinite().sum() == 8
    assert layer.weight[1:].abs().max() <= 0.0101


@each
def test_in_half_precision_the_bound_holds_to_rounding(make):
    layer = nn.Linear(30, 30).bfloat16()
    make(layer, 0.05).step()
    largest = layer.weight.abs().max() if make is WeightClip else layer.weight.float().norm(dim=1).max()
    assert largest.item() == pytest.approx(0.05, rel=5e-3)
