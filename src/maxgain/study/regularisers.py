"""Regularisers, one row each, and their combinations as the paper writes them: ``maxgain+batchnorm+dropout``.

A row says what a regulariser is called, what its one number is and by default is, and what it does: to the network
when it is built, to the built model, to the loss, or to the weights after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip
from maxgain.constraint import Constraint
from maxgain.errors import RegulariserError

from .dropout import ConcreteDropout, GaussianDropout, VariationalDropout, noise_penalty
from .models import BLOCK_RATE, CONV_RATE, DENSE_RATE
from .wording import Named

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
    usual: tuple[float, ...] = ()
    """The numbers that a person would try, the first one first: a grid of n has the first n of them."""
    batchnorm: bool = False
    """The network gets batch norm."""
    noise: Callable[[float], nn.Module] | None = None
    """Makes the noise layer of a place in the network from the rate there."""
    prepare: Callable[[nn.Module], None] | None = None
    """Changes the built model, once."""
    constrain: Callable[[nn.Module, float, Recipe], Constraint] | None = None
    """Makes what projects the weights after each step."""
    uses: tuple[str, ...] = ()
    """The fields of a recipe that it alone uses: they are part of a run's key only where it is chosen."""
    penalty: Callable[[PenaltyInputs, float], Tensor] | None = None
    """What is added to the loss."""
    needs_input_gradient: bool = False
    """Whether the penalty differentiates with respect to the images."""
    weight_decay: bool = False
    """Whether the number is a decay of all weights, on top of the recipe's own."""
    about: str = ""
    """What it does and where it is from, for people."""


@dataclass(frozen=True)
class PenaltyInputs:
    """What a penalty may look at."""

    model: nn.Module
    images: Tensor
    logits: Tensor
    labels: Tensor
    instances: int
    """The size of the training set."""


def _maxgain(model: nn.Module, gamma: float, recipe: Recipe) -> Constraint:
    return MaxGain(model, gamma, p=recipe.p, measure=recipe.measure, strength=recipe.strength or "full")


def _lipschitz(p: float) -> Callable[[nn.Module, float, Recipe], Constraint]:
    return lambda model, bound, recipe: Lipschitz(model, bound, p=p)


