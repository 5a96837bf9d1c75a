"""The tests of differences against scipy, statsmodels, textbooks and their own promises."""

import math
from unittest.mock import patch

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from maxgain.study import statistics
from maxgain.study.statistics import Difference, as_family, holm, is_equivalent, pooled, sampling_error, verdict

# Hours of extra sleep that two drugs gave the same ten patients (Student, 1908).
SLEEP_A = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
SLEEP_B = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
TABLE = {
    "none": dict(enumerate([0.900, 0.910, 0.890, 0.905, 0.895])),
    "dropout": dict(enumerate([0.931, 0.939, 0.922, 0.934, 0.926])),
    "maxgain": dict(enumerate([0.905, 0.915, 0.880, 0.915, 0.900])),
    "l2": dict(enumerate([0.880, 0.889, 0.872, 0.885, 0.874])),
}
CONTRASTS = [("dropout", "none"), ("maxgain", "none"), ("l2", "dropout")]

quick = settings(max_examples=40, deadline=None, derandomize=True)
accuracies = st.integers(0, 1000).map(lambda hits: hits / 1000)
pairs = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=12).map(lambda rows: np.array(rows).T)
probabilities = st.lists(st.floats(0, 1), max_size=8)


def paired(a, b, overlap=0.0):
    (test,) = statistics.paired({"a": dict(enumerate(a)), "b": dict(enumerate(b))}, [("a", "b")], overlap)
    return test


def difference(mean, error, degrees=9, **changes):
    p = 2 * stats.t.sf(abs(mean / error), degrees)
    return Difference(mean, 10, error, degrees, p, **changes)


def alone(test, rope=None):
    return as_family([test], rope)[0]


# Paired


def test_paired_test_of_sleep_data_is_that_of_textbooks():
    test = paired(SLEEP_A, SLEEP_B)
    assert test.mean / test.standard_error == pytest.approx(4.0621, abs=1e-4)
    assert (test.mean, test.degrees) == (pytest.approx(1.58), 9)
    assert test.p == pytest.approx(0.002833, abs=1e-6)
    assert test.interval_at(0.05) == pytest.approx((0.7001, 2.4599), abs=1e-4)


@quick
@given(pairs)
def test_paired_test_agrees_with_scipy(scores):
    a, b = scores
    ours = paired(a, b)
    if len(set(np.round(1000 * (a - b)))) == 1:
        assert ours.p is None
        return
    theirs = stats.ttest_rel(a, b)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert ours.interval_at(0.05) == pytest.approx(theirs.confidence_interval(0.95), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "mean"),
    [
        ([0.7, 0.8, 0.9], [0.7, 0.8, 0.9], 0),
        ([0.8, 0.7, 0.3], [0.7, 0.6, 0.2], 0.1),  # the same difference each time, which rounding blurs
        ([0.1 + 0.2] * 5, [0.3] * 5, 0),  # rounding alone is no difference
        ([0.5], [0.6], -0.1),
        ([5e-324, 0.0, 0.0], [0.0, 0.0, 0.0], 0),
    ],
)
@pytest.mark.parametrize("overlap", [0, 0.25])
def test_without_spread_only_the_mean_is_defined(a, b, mean, overlap):
    result = alone(paired(a, b, overlap), rope=0.5)
    assert result == Difference(pytest.approx(mean) if mean else 0, len(a))
    assert verdict(result) == "inconclusive"


# Accuracy ± standard error over the ten folds of SINS-10 in the paper's table, and the p-value it gives.
@pytest.mark.parametrize(
    ("ours", "theirs", "p"), [((70.65, 0.54), (70.13, 0.27), 0.332), ((74.80, 0.51), (74.81, 0.49), 0.976)]
)
def test_the_papers_p_values_follow_from_its_table(ours, theirs, p):
    # The table leaves the folds' correlation open; the p-value fixes it.
    error = abs(ours[0] - theirs[0]) / stats.t.isf(p / 2, 9)
    correlation = (ours[1] ** 2 + theirs[1] ** 2 - error**2) / (2 * ours[1] * theirs[1])
    basis = np.linalg.qr(np.column_stack([np.ones(10), np.random.default_rng(0).normal(size=(10, 2))]))[0][:, 1:]
    mixed = np.column_stack([basis[:, 0], correlation * basis[:, 0] + math.sqrt(1 - correlation**2) * basis[:, 1]])
    a, b = (mean + mixed[:, i] * 3 * math.sqrt(10) * error for i, (mean, error) in enumerate((ours, theirs)))
    assert (a.mean(), stats.sem(a)) == pytest.approx(ours)
    assert paired(a, b).p == pytest.approx(p, abs=1e-6)


