"""Recipes: what a training run computes, as one frozen row of settings, with its regularisers in one text.

A text names regularisers as the paper does: ``maxgain+batchnorm+dropout``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import permutations, product
from typing import Literal, get_args, get_origin, get_type_hints

from maxgain.errors import RecipeError, RegulariserError

from . import _files
from ._names import Table, unknown
from .regularisers import REGULARISERS, Regulariser

PEAK = 0.2
"""The share of a triangular schedule in which the learning rate rises."""


@dataclass(frozen=True)
class Chosen:
    """A regulariser in a text, with its number."""

    row: Regulariser
    number: float
    """The default where the text leaves it open; NaN where the regulariser has none."""
    is_open: bool
    """Whether there is a number to choose."""


def parse(text: str) -> tuple[Chosen, ...]:
    """The regularisers in a text like ``maxgain=2+batchnorm``, in the order of the table whatever the text's."""
    chosen = []
    for part in map(str.strip, text.split("+")):
        name, equals, typed = part.partition("=")
        row = REGULARISERS[name.strip()]
        number = math.nan if row.default is None else row.default
        if equals:
            if row.parameter is None:
                raise RegulariserError(f"{row.name} takes no number, but got {part!r}.", field="regulariser")
            try:
                number = float(typed)
            except ValueError:
                number = math.nan
            if not row.valid(number):
                raise RegulariserError(
                    f"{typed!r} is no {row.parameter} for {row.name} (default {row.default:g}).", field="regulariser"
                )
        chosen.append(Chosen(row, number, is_open=row.parameter is not None and not equals))
    order = list(REGULARISERS)
    chosen.sort(key=lambda choice: order.index(choice.row.name))
    if len({choice.row.name for choice in chosen}) < len(chosen):
        raise RegulariserError(f"{text} names a regulariser twice.", field="regulariser")
    for (one, other), (is_one, is_other, why) in product(permutations(chosen, 2), _CONFLICTS):
        if is_one(one.row) and is_other(other.row):
            raise RegulariserError(
                f"{text}: {one.row.name} and {other.row.name} {why}; choose one.", field="regulariser"
            )
    return tuple(chosen)


_Kind = Callable[[Regulariser], object]
_CONFLICTS: tuple[tuple[_Kind, _Kind, str], ...] = (
    (lambda row: row.name == "none", lambda row: True, "exclude each other"),
    (lambda row: row.noise, lambda row: row.noise, "both put noise in the same places"),
    (lambda row: row.reparametrise, lambda row: row.reparametrise, "both reparametrise the same weights"),
    (lambda row: row.constrain, lambda row: row.reparametrise, "both change the same weights"),
    (lambda row: row.needs_input_gradient, lambda row: row.batchnorm, "do not mix: batch norm mixes the images"),
)
"""Pairs of kinds that cannot stand in one text, and why."""


def open_parts(text: str, by: str | None = None) -> list[Chosen]:
    """The regularisers in a text whose numbers are left open; the early rule chooses maxgain's alone."""
    return [choice for choice in parse(text) if choice.is_open and (by != "early" or choice.row.name == "maxgain")]


def spell(chosen: Iterable[Chosen]) -> str:
    """The one spelling of these regularisers; `parse` reads every number back as the same one."""
    return "+".join(
        choice.row.name
        if choice.is_open or choice.row.parameter is None
        else f"{choice.row.name}={float(choice.number)!r}".removesuffix(".0").replace("e+", "e")
        for choice in chosen
    )


def fill(text: str, numbers: Mapping[str, float] | None = None) -> str:
    """The text with these numbers, by regulariser, where it leaves them open; by default with the default ones."""
    chosen = parse(text)
    if numbers is None:
        numbers = {choice.row.name: choice.number for choice in chosen}
    return spell(
        replace(choice, number=numbers[choice.row.name], is_open=False)
        if choice.is_open and choice.row.name in numbers
        else choice
        for choice in chosen
    )


