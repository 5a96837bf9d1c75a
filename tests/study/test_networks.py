"""Networks: sizes, names, initial weights, and functions of one's own."""

import math
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from maxgain.errors import RecipeError
from maxgain.study import data
from maxgain.study.networks import NETWORKS, name_network, own_network, wrn

SHAPES = {"cnn": (1, 8, 8), "mlp": (1, 8, 8)}


def sizes(widths, kernel=9, bias=1):
    """Parameters of a chain of layers."""
    return sum(a * b * kernel + bias * b for a, b in pairwise(widths))


def wrn_sizes():
    groups = [(a, b, b, b, b) for a, b in pairwise((16, 64, 128, 256))]
    shortcuts = sum(sizes(group[:2], 1, 0) for group in groups)
    return sizes((3, 16), bias=0) + sum(sizes(group, bias=0) for group in groups) + shortcuts + sizes((256, 10), 1)


VGG, SVHN = (64, 64, 128, 128, *[256] * 4, *[512] * 8), (64, 64, 128, 128, 192, 192, 256, 256)
PARAMETERS = {
    "vgg19": (sizes((3, *VGG)) + sizes((512, 512, 512, 10), 1), sum(VGG)),
    "svhn_vgg": (sizes((3, *SVHN)) + sizes((256 * 4, 512, 512, 10), 1), sum(SVHN)),
    "wrn16_4": (wrn_sizes(), 16 + 4 * (64 + 128 + 256)),
    "cnn": (sizes((1, 32, 32, 64, 64)) + sizes((64 * 4, 128, 10), 1), 32 + 32 + 64 + 64),
    "mlp": (sizes((64, 256, 256, 10), 1), 256 + 256),
}
"""Of each network without batch norm, and the channels that batch norm has a scale and a shift for."""


def test_totals():
    """The formulas as plain numbers, so that both cannot slip together."""
    assert PARAMETERS["vgg19"][0] == 20_554_826
    assert sum(PARAMETERS["wrn16_4"]) + PARAMETERS["wrn16_4"][1] == 2_748_890


@pytest.mark.parametrize("name", NETWORKS)
def test_sizes_and_output(name):
    shape = SHAPES.get(name, (3, 32, 32))
    plain, channels = PARAMETERS[name]
    for batchnorm in (False, True):
        with torch.device("meta"):
            network = NETWORKS[name](shape, 10, batchnorm=batchnorm, dropout=nn.Dropout)
            assert network(torch.empty(2, *shape)).shape == (2, 10)
        assert sum(p.numel() for p in network.parameters()) == plain + 2 * channels * batchnorm


@pytest.mark.parametrize(("depth", "width", "millions"), [(40, 1, 0.6), (16, 8, 11.0), (28, 10, 36.5)])
def test_wide_residual_networks_have_their_authors_sizes(depth, width, millions):
    with torch.device("meta"):
        network = wrn((3, 32, 32), 10, depth=depth, width=width, batchnorm=True)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", NETWORKS)
def test_batchnorm_and_dropout_change_neither_names_nor_weights(name):
    def build(**how):
        torch.manual_seed(0)
        return NETWORKS[name](SHAPES.get(name, (3, 32, 32)), 10, **how).state_dict()

    plain = build()
    for how in ({"batchnorm": True}, {"dropout": nn.Dropout}, {"batchnorm": True, "dropout": nn.Dropout}):
        other = build(**how)
        assert plain.keys() <= other.keys()
        assert all(torch.equal(other[key], tensor) for key, tensor in plain.items())
        assert all("norm" in key for key in other.keys() - plain.keys())


@pytest.mark.parametrize("name", ["cnn", "wrn16_4"])
def test_initial_weights_are_he_normal(name):
    network = NETWORKS[name]((3, 32, 32), 10)
    for key, tensor in network.state_dict().items():
        if tensor.dim() == 1:
            assert not tensor.any(), key
        elif tensor.numel() > 5000:
            assert tensor.std().item() == pytest.approx(math.sqrt(2 / tensor[0].numel()), rel=0.05), key


def test_places_of_batchnorm_and_dropout():
    names = [name for name, _ in NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True, dropout=nn.Dropout).named_modules()]
    assert [name for name in names if re.search("drop|norm", name)] == [
        "features.norm1_1", "features.norm1_2", "features.drop2_1", "features.norm2_1", "features.drop2_2",
        "features.norm2_2", "classifier.drop1",
    ]  # fmt: skip
    mlp = [name for name, _ in NETWORKS["mlp"]((1, 8, 8), 10, batchnorm=True, dropout=nn.Dropout).named_modules()]
    names = [name.split(".")[-1] for name in mlp if re.search("drop|norm", name)]
    assert names == ["norm1", "drop2", "norm2", "drop3"]
    blocks = NETWORKS["wrn16_4"]((3, 32, 32), 10, dropout=nn.Dropout)
    assert sum(isinstance(module, nn.Dropout) for module in blocks.modules()) == 6


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compile_as_one_graph(name):
    torch.compiler.reset()
    network = NETWORKS[name](SHAPES.get(name, (3, 32, 32)), 10, batchnorm=True, dropout=nn.Dropout).eval()
    images = torch.randn(2, *SHAPES.get(name, (3, 32, 32)))
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    assert torch.equal(compiled(images), network(images))


def test_refusals():
    with pytest.raises(RecipeError, match="did you mean 'vgg19'"):
        NETWORKS["vgg16"]
    with pytest.raises(RecipeError, match="32×32") as caught:
        NETWORKS["vgg19"]((3, 28, 28), 10)
    assert caught.value.field == "network"


# --- Networks of one's own


@pytest.fixture(scope="module")
def own(digits):
    return data.dataset("mine", (digits.train.images, digits.train.labels), (digits.test.images, digits.test.labels))


def linear(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def test_name_follows_the_layers(own):
    before = torch.get_rng_state()
    name = name_network(linear, own)
    assert torch.equal(torch.get_rng_state(), before)
    assert re.fullmatch("linear-[0-9a-f]{6}", name)
    assert name_network(linear, own) == name

    def wider(shape, classes):
        return nn.Sequential(linear(shape, 20), nn.Linear(20, classes))

    wider.__name__ = "linear"
    assert name_network(wider, own) != name


def test_arguments_are_passed_where_asked_for():
    def build(shape, classes, batchnorm=False):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64) if batchnorm else nn.Identity()).eval()

    made = own_network(build, (1, 8, 8), 10, batchnorm=True)
    assert isinstance(made[1], nn.BatchNorm1d)
    assert made.training
    with pytest.raises(RecipeError, match="dropout"):
        own_network(build, (1, 8, 8), 10, dropout=nn.Dropout)


SAME = linear((1, 8, 8), 10)
COUNT = iter(range(10, 100))


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(lambda shape, classes: 3, id="no module"),
        pytest.param(lambda shape: linear(shape, 10), id="arguments"),
        pytest.param(lambda shape, classes: linear(shape, 7), id="classes"),
        pytest.param(lambda shape, classes: linear((1, 9, 9), classes), id="shape"),
        pytest.param(lambda shape, classes: linear(shape, classes).requires_grad_(False), id="frozen"),
        pytest.param(lambda shape, classes: SAME, id="the same again"),
        pytest.param(
            lambda shape, classes: nn.Sequential(linear(shape, n := next(COUNT)), nn.Linear(n, 10)), id="random"
        ),
        pytest.param(SAME, id="a module"),
    ],
)
def test_networks_that_cannot_be_trained(own, network):
    with pytest.raises(RecipeError):
        name_network(network, own)
