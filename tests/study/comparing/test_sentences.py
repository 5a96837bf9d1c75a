"""Sentences that claim no more than the numbers do."""

import math

import pytest

from maxgain.study.comparing.sentences import p_value, points


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04996, "0.04996"),
        (0.0501, "0.050"),
        (0.05, "0.050"),
        (0.0006, "< 0.001"),
        (0.976, "0.976"),
        (0.0, "< 0.001"),
        (None, "–"),
        (math.nextafter(0.05, 0), "0.049999999999999996"),
    ],
)
def test_p_values_are_not_rounded_across_the_threshold(value, text):
    assert p_value(value) == text


@pytest.mark.parametrize(
    ("difference", "text"),
    [(0.0312, "+3.1"), (-0.0001, "-0.01"), (0.00001, "+0.001"), (0.0, "0.0"), (1e-9, "0.0")],
)
def test_a_small_difference_is_shown_with_the_decimals_that_it_takes(difference, text):
    assert points(difference) == text