def reparametrising(parametrise: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    """What puts one of torch's parametrisations on every convolution and dense layer of a model."""

    def prepare(model: nn.Module) -> None:
        for module in [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]:
            parametrise(module)

    return prepare


def _gradient_penalty(inputs: PenaltyInputs, weight: float) -> Tensor:
    """The mean over the batch of (‖∇_x f_y(x)‖₂ − 1)², f_y being the logit of the image's own class."""
    own = inputs.logits.gather(1, inputs.labels[:, None]).sum()
    (gradient,) = torch.autograd.grad(own, inputs.images, create_graph=True)
    slopes: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return weight * (slopes - 1).square().mean()


def _noise_penalty(inputs: PenaltyInputs, value: float) -> Tensor:
    return noise_penalty(inputs.model, inputs.instances)


def _is_factor(factor: float) -> bool:
    """Whether no place's rate becomes 1 or more, at which nothing is left of its input."""
    return 0 < factor * max(CONV_RATE, DENSE_RATE, BLOCK_RATE) < 1


FACTORS = (1, 0.5, 1.5, 0.75, 1.25, 0.25, 1.6, 0.35, 0.6, 0.9, 1.1, 1.4)
"""Of the paper's dropout rates, which are the first one."""
FACTOR = "factor"
_noise_row = partial(Regulariser, parameter=FACTOR, default=1.0, valid=_is_factor, search=(0.2, 1.6), usual=FACTORS)
"""Noise at every place in the network; its one number is the factor of the rates there."""

_ROWS = {
    row.name: row
    for row in (
        Regulariser("none", about="No regulariser: the baseline."),
        Regulariser(
            "maxgain",
            parameter="gamma",
            default=2.0,
            search=(1.0, 8.0),
            usual=(2, 1.5, 3, 1.25, 4, 2.5, 1.75, 6, 1, 8, 5, 3.5),
            constrain=_maxgain,
            uses=("p", "measure", "strength"),
            about="""After each step, divides the weight of every layer whose largest gain ‖Wx‖ / ‖x‖ on the batch
            exceeded gamma by the excess.
            Gouk, Pfahringer, Frank, Cree: MaxGain: Regularisation of neural networks by constraining activation
            magnitudes. ECML PKDD 2018.""",
        ),
        *(
            Regulariser(
                f"lipschitz-{p:g}",
                parameter="lambda",
                default=default,
                search=(default / 8, default * 8),
                usual=tuple(default * share for share in (1, 0.5, 2, 0.25, 4, 1.5, 0.75, 0.125, 8, 3, 0.375, 6)),
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
            "batchnorm",
            batchnorm=True,
            about="""Standardises each channel over the batch and scales it by a learned number, after every
            convolution (in the residual networks: before). It has no number of its own to tune. MaxGain treats the
            scale, divided by the running standard deviation, as a layer of its own.
            Ioffe, Szegedy: Batch normalization. ICML 2015.""",
        ),
        _noise_row(
            "dropout",
            noise=nn.Dropout,
            about="""Bernoulli dropout: zeroes each activation with the rate of its place while training, and scales
            the others by 1 / (1 - rate), so that nothing has to change for prediction. The rate is ``factor`` times
            the paper's own of that place: 0.2 before convolutions, 0.5 before hidden dense layers, 0.3 in residual
            blocks. The factor is 1 by default, and less than 2.
            Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov: Dropout. JMLR 15, 2014.""",
        ),
        _noise_row(
            "gaussiandropout",
            noise=GaussianDropout,
            about="""Multiplies each activation by a draw from N(1, rate / (1 - rate)) while training: noise of the
            same mean and variance as dropout's at that rate, without its zeros. The rates are dropout's.
            Srivastava et al.: Dropout. JMLR 15, 2014, section 10.""",
        ),
        _noise_row(
            "variationaldropout",
            noise=VariationalDropout,
            penalty=_noise_penalty,
            about="""Gaussian dropout whose strength α is learned at every place in the network, starting from
            dropout's rate there, by maximising the variational bound: the loss grows by the divergence of the noisy
            weights from a log-uniform prior, divided by the number of training images.
            Kingma, Salimans, Welling: Variational dropout and the local reparameterization trick. NIPS 2015.""",
        ),
        _noise_row(
            "concretedropout",
            noise=ConcreteDropout,
            penalty=_noise_penalty,
            about="""Dropout whose rate is learned at every place in the network, starting from dropout's, through a
            continuous relaxation of the mask; the loss grows by a term that asks for small weights and one that
            asks for entropy, both divided by the number of training images.
            Gal, Hron, Kendall: Concrete dropout. NIPS 2017.""",
        ),
        Regulariser(
            "weightnorm",
            prepare=reparametrising(nn.utils.parametrizations.weight_norm),
            about="""Writes the weights of each unit as a learned length times a learned direction, so that steps in
            the one do not disturb the other. It has no number to tune. PyTorch's parametrisation.
            Salimans, Kingma: Weight normalization. NIPS 2016.""",
        ),
        Regulariser(
            "spectralnorm",
            prepare=reparametrising(nn.utils.parametrizations.spectral_norm),
            about="""Divides each weight, flattened to a matrix, by an estimate of its largest singular value in every
            forward pass. It has no number to tune: the bound is 1. PyTorch's parametrisation, one power iteration per
            step. For a convolution the flattened matrix is not the operator: its norm is off by a factor.
            Miyato, Kataoka, Koyama, Yoshida: Spectral normalization for GANs. ICLR 2018.""",
        ),
        Regulariser(
            "maxnorm",
            parameter="c",
            default=3.0,
            search=(0.5, 8.0),
            usual=(3, 2, 4, 1, 6, 1.5, 2.5, 0.5, 8, 5, 3.5, 0.75),
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
            usual=(0.1, 0.03, 0.3, 0.01, 1, 0.05, 0.2, 0.02, 0.5, 0.07, 0.15, 0.7),
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
            usual=(10, 1, 0.1, 100, 0.01, 3, 0.3, 30, 0.03, 5, 0.5, 50),
            penalty=_gradient_penalty,
            needs_input_gradient=True,
            about="""Adds ``weight`` times the mean of (‖∇_x f(x)‖₂ − 1)² to the loss: a soft pull of the slope at the
            data towards 1. Here f is the logit of an image's own class and x the training images, where the paper
            has a critic and points between real and generated images. As there, it is not for networks with batch
            norm, in which an output depends on all images of the batch.
            Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville: Improved training of Wasserstein GANs. NIPS 2017.""",
        ),
        Regulariser(
            "weightdecay",
            parameter="lambda",
            default=5e-4,
            search=(1e-6, 1e-1),
            usual=(5e-4, 1e-4, 1e-3, 1e-5, 1e-2, 2e-4, 2e-3, 1e-6, 1e-1, 5e-5, 5e-3, 2e-5),
            weight_decay=True,
            about="""Adds lambda times each weight to its gradient: the ℓ2 penalty, on convolutions and dense layers,
            biases and batch-norm scales excepted, on top of the recipe's own.
            Krogh, Hertz: A simple weight decay can improve generalization. NIPS 1991.""",
        ),
    )
}
REGULARISERS = Named("regulariser", RegulariserError, _ROWS)


@dataclass(frozen=True)
class Chosen:
    """A regulariser with its number."""

    row: Regulariser
    value: float | None
    """None where it has no number, or where the text leaves it open."""

    @property
    def number(self) -> float:
        """The number of a regulariser that has one."""
        if self.value is None:
            raise RegulariserError(f"{self.row.name} has no number here.")
        return self.value

    @property
    def is_open(self) -> bool:
        """Whether there is a number to choose."""
        return self.value is None and self.row.parameter is not None


def parse(text: str) -> tuple[Chosen, ...]:
    """The regularisers that a text like ``maxgain=2+batchnorm+dropout`` names, in the order of the table.

    The order in the text means nothing, so that two texts that name the same regularisers are the same.
    """
    chosen = []
    for part in map(str.strip, text.split("+")):
        words = part.replace(",", " ").split()
        if len(words) > 1 and all(word.partition("=")[0] in REGULARISERS for word in words):
            raise RegulariserError(
                f"{part!r} is not one regulariser: join them by + to use them together, or give them one by one."
            )
        name, gives_number, number = part.partition("=")
        row, value = REGULARISERS[name.strip()], None
        if gives_number:
            if row.parameter is None:
                raise RegulariserError(f"{row.name} takes no number, so '{part}' makes no sense.")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not row.valid(value):
                raise RegulariserError(
                    f"{number!r} is no {row.parameter} that {row.name} can have: it is {row.default:g} by default, and "
                    f"'maxgain list {row.name}' tells about it."
                )
        chosen.append(Chosen(row, value))
    if len(chosen) > 1:
        refuse_nonsense(chosen)
    order = list(REGULARISERS)
    return tuple(sorted(chosen, key=lambda choice: order.index(choice.row.name)))


def settled(text: str) -> tuple[Chosen, ...]:
    """The same with every number that the text leaves open at its default."""
    return tuple(
        replace(choice, value=choice.row.default) if choice.value is None else choice for choice in parse(text)
    )


def spelt(chosen: Iterable[Chosen]) -> str:
    """The one spelling of these regularisers."""
    # A number is the shortest text that is read back as the same one; without a plus, which joins regularisers.
    return "+".join(
        one.row.name
        if one.value is None
        else f"{one.row.name}={float(one.value)!r}".removesuffix(".0").replace("e+", "e")
        for one in chosen
    )


def brief(text: str, named: Collection[str]) -> str:
    """The text without factors of 1, but for those `named`: dropout at the network's own rates is called dropout."""
    return spelt(
        replace(choice, value=None)
        if choice.row.parameter == FACTOR and choice.value == 1 and choice.row.name not in named
        else choice
        for choice in parse(text)
    )


def filled(text: str, numbers: Mapping[str, float]) -> str:
    """The text with these numbers, by regulariser, where it leaves them open: ``maxgain=1.75+batchnorm``."""
    return spelt(
        replace(choice, value=numbers[choice.row.name]) if choice.is_open and choice.row.name in numbers else choice
        for choice in parse(text)
    )


def with_gamma(texts: Sequence[str], gamma: float | None) -> tuple[str, ...]:
    """The texts with the command line's gamma where they name maxgain without a number; refused if nothing uses it."""
    if gamma is None:
        return tuple(texts)
    if not REGULARISERS["maxgain"].valid(gamma):
        raise RegulariserError(f"gamma must be positive, not {gamma}.")
    bounds = [choice.value for text in texts for choice in parse(text) if choice.row.name == "maxgain"]
    if not {None, gamma} & set(bounds):
        raise RegulariserError(
            f"--gamma {gamma:g} has no effect with {' '.join(texts)}: name maxgain there, without a number, or leave "
            "--gamma out."
        )
    return tuple(filled(text, {"maxgain": gamma}) for text in texts)


def refuse_nonsense(chosen: Sequence[Chosen]) -> None:
    """Raises where a combination cannot mean anything, and says why."""
    names = [choice.row.name for choice in chosen]
    if len(set(names)) < len(names):
        raise RegulariserError(f"{'+'.join(names)} names a regulariser twice.")
    if "none" in names and len(names) > 1:
        raise RegulariserError(f"{'+'.join(names)} makes no sense: 'none' stands alone.")
    noisy = [choice.row.name for choice in chosen if choice.row.noise]
    if len(noisy) > 1:
        raise RegulariserError(f"{' and '.join(noisy)} would put noise in the same places: choose one.")
    sloped = [choice.row.name for choice in chosen if choice.row.needs_input_gradient]
    standardised = [choice.row.name for choice in chosen if choice.row.batchnorm]
    if sloped and standardised:
        raise RegulariserError(
            f"{sloped[0]} is about the slope at each image by itself, and {standardised[0]} lets all images of a batch "
            "have a part in it: leave one of them out."
        )
    prepared = [choice.row.name for choice in chosen if choice.row.prepare]
    constrained = [choice.row.name for choice in chosen if choice.row.constrain]
    if len(prepared) > 1:
        raise RegulariserError(f"{' and '.join(prepared)} would both reparametrise the same weights: choose one.")
    if prepared and constrained:
        raise RegulariserError(
            f"{constrained[0]} scales weights in place, and {prepared[0]} makes them a function of other parameters: "
            "choose one."
        )


def noise_for(chosen: tuple[Chosen, ...]) -> Callable[[float], nn.Module] | None:
    """What makes the noise layer of each place in a network from the paper's rate there; None without noise."""
    for choice in chosen:
        if choice.row.noise is not None:
            return partial(_scaled_noise, choice.row.noise, choice.number)
    return None


def _scaled_noise(noise: Callable[[float], nn.Module], factor: float, rate: float) -> nn.Module:
    return noise(factor * rate)


def numbers(chosen: tuple[Chosen, ...]) -> Mapping[str, float]:
    """What each regulariser's number is, by the regulariser's name."""
    return {choice.row.name: choice.value for choice in chosen if choice.value is not None}
