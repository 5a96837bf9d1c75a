"""The noise regularisers the paper names beside Bernoulli dropout: Gaussian, variational and concrete dropout.

Each is a layer made from the dropout rate of its place, as ``torch.nn.Dropout`` is, and does nothing in evaluation.
Variational and concrete dropout learn their rate from there; ``noise_penalty`` is the divergence that keeps it from
shrinking to nothing. Learned noise is noise on the weights: an input of a layer has one factor per instance, a channel
of a convolution has one for all positions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from maxgain.errors import RegulariserError

Fed = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""A layer that noise can feed."""

TEMPERATURE = 0.1
"""How far concrete dropout is from Bernoulli dropout; the value of Gal et al."""
LARGEST_START = 0.95
"""Where variational dropout starts from rates whose alpha is 1 or more, the bound that alpha stays under."""


def per_channel(x: Tensor) -> Tensor:
    """One element per instance and channel of x, whose further dimensions are positions."""
    return x[(slice(None), slice(None), *(slice(1) for _ in x.shape[2:]))] if x.dim() > 2 else x


def gaussian_noise(x: Tensor, variance: float | Tensor, drawn: Tensor) -> Tensor:
    """x·ξ with ξ ~ N(1, variance), one for each element of ``drawn``, broadcast to x."""
    return torch.addcmul(x, x, torch.randn_like(drawn) * variance**0.5)


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(1, α) ‖ p) for the prior p(log|s|) ∝ 1, up to a constant: the cubic fit of Kingma et al., for α ≤ 1."""
    alpha = log_alpha.exp()
    return -(0.5 * log_alpha + 1.16145124 * alpha - 1.50204118 * alpha**2 + 0.58629921 * alpha**3)


def bernoulli_entropy(logit: Tensor) -> Tensor:
    """-p log p - (1 - p) log(1 - p) where p = σ(logit); finite at both ends."""
    return -(logit.sigmoid() * logsigmoid(logit) + (-logit).sigmoid() * logsigmoid(-logit))


class GaussianDropout(nn.Module):
    """Multiplies each activation by noise from N(1, rate / (1 - rate)): the mean and variance of Bernoulli dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.variance = _odds(rate)

    def forward(self, x: Tensor) -> Tensor:
        """Noisy x in training, x otherwise."""
        return gaussian_noise(x, self.variance, x) if self.training else x


class LearnedNoise(nn.Module, ABC):
    """Noise of a learned strength σ(logit) that costs ``kl(layer)`` for the layer it feeds."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        # One element, not a scalar: FSDP refuses scalar parameters.
        self.logit = nn.Parameter(torch.tensor([math.log(_odds(strength))]))

    @property
    def strength(self) -> Tensor:
        """σ(logit): the alpha of variational dropout, the p of concrete dropout."""
        return self.logit[0].sigmoid()

    @abstractmethod
    def kl(self, layer: Fed) -> Tensor:
        """The divergence, in nats, of the noisy weights of ``layer`` from their prior, up to a constant."""


class VariationalDropout(LearnedNoise):
    """Multiplies each input of a layer by noise from N(1, α) with a learned α, 0 < α < 1.

    The paper's type B, with one α per place and a log-uniform prior. α starts at rate / (1 - rate), and is bounded by 1
    as in the paper: the cubic holds no further.
    """

    def __init__(self, rate: float) -> None:
        super().__init__(min(_odds(rate), LARGEST_START))

    def forward(self, x: Tensor) -> Tensor:
        """Noisy x in training, x otherwise."""
        return gaussian_noise(x, self.strength, per_channel(x)) if self.training else x

    def kl(self, layer: Fed) -> Tensor:
        """One divergence from the log-uniform prior for each input (channel) of the layer."""
        return _inputs(layer) * log_uniform_kl(logsigmoid(self.logit[0]))


class ConcreteDropout(LearnedNoise):
    """Dropout whose rate p is learned by gradient descent through a concrete relaxation of the Bernoulli mask.

    x is multiplied by (1 - z) / (1 - p), where z = σ((logit + log u - log(1 - u)) / t) with u ~ U(0, 1) and a small
    temperature t: nearly a Bernoulli variable, but one through which the gradient of p flows. Before a convolution it
    is the authors' spatial variant: a mask of whole channels. For a layer with K inputs and weights W, ``kl`` is
    ½·‖W‖² / (1 - p) - K·H(p), where H is the entropy of the mask and N(0, 1) a weight's prior.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Noisy x in training, x otherwise."""
        if not self.training:
            return x
        # In half precision u has too few values near 0 and 1 for a small p to be drawn with the right frequency.
        uniform, logit = torch.rand_like(per_channel(x), dtype=torch.float32), self.logit[0]
        keep = torch.sigmoid(-(logit + uniform.logit()) / TEMPERATURE)
        return x * (keep / torch.sigmoid(-logit)).to(x.dtype)

    def kl(self, layer: Fed) -> Tensor:
        """The weight term less the entropy of the masks."""
        logit = self.logit[0]
        weights = 0.5 * layer.weight.square().sum() / torch.sigmoid(-logit)
        return weights - _inputs(layer) * bernoulli_entropy(logit)


def noise_penalty(model: nn.Module, instances: int) -> Tensor:
    """Σ KL / instances: what learned noise adds to a loss that is a mean over a training set of ``instances``."""
    total = torch.zeros((), device=next(model.parameters()).device)
    waiting: dict[str, LearnedNoise] = {}
    for name, module in model.named_modules():  # in whose order a noise feeds the layer that follows it
        if isinstance(module, LearnedNoise):
            waiting[name] = module
        elif isinstance(module, Fed):
            for noise in waiting.values():
                total = total + noise.kl(module)
            waiting.clear()
    if waiting:
        name = next(iter(waiting))
        raise RegulariserError(f"no convolution or dense layer follows the learned noise {name!r}; move or remove it.")
    return total / instances


def _inputs(layer: Fed) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _odds(rate: float) -> float:
    """Rate / (1 - rate): the variance of dropout's factors."""
    if not 0 < rate < 1:
        raise RegulariserError(f"a dropout rate must lie between 0 and 1, not at {rate}.")
    return rate / (1 - rate)
