"""Regularisers, one row each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain
from maxgain.errors import RegulariserError
from maxgain.weights import MaxNorm, WeightClip

from ._names import Table
from .dropout import ConcreteDropout, GaussianDropout, VariationalDropout, noise_penalty
from .networks import BLOCK_RATE, CONV_RATE, DENSE_RATE, Noise


@dataclass(frozen=True)
class Batch:
    """What a penalty is computed from."""

    model: nn.Module
    images: Tensor
    logits: Tensor
    labels: Tensor
    instances: int
    """Size of the training set."""


Constrain = Callable[..., Any]
"""Makes what projects the weights after each step, from (model, number, p=, include=)."""


@dataclass(frozen=True)
class Regulariser:
    """One way to regularise: what its number is, and what it does to network, loss or weights."""

    name: str
    parameter: str | None = None
    """Name of its one number, if it has one."""
    default: float | None = None
    valid: Callable[[float], bool] = lambda value: value > 0
    search: tuple[float, float] | None = None
    """Range of a search, on a logarithmic scale."""
    grid: tuple[float, ...] = ()
    """Values to try, most plausible first."""
    batchnorm: bool = False
    """Adds batch norm to the network."""
    noise: Noise | None = None
    """Makes the noise layer of a place in the network from the rate there."""
    reparametrise: Callable[[nn.Module], object] | None = None
    """Rewrites the weight of a convolution or dense layer of the built model."""
    constrain: Constrain | None = None
    penalty: Callable[[Batch, float], Tensor] | None = None
    """A term of the loss."""
    needs_input_gradient: bool = False
    """Whether the penalty differentiates with respect to the images."""
    weight_decay: bool = False
    """Whether the number is an ℓ2 decay of all weights, on top of the recipe's."""
    about: str = ""


def _gradient_penalty(batch: Batch, weight: float) -> Tensor:
    """The mean over the batch of (‖∇_x f_y(x)‖₂ − 1)², where f_y is the logit of the image's own class."""
    own = batch.logits.gather(1, batch.labels[:, None]).sum()
    (gradient,) = torch.autograd.grad(own, batch.images, create_graph=True)
    slopes: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return weight * (slopes - 1).square().mean()


_noise = partial(
    Regulariser,
    parameter="factor",
    default=1.0,
    valid=lambda factor: 0 < factor * max(CONV_RATE, DENSE_RATE, BLOCK_RATE) < 1,
    search=(0.2, 1.6),
    grid=(1, 0.5, 1.5, 0.75, 1.25, 0.25, 1.6, 0.35, 0.6, 0.9, 1.1, 1.4),
)

