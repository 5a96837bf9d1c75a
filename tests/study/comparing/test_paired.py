"""The paired test, plain and corrected for training sets that overlap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from maxgain.errors import RecordError
from maxgain.study.comparing.statistics import (
    DISJOINT_FOLDS,
    ONE_SPLIT,
    OVERLAPPING,
    Design,
    Summary,
    paired,
    summary,
    verdict,
)
from score_examples import FOLDS, SLEEP_A, SLEEP_B, accuracies, corrected_t, paired_t, quick

pairs = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=12)


def as_arrays(scores):
    a, b = np.array(scores).T
    return a, b


def test_the_paired_test_of_students_sleep_data_is_that_of_textbooks():
    test = paired_t(SLEEP_A, SLEEP_B)
    # By hand: the differences add up to 15.8 and their squares to 38.58, so s² = (38.58 - 15.8²/10) / 9.
    s = math.sqrt((38.58 - 15.8**2 / 10) / 9)
    assert test.mean == pytest.approx(1.58)
    assert test.standard_error == pytest.approx(s / math.sqrt(10))
    assert test.t == pytest.approx(1.58 / (s / math.sqrt(10)))
    assert test.degrees == 9
    # As printed in textbooks: t = 4.0621, p = 0.00283, the interval from 0.70 to 2.46.
    assert test.t == pytest.approx(4.0621, abs=1e-4)
    assert test.p_value == pytest.approx(0.002833, abs=1e-6)
    assert test.interval == pytest.approx((0.7001, 2.4599), abs=1e-4)
    # Cohen's d_z = 1.58 / s = 1.2846; Hedges' approximate correction for 9 degrees of freedom is 1 - 3/35.
    assert test.effect_size == pytest.approx(1.2846 * (1 - 3 / 35), rel=1e-3)


@quick
@given(pairs)
def test_the_paired_test_agrees_with_scipy(scores):
    a, b = as_arrays(scores)
    ours = paired_t(a, b)
    if len({round(1000 * (one - other)) for one, other in scores}) == 1:
        assert ours.p_value is None
        return
    theirs = stats.ttest_rel(a, b)
    interval = theirs.confidence_interval(0.95)
    assert ours.t == pytest.approx(theirs.statistic, rel=1e-10)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert ours.interval == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-12)
    assert ours.degrees == theirs.df


@quick
@given(pairs, st.sampled_from([None, 1 / 9, 0.5]))
def test_swapping_the_sides_swaps_the_signs(scores, ratio):
    a, b = as_arrays(scores)
    forth, back = (corrected_t(*s, ratio) if ratio else paired_t(*s) for s in ((a, b), (b, a)))
    assert back.mean == -forth.mean
    if forth.p_value is None:
        assert back.p_value is None
        return
    assert back.t == -forth.t
    assert back.effect_size == -forth.effect_size
    assert back.p_value == forth.p_value
    assert back.standard_error == forth.standard_error
    assert back.interval == (-forth.interval[1], -forth.interval[0])
    assert back.effect_interval == (-forth.effect_interval[1], -forth.effect_interval[0])


@quick
@given(pairs, st.floats(-1, 1), st.randoms(use_true_random=False))
def test_neither_a_common_shift_nor_the_order_of_the_pairs_matters(scores, shift, random):
    original = paired_t(*as_arrays(scores))
    moved = scores.copy()
    random.shuffle(moved)
    a, b = as_arrays(moved)
    changed = paired_t(a + shift, b + shift)
    if original.p_value is None:
        assert changed.p_value is None
        return
    assert changed.p_value == pytest.approx(original.p_value, rel=1e-6, abs=1e-12)
    assert changed.interval == pytest.approx(original.interval, rel=1e-6, abs=1e-12)
    assert changed.effect_interval == pytest.approx(original.effect_interval, rel=1e-6, abs=1e-9)


UNDEFINED = ("standard_error", "t", "p_value", "interval", "interval_90", "effect_size", "effect_interval")


@pytest.mark.parametrize(
    ("a", "b", "mean"),
    [
        ([0.7, 0.8, 0.9], [0.7, 0.8, 0.9], 0),
        ([0.8, 0.7, 0.3], [0.7, 0.6, 0.2], 0.1),  # the same difference each time, which rounding blurs
        ([0.5, 0.25], [0.25, 0.0], 0.25),
        ([0.1 + 0.2] * 5, [0.3] * 5, 0),  # rounding alone is no difference
        ([0.5], [0.6], -0.1),
    ],
)
@pytest.mark.parametrize("test", [paired_t, lambda a, b: corrected_t(a, b, 0.25)])
def test_without_spread_or_a_second_pair_nothing_is_defined_but_the_mean(a, b, mean, test):
    result = test(a, b)
    assert result.mean == (pytest.approx(mean) if mean else 0)
    assert result.n == len(a)
    assert [getattr(result, name) for name in UNDEFINED] == [None] * len(UNDEFINED)
    assert verdict(result, rope=0.5) == "inconclusive"


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(RecordError, match="there are 3 and 2"):
        paired_t([0.5, 0.6, 0.7], [0.6, 0.6])
    with pytest.raises(RecordError, match="score 2 of 2 is nan"):
        paired_t([0.5, 0.6], [0.6, math.nan])
    with pytest.raises(RecordError, match="at least one"):
        paired_t([], [])


# Numbers of the paper: accuracy ± standard error over the ten folds of SINS-10, and the p-value it gives


@pytest.mark.parametrize(
    ("ours", "theirs", "p"),
    [((70.65, 0.54), (70.13, 0.27), 0.332), ((74.80, 0.51), (74.81, 0.49), 0.976)],
)
def test_the_papers_p_values_follow_from_its_table_by_this_procedure(ours, theirs, p):
    # The table leaves open how alike the folds' scores are; the p-value fixes that correlation.
    error = abs(ours[0] - theirs[0]) / stats.t.isf(p / 2, 9)
    correlation = (ours[1] ** 2 + theirs[1] ** 2 - error**2) / (2 * ours[1] * theirs[1])
    assert 0 < correlation < 1
    # Ten scores each with exactly these means, standard errors and correlation.
    noise = np.random.default_rng(0).normal(size=(10, 2))
    basis = np.linalg.qr(np.column_stack([np.ones(10), noise]))[0][:, 1:]
    mixed = np.column_stack([basis[:, 0], correlation * basis[:, 0] + math.sqrt(1 - correlation**2) * basis[:, 1]])
    deviations = mixed * 3 * math.sqrt(10)  # columns of length 1 have a standard deviation of 1/3
    a, b = (mean + deviations[:, i] * error for i, (mean, error) in enumerate((ours, theirs)))
    assert summary(a) == Summary(pytest.approx(ours[0]), pytest.approx(ours[1]), 10)
    assert summary(b) == Summary(pytest.approx(theirs[0]), pytest.approx(theirs[1]), 10)
    assert paired_t(a, b).p_value == pytest.approx(p, abs=1e-6)
    assert verdict(paired_t(a, b), None) == "inconclusive"


# Overlapping training sets


def test_the_correction_for_overlap_is_what_is_found_by_hand():
    # Ten-fold cross-validation: t = 1.58 / sqrt((1/10 + 1/9) s²), with s² as in the sleep data above.
    test = corrected_t(SLEEP_A, SLEEP_B, 1 / 9)
    s = math.sqrt((38.58 - 15.8**2 / 10) / 9)
    assert test.t == pytest.approx(1.58 / (s * math.sqrt(1 / 10 + 1 / 9)))
    assert test.t == pytest.approx(2.7958, abs=1e-4)
    assert test.p_value == pytest.approx(2 * stats.t.sf(test.t, 9))
    assert test.interval == pytest.approx((1.58 - 2.262157 * 1.58 / test.t, 1.58 + 2.262157 * 1.58 / test.t))
    assert test.effect_size == pytest.approx(paired_t(SLEEP_A, SLEEP_B).effect_size)
    assert test.method == OVERLAPPING


@quick
@given(pairs, st.floats(0.01, 10))
def test_the_correction_for_overlap_only_makes_the_test_more_cautious(scores, ratio):
    a, b = as_arrays(scores)
    plain, corrected = paired_t(a, b), corrected_t(a, b, ratio)
    if plain.p_value is None:
        assert corrected.p_value is None
        return
    assert corrected.p_value >= plain.p_value
    assert corrected.interval[0] <= plain.interval[0]
    assert corrected.interval[1] >= plain.interval[1]


@pytest.mark.parametrize(
    ("over", "cut", "train_on", "overlap", "method"),
    [
        ("fold", None, "train", 0, DISJOINT_FOLDS),
        ("seed", None, "train+validation", 0, ONE_SPLIT),
        # Of four folds one is tested on, one is for validation, and two or three are trained on.
        ("fold", 4, "train", 1 / 2, OVERLAPPING),
        ("fold", 4, "train+validation", 1 / 3, OVERLAPPING),
    ],
)
def test_how_the_data_were_split_chooses_and_names_the_test(over, cut, train_on, overlap, method):
    design = Design.of(over, cut, train_on)
    assert design.overlap == pytest.approx(overlap)
    assert paired(SLEEP_A, SLEEP_B, design).method == design.paired_method == method


def test_the_tests_are_named_in_words():
    assert DISJOINT_FOLDS == "paired t-test on disjoint folds"
    assert ONE_SPLIT == "paired t-test over seeds on one split (says nothing about other data)"
    assert OVERLAPPING == "Nadeau–Bengio corrected t-test (training sets overlap)"
    assert FOLDS.pooled_method == "accuracy ~ row + fold, pooled error"


def test_false_alarms_are_as_rare_as_promised():
    random = np.random.default_rng(2018)
    # Ten folds on which two regularisers are equally good, and the folds differ in difficulty.
    null = [random.normal(0.7, 0.02, (10, 1)) + random.normal(0, 0.005, (10, 2)) for _ in range(600)]
    assert np.mean([paired_t(*s.T).p_value < 0.05 for s in null]) == pytest.approx(0.05, abs=0.025)


def test_false_alarms_under_overlap_need_the_correction():
    random = np.random.default_rng(2003)
    # What Nadeau and Bengio assume of ten-fold cross-validation: differences with a correlation of 1/10.
    null = [math.sqrt(0.1) * random.normal() + math.sqrt(0.9) * random.normal(size=10) for _ in range(600)]
    zeros = np.zeros(10)
    assert np.mean([corrected_t(d, zeros, 1 / 9).p_value < 0.05 for d in null]) == pytest.approx(0.05, abs=0.025)
    assert np.mean([paired_t(d, zeros).p_value < 0.05 for d in null]) > 0.12


def test_scores_whose_squares_vanish_are_equal_and_no_division_by_zero():
    for tiny in (5e-324, 1e-320, 1e-170):
        assert paired([tiny, 0.0, 0.0], [0.0, 0.0, 0.0], Design("seed")).p_value is None
