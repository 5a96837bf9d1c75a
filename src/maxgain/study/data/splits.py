"""A data set in memory: three parts that share no image, and how to cut a set into parts that are alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maxgain.errors import DataError

Bytes = NDArray[np.uint8]
Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


@dataclass(frozen=True)
class Split:
    """One part of a data set: uint8 images (N, C, H, W) and their int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, parts: Iterable[tuple[Bytes, NDArray[Any]]]) -> Split:
        """The images and labels of all `parts` in turn, copied."""
        images, labels = zip(*parts, strict=True)
        shape = (sum(map(len, labels)), *images[0].shape[1:])
        # Without out=, numpy keeps the memory order of its inputs, which MATLAB files have another of.
        joined = np.concatenate(images, out=np.empty(shape, np.uint8))
        return cls(torch.from_numpy(joined), torch.from_numpy(np.concatenate(labels).astype(np.int64)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | NDArray[np.intp]) -> Split:
        """The images in a slice, or those with these numbers, in this order."""
        chosen = index if isinstance(index, slice) else torch.from_numpy(index)
        return Split(self.images[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> Split:
        """The same images on another device."""
        return Split(self.images.to(device), self.labels.to(device))

    def join(self, other: Split) -> Split:
        """The images of both, this one's first."""
        return Split(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))

    def with_noise(self, fraction: float, classes: int, generator: torch.Generator) -> Split:
        """The same images, this fraction of the labels replaced by labels drawn uniformly from all classes."""
        count = round(fraction * len(self))
        chosen = torch.randperm(len(self), generator=generator)[:count]
        labels = self.labels.clone()
        labels[chosen] = torch.randint(classes, (count,), generator=generator)
        return Split(self.images, labels)


@dataclass(frozen=True, repr=False)
class Dataset:
    """A data set, or one fold of it, in three parts that share no image."""

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    fold: int | None = None
    folds: int = 1
    """How many disjoint folds the data set has."""
    note: str = ""
    """What a reader of results on this copy of it has to know."""
    source: str = ""
    """Where it was published."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file that was read."""

    def __repr__(self) -> str:
        sizes = f"{len(self.train):,} train, {len(self.validation):,} validation, {len(self.test):,} test"
        return f"<{self.name}: images of {self.shape} in {len(self.classes)} classes: {sizes}>"

    @property
    def shape(self) -> Shape:
        """Channels, height and width of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the images and labels of each part."""
        digest = hashlib.sha256(f"{len(self.classes)} classes".encode())
        for name, part in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            digest.update(f" {name} {tuple(part.images.shape)} ".encode())
            digest.update(part.images.contiguous().numpy().data)
            digest.update(part.labels.numpy().astype("<i8").data)
        return digest.hexdigest()

    def without_test(self) -> Dataset:
        """The same without its test part, for runs on which something is chosen."""
        return replace(self, test=self.test[:0])


def cross_validate(dataset: Dataset, fold: int | None, folds: int) -> Dataset:
    """One fold of `folds`-fold cross-validation over the training and validation parts.

    The fold is the test part, the next one the validation part; the official test part is not used.
    """
    if fold is None or not 0 <= fold < folds:
        raise DataError(f"{folds}-fold cross-validation has folds 0 to {folds - 1}, not {fold}.", field="fold")
    pool = dataset.train.join(dataset.validation)
    if len(pool) < folds:
        raise DataError(
            f"{dataset.name} has only {len(pool)} images for training and validation: too few for {folds} folds.",
            field="cross_validation",
        )
    counts = torch.bincount(pool.labels, minlength=len(dataset.classes)).tolist()
    rare = [name for name, count in zip(dataset.classes, counts, strict=True) if count < folds]
    note = f"classes with fewer images than folds: {', '.join(rare)}" if rare else ""
    parts = stratified(pool.labels.numpy(), *(number / folds for number in range(1, folds)))
    following = (fold + 1) % folds
    rest = np.concatenate([part for number, part in enumerate(parts) if number not in (fold, following)])
    train, validation, test = pool[rest], pool[parts[following]], pool[parts[fold]]
    note = "; ".join(filter(None, (dataset.note, note)))
    return replace(dataset, train=train, validation=validation, test=test, fold=fold, note=note)


def stratified(labels: NDArray[Any], *fractions: float) -> list[NDArray[np.intp]]:
    """The images' numbers, cut at these fractions of an order whose every stretch has the classes in proportion.

    The images of a class are shuffled and spread evenly over the unit interval; sorting all of them by that position
    interleaves the classes.
    """
    rng = np.random.default_rng(0)  # another seed would make other data sets of those that come without a split
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled = members[np.argsort(rng.random(len(members)))]
        position[shuffled] = (np.arange(len(members)) + 0.5) / len(members)
    order = np.lexsort((rng.random(len(labels)), position))
    return np.split(order, [round(fraction * len(order)) for fraction in fractions])


def checked(dataset: Dataset) -> Dataset:
    """The same, with a note on images that are in more than one part; refuses a class that no training image has."""
    trained, seen, notes = {*dataset.train.labels.tolist()}, set[bytes](), []
    for name, part in (("train", dataset.train), ("validation", dataset.validation), ("test", dataset.test)):
        if unknown := {*part.labels.tolist()} - trained:
            raise DataError(
                f"no training image is of the class {dataset.classes[min(unknown)]!r}: add some.", field="data"
            )
        hashes = [hashlib.sha256(image.numpy().data).digest() for image in part.images.contiguous()]
        if name != "train" and (shared := sum(image in seen for image in hashes)):
            notes.append(f"{shared:,} of the {len(part):,} {name} images are also trained on")
        seen.update(hashes)  # of validation, too: final runs are trained on it
    return replace(dataset, note="; ".join(filter(None, [*notes, dataset.note])))
