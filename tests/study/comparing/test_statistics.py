import itertools
import math

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from maxgain.errors import RecordError
from maxgain.study.comparing import statistics
from maxgain.study.comparing.statistics import (
    DISJOINT_FOLDS,
    ONE_SPLIT,
    OVERLAPPING,
    Design,
    Difference,
    Summary,
    as_family,
    equivalent,
    holm,
    paired,
    pooled,
    summary,
    verdict,
    welch,
)

FOLDS = Design("fold")

# Hours of extra sleep that two drugs gave the same ten patients: the example of Student's paper of 1908.
SLEEP_A = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
SLEEP_B = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]

quick = settings(max_examples=60, deadline=None, derandomize=True)

# Accuracies as they come: hits among 1,000 test images.
accuracies = st.integers(0, 1000).map(lambda hits: hits / 1000)
pairs = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=12)


def paired_t(a, b):
    return paired(a, b, FOLDS)


def corrected_t(a, b, ratio):
    return paired(a, b, Design("fold", ratio))


def as_arrays(scores):
    a, b = np.array(scores).T
    return a, b


def noncentral_cdf(t, degrees, d):
    """P(T <= t) from the definition T = (Z + d) / S, by integrating over S."""

    def integrand(s):
        return special.ndtr(t * s - d) * 2 * s * degrees * stats.chi2.pdf(degrees * s**2, degrees)

    ends = np.sqrt(stats.chi2.ppf([1e-14, 1 - 1e-14], degrees) / degrees)
    step = [(d + z) / t for z in (-9, 0, 9)]  # where the normal part rises from 0 to 1
    places = np.unique(np.clip([*ends, *step], *ends))
    return sum(integrate.quad(integrand, *ends, limit=200)[0] for ends in itertools.pairwise(places))


# Summaries


def test_summary_is_mean_and_standard_error():
    assert summary([0.7, 0.8, 0.9]) == Summary(pytest.approx(0.8), pytest.approx(0.1 / math.sqrt(3)), 3)


def test_one_score_has_no_standard_error():
    assert summary([0.7]) == Summary(0.7, None, 1)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "at least one"),
        ([[0.1, 0.2]], "list of numbers"),
        ([0.1, math.nan], "score 2 of 2 is nan"),
        ([-math.inf], "score 1 of 1 is -inf"),
        ([0.5, None], "score 2 of 2"),
    ],
)
def test_what_is_no_score_is_refused(scores, message):
    with pytest.raises(RecordError, match=message):
        summary(scores)


# The paired test


def test_students_sleep_data():
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
def test_agrees_with_scipy(scores):
    a, b = as_arrays(scores)
    ours = paired_t(a, b)
    if ours.p_value is None:
        return
    theirs = stats.ttest_rel(a, b)
    interval = theirs.confidence_interval(0.95)
    assert ours.t == pytest.approx(theirs.statistic, rel=1e-10)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert ours.interval == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-12)
    assert ours.degrees == theirs.df


@pytest.mark.parametrize("ratio", [0, 1 / 9])
def test_effect_interval_holds_the_effects_that_t_does_not_contradict(ratio):
    test = corrected_t(SLEEP_A, SLEEP_B, ratio) if ratio else paired_t(SLEEP_A, SLEEP_B)
    low, high = np.array(test.effect_interval) / math.sqrt(1 / 10 + ratio)
    assert noncentral_cdf(test.t, 9, low) == pytest.approx(0.975, abs=1e-9)
    assert noncentral_cdf(test.t, 9, high) == pytest.approx(0.025, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 10, 100])
