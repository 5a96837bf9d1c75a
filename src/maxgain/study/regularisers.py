"""Regularisers, one row each, and their combinations as the paper writes them: ``maxgain+batchnorm+dropout``.

A row says what a regulariser is called, what its one number is and by default is, and what it does: to the network
when it is built, to the built model, to the loss, or to the weights after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip
from maxgain.constraint import Constraint
from maxgain.errors import RegulariserError

from .dropout import ConcreteDropout, GaussianDropout, VariationalDropout, noise_penalty
from .wording import unknown

if TYPE_CHECKING:
    from .recipes import Recipe


@dataclass(frozen=True)
class Regulariser:
    """One way to regularise; every field but the name is what it takes part in."""

    name: str
    parameter: str | None = None
    """What its one number is called, if it has one."""
    default: float | None = None
    """That number where the user gives none; None where the network or the recipe decides."""
    valid: Callable[[float], bool] = lambda value: value > 0
    search: tuple[float, float] | None = None
    """Where a good number is looked for, on a logarithmic scale; None where only a grid can say."""
    batchnorm: bool = False
    """The network gets batch norm."""
    noise: Callable[[float], nn.Module] | None = None
    """Makes the noise layer of a place in the network from the rate there."""
    prepare: Callable[[nn.Module, float], None] | None = None
    """Changes the built model, once."""
    constrain: Callable[[nn.Module, float, Recipe], Constraint] | None = None
    """Makes what projects the weights after each step."""
    penalty: Callable[[Penalised, float], Tensor] | None = None
    """What is added to the loss."""
    needs_input_gradient: bool = False
    """Whether the penalty differentiates with respect to the images."""
    weight_decay: bool = False
    """Whether the number is a decay of all weights, on top of the recipe's own."""
    about: str = ""
    """What it does and where it is from, for people."""


@dataclass(frozen=True)
class Penalised:
    """What a penalty may look at."""

    model: nn.Module
    images: Tensor
    logits: Tensor
    labels: Tensor
    instances: int
    """The size of the training set."""


def _maxgain(model: nn.Module, gamma: float, recipe: Recipe) -> Constraint:
    return MaxGain(model, gamma, p=recipe.p, measure=recipe.measure)


def _lipschitz(p: float) -> Callable[[nn.Module, float, Recipe], Constraint]:
    return lambda model, bound, recipe: Lipschitz(model, bound, p=p)


def _reparametrise(parametrise: Callable[[nn.Module], object]) -> Callable[[nn.Module, float], None]:
    def prepare(model: nn.Module, value: float) -> None:
        for module in [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]:
            parametrise(module)

    return prepare


def _gradient_penalty(seen: Penalised, weight: float) -> Tensor:
    """The mean over the batch of (‖∇_x f_y(x)‖₂ − 1)², f_y being the logit of the image's own class."""
    own = seen.logits.gather(1, seen.labels[:, None]).sum()
    (gradient,) = torch.autograd.grad(own, seen.images, create_graph=True)
    slopes: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return weight * (slopes - 1).square().mean()


def _noise_penalty(seen: Penalised, value: float) -> Tensor:
    return noise_penalty(seen.model, seen.instances)


def _is_rate(rate: float) -> bool:
    return 0 < rate < 1


