"""Which layers of a model are constrained, by their kind and by patterns, and to which bounds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from maxgain import Lipschitz, MaxGain, MaxNorm
from maxgain.errors import BoundError, PatternError
from maxgain.layers import KINDS, find_layers
from small_net import net, one_step, sgd


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


def network() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "stem": nn.Conv1d(4, 4, 1),
            "body": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4)),
            "norm": nn.BatchNorm1d(4),
            "groups": nn.GroupNorm(1, 4),
            "head": nn.Linear(4, 2),
        }
    )


CHOICES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "scales of layer and group norms are left alone": ({}, ["stem", "body.0", "body.3", "norm", "head"]),
    "unless they are asked for": (
        {"include": "*"},
        ["stem", "body.0", "body.1", "body.3", "norm", "groups", "head"],
    ),
    "a glob": ({"include": "body.*"}, ["body.0", "body.1", "body.3"]),
    "several": ({"include": ["head", "*.1"]}, ["body.1", "head"]),
    "exclude": ({"exclude": "body.?"}, ["stem", "norm", "head"]),
    "exclude several": ({"exclude": ["norm", "head"]}, ["stem", "body.0", "body.3"]),
    "both": ({"include": "body.[0-1]", "exclude": ["*.1"]}, ["body.0"]),
}


@pytest.mark.parametrize(("options", "names"), CHOICES.values(), ids=CHOICES.keys())
def test_layers_are_chosen_by_kind_and_by_globs_over_their_names(options: dict[str, Any], names: list[str]) -> None:
    assert list(MaxGain(network(), **options).bounds) == names


def test_synchronised_batch_norm_and_subclasses_have_the_row_of_what_they_are() -> None:
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(nn.SyncBatchNorm(3), Mine(3, 3, 1))
    assert [layer.kind for layer in find_layers(model)] == [KINDS[nn.modules.batchnorm._BatchNorm], KINDS[nn.Conv2d]]


def test_a_refused_layer_that_is_not_asked_for_is_no_obstacle() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8)
    assert list(MaxGain(model, include="linear*").bounds) == ["linear1", "linear2"]
    assert list(MaxGain(model, exclude="self_attn").bounds) == ["linear1", "linear2"]


def test_what_is_inside_an_excluded_layer_may_be_excluded_too() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "dense": nn.Linear(4, 4)})
    for exclude in ("attention", "attention*", ["attention", "*.out_proj"]):
        assert list(MaxGain(model, exclude=exclude).bounds) == ["dense"]


def test_a_name_with_brackets_names_its_layer() -> None:
    model = nn.ModuleDict({"conv[3x3]": nn.Conv2d(1, 1, 3), "conv[1x1]": nn.Conv2d(1, 1, 1)})
    assert list(MaxGain(model, exclude="conv[3x3]").bounds) == ["conv[1x1]"]
    assert MaxGain(model, {"conv[1x1]": 1.0, "*": 2.0}).bounds["conv[1x1]"] == 1.0


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5),
    ],
    ids=["parametrised", "pruned"],
)
def test_what_cannot_be_scaled_in_place_can_be_measured(make: Callable[[], nn.Module]) -> None:
    assert [layer.name for layer in find_layers(nn.Sequential(make()), rescale=False)] == ["0"]


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm])
def test_a_bound_that_is_changed_holds_from_the_next_step_on(constrain: Any) -> None:
    model = net()
    optimiser = sgd(model, lr=0.0)
    constraint = constrain(model, 100.0).attach(optimiser)
    one_step(model, optimiser)
    constraint.bounds["2"] = 0.01
    one_step(model, optimiser)
    assert constraint.scales["0"] == 1
    assert constraint.scales["2"] == pytest.approx(0.01 / constraint.gains["2"], rel=1e-3)
    constraint.bounds.update(dict.fromkeys(constraint.bounds, 0.005))
    one_step(model, optimiser)
    assert max(constraint.scales.values()) < 0.6


def test_a_bound_that_is_changed_into_nonsense_is_refused() -> None:
    model = net()
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model).attach(optimiser)
    constraint.bounds["2"] = -1
    for _ in range(2):
        with pytest.raises(BoundError, match=r"bounds\['2'\] must be a positive number"):
            one_step(model, optimiser)
    constraint = MaxGain(model)
    constraint.bounds["three"] = 1.0
    with pytest.raises(PatternError, match="'three' of bounds matches no layer"):
        constraint.attach(optimiser)


@pytest.mark.parametrize(("constrain", "name"), [(MaxGain, "gamma"), (Lipschitz, "bound"), (MaxNorm, "bound")])
def test_a_bound_that_is_set_or_read_under_the_name_it_was_given_by_is_refused_with_what_to_do(
    constrain: Any, name: str
) -> None:
    constraint = constrain(net(), 2.0)
    with pytest.raises(BoundError, match=r"constraint.bounds.update\(dict.fromkeys\(constraint.bounds, 0.5\)\)"):
        setattr(constraint, name, 0.5)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': each layer's is in constraint.bounds"):
        getattr(constraint, name)
