"""Every row of the table trains, does what its paper says, and combines with what it can be combined with."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from maxgain import measure_gains, operator_norms
from maxgain.errors import RegulariserError
from maxgain.study.data import table as datasets
from maxgain.study.dropout import ConcreteDropout, GaussianDropout, VariationalDropout
from maxgain.study.evaluate import evaluate
from maxgain.study.recipes import recipe_named
from maxgain.study.regularisers import REGULARISERS, PenaltyInputs, parse
from maxgain.study.training import Training, to_float, train

# Its authors' default is for the critic of a GAN, and too tight for a classifier to learn anything.
VALUE = {"weightclip": "weightclip=0.1"}


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def trained(digits, regulariser, epochs=6, **overrides):
    recipe = replace(recipe_named("digits"), network="mlp", regulariser=regulariser, epochs=epochs, **overrides)
    training = Training(recipe, digits, torch.device("cpu"))
    for _ in train(training):
        pass
    return training


@pytest.mark.parametrize("name", REGULARISERS)
def test_every_regulariser_learns_digits_and_says_where_it_is_from(name, digits):
    training = trained(digits, VALUE.get(name, name))

    assert evaluate(training.model, digits.validation).accuracy > 0.8
    about = REGULARISERS[name].about
    assert name == "none" or any(str(year) in about for year in range(1990, 2022)), "no citation"
    assert len(about.splitlines()) <= 6


@pytest.mark.parametrize("name", [name for name, row in REGULARISERS.items() if row.parameter])
def test_a_number_is_taken_and_one_that_makes_no_sense_is_refused(name):
    (choice,) = parse(f"{name}=0.5")
    assert choice.value == 0.5
    for nonsense in ("-1", "nan", "much"):
        with pytest.raises(RegulariserError, match=name):
            parse(f"{name}={nonsense}")
    row = REGULARISERS[name]
    assert row.search is not None
    assert all(row.valid(end) for end in row.search)


@pytest.mark.parametrize("name", [name for name, row in REGULARISERS.items() if not row.parameter])
def test_one_without_a_number_refuses_one(name):
    with pytest.raises(RegulariserError, match="takes no number"):
        parse(f"{name}=2")


def test_noise_layers_have_the_papers_rate_of_their_place_times_the_factor(digits):
    def rates(regulariser, kind, rate):
        model = Training(replace(recipe_named("digits"), regulariser=regulariser), digits, torch.device("cpu")).model
        return {round(rate(module), 4) for module in model.modules() if isinstance(module, kind)}

    assert rates("dropout", nn.Dropout, lambda layer: layer.p) == {0.2, 0.5}
    assert rates("dropout=0.5", nn.Dropout, lambda layer: layer.p) == {0.1, 0.25}
    assert rates("gaussiandropout=0.5", GaussianDropout, lambda layer: layer.variance) == {
        0.1111,
        0.3333,
    }  # r / (1 - r)
    assert rates("variationaldropout=0.5", VariationalDropout, lambda layer: layer.strength.item()) == {0.1111, 0.3333}
    assert rates("concretedropout=1.6", ConcreteDropout, lambda layer: layer.strength.item()) == {0.32, 0.8}


def test_learned_noise_is_learned(digits):
    for name in ("variationaldropout", "concretedropout"):
        training = trained(digits, name, epochs=1)
        strengths = [m.strength.item() for m in training.model.modules() if hasattr(m, "strength")]
        assert strengths
        assert all(abs(strength - start) > 1e-3 for strength in strengths for start in (0.5, 0.95))


def test_weight_norm_is_a_length_times_a_direction(digits):
    layer = trained(digits, "weightnorm", epochs=1).model.classifier.fc1
    length, direction = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    expected = length * direction / direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer.weight, expected)


def test_spectral_norm_bounds_the_flattened_weight_by_one(digits):
    model = trained(digits, "spectralnorm", epochs=2).model
    layers = [module for module in model.modules() if is_parametrized(module)]
    assert len(layers) == 3
    for layer in layers:
        # One power iteration per step follows weights that move: it is not exact while they do.
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2).item() == pytest.approx(1, rel=0.15)


def test_max_norm_bounds_every_units_incoming_weights(digits):
    model = trained(digits, "maxnorm=0.8", epochs=2).model
    for name, weight in model.named_parameters():
        if name.endswith("weight"):
            assert weight.norm(dim=1).max().item() == pytest.approx(0.8, rel=1e-5), name


def test_weight_clipping_bounds_every_weight(digits):
    model = trained(digits, "weightclip=0.05", epochs=2).model
    for name, weight in model.named_parameters():
        if name.endswith("weight"):
            assert weight.abs().max().item() == pytest.approx(0.05, rel=1e-6), name


def test_weight_decay_is_the_gradient_of_half_the_square(digits):
    recipe = replace(recipe_named("digits"), optimiser="sgd", learning_rate=0.1, network="mlp")
    weights = {}
    for regulariser in ("none", "weightdecay=0.01"):
        training = Training(replace(recipe, regulariser=regulariser), digits, torch.device("cpu"))
        start = training.model.classifier.fc1.weight.detach().clone()
        training.begin_epoch()
        training.step()
        weights[regulariser] = dict(training.model.named_parameters())
    # Nesterov's first step is (1 + momentum) times the gradient.
    decayed, plain = weights["weightdecay=0.01"], weights["none"]
    difference = decayed["classifier.fc1.weight"] - plain["classifier.fc1.weight"]
    torch.testing.assert_close(difference, -0.1 * 1.9 * 0.01 * start, rtol=1e-3, atol=1e-7)
    assert torch.equal(decayed["classifier.fc1.bias"], plain["classifier.fc1.bias"])


def test_the_gradient_penalty_is_the_mean_of_the_squared_distance_of_slopes_from_one(digits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    images, labels = to_float(digits.train.images[:5]).requires_grad_(), digits.train.labels[:5]
    inputs = PenaltyInputs(model, images, model(images), labels, len(digits.train))

    penalty = REGULARISERS["gradpenalty"].penalty(inputs, 10.0)

    slopes = []
    for image, label in zip(images.detach(), labels, strict=True):
        jacobian = torch.func.jacrev(lambda x, label=label: model(x[None])[0, label])(image)
        slopes.append(jacobian.norm().item())
    expected = 10 * sum((slope - 1) ** 2 for slope in slopes) / len(slopes)
    assert penalty.item() == pytest.approx(expected, rel=1e-4)
    assert torch.autograd.grad(penalty, model[1].weight)[0].abs().sum() > 0, "it must train the weights"


@pytest.mark.parametrize(("p", "bound"), [(1.0, 2.0), (2.0, 0.9), (math.inf, 2.0)])
def test_lipschitz_bounds_every_layers_operator_norm(p, bound, digits):
    training = trained(digits, f"lipschitz-{p:g}={bound}", epochs=3)
    norms = operator_norms(training.model, to_float(digits.train.images[:1]), p=p).norms
    assert max(norms.values()) == pytest.approx(bound, rel=0.01)


def test_maxgain_bounds_every_layers_gain(digits):
    training = trained(digits, "maxgain=1.2", epochs=3)
    report = measure_gains(training.model, [to_float(digits.train.images)])
    largest = {name: row[-1] for name, row in report.quantiles().items()}
    assert max(largest.values()) == pytest.approx(1.2, rel=0.05)


@pytest.mark.parametrize(
    "combination",
    [
        "maxgain+batchnorm+dropout",
        "maxnorm+dropout",
        "lipschitz-2=4+batchnorm",
        "weightnorm+dropout",
        "maxgain+maxnorm",
    ],
)
def test_combinations_that_make_sense_train(combination, digits):
    training = trained(digits, combination, epochs=1)
    assert evaluate(training.model, digits.train).accuracy > 0.5


@pytest.mark.parametrize(
    ("combination", "reason"),
    [
        ("none+dropout", "stands alone"),
        ("dropout+dropout", "twice"),
        ("dropout+gaussiandropout", "choose one"),
        ("weightnorm+spectralnorm", "choose one"),
        ("maxgain+spectralnorm", "scales weights in place"),
        ("gradpenalty+batchnorm", "gradpenalty is about the slope at each image by itself, and batchnorm lets"),
        ("maxgian", "did you mean 'maxgain'"),
        ("", "there is no regulariser ''"),
    ],
)
def test_combinations_that_make_none_are_refused_with_the_reason(combination, reason):
    with pytest.raises(RegulariserError, match=reason):
        parse(combination)
