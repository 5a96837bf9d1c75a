"""The paper's experiments, one frozen row each: data, network, optimiser, schedule. Every field can be overridden.

Counts that could never be of use are refused, before anything is built that would never end.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from maxgain.errors import RecipeError

from . import files, reading
from .regularisers import REGULARISERS, Chosen, numbers, parse, settled, spelt
from .wording import Named, unknown

LARGEST = 1e30
"""Of learning rates and decays; weights in float32 hold little more."""
MOST = {
    "--seeds": 1_000,
    "--folds": 1_000,
    "--trials": 10_000,
    "--budget": 10_000,
    "--jobs": 1_024,
    "--per-gpu": 64,
    "--turns": 10_000,
    "epochs": 1_000_000,
    "batch-size": 1_000_000,
    "cross-validation": 1_000,
}
MOST_RUNS = 100_000
"""Of a comparison, or of a search."""
MOST_VALUES = 1_000
"""Of one grid."""


def expect_count(flag: str, count: int) -> None:
    """Refuse a count that is no count, or that could never be reached."""
    if count < 1:
        raise RecipeError(f"{flag} must be at least 1, not {count}.")
    if count > MOST[flag]:
        raise RecipeError(f"{flag} must be at most {MOST[flag]:,}, not {count}.")


def expect_runs(count: int) -> None:
    """Refuse more runs than could ever be made."""
    if count > MOST_RUNS:
        raise RecipeError(f"these are {count:,} runs, and {MOST_RUNS:,} are the most that one command makes.")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes. Where it reads, writes and runs is no part of it."""

    name: tyro.conf.Fixed[str]
    """the experiment's name"""
    dataset: str
    """the data set; 'maxgain data list' tells about them"""
    network: str
    """the network; 'maxgain list networks' tells about them"""
    optimiser: Literal["adam", "sgd"]
    """Adam, or SGD with Nesterov momentum 0.9"""
    learning_rate: float
    """the learning rate of the first epoch"""
    epochs: int
    """how often the training data are gone through"""
    batch_size: int
    """images per step; an incomplete last batch of an epoch is left out"""
    milestones: tuple[int, ...] = ()
    """the epochs after which the learning rate is multiplied by the decay"""
    decay: float = 0.1
    """what a milestone multiplies the learning rate by"""
    weight_decay: float = 0.0
    """ℓ2 decay of the convolutions' weights"""
    augment: bool = False
    """flip at random; pad by 4 with reflection and crop at random"""
    train_on: Literal["train", "train+validation"] = "train"
    """'train+validation' for a final run whose settings are chosen; then nothing is held out"""
    regulariser: str = "none"
    """as in the paper's rows, numbers optional: none, dropout, maxgain+batchnorm, maxgain=1.5+dropout=0.8 (which is
    0.8 times the paper's rates of dropout); 'maxgain list' tells about them"""
    p: float = 2.0
    """the norm in which gains are taken, from 1 to inf"""
    measure: Literal["stale", "fresh"] = "stale"
    """take gains before the update, as the paper does, or apply the updated weight to the batch again"""
    strength: Literal["rate"] | None = None
    """'rate' weakens projections as the learning rate falls (default: the paper's, always in full)"""
    seed: int = 0
    """of the initial weights, the order of the data, the augmentation and the noise"""
    fold: int | None = None
    """which of the data set's folds, from 0 on (default: all the data)"""
    cross_validation: int | None = None
    """cut a data set that has no folds of its own into this many, whose training parts overlap; its own test part is
    then left alone"""
    image_size: int | None = None
    """make the images this many pixels wide and high; only folder has images of any size (default: 96 there)"""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epochs", "batch_size", "decay"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{_flag(name)} must be positive, not {getattr(self, name)}.")
        for name in ("learning_rate", "decay", "weight_decay"):
            if getattr(self, name) > LARGEST:
                most = "finite" if math.isinf(getattr(self, name)) else f"at most {LARGEST:g}"
                raise RecipeError(f"{_flag(name)} must be {most}, not {getattr(self, name)}.")
        expect_count("epochs", self.epochs)
        expect_count("batch-size", self.batch_size)
        if self.cross_validation is not None:
            expect_count("cross-validation", self.cross_validation)
        if strange := [epoch for epoch in self.milestones if not 0 <= epoch <= MOST["epochs"]]:
            raise RecipeError(f"milestones must be epochs from 0 to {MOST['epochs']:,}, not {strange[0]}.")
        if not self.weight_decay >= 0:
            raise RecipeError(f"weight-decay must not be negative, but is {self.weight_decay}.")
        if not self.p >= 1:
            raise RecipeError(f"p must be a number from 1 to inf, not {self.p}.")
        if not 0 <= self.seed < 2**32:  # torch's generator on the CPU takes no more bits than these from a seed
            raise RecipeError(f"seed must be a whole number from 0 to {2**32 - 1}, not {self.seed}.")
        if self.cross_validation is not None and (self.cross_validation < 3 or self.fold is None):
            raise RecipeError(
                "cross-validation needs at least 3 folds, and a --fold that says which of them to test on."
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RecipeError(unknown(_flag(name), getattr(self, name), choices))
        if any(choice.row.batchnorm for choice in self.chosen) and self.batch_size == 1:
            raise RecipeError("batchnorm standardises over the batch, so it needs a batch-size of at least 2.")
        object.__setattr__(self, "regulariser", spelt(parse(self.regulariser)))

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The regularisers, each with its number: the text's, or the default."""
        return settled(self.regulariser)

    @property
    def gamma(self) -> float | None:
        """The bound of maxgain, where that is chosen."""
        return numbers(self.chosen).get("maxgain")

    def learning_rate_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        return self.learning_rate * math.prod(self.decay for milestone in self.milestones if epoch >= milestone)


def _flag(name: str) -> str:
    return name.replace("_", "-")


# The command line sees to these itself; a recipe may also come from Python or from a file.
_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(Recipe).items() if get_origin(hint) is Literal}

