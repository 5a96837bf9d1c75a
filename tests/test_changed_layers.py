"""Layers that were changed after the constraint was made, and quantisation-aware training."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from maxgain import MaxGain
from maxgain.errors import UnsupportedLayerError
from odd_layers import each_constraint, train

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


def keep_units(layer: Any, outputs: int, inputs: int) -> None:
    layer.weight = nn.Parameter(layer.weight.detach()[:outputs, :inputs].clone())
    layer.bias = nn.Parameter(layer.bias.detach()[:outputs].clone())


@each_constraint
@pytest.mark.parametrize("dense", [True, False])
def test_units_may_be_pruned_while_a_network_is_trained(constrain, dense):
    """What is held to its bound is the layer as it is now, as if the constraint had been made of that."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 4), nn.Linear(4, 2)) if dense else (nn.Conv2d(6, 4, 3), nn.Conv2d(4, 2, 3))
    model, x = nn.Sequential(*layers), torch.randn(4, 6) if dense else torch.randn(4, 6, 7, 7)
    constraint = constrain(model, 0.05)
    train(model, x, constraint=constraint)
    keep_units(model[0], 3, 6)
    keep_units(model[1], 2, 3)
    nn.init.normal_(model[1].weight)
    other = copy.deepcopy(model)
    train(model, x, constraint=constraint)
    train(other, x, constraint=constrain(other, 0.05))
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-3, atol=1e-6)


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


@pytest.mark.parametrize(
    "change", [lambda memory: memory.view(torch.bfloat16)[:16].view(4, 4), lambda memory: memory.view(8, 4)]
)
def test_a_weight_of_another_type_or_shape_at_the_same_address_is_noticed(change):
    layer, memory = nn.Linear(4, 4, bias=False), torch.zeros(32)
    layer.weight.data = memory[:16].view(4, 4)
    constraint = MaxGain(layer, 2.0)
    before = constraint._share(None)
    assert constraint._share(None) is before
    layer.weight.data = change(memory)
    assert layer.weight.data_ptr() == memory.data_ptr()
    assert constraint._share(None) is not before
