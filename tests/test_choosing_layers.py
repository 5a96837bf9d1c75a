"""Bounds and patterns: which layers of a model are constrained, to what, and layer types of one's own."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain, register_layer
from maxgain.errors import NothingToConstrainError
from small_net import each_measure, net, one_step, sgd


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


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_layer_type_of_ones_own_is_constrained_once_it_is_registered() -> None:
    model = nn.Sequential(Scale())
    with pytest.raises(NothingToConstrainError):
        MaxGain(model)
    register_layer(Scale, instance_dims=1, weight="factor")
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model, gamma=2.0).attach(optimiser)
    one_step(model, optimiser, torch.randn(2, 3))
    assert constraint.gains == {"0": 4.0}
    assert model[0].factor.tolist() == [2.0, 2.0, 2.0]


@each_measure
def test_a_layer_type_is_measured_by_the_linear_part_that_it_was_registered_with(measure: Any) -> None:
    class Shifted(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 100

    register_layer(Shifted, 1, lambda layer, x, output: (x, output - 100), weight="factor")
    model = Shifted()
    constraint = MaxGain(model, gamma=2.0, measure=measure)
    model(torch.randn(2, 3))
    constraint.step()
    assert constraint.gains[""] == pytest.approx(4.0, rel=1e-4)