def short_name(text: str, typed: Collection[str] = ()) -> str:
    """The text with its defaults, but without factors of 1, except for the regularisers in `typed`."""
    return spell(
        replace(
            choice, is_open=choice.row.parameter == "factor" and choice.number == 1 and choice.row.name not in typed
        )
        for choice in parse(text)
    )


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes."""

    name: str
    """name of the recipe"""
    dataset: str
    """data set"""
    network: str
    """network"""
    optimiser: Literal["adam", "sgd"]
    """Adam, or SGD with Nesterov momentum 0.9"""
    learning_rate: float
    """initial learning rate; the peak of a triangular schedule"""
    epochs: int
    """number of epochs"""
    batch_size: int
    """images per step; an incomplete last batch is dropped"""
    schedule: Literal["steps", "cosine", "triangular"] = "steps"
    """learning-rate schedule: multiply by decay at the milestones; cosine to 0; linear to the peak and back to 0"""
    milestones: tuple[int, ...] = ()
    """epochs after which the learning rate is multiplied by decay"""
    decay: float = 0.1
    """factor of the learning rate at a milestone"""
    weight_decay: float = 0.0
    """ℓ2 decay of the convolutions' weights"""
    augment: bool = False
    """random flips and crops (4 pixels of reflection padding)"""
    cutout: int = 0
    """side of the square that is erased from each training image, in pixels"""
    label_smoothing: float = 0.0
    """share of the target probability that is spread over all classes"""
    label_noise: float = 0.0
    """share of the training and validation labels that are replaced by random ones"""
    train_on: Literal["train", "train+validation"] = "train"
    """parts of the data to train on; 'train+validation' is for final runs"""
    regulariser: str = "none"
    """regularisers joined by +, numbers optional: none, maxgain=2, maxgain=1.5+dropout"""
    include: tuple[str, ...] = ()
    """layers that maxgain constrains, as globs; none: all"""
    p: float = 2.0
    """norm in which gains are taken, from 1 to inf"""
    seed: int = 0
    """seed of weights, data order, augmentation and noise"""
    fold: int | None = None
    """fold of the data set, from 0; None: all data"""
    cross_validation: int | None = None
    """K-fold cross-validation (K ≥ 3) instead of the official split; the official test set stays unused"""
    image_size: int | None = None
    """side to which a folder's images are resized, in pixels; None: 96"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of the forward pass; 'auto' is bfloat16 on GPUs that support it"""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RecipeError(unknown(name, getattr(self, name), choices), field=name)
        for name, holds, what in (
            ("learning_rate", 0 < self.learning_rate < math.inf, "positive and finite"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("milestones", all(epoch >= 0 for epoch in self.milestones), "epochs from 0"),
            ("decay", 0 < self.decay < math.inf, "positive and finite"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "finite and not negative"),
            ("cutout", self.cutout >= 0, "0 or more pixels"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1"),
            ("label_noise", 0 <= self.label_noise < 1, "at least 0 and below 1"),
            ("p", self.p >= 1, "a number from 1 to inf"),
            ("seed", 0 <= self.seed < 2**32, f"from 0 to {2**32 - 1}"),
            ("cross_validation", self.cross_validation is None or self.cross_validation >= 3, "at least 3 folds"),
            ("fold", self.cross_validation is None or self.fold is not None, "given with cross_validation"),
        ):
            if not holds:
                raise RecipeError(f"{name} must be {what}, not {getattr(self, name)}.", field=name)
        if any(choice.row.batchnorm for choice in self.chosen) and self.batch_size == 1:
            raise RecipeError("batchnorm needs a batch_size of at least 2.", field="batch_size")
        object.__setattr__(self, "regulariser", spell(self.chosen))

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The regularisers with their numbers."""
        return parse(self.regulariser)

    @property
    def gamma(self) -> float | None:
        """The bound of maxgain, if that is among the regularisers."""
        return next((choice.number for choice in self.chosen if choice.row.name == "maxgain"), None)

    def learning_rate_at(self, epoch: float) -> float:
        """The learning rate after this many epochs."""
        match self.schedule:
            case "steps":
                factor = math.prod(self.decay for milestone in self.milestones if epoch >= milestone)
            case "cosine":
                factor = 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
            case "triangular":
                done = epoch / self.epochs
                factor = done / PEAK if done < PEAK else (1 - done) / (1 - PEAK)
        return self.learning_rate * factor

    @property
    def key(self) -> str:
        """A hash of what the recipe computes: its name and spelling do not matter, nor do fields at their default."""
        ignored = ("name",) if "maxgain" in self.regulariser else ("name", "include")  # which maxgain alone reads
        content = asdict(self) | {"regulariser": fill(self.regulariser)}
        changed = {each.name: content[each.name] for each in fields(self) if content[each.name] != each.default}
        decisive = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value  # 2.0 is 2
            for name, value in _files.to_builtins(changed).items()
            if name not in ignored
        }
        text = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """What people call a run of this recipe: name, regularisers, fold and seed."""
        fold = "" if self.fold is None else f"-fold{self.fold}"
        return f"{self.name}-{fill(self.regulariser)}{fold}-seed{self.seed}"


_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(Recipe).items() if get_origin(hint) is Literal}

RECIPES = Table(
    "recipe",
    RecipeError,
    {
        recipe.name: recipe
        for recipe in (
            Recipe("digits", "digits", "cnn", "adam", 1e-3, epochs=60, batch_size=16),
            Recipe(
                "noisy-digits", "digits", "mlp", "adam", 1e-3, epochs=40, batch_size=32,
                label_noise=1 / 3, fold=0, cross_validation=5,
            ),
            Recipe("cifar10", "cifar10", "vgg19", "adam", 1e-4, 140, 100, milestones=(100, 120), augment=True),
            Recipe(
                "cifar100", "cifar100", "wrn16_4", "sgd", 1e-1, 200, 50,
                milestones=(60, 120, 160), decay=0.2, weight_decay=2e-4, augment=True, regulariser="batchnorm",
            ),
            Recipe("svhn", "svhn", "svhn_vgg", "adam", 1e-4, 17, 100, milestones=(15,)),
            Recipe(
                "sins10", "sins10", "wrn16_4", "sgd", 1e-1, 90, 50,
                milestones=(60, 80), decay=0.2, weight_decay=2e-4, regulariser="batchnorm", fold=0,
            ),
            Recipe("folder", "folder", "cnn", "adam", 1e-3, 60, 32, milestones=(50,), augment=True, image_size=32),
        )
    },
)  # fmt: skip


def run_key(recipe: Recipe, fingerprint: str) -> str:
    """A hash of what a run computes, and of the data that it computes it on."""
    return hashlib.sha256(f"{recipe.key} {fingerprint}".encode()).hexdigest()[:16]
