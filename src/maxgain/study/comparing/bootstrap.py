"""How far a difference may be off because the test set is a sample too: a bootstrap over runs and test images.

A test over seeds on one split knows how much the seeds spread, and takes the test images as they are. Drawing both
again, with replacement, adds what other images would have changed. Folds have test images of their own, so the spread
over folds has these in it already, and to draw them again would count them twice.
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
    """How many test images there are."""
    draws: int = DRAWS


def bootstrap(differences: Sequence[Floats]) -> Bootstrap:
    """The bootstrap of a mean difference on one test set.

    `differences` holds for each seed one number per test image: how much more often the first row's runs classified it
    right than the second's. Runs and images are drawn independently of each other (Owen's pigeonhole bootstrap, Annals
    of Applied Statistics 1, 2007, which errs on the cautious side). The draws are the same in every call.
    """
    random = np.random.default_rng(0)
    table = np.stack(differences)
    runs, images = table.shape
    drawn, drawn_images = [], []
    for start in range(0, DRAWS, CHUNK):
        size = min(CHUNK, DRAWS - start)
        of_runs = _weights(runs, size, random)
        of_images = _weights(images, size, random)
        drawn.append(((of_runs @ table) * of_images).sum(axis=1))
        drawn_images.append(of_images @ table.mean(axis=0))
    means = np.concatenate(drawn)
    low, high = np.quantile(means, [0.025, 0.975])
    return Bootstrap(float(means.std()), (float(low), float(high)), float(np.concatenate(drawn_images).std()), images)


def _weights(count: int, draws: int, random: np.random.Generator) -> Floats:
    """How often each of `count` things is drawn in as many draws with replacement, as a share."""
    drawn = random.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
    weights: Floats = np.bincount(drawn.ravel(), minlength=draws * count).reshape(draws, count) / count
    return weights
