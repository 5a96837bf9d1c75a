"""MaxNorm and WeightClip: what they bound, against weights found by gradients and against clamp.

What all constraints promise is in test_core.py.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from maxgain import register_layer
from maxgain.errors import NothingToConstrainError
from maxgain.weights import MaxNorm, WeightClip
from odd_layers import Scale

each = pytest.mark.parametrize("make", [MaxNorm, WeightClip])
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3), padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (4, 2, 2)),
    "transposed in groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 3)),
    "transposed matrix": (lambda: Conv1D(4, 5), (5,)),
}


def incoming(layer: nn.Module, shape: tuple[int, ...], p: float) -> list[float]:
    """The norm of the weights that come into each unit: those that its outputs depend on."""
    norms, weight = [], layer.get_parameter("weight")
    for unit in range(layer(torch.zeros(1, *shape)).shape[1]):
        (gradient,) = torch.autograd.grad(layer(torch.randn(8, *shape)).abs()[:, unit].sum(), weight)
        norms.append(torch.linalg.vector_norm(weight[gradient != 0], p).item())
    return norms


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_every_unit_is_bounded_by_itself(name: str, p: float) -> None:
    make, shape = LAYERS[name]
    layer = make()
    before = incoming(layer, shape, p)
    bound = sum(before) / len(before)  # some units are above it and some below
    constraint = MaxNorm(layer, bound, p=p)
    constraint.step()
    assert incoming(layer, shape, p) == pytest.approx([min(norm, bound) for norm in before], rel=1e-5)
    assert constraint.gains[""] == pytest.approx(max(before), rel=1e-5)
    assert constraint.scales[""] == pytest.approx(bound / max(before), rel=1e-5)


@pytest.mark.parametrize(("p", "entry"), [(20, 100.0), (20, 1e-3)])
def test_units_are_bounded_whose_powers_are_beyond_the_dtype(p: float, entry: float) -> None:
    layer = nn.Linear(8, 4)
    nn.init.constant_(layer.weight, entry)
    MaxNorm(layer, entry / 10, p=p).step()
    assert torch.linalg.vector_norm(layer.weight[0].double(), p).item() == pytest.approx(entry / 10, rel=1e-5, abs=0)


def test_units_within_the_bound_keep_their_bits() -> None:
    layer = nn.Linear(50, 50)
    before = layer.weight.detach().clone()
    norms = torch.linalg.vector_norm(before, dim=1)
    within = norms <= norms.median()
    MaxNorm(layer, norms.median().item() * 1.000001).step()
    assert torch.equal(layer.weight[within], before[within])
    assert not (layer.weight[~within] == before[~within]).all(1).any()


def test_normalisation_layers_have_no_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(MaxNorm(model).gains) == ["0"]
    assert list(WeightClip(model).gains) == ["0", "1"]
    with pytest.raises(NothingToConstrainError):
        MaxNorm(nn.BatchNorm1d(2))


def test_a_registered_type_has_its_units_along_the_first_dimension() -> None:
    register_layer(Scale, dims=1, weight="factor")
    layer = Scale()
    layer.factor.data[0] = -1.0
    MaxNorm(layer, 2.0).step()
    assert layer.factor.tolist() == [-1.0, 2.0, 2.0]


def test_clipping_is_what_clamp_does() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    before = copy.deepcopy(model)
    constraint = WeightClip(model, {"1": 0.5, "*": 0.05})
    constraint.step()
    for name, bound in {"0": 0.05, "1": 0.5, "3": 0.05}.items():
        was = before.get_submodule(name).weight
        torch.testing.assert_close(model.get_submodule(name).weight, was.clamp(-bound, bound), rtol=1e-6, atol=0)
        assert torch.equal(model.get_submodule(name).bias, before.get_submodule(name).bias)
        assert constraint.gains[name] == was.abs().max()


@each
def test_in_half_precision_the_bound_holds_to_rounding(make: Any) -> None:
    layer = nn.Linear(30, 30).bfloat16()
    make(layer, 0.05).step()
    largest = layer.weight.abs().max() if make is WeightClip else layer.weight.float().norm(dim=1).max()
    assert largest.item() == pytest.approx(0.05, rel=5e-3)