_ROWS = {
    recipe.name: recipe
    for recipe in (
        Recipe("digits", "digits", "cnn", "adam", 1e-3, epochs=60, batch_size=16),
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
        Recipe("folder", "folder", "wrn16_4", "sgd", 1e-1, 90, 50, milestones=(60, 80), decay=0.2,
               weight_decay=2e-4, augment=True, regulariser="batchnorm"),
    )
}  # fmt: skip
RECIPES = Named("recipe", RecipeError, _ROWS)


def recipe_named(name: str) -> Recipe:
    """The recipe of that name."""
    return RECIPES[name]


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe as strict JSON can hold it, with every number that its regulariser has."""
    content: dict[str, Any] = files.plain(asdict(recipe) | {"regulariser": spelt(recipe.chosen)})
    return content


def from_json(content: dict[str, Any]) -> Recipe:
    """The recipe that ``to_json`` wrote; what a recipe may be without may be missing, as in older files."""
    known = {field.name for field in fields(Recipe)}
    optional = {field.name for field in fields(Recipe) if field.default is None}
    if strange := sorted((set(content) ^ known) - optional):
        raise RecipeError(f"this recipe was written by another version of maxgain: it differs in {strange[0]!r}.")
    try:
        return reading.converted(files.revived(content), Recipe)
    except ValueError as error:
        raise RecipeError(f"this is no recipe: {error}.") from error


def key(recipe: Recipe) -> str:
    """A name for what a recipe computes, and nothing else: the same on every machine, always.

    No part of it are the recipe's name, how its regulariser was written, and fields that no chosen regulariser uses.
    """
    used = {name for choice in recipe.chosen for name in choice.row.uses}
    unused = {name for row in REGULARISERS.values() for name in row.uses} - used
    decisive = {name: value for name, value in to_json(recipe).items() if name not in {"name", *unused}}
    text = json.dumps(_one_spelling(decisive), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_key(recipe: Recipe, fingerprint: str) -> str:
    """A name for a run: what it computes, on the data with that fingerprint. On other data it has another name."""
    return hashlib.sha256(f"{key(recipe)} {fingerprint}".encode()).hexdigest()[:16]


def run_name(recipe: Recipe) -> str:
    """What people call a run, and its folder: recipe, regularisers with their numbers, fold and seed."""
    fold = "" if recipe.fold is None else f"-fold{recipe.fold}"
    return f"{recipe.name}-{spelt(recipe.chosen)}{fold}-seed{recipe.seed}"


def _one_spelling(value: Any) -> Any:
    """2 and 2.0 are the same number, and None is nothing at all, so that a new optional field changes no key."""
    match value:
        case dict():
            return {name: _one_spelling(item) for name, item in value.items() if item is not None}
        case list():
            return [_one_spelling(item) for item in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