def test_correction_for_overlap_by_hand():
    # Ten-fold cross-validation: t = 1.58 / sqrt((1/10 + 1/9) s²).
    test = paired(SLEEP_A, SLEEP_B, 1 / 9)
    s = math.sqrt((38.58 - 15.8**2 / 10) / 9)
    assert test.standard_error == pytest.approx(s * math.sqrt(1 / 10 + 1 / 9))
    assert test.p == pytest.approx(2 * stats.t.sf(1.58 / test.standard_error, 9))


def test_false_alarms_are_as_rare_as_promised():
    random = np.random.default_rng(2018)
    null = [random.normal(0.7, 0.02, (10, 1)) + random.normal(0, 0.005, (10, 2)) for _ in range(600)]
    assert np.mean([paired(*s.T).p < 0.05 for s in null]) == pytest.approx(0.05, abs=0.025)
    # What Nadeau and Bengio assume of ten-fold cross-validation: differences with a correlation of 1/10.
    null = [math.sqrt(0.1) * random.normal() + math.sqrt(0.9) * random.normal(size=10) for _ in range(600)]
    assert np.mean([paired(d, np.zeros(10), 1 / 9).p < 0.05 for d in null]) == pytest.approx(0.05, abs=0.025)
    assert np.mean([paired(d, np.zeros(10)).p < 0.05 for d in null]) > 0.12, "there is something to correct"


# Pooled


def without(*missing):
    return {row: {unit: v for unit, v in by.items() if (row, unit) not in missing} for row, by in TABLE.items()}


@pytest.mark.parametrize(
    "scores", [TABLE, without(("maxgain", 1)), without(("maxgain", 1), ("none", 0), ("l2", 0), ("l2", 4))]
)
def test_additive_model_agrees_with_statsmodels(scores):
    cells = [(row, unit, value) for row, by_unit in scores.items() for unit, value in by_unit.items()]
    frame = pandas.DataFrame(cells, columns=["row", "unit", "accuracy"])
    model = smf.ols("accuracy ~ 0 + C(row) + C(unit)", frame).fit()
    ours = pooled(scores, CONTRASTS)
    for mine, (first, second) in zip(ours, CONTRASTS, strict=True):
        test = model.t_test(f"C(row)[{first}] - C(row)[{second}] = 0")
        assert mine.mean == pytest.approx(test.effect.item(), rel=1e-9)
        assert mine.standard_error == pytest.approx(test.sd.item(), rel=1e-9)
        assert mine.p == pytest.approx(test.pvalue.item(), rel=1e-8)
        assert mine.interval_at(0.1) == pytest.approx(test.conf_int(alpha=0.1)[0], rel=1e-9)
        assert mine.degrees == model.df_resid
        assert mine.n == len(set(scores[first]) & set(scores[second]))


def test_a_contrast_that_no_runs_connect_is_none():
    scores = {"a": {0: 0.5, 1: 0.6}, "b": {0: 0.4, 1: 0.55}, "c": {2: 0.7, 3: 0.8}, "d": {2: 0.6, 3: 0.75}, "e": {}}
    tests = pooled(scores, [("a", "b"), ("a", "c"), ("c", "d"), ("e", "a")])
    assert [test is None for test in tests] == [False, True, False, True]
    assert pooled({"a": {}, "b": {}}, [("a", "b")]) == [None]


# Families


@quick
@given(probabilities)
def test_holm_agrees_with_statsmodels(p):
    with patch("gc.collect"):  # which statsmodels calls each time, and which takes most of a second in a large process
        expected = multipletests(p, method="holm")[1] if p else []
    assert holm(p) == pytest.approx(list(expected))


