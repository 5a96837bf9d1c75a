"""Which layers of a model are found, and which are refused."""

import ast
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from maxgain import MaxGain, register_layer
from maxgain.errors import NothingToConstrainError, PatternError, UnsupportedLayerError
from maxgain.layers import KINDS, REFUSED, find_layers


def network():
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "body": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4)),
            "norm": nn.BatchNorm1d(4),
            "head": nn.Linear(4, 2),
        }
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["body.0", "body.3", "norm", "head"]),
        ({"include": "body.*"}, ["body.0", "body.1", "body.3"]),
        ({"include": ["head", "*.1"]}, ["body.1", "head"]),
        ({"exclude": "body.?"}, ["norm", "head"]),
        ({"include": "body.*", "exclude": ["*.1"]}, ["body.0", "body.3"]),
    ],
)
def test_layers_are_found_by_kind_and_by_globs_over_their_names(options, names):
    assert [layer.name for layer in find_layers(network(), **options)] == names


def test_synchronised_batch_norm_and_subclasses_have_the_row_of_what_they_are():
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(nn.SyncBatchNorm(3), Mine(3, 3, 1))
    assert [layer.kind for layer in find_layers(model)] == [KINDS[nn.modules.batchnorm._BatchNorm], KINDS[nn.Conv2d]]


@pytest.mark.parametrize("options", [{"include": ["body.0", "boddy.*"]}, {"exclude": "boddy.*"}])
def test_a_pattern_that_matches_no_layer_is_refused_by_name(options):
    with pytest.raises(PatternError, match=r"^the pattern 'boddy\.\*' matches no layer; the layers are 'body\.0'"):
        find_layers(network(), **options)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(nn.Embedding(3, 3), nn.LayerNorm(3))])
def test_a_model_without_a_layer_to_constrain_is_refused(model):
    with pytest.raises(NothingToConstrainError, match=rf"^{type(model).__name__} has no layer to work on: "):
        find_layers(model)


def weight_normed():
    return parametrizations.weight_norm(nn.Linear(4, 4))


def pruned():
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


UNMEASURABLE = {
    "attention": (lambda: nn.MultiheadAttention(4, 2), "inside one fused operation"),
    "lstm": (lambda: nn.LSTM(4, 4), "inside one fused operation"),
    "gru cell": (lambda: nn.GRUCell(4, 4), "inside one fused operation"),
    "attention's own projection": (
        lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4),
        "inside one fused operation",
    ),
    "bilinear": (lambda: nn.Bilinear(4, 4, 4), "linear in each of two inputs"),
    "lazy": (lambda: nn.LazyLinear(4), "size is not known before a first batch"),
    "batch norm without a scale": (lambda: nn.BatchNorm1d(4, affine=False), "affine=False"),
    "batch norm without a memory": (lambda: nn.BatchNorm1d(4, track_running_stats=False), "no running variance"),
}
UNSCALABLE = {
    "parametrised": (weight_normed, "computed from others"),
    "pruned": (pruned, "computed from others"),
}


def test_every_refused_type_is_tried():
    assert set(REFUSED) <= {cls for make, _ in UNMEASURABLE.values() for cls in type(make()).__mro__}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", UNMEASURABLE | UNSCALABLE)
def test_what_cannot_be_constrained_is_refused_with_its_path_the_reason_and_a_remedy_that_works(name):
    make, reason = (UNMEASURABLE | UNSCALABLE)[name]
    blocks = [nn.ModuleDict({"good": nn.Linear(4, 4)}) for _ in range(11)]
    blocks[1]["bad"] = make()
    model = nn.Sequential(*blocks)
    with pytest.raises(UnsupportedLayerError) as error:
        MaxGain(model)
    said = re.fullmatch(
        r"layer '1\.bad' \((\w+)\) cannot be constrained: (.*)\. Leave it out with exclude='(.*)'\.", str(error.value)
    )
    assert said, str(error.value)
    assert said[1] == type(blocks[1]["bad"]).__name__
    assert reason in said[2]
    assert [layer.name for layer in find_layers(model, exclude=said[3])] == [f"{i}.good" for i in range(11)]


@pytest.mark.parametrize("name", UNSCALABLE)
def test_what_cannot_be_scaled_in_place_can_be_measured(name):
    make, _ = UNSCALABLE[name]
    assert [layer.name for layer in find_layers(nn.Sequential(make()), rescale=False)] == ["0"]


def test_a_refused_layer_that_is_not_asked_for_is_no_obstacle():
    model = nn.TransformerEncoderLayer(4, 2, 8)
    assert [layer.name for layer in find_layers(model, include="linear*")] == ["linear1", "linear2"]
    assert [layer.name for layer in find_layers(model, exclude="self_attn")] == ["linear1", "linear2"]


def test_a_model_that_is_itself_refused_says_so():
    with pytest.raises(UnsupportedLayerError, match=r"^the model itself \(LSTM\) cannot be constrained: .*seen\.$"):
        MaxGain(nn.LSTM(4, 4))


def test_a_type_of_ones_own_is_measured_and_scaled(monkeypatch):
    class Shifted(nn.Module):
        """Computes A(x - 1) row by row, so that its linear part is not its output less a bias."""

        def __init__(self):
            super().__init__()
            self.A = nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))

        def forward(self, x):
            return (x - 1) @ self.A.T

    monkeypatch.setattr("maxgain.layers.KINDS", dict(KINDS))
    register_layer(Shifted, 1, lambda layer, x, output: (x, x @ layer.A.T), weight="A")
    model = nn.Sequential(Shifted())
    constraint = MaxGain(model, gamma=1.5)
    model(torch.tensor([[2.0, 0.0], [0.0, 5.0]]))
    constraint.step()
    assert constraint.gains == {"0": 3.0}
    assert model[0].A.tolist() == [[1.5, 0.0], [0.0, 0.5]]


def test_all_refused_layers_are_named_at_once_and_the_remedy_covers_them():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
    with pytest.raises(UnsupportedLayerError) as error:
        find_layers(model)
    remedy = re.search(r"exclude=(\[.*\])", str(error.value))
    found = find_layers(model, exclude=ast.literal_eval(remedy[1]))
    assert [layer.name for layer in found] == [f"layers.{i}.linear{j}" for i in range(3) for j in (1, 2)]