REGULARISERS: dict[str, Regulariser] = {
    row.name: row
    for row in (
        Regulariser("none", about="No regulariser: the baseline."),
        Regulariser(
            "dropout",
            parameter="rate",
            valid=_is_rate,
            search=(0.05, 0.7),
            noise=nn.Dropout,
            about="""Bernoulli dropout: zeroes each activation with probability ``rate`` while training, and scales
            the others by 1 / (1 - rate), so that nothing has to change for prediction. Without a rate each place in
            the network has the paper's own: 0.2 before convolutions, 0.5 before hidden dense layers, 0.3 in
            residual blocks.
            Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov: Dropout. JMLR 15, 2014.""",
        ),
        Regulariser(
            "gaussiandropout",
            parameter="rate",
            valid=_is_rate,
            search=(0.05, 0.7),
            noise=GaussianDropout,
            about="""Multiplies each activation by a draw from N(1, rate / (1 - rate)) while training: noise of the
            same mean and variance as dropout's at that rate, without its zeros. The rates are dropout's.
            Srivastava et al.: Dropout. JMLR 15, 2014, section 10.""",
        ),
        Regulariser(
            "variationaldropout",
            parameter="rate",
            valid=_is_rate,
            search=(0.05, 0.7),
            noise=VariationalDropout,
            penalty=_noise_penalty,
            about="""Gaussian dropout whose strength α is learned at every place in the network, starting from
            ``rate``, by maximising the variational bound: the loss grows by the divergence of the noisy weights from
            a log-uniform prior, divided by the number of training images.
            Kingma, Salimans, Welling: Variational dropout and the local reparameterization trick. NIPS 2015.""",
        ),
        Regulariser(
            "concretedropout",
            parameter="rate",
            valid=_is_rate,
            search=(0.05, 0.7),
            noise=ConcreteDropout,
            penalty=_noise_penalty,
            about="""Dropout whose rate is learned at every place in the network, starting from ``rate``, through a
            continuous relaxation of the mask; the loss grows by a term that asks for small weights and one that
            asks for entropy, both divided by the number of training images.
            Gal, Hron, Kendall: Concrete dropout. NIPS 2017.""",
        ),
        Regulariser(
            "batchnorm",
            batchnorm=True,
            about="""Standardises each channel over the batch and scales it by a learned number, after every
            convolution (in the residual networks: before). It has no number of its own to tune. MaxGain treats the
            scale, divided by the running standard deviation, as a layer of its own.
            Ioffe, Szegedy: Batch normalization. ICML 2015.""",
        ),
        Regulariser(
            "weightnorm",
            prepare=_reparametrise(nn.utils.parametrizations.weight_norm),
            about="""Writes the weights of each unit as a learned length times a learned direction, so that steps in
            the one do not disturb the other. It has no number to tune. PyTorch's parametrisation.
            Salimans, Kingma: Weight normalization. NIPS 2016.""",
        ),
        Regulariser(
            "spectralnorm",
            prepare=_reparametrise(nn.utils.parametrizations.spectral_norm),
            about="""Divides each weight, flattened to a matrix, by an estimate of its largest singular value in every
            forward pass. It has no number to tune: the bound is 1. PyTorch's parametrisation, one power iteration a
            step. For a convolution the flattened matrix is not the operator: its norm is off by a factor.
            Miyato, Kataoka, Koyama, Yoshida: Spectral normalization for GANs. ICLR 2018.""",
        ),
        Regulariser(
            "maxnorm",
            parameter="c",
            default=3.0,
            search=(0.5, 8.0),
            constrain=lambda model, bound, recipe: MaxNorm(model, bound),
            about="""After each step, scales the incoming weights of every unit whose ℓ2 norm exceeds c back to
            norm c. The paper recommends it beside dropout, with c of 3 or 4.
            Srivastava et al.: Dropout. JMLR 15, 2014, section 5.1.""",
        ),
        Regulariser(
            "weightclip",
            parameter="c",
            default=0.01,
            search=(0.01, 1.0),
            constrain=lambda model, bound, recipe: WeightClip(model, bound),
            about="""After each step, clips every weight to [-c, c]. Its authors use c = 0.01 for the critic of a
            Wasserstein GAN, to keep it Lipschitz with a constant that nobody knows. For a classifier that is tight:
            an MLP on digits learns nothing with it, and learns with 0.1.
            Arjovsky, Chintala, Bottou: Wasserstein GAN. ICML 2017.""",
        ),
        Regulariser(
            "gradpenalty",
            parameter="weight",
            default=10.0,
            search=(0.01, 100.0),
            penalty=_gradient_penalty,
            needs_input_gradient=True,
            about="""Adds ``weight`` times the mean of (‖∇_x f(x)‖₂ − 1)² to the loss: a soft pull of the slope at the
            data towards 1. Here f is the logit of an image's own class and x the training images, where the paper
            has a critic and points between real and generated images.
            Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville: Improved training of Wasserstein GANs. NIPS 2017.""",
        ),
        *(
            Regulariser(
                f"lipschitz-{p:g}",
                parameter="lambda",
                default=default,
                search=(default / 8, default * 8),
                constrain=_lipschitz(p),
                about=f"""After each step, divides the weight of every layer whose ℓ{p:g} operator norm, at the
                layer's true input size, exceeds lambda by the excess: a bound that holds for every input there could
                be, where a gain is one for the inputs there were.
                Gouk, Frank, Pfahringer, Cree: Regularisation of neural networks by enforcing Lipschitz continuity.
                2018 (Machine Learning 110, 2021).""",
            )
            for p, default in ((1.0, 30.0), (2.0, 8.0), (math.inf, 30.0))
        ),
        Regulariser(
            "weightdecay",
            parameter="lambda",
            default=5e-4,
            search=(1e-6, 1e-1),
            weight_decay=True,
            about="""Adds lambda times each weight to its gradient: the ℓ2 penalty, on convolutions and dense layers,
            biases and batch-norm scales excepted, on top of the recipe's own.
            Krogh, Hertz: A simple weight decay can improve generalization. NIPS 1991.""",
        ),
        Regulariser(
            "maxgain",
            parameter="gamma",
            search=(1.0, 8.0),
            constrain=_maxgain,
            about="""After each step, divides the weight of every layer whose largest gain ‖Wx‖ / ‖x‖ on the batch
            exceeded gamma by the excess. Without a number, gamma is the recipe's.
            Gouk, Pfahringer, Frank, Cree: MaxGain: Regularisation of neural networks by constraining activation
            magnitudes. ECML PKDD 2018.""",
        ),
    )
}


