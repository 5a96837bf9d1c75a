"""How far a difference may be off because the test set is a sample too: a bootstrap over runs and test images.

A test over seeds on one split knows how much the seeds spread, and takes the test images as they are. Drawing both
again, with replacement, adds what other images would have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
CHUNK = 100
"""Draws at once, to keep the memory small."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bootstrap:
    """A mean difference whose runs and test images were both drawn anew."""

    standard_error: float
    interval: tuple[float, float]
    """From the 2.5th to the 97.5th percentile of the draws."""
    images_alone: float
    """The standard error where the images alone are drawn anew: the test set's own share."""
    images: int
    """How many different test images there are."""
    draws: int = DRAWS


def bootstrap(differences: Sequence[Floats], *, same_images: bool) -> Bootstrap:
    """The bootstrap of a mean difference.

    `differences` holds for each seed or fold one number per test image: how much more often the first row's runs
    classified it right than the second's. With `same_images` all have the same test set, whose images are drawn once
    for all (Owen's pigeonhole bootstrap, Annals of Applied Statistics 1, 2007, which errs on the cautious side); else
    each has its own, and they are drawn within it. The draws are the same in every call.
    """
    random = np.random.default_rng(0)
    drawn = _crossed if same_images else _nested
    means, image_means = drawn(differences, random)
    low, high = np.quantile(means, [0.025, 0.975])
    images = len(differences[0]) if same_images else sum(map(len, differences))
    return Bootstrap(float(means.std()), (float(low), float(high)), float(image_means.std()), images)


def _crossed(differences: Sequence[Floats], random: np.random.Generator) -> tuple[Floats, Floats]:
    table = np.stack(differences)
    runs, images = table.shape
    means, image_means = [], []
    for start in range(0, DRAWS, CHUNK):
        size = min(CHUNK, DRAWS - start)
        of_runs = _weights(runs, size, random)
        of_images = _weights(images, size, random)
        means.append(((of_runs @ table) * of_images).sum(axis=1))
        image_means.append(of_images @ table.mean(axis=0))
    return np.concatenate(means), np.concatenate(image_means)


def _nested(differences: Sequence[Floats], random: np.random.Generator) -> tuple[Floats, Floats]:
    groups = len(differences)
    chosen = random.integers(groups, size=(DRAWS, groups))
    means = np.zeros((DRAWS, groups))
    image_means = np.zeros(DRAWS)
    for group, values in enumerate(differences):
        places = np.nonzero(chosen == group)
        means[places] = _resampled(values, len(places[0]), random)
        image_means += _resampled(values, DRAWS, random) / groups
    return means.mean(axis=1), image_means


def _resampled(values: Floats, draws: int, random: np.random.Generator) -> Floats:
    chunks = [_weights(len(values), min(CHUNK, draws - start), random) @ values for start in range(0, draws, CHUNK)]
    return np.concatenate(chunks) if chunks else np.empty(0)


def _weights(count: int, draws: int, random: np.random.Generator) -> Floats:
    """How often each of `count` things is drawn in as many draws with replacement, as a share."""
    drawn = random.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
    weights: Floats = np.bincount(drawn.ravel(), minlength=draws * count).reshape(draws, count) / count
    return weights