def test_holm_leaves_out_what_is_undefined():
    assert holm([0.01, None, 0.04]) == [pytest.approx(0.02), None, 0.04]
    assert holm([None]) == [None]


def test_simultaneous_intervals_are_bonferronis_over_the_defined_ones():
    family = as_family([difference(0.01, 0.004), None, Difference(0.2, 3), difference(-0.02, 0.01, 5)])
    assert family[1] is None
    assert family[2] == Difference(0.2, 3)
    for test in (family[0], family[3]):
        half = stats.t.ppf(1 - 0.05 / 2 / 2, test.degrees) * test.standard_error
        assert test.interval == pytest.approx((test.mean - half, test.mean + half))
    assert [family[0].p_holm, family[3].p_holm] == holm([family[0].p, family[3].p])


def test_simultaneous_intervals_hold_all_at_once():
    random = np.random.default_rng(1936)
    held = held_alone = 0
    for _ in range(400):
        scores = {row: dict(enumerate(random.normal(0.7, 0.01, 6))) for row in "abcd"}
        tests = as_family(pooled(scores, [("b", "a"), ("c", "a"), ("d", "a")]))
        held += all(low <= 0 <= high for low, high in (test.interval for test in tests))
        held_alone += all(low <= 0 <= high for low, high in (test.interval_at(0.05) for test in tests))
    assert held / 400 >= 0.94
    assert held_alone / 400 < 0.92, "there is something to correct"


@quick
@given(pairs, st.floats(0.001, 0.3))
def test_equivalence_is_two_one_sided_tests(scores, rope):
    a, b = scores
    ours = alone(paired(a, b), rope)
    if ours.p is None:
        assert ours.p_equivalence is None
        return
    assert ours.p_equivalence == pytest.approx(ttost_paired(a, b, -rope, rope)[0], rel=1e-8, abs=1e-12)
    low, high = paired(a, b).interval_at(0.1)
    if abs(ours.p_equivalence - 0.05) > 1e-9:
        assert is_equivalent(ours) == (-rope < low and high < rope)


def test_equivalence_is_corrected_for_the_family():
    close = difference(0.001, 0.002)  # p of lying outside ±0.005: 0.038
    assert verdict(alone(close, 0.005)) == "equivalent"
    family = as_family([close, close, close], 0.005)
    assert [verdict(test) for test in family] == ["inconclusive"] * 3
    assert family[0].p_equivalence == pytest.approx(3 * alone(close, 0.005).p_equivalence)


@pytest.mark.parametrize(
    ("test", "rope", "word"),
    [
        (difference(0.02, 0.002), 0.005, "established"),
        (difference(-0.02, 0.002), 0.005, "reversed"),
        (difference(0.001, 0.002), 0.005, "equivalent"),
        (difference(0.001, 0.002), 0.002, "inconclusive"),
        (difference(0.001, 0.002), None, "inconclusive"),
        (difference(0.001, 0.0001), 0.005, "established"),  # too small to matter, and there all the same
        (None, 0.005, "inconclusive"),
    ],
)
def test_verdicts(test, rope, word):
    assert verdict(alone(test, rope)) == word


def test_holms_p_decides_to_the_last_bit():
    assert verdict(difference(0.02, 0.002, p_holm=0.05)) == "inconclusive"
    assert verdict(difference(0.02, 0.002, p_holm=math.nextafter(0.05, 0))) == "established"


def test_sampling_error_is_that_of_redrawn_test_images():
    random = np.random.default_rng(0)
    easy = random.uniform(0.3, 1, 500)
    first, second = random.uniform(size=(3, 500)) < easy, random.uniform(size=(3, 500)) < easy - 0.1
    per_image = first.mean(0) - second.mean(0)
    drawn = [per_image[random.integers(500, size=500)].mean() for _ in range(4000)]
    assert sampling_error(first, second) == pytest.approx(np.std(drawn), rel=0.05)
    assert sampling_error(first, first) == 0
