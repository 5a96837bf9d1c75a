"""Counts beyond all use are refused before anything is built from them, in a sentence that says the bound."""

from dataclasses import replace

import pytest

from maxgain.errors import RecipeError
from maxgain.study.comparing import jobs
from maxgain.study.comparing.tuning_rule import Dimension, Grid, points
from maxgain.study.recipes import MOST, RECIPES

DIGITS = RECIPES["digits"]
FAR = [10**9, 10**18, 10**400]


@pytest.mark.parametrize("text", ["gamma=1:2:1e-9", "gamma=1:1e300:1", "gamma=1e-300:1e300:1e-300", "gamma=0:1e18:1"])
def test_a_grid_that_would_never_end_is_refused_at_once(text: str) -> None:
    with pytest.raises(RecipeError, match=r"has [\d,]+ values, and 1,000 are the most|is no grid"):
        Grid.parsed(text)


def test_a_grid_has_no_value_twice() -> None:
    assert Grid.parsed("gamma=1:1.000001:0.0000001").values == (1.0,)


def test_grids_that_multiply_beyond_all_are_refused_before_they_are_multiplied() -> None:
    values = tuple(map(float, range(1000)))
    space = [Dimension(name, "x", 1, 2, values) for name in ("a", "b", "c", "d", "e", "f")]
    with pytest.raises(RecipeError, match="these are 1,000,000,000,000,000,000 runs, and 100,000 are the most"):
        points(space)


@pytest.mark.parametrize("count", FAR)
def test_seeds_and_folds_without_end_are_refused_at_once(count: int) -> None:
    with pytest.raises(RecipeError, match="--seeds must be at most 1,000"):
        jobs.seeds(DIGITS, count)
    with pytest.raises(RecipeError, match="--seeds must be at most 1,000"):
        jobs.folds(DIGITS, 2, count)
    with pytest.raises(RecipeError, match="--folds must be at most 1,000"):
        jobs.folds(replace(DIGITS, dataset="cifar10"), count)


@pytest.mark.parametrize("count", FAR)
def test_epochs_without_end_are_refused(count: int) -> None:
    with pytest.raises(RecipeError, match="epochs must be at most 1,000,000"):
        replace(DIGITS, epochs=count)
    with pytest.raises(RecipeError, match="cross-validation must be at most 1,000"):
        replace(DIGITS, dataset="cifar10", fold=0, cross_validation=count)


def test_more_runs_than_could_ever_be_made_are_refused_before_they_are_planned() -> None:
    rows = [f"maxgain={number}" for number in range(1, 200)]
    with pytest.raises(RecipeError, match="100,000 are the most that one command makes"):
        jobs.plan(DIGITS, rows, jobs.seeds(DIGITS, MOST["--seeds"]))
