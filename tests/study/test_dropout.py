"""The noise has the moments its formulas say, and learned rates move as their objectives ask."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from maxgain.errors import RegulariserError
from maxgain.study.dropout import (
    TEMPERATURE,
    ConcreteDropout,
    GaussianDropout,
    VariationalDropout,
    bernoulli_entropy,
    log_uniform_kl,
    noise_penalty,
)
from maxgain.study.networks import NETWORKS

ALL = [GaussianDropout, VariationalDropout, ConcreteDropout]
LEARNED = [VariationalDropout, ConcreteDropout]
SAMPLES = 300_000

every_noise = pytest.mark.parametrize("noise", ALL)
every_learned_noise = pytest.mark.parametrize("noise", LEARNED)


def factors(module, samples=SAMPLES):
    """What a noise multiplies ones by."""
    torch.manual_seed(0)
    with torch.no_grad():
        return module(torch.ones(samples)).double().numpy()


def assert_moments(sample, mean, variance):
    """The sample's mean and variance are the expected ones within five standard errors."""
    assert abs(sample.mean() - mean) < 5 * math.sqrt(variance / len(sample))
    squares = (sample - mean) ** 2
    assert abs(squares.mean() - variance) < 5 * squares.std() / math.sqrt(len(sample))


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3, 0.5, 0.8])
def test_gaussian_moments(rate):
    sample = factors(GaussianDropout(rate))
    assert_moments(sample, 1, rate / (1 - rate))
    assert stats.kurtosis(sample) == pytest.approx(0, abs=5 * math.sqrt(24 / SAMPLES))


@pytest.mark.parametrize(("rate", "alpha"), [(0.1, 1 / 9), (0.2, 0.25), (0.3, 3 / 7), (0.5, 0.95), (0.9, 0.95)])
def test_variational_moments(rate, alpha):
    module = VariationalDropout(rate)
    assert module.strength.item() == pytest.approx(alpha)
    assert_moments(factors(module), 1, alpha)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.3, 0.5, 0.8])
def test_concrete_moments(rate):
    def keep(u):
        return 1 / (1 + math.exp((math.log(rate / (1 - rate)) + math.log(u / (1 - u))) / TEMPERATURE))

    # keep drops from 1 to 0 around u = 1 - rate, with a width of the order of the temperature.
    steps = sorted({1e-12, *np.clip(1 - rate + TEMPERATURE * np.linspace(-2, 2, 9), 1e-12, 1 - 1e-12), 1 - 1e-12})

    def expected(power):
        return sum(integrate.quad(lambda u: keep(u) ** power, *piece)[0] for piece in pairwise(steps))

    first, second = expected(1), expected(2)
    module = ConcreteDropout(rate)
    assert module.strength.item() == pytest.approx(rate)
    assert_moments(factors(module), first / (1 - rate), (second - first**2) / (1 - rate) ** 2)
    # And that is dropout, nearly: mean 1, and each factor near 0 or near 1 / (1 - rate).
    assert first / (1 - rate) == pytest.approx(1, abs=0.02)
    dropped = (factors(module) * (1 - rate) < 0.5).mean()
    assert dropped == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / SAMPLES))


def test_fixed_noise_differs_by_element():
    torch.manual_seed(0)
    image = GaussianDropout(0.5)(torch.ones(2, 3, 8, 8)).detach()
    assert image.shape == (2, 3, 8, 8)
    assert len(image.flatten().unique()) > 0.5 * image.numel()


@every_learned_noise
@pytest.mark.parametrize("size", [(), (7,), (6, 7), (5, 6, 7)], ids=["dense", "1d", "2d", "3d"])
def test_learned_noise_has_one_factor_per_input(noise, size):
    torch.manual_seed(0)
    module, x = noise(0.5), torch.randn(40, 30, *size)
    drawn = (module(x) / x).detach().reshape(40, 30, -1)
    torch.testing.assert_close(drawn, drawn[:, :, :1].expand_as(drawn), rtol=1e-4, atol=1e-6)
    factors = drawn[:, :, 0]
    assert abs(np.corrcoef(factors.numpy())[np.triu_indices(40, 1)].mean()) < 0.05, "instances share their noise"
    assert abs(np.corrcoef(factors.numpy().T)[np.triu_indices(30, 1)].mean()) < 0.05, "channels share their noise"


@every_noise
def test_zero_and_evaluation(noise):
    module = noise(0.3)
    assert not module(torch.zeros(2, 3, 8, 8)).any()
    x = torch.randn(2, 3, 8, 8)
    assert module.eval()(x) is x


