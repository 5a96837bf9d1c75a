"""The noise regularisers the paper names beside Bernoulli dropout: Gaussian, variational and concrete dropout.

Each is a layer made from the dropout rate of its place, as ``torch.nn.Dropout`` is, and does nothing when the
network is evaluated. Variational and concrete dropout learn their rate from there. What keeps it from shrinking
to nothing is a Kullback-Leibler divergence that belongs in the loss: ``noise_penalty`` sums it over a network.

Learned noise is noise on the weights: an input of a layer has one factor per instance, which all of its weights share.
A convolution reads a channel at many positions with the same weights, so a channel has one factor for all positions.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

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
    """One element per instance and channel of x, whose further dimensions are positions: what a draw is made for."""
    return x[(slice(None), slice(None), *(slice(1) for _ in x.shape[2:]))] if x.dim() > 2 else x


def gaussian_noise(x: Tensor, variance: float | Tensor, drawn: Tensor) -> Tensor:
    """x·ξ with ξ ~ N(1, variance), one for each element of ``drawn``, whose shape x has or can be stretched from."""
    return torch.addcmul(x, x, torch.randn_like(drawn) * variance**0.5)


def concrete_noise(x: Tensor, logit: Tensor, drawn: Tensor) -> Tensor:
    """x·(1 - z) / (1 - p), where p = σ(logit) and z ≈ 1 with probability p, one for each element of ``drawn``.

    z = σ((logit + log u - log(1 - u)) / t) with u ~ U(0, 1) and a small temperature t: nearly a Bernoulli
    variable, but one through which the gradient of p flows.
    """
    # In half precision u has too few values near 0 and 1 for a small p to be drawn with the right frequency.
    uniform = torch.rand_like(drawn, dtype=torch.float32)
    keep = torch.sigmoid(-(logit + uniform.logit()) / TEMPERATURE)
    return x * (keep / torch.sigmoid(-logit)).to(x.dtype)


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(1, α) ‖ p) for the prior p(log|s|) ∝ 1, up to a constant: the cubic fit of Kingma et al., for α ≤ 1."""
    alpha = log_alpha.exp()
    return -(0.5 * log_alpha + 1.16145124 * alpha - 1.50204118 * alpha**2 + 0.58629921 * alpha**3)


def bernoulli_entropy(logit: Tensor) -> Tensor:
    """-p log p - (1 - p) log(1 - p) where p = σ(logit); finite at both ends."""
    return -(logit.sigmoid() * logsigmoid(logit) + (-logit).sigmoid() * logsigmoid(-logit))


class GaussianDropout(nn.Module):
    """Multiplies each activation by noise from N(1, rate / (1 - rate)).

    That is the mean and the variance of Bernoulli dropout's factors. Srivastava, Hinton, Krizhevsky, Sutskever
    and Salakhutdinov: Dropout: a simple way to prevent neural networks from overfitting. JMLR 15, 2014.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.variance = _odds(rate)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies x by noise in training and passes it on as it is otherwise."""
        return gaussian_noise(x, self.variance, x) if self.training else x

    def extra_repr(self) -> str:
        """What a printed network shows of it."""
        return f"variance={self.variance:.4g}"


class LearnedNoise(nn.Module, ABC):
    """Noise of a learned strength σ(logit), between 0 and 1, that costs ``kl(layer)`` for the layer it feeds."""

    logit: nn.Parameter

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
    """Gaussian dropout with a learned variance: multiplies each input of a layer by noise from N(1, α), 0 < α < 1.

    Noise s_i on input (or channel) i of a layer makes its weights s_i·θ_i (the paper's type B, with one α per place);
    with a log-uniform prior on each s_i, ``kl`` is the number of inputs times a cubic in α. α starts at
    rate / (1 - rate). Kingma, Salimans and Welling: Variational dropout and the local reparameterization trick.
    NIPS 2015, where α is bounded by 1 too: the cubic holds no further.
    """

    def __init__(self, rate: float) -> None:
        super().__init__(min(_odds(rate), LARGEST_START))

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies x by noise in training and passes it on as it is otherwise."""
        return gaussian_noise(x, self.strength, per_channel(x)) if self.training else x

    def kl(self, layer: Fed) -> Tensor:
        """One divergence from the log-uniform prior for each input (channel) of the layer."""
        return _inputs(layer) * log_uniform_kl(logsigmoid(self.logit[0]))


class ConcreteDropout(LearnedNoise):
    """Dropout whose rate p is learned by gradient descent through a concrete relaxation of the Bernoulli mask.

    Before a convolution it is the authors' spatial variant: a mask is of whole channels. ``kl`` of a layer with K
    inputs (or channels) and weights W is ½·‖W‖² / (1 - p) - K·H(p), where H is the entropy of the
    mask and N(0, 1) the prior of a weight: large weights ask for little noise, many inputs for much. p starts
    at rate. Gal, Hron and Kendall: Concrete dropout. NIPS 2017. Evaluation uses the mean network, as for dropout.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies x by noise in training and passes it on as it is otherwise."""
        return concrete_noise(x, self.logit[0], per_channel(x)) if self.training else x

    def kl(self, layer: Fed) -> Tensor:
        """The weight term less the entropy of the masks."""
        logit = self.logit[0]
        weights = 0.5 * layer.weight.square().sum() / torch.sigmoid(-logit)
        return weights - _inputs(layer) * bernoulli_entropy(logit)


def noise_penalty(model: nn.Module, instances: int) -> Tensor:
    """What the learned noise in ``model`` adds to a loss that is a mean over instances: Σ KL / instances.

    ``instances`` is the size of the training set, so that the sum is the negative variational bound per instance.
    Each learned noise is paired with the convolution or dense layer that follows it in the order of modules. A
    model without learned noise costs 0.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for noise, layer in _fed_layers(model):
        total = total + noise.kl(layer)
    return total / instances


def _fed_layers(model: nn.Module) -> Iterator[tuple[LearnedNoise, Fed]]:
    """Each learned noise of the model with the layer that it feeds."""
    waiting: dict[str, LearnedNoise] = {}
    for name, module in model.named_modules():
        if isinstance(module, LearnedNoise):
            waiting[name] = module
        elif isinstance(module, Fed):
            yield from ((noise, module) for noise in waiting.values())
            waiting.clear()
    if waiting:
        raise RegulariserError(
            f"no convolution or dense layer follows the noise at '{next(iter(waiting))}', so it cannot be weighed: "
            "put learned noise before a layer with weights."
        )


def _inputs(layer: Fed) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _odds(rate: float) -> float:
    """The variance of the factors of dropout at that rate: rate / (1 - rate)."""
    if not 0 < rate < 1:
        raise RegulariserError(f"a dropout rate must lie between 0 and 1, not at {rate}.")
    return rate / (1 - rate)
