"""choose_gamma: the rule, and what it refuses."""

import math

import pytest

from maxgain import choose_gamma
from maxgain.errors import ChoiceError


@pytest.mark.parametrize(
    ("losses", "tolerance", "chosen"),
    [
        ({4: 0.40, 2: 0.44, 1.5: 0.45, 1: 2.0}, 0.1, 2),
        ({1: 2.0, 1.5: 0.45, 2: 0.44, 4: 0.40}, 0.1, 2),  # in any order
        ({4: 0.40, 2: 0.44, 1.5: 0.45, 1: 2.0}, 0.0, 4),
        ({4: 0.40, 2: 0.44, 1.5: 0.45, 1: 2.0}, 0.2, 1.5),
        ({4: 0.41, 2: 0.40, 1: math.nan}, 0.1, 2),  # a failed run
        ({math.inf: 0.40, 2: 0.41, 1: 0.9}, 0.1, 2),
        ({4: 0.0, 2: 0.1}, 0.1, 4),
        ({4: 0.3, 2: math.inf}, 0.1, 4),
    ],
)
def test_the_smallest_within_the_tolerance(losses, tolerance, chosen):
    assert choose_gamma(losses, tolerance) == chosen


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({}, "two gammas"),
        ({2: 0.4}, "two gammas"),
        ({0: 0.4, 2: 0.5}, "positive"),
        ({-1: 0.4, 2: 0.5}, "positive"),
        ({"2": 0.4, 3: 0.5}, "positive"),
        ({math.nan: 0.4, 3: 0.5}, "positive"),
        ({1: math.nan, 2: math.inf}, "finite"),
        ({1: 0.5, 2: 0.5}, "all losses are 0.5"),
        ({1: -0.5, 2: 0.5}, "negative"),
        ({1: 0.41, 2: 0.40}, "the smallest gamma, 1, .* try smaller ones"),
    ],
)
def test_what_cannot_be_chosen_from(losses, message):
    with pytest.raises(ChoiceError, match=message):
        choose_gamma(losses)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf, "0.1"])
def test_a_tolerance_is_a_number_from_zero_on(tolerance):
    with pytest.raises(ChoiceError, match="tolerance"):
        choose_gamma({1: 1.0, 2: 0.4}, tolerance)
