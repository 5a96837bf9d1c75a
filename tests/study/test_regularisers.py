"""Regularisers: how texts are read, and that each row does what its paper says."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from maxgain import measure_gains, operator_norms
from maxgain.errors import RegulariserError
from maxgain.study.dropout import LearnedNoise
from maxgain.study.recipe import RECIPES, fill, parse, short_name, spell
from maxgain.study.regularisers import REGULARISERS, Batch
from maxgain.study.training import Training, to_float

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], fold=0)


def trained(digits, regulariser, steps=6, **changes):
    """A training after a few steps."""
    with torch.random.fork_rng(devices=[]):
        training = Training(replace(RECIPE, regulariser=regulariser, **changes), digits, CPU)
        for taken in range(steps):
            if taken % training.steps_per_epoch == 0:
                training.begin_epoch()
            training.step()
    return training


def layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}


# --- Texts


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("none", "none"),
        ("maxgain = 2", "maxgain=2"),
        (" dropout + maxgain=1.50", "maxgain=1.5+dropout"),
        ("weightdecay=1e-4", "weightdecay=0.0001"),
        ("lipschitz-inf=1e30", "lipschitz-inf=1e30"),
        ("batchnorm+dropout=0.8+maxgain", "maxgain+batchnorm+dropout=0.8"),
    ],
)
def test_spelling(text, spelling):
    assert spell(parse(text)) == spelling
    assert spell(parse(spelling)) == spelling


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_numbers_are_read_back(number):
    (choice,) = parse(fill("maxgain", {"maxgain": number}))
    assert choice.number == number


@pytest.mark.parametrize(
    "text",
    [
        "", "+", "maxgian", "maxgain=", "maxgain=two", "maxgain=-1", "maxgain=0", "maxgain=nan", "none=1",
        "batchnorm=1", "dropout=2", "maxgain dropout", "none+maxgain", "maxgain+maxgain=1", "dropout+gaussiandropout",
        "gradpenalty+batchnorm", "weightnorm+spectralnorm", "maxgain+weightnorm", "lipschitz-2+spectralnorm",
    ],
)  # fmt: skip
def test_refusals(text):
    with pytest.raises(RegulariserError) as caught:
        parse(text)
    assert caught.value.field == "regulariser"


def test_filling_and_defaults():
    assert fill("maxgain+dropout=0.5", {"maxgain": 1.5, "dropout": 0.9}) == "maxgain=1.5+dropout=0.5"
    assert fill("batchnorm", {"batchnorm": 3}) == "batchnorm"
    assert fill("maxgain+dropout") == "maxgain=2+dropout=1"
    assert short_name("maxgain=1+dropout=1") == "maxgain=1+dropout"
    assert short_name("dropout=1", ["dropout"]) == "dropout=1"


@pytest.mark.parametrize("row", [row for row in REGULARISERS.values() if row.parameter], ids=lambda row: row.name)
def test_numbers_to_try_are_valid(row):
    assert row.about
    assert all(map(row.valid, (row.default, *row.grid, *row.search)))
    assert len(set(row.grid)) == len(row.grid)
    assert not row.valid(math.nan)


# --- What each does


@pytest.mark.parametrize("name", REGULARISERS)
def test_every_row_changes_training(digits, name):
    number = {"maxgain": "=0.5", "lipschitz-1": "=1", "lipschitz-2": "=1", "lipschitz-inf": "=1", "maxnorm": "=0.5"}
    training = trained(digits, name + number.get(name, ""), steps=3)
    training.expect_finite()
    plain = trained(digits, "none", steps=3).model.state_dict()
    state = training.model.state_dict()
    same = state.keys() == plain.keys() and all(torch.equal(state[key], plain[key]) for key in plain)
    assert same == (name == "none")


@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_maxgain_bounds_gains(digits, network):
    training = trained(digits, "maxgain=0.5", steps=40, network=network)
    # Gains are bounded on batches; whole data and one more update may exceed the bound a little.
    report = measure_gains(training.model, [to_float(digits.train.images)])
    assert max(row[-1] for row in report.quantiles().values()) < 0.6
    free = measure_gains(trained(digits, "none", network=network).model, [to_float(digits.train.images)])
    assert max(row[-1] for row in free.quantiles().values()) > 1


def test_include_limits_maxgain(digits):
    training = trained(digits, "maxgain=0.5", include=("classifier.*",))
    (constraint,) = training.constraints
    assert set(constraint.gains) == {"classifier.fc1", "classifier.fc2"}


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_lipschitz_bounds_operator_norms(digits, p):
    training = trained(digits, f"lipschitz-{p:g}=0.9", steps=20)
    norms = operator_norms(training.model, to_float(digits.train.images[:1]), p=p).norms
    slack = 0.15 if p == 2 else 1e-4  # one power iteration per step follows weights that move
    assert max(norms.values()) <= 0.9 * (1 + slack)


def test_maxnorm_and_weightclip(digits):
    for weight in (layer.weight for layer in layers(trained(digits, "maxnorm=0.5").model).values()):
        assert weight.flatten(1).norm(dim=1).max() <= 0.5 * (1 + 1e-5)
    for weight in (layer.weight for layer in layers(trained(digits, "weightclip=0.02").model).values()):
        assert weight.abs().max() <= 0.02 * (1 + 1e-6)


def test_parametrisations(digits):
    for layer in layers(trained(digits, "weightnorm").model).values():
        length, direction = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
        expected = length.flatten() * direction.flatten(1).T / direction.flatten(1).norm(dim=1)
        torch.testing.assert_close(layer.weight.flatten(1), expected.T)
    model = trained(digits, "spectralnorm", steps=40, learning_rate=1e-5).model.eval()
    for layer in layers(model).values():
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() == pytest.approx(1, abs=0.15)


def test_noise_has_the_papers_rates_times_the_factor(digits):
    model = trained(digits, "dropout=0.5", steps=0).model
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert rates == {"features.drop2_1": 0.1, "features.drop2_2": 0.1, "classifier.drop1": 0.25}


@pytest.mark.parametrize("name", ["variationaldropout", "concretedropout"])
def test_learned_noise_learns(digits, name):
    before, after = (trained(digits, name, steps=steps).model for steps in (0, 3))
    for one, other in zip(before.modules(), after.modules(), strict=True):
        assert not isinstance(one, LearnedNoise) or one.strength != other.strength


def test_weight_decay_is_the_gradient_of_half_the_square(digits):
    one_step = {"steps": 1, "optimiser": "sgd", "learning_rate": 0.1}
    start = trained(digits, "none", steps=0).model.state_dict()
    plain = trained(digits, "none", **one_step).model.state_dict()
    decayed = trained(digits, "weightdecay=0.3", **one_step).model.state_dict()
    for name, weight in start.items():
        change = -0.1 * 1.9 * 0.3 * weight if weight.dim() > 1 else torch.zeros_like(weight)  # Nesterov's first step
        torch.testing.assert_close(decayed[name] - plain[name], change, atol=1e-5, rtol=1e-3)


def test_gradient_penalty_is_the_distance_of_slopes_from_one(digits):
    row, model = REGULARISERS["gradpenalty"], trained(digits, "none", network="mlp").model.double()
    images = to_float(digits.train.images[:3]).double().requires_grad_()
    labels, step = digits.train.labels[:3], 1e-6
    penalty = row.penalty(Batch(model, images, model(images), labels, 100), 7.0)
    slopes = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for pixel in range(64):
            shift = F.one_hot(torch.tensor(pixel), 64).view(1, 1, 8, 8) * step
            difference = (model(images + shift) - model(images - shift))[range(3), labels] / (2 * step)
            slopes += difference**2
    assert penalty.item() == pytest.approx(7 * (slopes.sqrt() - 1).square().mean().item(), rel=1e-4)
