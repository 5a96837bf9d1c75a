"""A data set in memory: three parts that share no image, and how to cut a set into parts that are alike."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maxgain.errors import DataError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Split:
    """One part of a data set: uint8 images (N, C, H, W) and their int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, parts: Iterable[tuple[Bytes, NDArray[Any]]]) -> "Split":
        """The images and labels of all `parts` in turn, copied into memory of its own."""
        images, labels = zip(*parts, strict=True)
        shape = (sum(map(len, labels)), *images[0].shape[1:])
        # Given somewhere to write to, numpy cannot keep the odd memory order that some readers hand over.
        joined = np.concatenate(images, out=np.empty(shape, np.uint8))
        return cls(torch.from_numpy(joined), torch.from_numpy(np.concatenate(labels).astype(np.int64)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice) -> "Split":
        return Split(self.images[index], self.labels[index])

    def take(self, indices: NDArray[np.intp]) -> "Split":
        """The images with these numbers, in this order."""
        chosen = torch.from_numpy(indices)
        return Split(self.images[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> "Split":
        """The same images on another device."""
        return Split(self.images.to(device), self.labels.to(device))

    def join(self, other: "Split") -> "Split":
        """The images of both, this one's first."""
        return Split(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))


@dataclass(frozen=True, repr=False)
class Dataset:
    """A data set, or one fold of it, in three parts that share no image."""

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    fold: int | None = None
    folds: int = 1  # how many disjoint folds the data set has
    note: str = ""  # what a reader of results made with this copy of it has to know

    def __repr__(self) -> str:
        sizes = f"{len(self.train):,} train, {len(self.validation):,} validation, {len(self.test):,} test"
        return f"<{self.name}: images of {self.shape} in {len(self.classes)} classes: {sizes}>"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the images and labels of each part: data with another one are other data."""
        digest = hashlib.sha256(f"{len(self.classes)} classes".encode())
        for name, part in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            digest.update(f" {name} {tuple(part.images.shape)} ".encode())
            digest.update(part.images.contiguous().numpy().data)
            digest.update(part.labels.numpy().astype("<i8").data)
        return digest.hexdigest()

    def without_test(self) -> "Dataset":
        """The same without its test part, for a run on which something is chosen, which must not see it."""
        return replace(self, test=self.test[:0])


def shared_images(train: Split, validation: Split, test: Split) -> str:
    """A note on images that a part has in common with those that networks learn from; nothing where there are none."""
    learned, chosen_on, scored_on = (
        [hashlib.sha256(image.numpy().data).digest() for image in part.images.contiguous()]
        for part in (train, validation, test)
    )
    known = set(learned)
    notes = []
    for name, part in (("validation", chosen_on), ("test", scored_on)):
        if shared := sum(image in known for image in part):
            notes.append(f"{shared:,} of the {len(part):,} {name} images are also among those that are trained on")
        known |= set(part)  # a final run is trained on the validation part too
    return "; ".join(notes)


def cross_validated(dataset: Dataset, fold: int | None, folds: int) -> Dataset:
    """One of `folds` ways to cut the training and validation part, to be tested on one fold of it.

    The next fold is for validation and all others are for training. The data set's own test part takes no part in it.
    """
    fold = expect_fold(fold, folds)
    if len(dataset.train) + len(dataset.validation) < folds:
        raise DataError(f"{dataset.name} has too few images for {folds}-fold cross-validation.")
    pool = dataset.train.join(dataset.validation)
    order = stratified_order(pool.labels.numpy(), seed=0)
    parts = cut(order, *(number / folds for number in range(1, folds)))
    following = (fold + 1) % folds
    rest = np.concatenate([part for number, part in enumerate(parts) if number not in (fold, following)])
    train, validation, test = (pool.take(part) for part in (rest, parts[following], parts[fold]))
    return replace(dataset, train=train, validation=validation, test=test, fold=fold)


def expect_fold(fold: int | None, folds: int) -> int:
    """The fold, refused if there is none of that number."""
    if fold is None or not 0 <= fold < folds:
        raise DataError(f"{folds}-fold cross-validation has no fold {fold}.")
    return fold


def stratified_order(labels: NDArray[Any], seed: int) -> NDArray[np.intp]:
    """An order of the images in which every consecutive stretch has the classes in proportion, as near as can be.

    The images of a class are shuffled and spread evenly over the unit interval; sorting all of them by that position
    interleaves the classes. Folds, and the parts of a fold, are stretches of such an order.
    """
    rng = np.random.default_rng(seed)
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled = members[np.argsort(rng.random(len(members)))]
        position[shuffled] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((rng.random(len(labels)), position))


def cut(order: NDArray[np.intp], *fractions: float) -> list[NDArray[np.intp]]:
    """The consecutive stretches of `order` between these fractions of its length."""
    return np.split(order, [round(fraction * len(order)) for fraction in fractions])