@pytest.mark.parametrize("t", [0.01, 3.0, 40.0, 900.0, 1100.0, 1e6])
def test_effect_interval_for_any_t(n, t):
    # Differences with mean t / sqrt(n) and standard deviation 1.
    shape = np.linspace(-1, 1, n)
    differences = shape / shape.std(ddof=1) + t / math.sqrt(n)
    test = paired_t(differences, np.zeros(n))
    low, high = np.array(test.effect_interval) * math.sqrt(n)
    assert noncentral_cdf(test.t, n - 1, low) == pytest.approx(0.975, abs=1e-4)
    assert noncentral_cdf(test.t, n - 1, high) == pytest.approx(0.025, abs=1e-4)
    assert test.effect_interval[0] < test.effect_size < test.effect_interval[1]


def test_effect_size_is_right_on_average_and_its_interval_19_times_in_20():
    random = np.random.default_rng(1)
    true_effect = 0.8
    tests = [paired_t(random.normal(true_effect, 1, 5), np.zeros(5)) for _ in range(600)]
    # The standard error of this average is 0.03; without the correction it would be 1.0.
    assert np.mean([test.effect_size for test in tests]) == pytest.approx(true_effect, abs=0.06)
    covered = [test.effect_interval[0] <= true_effect <= test.effect_interval[1] for test in tests]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)


@pytest.mark.parametrize("degrees", [2, 3, 9, 200])
def test_hedges_correction_undoes_the_bias_of_the_noncentral_t(degrees):
    # The expectation of 1/S, where S² is a chi-square over its degrees of freedom, is what inflates d_z.
    def integrand(s):
        return 2 * degrees * stats.chi2.pdf(degrees * s**2, degrees)

    bias = integrate.quad(integrand, 0, 1)[0] + integrate.quad(integrand, 1, np.inf)[0]
    assert statistics._hedges(degrees) == pytest.approx(1 / bias, rel=1e-6)


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


def test_correction_by_hand():
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
def test_correction_only_makes_the_test_more_cautious(scores, ratio):
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


# Several comparisons


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
def test_holm_by_hand(p, adjusted):
    assert holm(p) == [value if value is None else pytest.approx(value) for value in adjusted]


probabilities = st.lists(st.floats(0, 1), max_size=8)


@quick
@given(probabilities)
def test_holm_by_its_definition(p):
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
def test_holm_never_lowers_keeps_the_order_and_ignores_it(p, random):
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


# All rows at once

SCORES = {
    "none": [0.900, 0.910, 0.890, 0.905, 0.895],
    "dropout": [0.931, 0.939, 0.922, 0.934, 0.926],
    "maxgain": [0.905, 0.915, 0.880, 0.915, 0.900],
    "l2": [0.880, 0.889, 0.872, 0.885, 0.874],
}
TABLE = {row: dict(enumerate(values)) for row, values in SCORES.items()}
CONTRASTS = [("dropout", "none"), ("maxgain", "none"), ("l2", "dropout")]


def fitted(scores, contrasts):
    """The same contrasts by statsmodels, each with its estimate, standard error, p-value and interval."""
    frame = pandas.DataFrame(
        [(row, unit, value) for row, by_unit in scores.items() for unit, value in by_unit.items()],
        columns=["row", "unit", "accuracy"],
    )
    # Cell means of the rows and effects of the units, so that a contrast is a difference of two coefficients.
    model = smf.ols("accuracy ~ 0 + C(row) + C(unit)", frame).fit()
    return model, [model.t_test(f"C(row)[{first}] - C(row)[{second}] = 0") for first, second in contrasts]


def without(*missing):
    return {row: {unit: v for unit, v in by.items() if (row, unit) not in missing} for row, by in TABLE.items()}


@pytest.mark.parametrize(
    "scores", [TABLE, without(("maxgain", 1)), without(("maxgain", 1), ("none", 0), ("l2", 0), ("l2", 4))]
)
def test_the_additive_model_agrees_with_statsmodels_with_runs_missing_too(scores):
    model, theirs = fitted(scores, CONTRASTS)
    ours = pooled(scores, CONTRASTS, FOLDS)
    for mine, test in zip(ours, theirs, strict=True):
        assert mine.mean == pytest.approx(test.effect.item(), rel=1e-9)
        assert mine.standard_error == pytest.approx(test.sd.item(), rel=1e-9)
        assert mine.p_value == pytest.approx(test.pvalue.item(), rel=1e-8)
        assert mine.interval == pytest.approx(test.conf_int()[0], rel=1e-9)
        assert mine.interval_90 == pytest.approx(test.conf_int(alpha=0.1)[0], rel=1e-9)
        assert mine.degrees == model.df_resid
    assert ours[0].n == len(set(scores["none"]) & set(scores["dropout"]))


