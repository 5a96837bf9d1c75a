"""Several contrasts at once: Holm's p-values, simultaneous intervals, and verdicts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from maxgain.errors import RecordError
from maxgain.study.comparing import statistics
from maxgain.study.comparing.statistics import Difference, as_family, equivalent, holm, pooled, verdict
from score_examples import FOLDS, quick


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [
        # 4 × 0.005, 3 × 0.01, 2 × 0.03, and 1 × 0.04, which must not be below the one before.
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        # Ties share the larger multiple; nothing exceeds 1.
        ([0.02, 0.02, 0.9], [0.06, 0.06, 0.9]),
        ([0.6, 0.7, 0.8], [1, 1, 1]),
        ([0.03], [0.03]),
        ([], []),
        # What is undefined stays so, and takes no step from the others.
        ([0.01, None, 0.04], [0.02, None, 0.04]),
        ([None], [None]),
    ],
)
def test_holm_gives_what_is_found_by_hand(p, adjusted):
    assert holm(p) == [value if value is None else pytest.approx(value) for value in adjusted]


probabilities = st.lists(st.floats(0, 1), max_size=8)


@quick
@given(probabilities)
def test_holm_rejects_what_its_definition_rejects(p):
    # Step down from the smallest: reject while p_(i) <= alpha / (m - i). Just above its adjusted p, each is rejected.
    adjusted = holm(p)
    for i, own in enumerate(adjusted):
        alpha = own * (1 + 1e-12) + 1e-300
        rejected = set()
        for rank, j in enumerate(sorted(range(len(p)), key=p.__getitem__)):
            if p[j] > alpha / (len(p) - rank):
                break
            rejected.add(j)
        assert own == 1 or i in rejected


@quick
@given(probabilities, st.randoms(use_true_random=False))
def test_holm_lowers_no_p_keeps_which_is_smaller_and_does_not_depend_on_their_order(p, random):
    adjusted = holm(p)
    assert all(after >= before for before, after in zip(p, adjusted, strict=True))
    assert all(adjusted[i] <= adjusted[j] for i in range(len(p)) for j in range(len(p)) if p[i] < p[j])
    order = list(range(len(p)))
    random.shuffle(order)
    assert holm([p[i] for i in order]) == [adjusted[i] for i in order]


def test_holm_keeps_the_risk_of_any_false_alarm():
    p = np.random.default_rng(1979).uniform(size=(4000, 5))
    assert np.mean([min(holm(row.tolist())) < 0.05 for row in p]) == pytest.approx(0.05, abs=0.01)
    assert np.mean(p.min(axis=1) < 0.05) > 0.2


@pytest.mark.parametrize("p", [[0.1, math.nan], [1.1], [-0.1]])
def test_holm_refuses_what_is_no_p_value(p):
    with pytest.raises(RecordError, match="p-values must be"):
        holm(p)


def difference(mean, error, degrees=9, **changes):
    return statistics.replace(statistics._tested(mean, error, degrees, 10, "some test"), **changes)


def test_simultaneous_intervals_are_bonferronis_over_the_defined_ones():
    family = as_family([difference(0.01, 0.004), None, Difference(0.2, 3, "no spread"), difference(-0.02, 0.01, 5)])
    assert family[1] is None
    assert (family[2].adjusted_p, family[2].simultaneous_interval) == (None, None)
    for test in (family[0], family[3]):
        half = stats.t.ppf(1 - 0.05 / 2 / 2, test.degrees) * test.standard_error
        assert test.simultaneous_interval == pytest.approx((test.mean - half, test.mean + half))
    assert [family[0].adjusted_p, family[3].adjusted_p] == holm([family[0].p_value, family[3].p_value])


def test_one_contrast_alone_needs_no_correction():
    (alone,) = as_family([difference(0.01, 0.004)])
    assert alone.adjusted_p == alone.p_value
    assert alone.simultaneous_interval == pytest.approx(alone.interval)


def test_simultaneous_intervals_hold_all_at_once():
    random = np.random.default_rng(1936)
    held = alone_held = 0
    contrasts = [("b", "a"), ("c", "a"), ("d", "a")]
    for _ in range(400):
        scores = {row: dict(enumerate(random.normal(0.7, 0.01, 6))) for row in "abcd"}
        tests = as_family(pooled(scores, contrasts, FOLDS))
        held += all(low <= 0 <= high for low, high in (test.simultaneous_interval for test in tests))
        alone_held += all(low <= 0 <= high for low, high in (test.interval for test in tests))
    assert held / 400 >= 0.94
    assert alone_held / 400 < 0.92, "so there was something to correct"


# Verdicts


def test_equivalence_is_two_one_sided_tests_at_five_per_cent():
    test = difference(0.001, 0.002)
    for rope in (0.001, 0.004, 0.0046, 0.0047, 0.005, 0.02):
        below = stats.t.cdf((test.mean - rope) / test.standard_error, test.degrees)
        above = stats.t.sf((test.mean + rope) / test.standard_error, test.degrees)
        assert equivalent(test, rope) == (max(below, above) < 0.05)
    assert not equivalent(test, None)


@pytest.mark.parametrize(
    ("test", "rope", "word"),
    [
        (difference(0.02, 0.002), 0.005, "established"),
        (difference(-0.02, 0.002), 0.005, "reversed"),
        (difference(0.001, 0.002), 0.005, "equivalent"),
        (difference(0.001, 0.002), 0.002, "inconclusive"),
        (difference(0.001, 0.002), None, "inconclusive"),
        # Too small to matter, and there all the same: what is established stays so.
        (difference(0.001, 0.0001), 0.005, "established"),
        (None, 0.005, "inconclusive"),
        # Holm's p decides where there is one, to the last bit.
        (difference(0.02, 0.002, adjusted_p=0.05), None, "inconclusive"),
        (difference(0.02, 0.002, adjusted_p=math.nextafter(0.05, 0)), None, "established"),
        (difference(-0.02, 0.002, adjusted_p=math.nextafter(0.05, 0)), None, "reversed"),
    ],
)
def test_verdicts_are_different_words_for_different_things(test, rope, word):
    assert verdict(test, rope) == word