@dataclass(frozen=True)
class Chosen:
    """A regulariser with its number."""

    row: Regulariser
    value: float | None

    def __str__(self) -> str:
        return self.row.name if self.value is None else f"{self.row.name}={self.value:g}"


def parse(text: str) -> tuple[Chosen, ...]:
    """The regularisers that a text like ``maxgain=2+batchnorm+dropout`` names, in its order."""
    chosen: list[Chosen] = []
    for part in text.split("+"):
        name, gives_number, number = part.strip().partition("=")
        if name not in REGULARISERS:
            raise RegulariserError(unknown("regulariser", name, REGULARISERS))
        row = REGULARISERS[name]
        chosen.append(Chosen(row, _number(row, number) if gives_number else row.default))
    refuse_nonsense(tuple(chosen))
    return tuple(chosen)


def _number(row: Regulariser, text: str) -> float:
    if row.parameter is None:
        raise RegulariserError(f"{row.name} takes no number, so '{row.name}={text}' makes no sense.")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not row.valid(value):
        raise RegulariserError(f"{text!r} is no {row.parameter} that {row.name} can have.")
    return value


def refuse_nonsense(chosen: tuple[Chosen, ...]) -> None:
    """Raises where a combination cannot mean anything, and says why."""
    names = [choice.row.name for choice in chosen]
    if len(set(names)) < len(names):
        raise RegulariserError(f"{'+'.join(names)} names a regulariser twice.")
    if "none" in names and len(names) > 1:
        raise RegulariserError(f"{'+'.join(names)} makes no sense: 'none' stands alone.")
    noisy = [choice.row.name for choice in chosen if choice.row.noise]
    if len(noisy) > 1:
        raise RegulariserError(f"{' and '.join(noisy)} would put noise in the same places: choose one.")
    prepared = [choice.row.name for choice in chosen if choice.row.prepare]
    constrained = [choice.row.name for choice in chosen if choice.row.constrain]
    if len(prepared) > 1:
        raise RegulariserError(f"{' and '.join(prepared)} would both reparametrise the same weights: choose one.")
    if prepared and constrained:
        raise RegulariserError(
            f"{constrained[0]} scales weights in place, and {prepared[0]} makes them a function of other parameters: "
            "choose one."
        )


def chosen_for(recipe: Recipe) -> tuple[Chosen, ...]:
    """The recipe's regularisers, with its gamma where maxgain gives none."""
    return tuple(
        replace(choice, value=recipe.gamma) if choice.row.name == "maxgain" and choice.value is None else choice
        for choice in parse(recipe.regulariser)
    )


def noise_for(chosen: tuple[Chosen, ...]) -> Callable[[float], nn.Module] | None:
    """What makes the noise layers of a network: at each place's own rate, or at the chosen one everywhere."""
    for row, value in ((choice.row, choice.value) for choice in chosen):
        if row.noise is not None:
            return row.noise if value is None else partial(_at_rate, row.noise, value)
    return None


def _at_rate(noise: Callable[[float], nn.Module], rate: float, place: float) -> nn.Module:
    return noise(rate)


def numbers(chosen: tuple[Chosen, ...]) -> Mapping[str, float]:
    """What each regulariser's number is, by the regulariser's name."""
    return {choice.row.name: choice.value for choice in chosen if choice.value is not None}
