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

from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.constraint import Constraint
from maxgain.errors import RegulariserError

from .spelling import unknown

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
    summary: str = ""
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


REGULARISERS: dict[str, Regulariser] = {
    row.name: row
    for row in (
        Regulariser("none", summary="No regulariser: the baseline."),
        Regulariser(
            "dropout",
            parameter="rate",
            valid=lambda rate: 0 <= rate < 1,
            search=(0.05, 0.7),
            noise=nn.Dropout,
            summary="Zeroes activations at random. Srivastava et al., JMLR 2014.",
        ),
        Regulariser(
            "batchnorm",
            batchnorm=True,
            summary="Standardises activations over the batch. Ioffe and Szegedy, ICML 2015.",
        ),
        Regulariser(
            "maxgain",
            parameter="gamma",
            search=(1.0, 8.0),
            constrain=_maxgain,
            summary="Bounds each layer's largest measured gain. Gouk et al., ECML PKDD 2018.",
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
