"""Recipes: what a training run computes, as one frozen row of settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import MISSING, dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from maxgain.errors import RecipeError

from . import _files
from ._names import Table, unknown
from .regularisers import Chosen, parse, spell, with_defaults

PEAK = 0.2
"""The share of a triangular schedule in which the learning rate rises."""


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
        for name in ("learning_rate", "decay"):
            self._expect(name, "positive and finite", 0 < getattr(self, name) < math.inf)
        for name in ("epochs", "batch_size"):
            self._expect(name, "at least 1", getattr(self, name) >= 1)
        self._expect("milestones", "epochs from 0", all(epoch >= 0 for epoch in self.milestones))
        self._expect("weight_decay", "finite and not negative", 0 <= self.weight_decay < math.inf)
        self._expect("cutout", "0 or more pixels", self.cutout >= 0)
        for name in ("label_smoothing", "label_noise"):
            self._expect(name, "at least 0 and below 1", 0 <= getattr(self, name) < 1)
        self._expect("p", "a number from 1 to inf", self.p >= 1)
        self._expect("seed", f"from 0 to {2**32 - 1}", 0 <= self.seed < 2**32)
        if self.cross_validation is not None:
            self._expect("cross_validation", "at least 3 folds", self.cross_validation >= 3)
            self._expect("fold", "given with cross_validation", self.fold is not None)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RecipeError(unknown(name, getattr(self, name), choices), field=name)
        if self.batch_size == 1 and any(choice.row.batchnorm for choice in self.chosen):
            raise RecipeError("batchnorm needs a batch_size of at least 2.", field="batch_size")
        object.__setattr__(self, "regulariser", spell(parse(self.regulariser)))

    def _expect(self, name: str, what: str, holds: bool) -> None:
        if not holds:
            raise RecipeError(f"{name} must be {what}, not {getattr(self, name)}.", field=name)

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The regularisers with their numbers, defaults filled in."""
        return with_defaults(parse(self.regulariser))

    @property
    def gamma(self) -> float | None:
        """The bound of maxgain, if that is among the regularisers."""
        return next((choice.value for choice in self.chosen if choice.row.name == "maxgain"), None)

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
        content = to_json(self)
        del content["name"]
        if self.gamma is None:
            content["include"] = []  # which only maxgain reads
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.default is not MISSING}
        plain = _files.to_builtins(defaults)
        decisive = {
            name: _as_int(value) for name, value in content.items() if name not in plain or plain[name] != value
        }
        text = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """What people call a run of this recipe: name, regularisers, fold and seed."""
        fold = "" if self.fold is None else f"-fold{self.fold}"
        return f"{self.name}-{spell(self.chosen)}{fold}-seed{self.seed}"


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


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe in the types of JSON, with every number of its regularisers."""
    content: dict[str, Any] = _files.to_builtins(recipe)
    return content | {"regulariser": spell(recipe.chosen)}


def from_json(content: dict[str, Any]) -> Recipe:
    """The recipe that `to_json` wrote."""
    return _files.convert(content, Recipe)


def run_key(recipe: Recipe, fingerprint: str) -> str:
    """A hash of what a run computes, and of the data that it computes it on."""
    return hashlib.sha256(f"{recipe.key} {fingerprint}".encode()).hexdigest()[:16]


def _as_int(value: Any) -> Any:
    """2.0 as 2, so that both make the same key."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