@every_noise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype(noise, dtype):
    torch.manual_seed(0)
    noisy = noise(0.2)(torch.ones(100_000, dtype=dtype))
    assert noisy.dtype == dtype
    assert noisy.isfinite().all()
    assert noisy.double().mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_cubic_matches_integration(alpha):
    """-KL = ½ log α - E log|ξ| + constant, with ξ ~ N(1, α); the paper's fit keeps within 0.04 of it up to α = 1."""
    std = math.sqrt(alpha)

    def integrand(z):
        return stats.norm.pdf(z) * math.log(abs(1 + std * z))

    # Split where the logarithm is singular.
    pieces = [(-12, -1 / std), (-1 / std, 12)] if std > 1 / 12 else [(-12, 12)]
    expected_log = sum(integrate.quad(integrand, *piece, limit=200)[0] for piece in pieces)
    exact = expected_log - 0.5 * math.log(alpha)
    cubic = log_uniform_kl(torch.tensor(math.log(alpha), dtype=torch.float64)).item()
    assert abs(cubic - exact) < 0.04


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9])
def test_entropy_matches_scipy(p):
    logit = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64)
    assert bernoulli_entropy(logit).item() == pytest.approx(stats.bernoulli(p).entropy(), rel=1e-9)


def test_entropy_is_finite():
    logit = torch.tensor([-200.0, 200.0], requires_grad=True)
    entropy = bernoulli_entropy(logit)
    entropy.sum().backward()
    assert entropy.tolist() == [0, 0]
    assert logit.grad.isfinite().all()


def test_divergences():
    linear, conv = nn.Linear(7, 5), nn.Conv2d(8, 4, 3, groups=2)
    alpha, p = 0.25, 0.3
    cubic = -(0.5 * math.log(alpha) + 1.16145124 * alpha - 1.50204118 * alpha**2 + 0.58629921 * alpha**3)
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    for layer, inputs in [(linear, 7), (conv, 8)]:
        assert VariationalDropout(0.2).kl(layer).item() == pytest.approx(inputs * cubic, rel=1e-5)
        squares = layer.weight.square().sum().item()
        expected = 0.5 * squares / (1 - p) - inputs * entropy
        assert ConcreteDropout(p).kl(layer).item() == pytest.approx(expected, rel=1e-5)


def test_penalty_pairs_noise_with_the_next_layer():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        ConcreteDropout(0.2),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 16, 3),
        nn.Flatten(),
        VariationalDropout(0.3),
        nn.Linear(16, 10),
        GaussianDropout(0.5),
        nn.Linear(10, 10),
    )
    expected = (model[1].kl(model[3]) + model[5].kl(model[6])) / 50
    assert noise_penalty(model, 50).item() == pytest.approx(expected.item(), rel=1e-6)
    assert noise_penalty(nn.Sequential(GaussianDropout(0.5), nn.Dropout(0.5), nn.Linear(3, 3)), 10).item() == 0


def test_noise_that_feeds_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(VariationalDropout(0.5)))
    with pytest.raises(RegulariserError, match=r"learned noise '1\.0'"):
        noise_penalty(model, 10)


@every_noise
@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_rates_outside_zero_and_one(noise, rate):
    with pytest.raises(RegulariserError):
        noise(rate)


@pytest.mark.parametrize("start", [0.05, 0.2, 0.8])
@pytest.mark.parametrize("squares", [0.0, 1.0, 20.0, 100.0])
def test_concrete_divergence_weighs_weights_against_inputs(start, squares):
    """Alone it settles where ½‖W‖²/(1 - p) - K·H(p) is least: at ½ without weights, lower the larger they are."""
    model = nn.Sequential(ConcreteDropout(start), nn.Linear(20, 1))
    nn.init.constant_(model[1].weight, math.sqrt(squares / 20))
    grid = np.linspace(1e-6, 1 - 1e-6, 200_001)
    least = grid[np.argmin(0.5 * squares / (1 - grid) - 20 * stats.bernoulli(grid).entropy())]
    optimizer = torch.optim.Adam([model[0].logit], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        noise_penalty(model, 10).backward()
        optimizer.step()
        assert 0 < model[0].strength.item() < 1
    assert model[0].strength.item() == pytest.approx(least, abs=0.02)


@every_noise
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train(noise, name):
    torch.manual_seed(0)
    shape = (3, 32, 32) if "vgg" in name else (1, 8, 8)
    network = NETWORKS[name](shape, 10, batchnorm=True, dropout=noise)
    logits = [parameter for key, parameter in network.named_parameters() if key.endswith("logit")]
    assert len(logits) == (noise in LEARNED) * sum(isinstance(module, noise) for module in network.modules())
    if logits:
        noise_penalty(network, 1000).backward()
        assert all(logit.grad.any() for logit in logits), "the penalty misses a rate"
    nn.functional.cross_entropy(network(torch.randn(4, *shape)), torch.tensor([0, 1, 2, 3])).backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@every_noise
def test_compiles_as_one_graph(noise):
    torch.compiler.reset()
    torch.manual_seed(0)
    network = NETWORKS["cnn"]((1, 8, 8), 10, batchnorm=True, dropout=noise)
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])

    def loss():
        return nn.functional.cross_entropy(network(images), labels) + noise_penalty(network, 1000)

    torch.manual_seed(1)
    expected = loss()
    torch.manual_seed(1)
    actual = torch.compile(loss, fullgraph=True, backend="eager")()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