_ROWS = (
    Regulariser("none", about="No regulariser: the baseline."),
    Regulariser(
        "maxgain",
        parameter="gamma",
        default=2.0,
        search=(1.0, 8.0),
        grid=(2, 1.5, 3, 1.25, 4, 2.5, 1.75, 6, 1, 8, 5, 3.5),
        constrain=lambda model, gamma, *, p, include: MaxGain(model, gamma, p=p, include=include or None),
        about="""After each step, divides the weight of every layer whose largest gain ‖Wx‖ / ‖x‖ on the batch exceeded
        gamma by the excess.
        Gouk, Pfahringer, Frank, Cree: MaxGain: Regularisation of neural networks by constraining activation
        magnitudes. ECML PKDD 2018.""",
    ),
    *(
        Regulariser(
            f"lipschitz-{norm:g}",
            parameter="lambda",
            default=default,
            search=(default / 8, default * 8),
            grid=tuple(default * factor for factor in (1, 0.5, 2, 0.25, 4, 1.5, 0.75, 0.125, 8, 3, 0.375, 6)),
            constrain=lambda model, bound, *, norm=norm, **_: Lipschitz(model, bound, p=norm),
            about=f"""After each step, divides the weight of every layer whose ℓ{norm:g} operator norm, at the layer's
            true input size, exceeds lambda by the excess. The bound holds for every possible input; a gain holds for
            the inputs that were seen.
            Gouk, Frank, Pfahringer, Cree: Regularisation of neural networks by enforcing Lipschitz continuity. 2018
            (Machine Learning 110, 2021).""",
        )
        for norm, default in ((1.0, 30.0), (2.0, 8.0), (math.inf, 30.0))
    ),
    Regulariser(
        "batchnorm",
        batchnorm=True,
        about="""Standardises each channel over the batch and scales it by a learned number, after every convolution (in
        residual networks: before). MaxGain treats the scale, divided by the running standard deviation, as a layer.
        Ioffe, Szegedy: Batch normalization. ICML 2015.""",
    ),
    _noise(
        "dropout",
        noise=nn.Dropout,
        about="""Zeroes each activation with the rate of its place while training, and scales the others by
        1 / (1 - rate). The rate is ``factor`` times the paper's: 0.2 before convolutions, 0.5 before hidden dense
        layers, 0.3 in residual blocks.
        Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov: Dropout. JMLR 15, 2014.""",
    ),
    _noise(
        "gaussiandropout",
        noise=GaussianDropout,
        about="""Multiplies each activation by a draw from N(1, rate / (1 - rate)) while training: the mean and variance
        of dropout at that rate, without its zeros.
        Srivastava et al.: Dropout. JMLR 15, 2014, section 10.""",
    ),
    _noise(
        "variationaldropout",
        noise=VariationalDropout,
        penalty=lambda batch, factor: noise_penalty(batch.model, batch.instances),
        about="""Gaussian dropout whose variance α is learned at every place, starting from dropout's rate, by
        maximising the variational bound: the loss grows by the divergence of the noisy weights from a log-uniform
        prior, divided by the number of training images.
        Kingma, Salimans, Welling: Variational dropout and the local reparameterization trick. NIPS 2015.""",
    ),
    _noise(
        "concretedropout",
        noise=ConcreteDropout,
        penalty=lambda batch, factor: noise_penalty(batch.model, batch.instances),
        about="""Dropout whose rate is learned at every place, starting from dropout's, through a continuous relaxation
        of the mask; the loss grows by a weight term less the entropy of the mask, both divided by the number of
        training images.
        Gal, Hron, Kendall: Concrete dropout. NIPS 2017.""",
    ),
    Regulariser(
        "weightnorm",
        reparametrise=nn.utils.parametrizations.weight_norm,
        about="""Writes the weights of each unit as a learned length times a learned direction.
        Salimans, Kingma: Weight normalization. NIPS 2016.""",
    ),
    Regulariser(
        "spectralnorm",
        reparametrise=nn.utils.parametrizations.spectral_norm,
        about="""Divides each weight, flattened to a matrix, by an estimate of its largest singular value in every
        forward pass: PyTorch's parametrisation, one power iteration per step. A convolution's flattened matrix is not
        its operator: the norm is off by a factor.
        Miyato, Kataoka, Koyama, Yoshida: Spectral normalization for GANs. ICLR 2018.""",
    ),
    Regulariser(
        "maxnorm",
        parameter="c",
        default=3.0,
        search=(0.5, 8.0),
        grid=(3, 2, 4, 1, 6, 1.5, 2.5, 0.5, 8, 5, 3.5, 0.75),
        constrain=lambda model, bound, **_: MaxNorm(model, bound),
        about="""After each step, scales the incoming weights of every unit whose ℓ2 norm exceeds c back to norm c. The
        paper recommends it beside dropout, with c of 3 or 4.
        Srivastava et al.: Dropout. JMLR 15, 2014, section 5.1.""",
    ),
    Regulariser(
        "weightclip",
        parameter="c",
        default=0.01,
        search=(0.01, 1.0),
        grid=(0.1, 0.03, 0.3, 0.01, 1, 0.05, 0.2, 0.02, 0.5, 0.07, 0.15, 0.7),
        constrain=lambda model, bound, **_: WeightClip(model, bound),
        about="""After each step, clips every weight to [-c, c]. The paper uses c = 0.01 for the critic of a Wasserstein
        GAN. A classifier needs more: an MLP on digits learns with 0.1 and not with 0.01.
        Arjovsky, Chintala, Bottou: Wasserstein GAN. ICML 2017.""",
    ),
    Regulariser(
        "gradpenalty",
        parameter="weight",
        default=10.0,
        search=(0.01, 100.0),
        grid=(10, 1, 0.1, 100, 0.01, 3, 0.3, 30, 0.03, 5, 0.5, 50),
        penalty=_gradient_penalty,
        needs_input_gradient=True,
        about="""Adds ``weight`` times the mean of (‖∇_x f(x)‖₂ − 1)² to the loss, where f is the logit of an image's
        own class and x the training images; the paper has a critic, and points between real and generated images.
        Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville: Improved training of Wasserstein GANs. NIPS 2017.""",
    ),
    Regulariser(
        "weightdecay",
        parameter="lambda",
        default=5e-4,
        search=(1e-6, 1e-1),
        grid=(5e-4, 1e-4, 1e-3, 1e-5, 1e-2, 2e-4, 2e-3, 1e-6, 1e-1, 5e-5, 5e-3, 2e-5),
        weight_decay=True,
        about="""Adds lambda times each weight to its gradient: the ℓ2 penalty, on convolutions and dense layers but not
        on biases and batch-norm scales, on top of the recipe's own.
        Krogh, Hertz: A simple weight decay can improve generalization. NIPS 1991.""",
    ),
)
REGULARISERS = Table("regulariser", RegulariserError, {row.name: row for row in _ROWS})