def test_for_two_rows_the_additive_model_is_the_paired_test():
    two = {"a": dict(enumerate(SLEEP_A)), "b": dict(enumerate(SLEEP_B))}
    for overlap in (0, 1 / 9):
        design = Design("fold", overlap)
        (model,) = pooled(two, [("a", "b")], design)
        test = paired(SLEEP_A, SLEEP_B, design)
        for name in ("mean", "standard_error", "t", "p_value", "interval", "interval_90", "degrees"):
            assert getattr(model, name) == pytest.approx(getattr(test, name), rel=1e-9)


def test_a_contrast_that_no_runs_tell_anything_about_is_none():
    scores = {"a": {0: 0.5, 1: 0.6}, "b": {0: 0.4, 1: 0.55}, "c": {2: 0.7, 3: 0.8}, "d": {2: 0.6, 3: 0.75}, "e": {}}
    tests = pooled(scores, [("a", "b"), ("a", "c"), ("c", "d"), ("e", "a")], FOLDS)
    assert [test is None for test in tests] == [False, True, False, True]
    assert pooled({"a": {}, "b": {}}, [("a", "b")], FOLDS) == [None]


def test_without_spread_or_degrees_of_freedom_the_additive_model_defines_no_p():
    even = {"a": {0: 0.5, 1: 0.7, 2: 0.6}, "b": {0: 0.4, 1: 0.6, 2: 0.5}, "c": {0: 0.2, 1: 0.4, 2: 0.3}}
    for scores in (even, {"a": {0: 0.5}, "b": {0: 0.4}}):
        (test,) = pooled(scores, [("a", "b")], FOLDS)
        assert test.mean == pytest.approx(0.1)
        assert (test.p_value, test.interval, test.standard_error) == (None, None, None)


def test_pooling_sees_a_difference_that_few_pairs_cannot():
    random = np.random.default_rng(5)
    seeds = random.normal(0, 0.002, 5)
    scores = {row: dict(enumerate(0.9 + seeds + random.normal(0, 0.002, 5))) for row in "abcdefgh"}
    scores["b"] = {seed: scores["b"][seed] + 0.006 for seed in scores["b"]}
    contrasts = [("b", "a"), ("d", "c"), ("f", "e"), ("h", "g")]
    design = Design("seed")
    by_pairs = as_family([paired(list(scores[x].values()), list(scores[y].values()), design) for x, y in contrasts])
    together = as_family(pooled(scores, contrasts, design))
    assert together[0].degrees == 28
    assert verdict(together[0], None) == "established"
    assert together[0].adjusted_p < by_pairs[0].adjusted_p


# Without pairing


@pytest.mark.filterwarnings("ignore:Precision loss")
@quick
@given(st.lists(accuracies, min_size=2, max_size=9), st.lists(accuracies, min_size=2, max_size=9))
def test_welch_agrees_with_scipy(a, b):
    ours = welch(a, b)
    if len(set(a)) == len(set(b)) == 1:
        assert ours.p_value is None
        return
    theirs = stats.ttest_ind(a, b, equal_var=False)
    interval = theirs.confidence_interval()
    assert ours.mean == pytest.approx(np.mean(a) - np.mean(b), abs=1e-12)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-8)
    assert ours.interval == pytest.approx((interval.low, interval.high), rel=1e-8, abs=1e-12)


def test_welch_of_one_score_is_undefined():
    assert welch([0.5], [0.4, 0.3]).p_value is None


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
