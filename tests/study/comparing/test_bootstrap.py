"""The bootstrap over runs and images, against what the variance of a mean is known to be."""

import numpy as np
import pytest

from maxgain.study.comparing.bootstrap import bootstrap


def crossed(runs, images, *, of_runs, of_images, noise, seed=0):
    """Differences that vary by run, by image, and by both."""
    random = np.random.default_rng(seed)
    table = random.normal(0, of_runs, (runs, 1)) + random.normal(0, of_images, (1, images))
    return list(table + random.normal(0, noise, (runs, images)))


def components(differences):
    """The variance of the mean of a two-way table of random runs and random images, from its mean squares."""
    table = np.stack(differences)
    runs, images = table.shape
    by_run, by_image = table.mean(axis=1), table.mean(axis=0)
    rest = table - by_run[:, None] - by_image[None, :] + table.mean()
    mean_squares = (
        images * by_run.var(ddof=1),
        runs * by_image.var(ddof=1),
        (rest**2).sum() / ((runs - 1) * (images - 1)),
    )
    return (mean_squares[0] + mean_squares[1] - mean_squares[2]) / (runs * images)


def test_the_same_images_for_all_runs_give_the_variance_of_a_crossed_table():
    differences = crossed(20, 800, of_runs=0.01, of_images=0.3, noise=0.1)
    found = bootstrap(differences)
    # A bootstrap of 20 runs has 19/20 of their variance; its own error with 2,000 draws is 2 %.
    assert found.standard_error == pytest.approx(np.sqrt(components(differences)), rel=0.06)
    table = np.stack(differences)
    assert found.images_alone == pytest.approx(table.mean(axis=0).std() / np.sqrt(800), rel=0.06)
    low, high = found.interval
    assert low < table.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * found.standard_error, rel=0.1)
    assert (found.images, found.draws) == (800, 2000)


def test_the_images_add_to_what_the_runs_spread():
    differences = crossed(10, 500, of_runs=0.005, of_images=0.4, noise=0.2)
    of_runs = np.stack(differences).mean(axis=1).std(ddof=1) / np.sqrt(10)
    assert bootstrap(differences).standard_error > 2 * of_runs


def test_the_draws_are_the_same_every_time():
    differences = crossed(3, 50, of_runs=0.1, of_images=0.1, noise=0.1)
    assert bootstrap(differences) == bootstrap(differences)
