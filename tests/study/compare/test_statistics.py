import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from maxgain.errors import RecordError
from maxgain.study.compare import statistics
from maxgain.study.compare.statistics import (
    DISJOINT_FOLDS,
    ONE_SPLIT,
    OVERLAPPING,
    Overlap,
    Row,
    Summary,
    compare,
    corrected_t,
    holm,
    paired_t,
    summary,
    verdict,
)

# Hours of extra sleep that two drugs gave the same ten patients: the example of Student's paper of 1908.
SLEEP_A = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
SLEEP_B = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]

quick = settings(max_examples=60, deadline=None, derandomize=True)

# Accuracies as they come: hits among 1,000 test images.
accuracies = st.integers(0, 1000).map(lambda hits: hits / 1000)
pairs = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=12)


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
    assert test.mean_difference == pytest.approx(1.58)
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
    if ours.standard_error == 0:
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
    assert back.mean_difference == -forth.mean_difference
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
    assert changed.p_value == pytest.approx(original.p_value, rel=1e-6, abs=1e-12)
    assert changed.interval == pytest.approx(original.interval, rel=1e-6, abs=1e-12)
    assert changed.effect_interval == pytest.approx(original.effect_interval, rel=1e-6, abs=1e-9)


def test_equal_scores_show_no_difference():
    test = paired_t([0.7, 0.8, 0.9], [0.7, 0.8, 0.9])
    assert (test.mean_difference, test.t, test.p_value, test.effect_size) == (0, 0, 1, 0)
    assert test.interval == (0, 0)
    assert test.effect_interval == pytest.approx((-1.96 / math.sqrt(3), 1.96 / math.sqrt(3)), rel=1e-4)


@pytest.mark.parametrize(("a", "b"), [([0.8, 0.7, 0.3], [0.7, 0.6, 0.2]), ([0.5, 0.25], [0.25, 0.0])])
@pytest.mark.parametrize("test", [paired_t, lambda a, b: corrected_t(a, b, 0.25)])
def test_a_constant_difference_is_an_infinite_effect_even_where_rounding_blurs_it(a, b, test):
    result = test(a, b)
    assert (result.t, result.p_value, result.effect_size) == (math.inf, 0, math.inf)
    assert result.effect_interval == (math.inf, math.inf)
    assert result.interval == (result.mean_difference, result.mean_difference)
    assert result.mean_difference == pytest.approx(a[0] - b[0])
    assert test(b, a).effect_interval == (-math.inf, -math.inf)


def test_rounding_alone_is_no_difference():
    test = paired_t([0.1 + 0.2] * 5, [0.3] * 5)
    assert (test.mean_difference, test.p_value) == (0, 1)


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(RecordError, match="at least two pairs"):
        paired_t([0.5], [0.6])
    with pytest.raises(RecordError, match="there are 3 and 2"):
        paired_t([0.5, 0.6, 0.7], [0.6, 0.6])
    with pytest.raises(RecordError, match="score 2 of 2 is nan"):
        paired_t([0.5, 0.6], [0.6, math.nan])


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
    [row] = [row for row in compare({"bn": b / 100, "maxgain+bn": a / 100}, "bn", None) if row.test]
    assert not row.significant


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
    assert corrected.p_value >= plain.p_value
    assert corrected.interval[0] <= plain.interval[0]
    assert corrected.interval[1] >= plain.interval[1]


@pytest.mark.parametrize("ratio", [0, -1, math.nan, math.inf])
def test_a_senseless_ratio_is_refused(ratio):
    with pytest.raises(RecordError, match="ratio of test to training"):
        corrected_t(SLEEP_A, SLEEP_B, ratio)


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
    ],
)
def test_holm_by_hand(p, adjusted):
    assert holm(p) == pytest.approx(adjusted)


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
    assert holm([p[i] for i in order]).tolist() == [adjusted[i] for i in order]


def test_holm_keeps_the_risk_of_any_false_alarm():
    p = np.random.default_rng(1979).uniform(size=(4000, 5))
    assert np.mean([holm(row).min() < 0.05 for row in p]) == pytest.approx(0.05, abs=0.01)
    assert np.mean(p.min(axis=1) < 0.05) > 0.2


@pytest.mark.parametrize("p", [[0.1, math.nan], [1.1], [-0.1], [[0.1]]])
def test_holm_refuses_what_is_no_p_value(p):
    with pytest.raises(RecordError, match="p-values must be"):
        holm(p)


# The comparison

SCORES = {
    "none": [0.900, 0.910, 0.890, 0.905, 0.895],
    "dropout": [0.931, 0.939, 0.922, 0.934, 0.926],
    "maxgain": [0.905, 0.915, 0.880, 0.915, 0.900],
    "l2": [0.880, 0.889, 0.872, 0.885, 0.874],
}


def test_compare_pairs_each_with_the_baseline_and_corrects_over_all():
    rows = {row.regulariser: row for row in compare(SCORES, "none", None)}
    assert list(rows) == list(SCORES)
    raw = {name: stats.ttest_rel(SCORES[name], SCORES["none"]) for name in SCORES if name != "none"}
    adjusted = dict(zip(raw, holm([test.pvalue for test in raw.values()]), strict=True))
    for name, test in raw.items():
        assert rows[name].test.t == pytest.approx(test.statistic)
        assert rows[name].adjusted_p == pytest.approx(adjusted[name])
        assert rows[name].significant == (adjusted[name] < 0.05)
        assert rows[name].comparisons == 3
        assert rows[name].summary == summary(SCORES[name])
    assert (rows["none"].test, rows["none"].adjusted_p, rows["none"].significant) == (None, None, False)
    assert [name for name, row in rows.items() if row.significant] == ["dropout", "l2"]


@pytest.mark.parametrize(
    ("overlap", "method", "same_as"),
    [
        (None, DISJOINT_FOLDS, paired_t),
        (Overlap(), ONE_SPLIT, paired_t),
        (Overlap(1 / 4), OVERLAPPING, lambda a, b: corrected_t(a, b, 1 / 4)),
    ],
)
def test_how_the_data_were_split_chooses_and_names_the_test(overlap, method, same_as):
    for row in compare(SCORES, "none", overlap):
        if row.regulariser != "none":
            assert row.test.method == method
            assert row.test.p_value == same_as(SCORES[row.regulariser], SCORES["none"]).p_value


def test_the_tests_are_named_in_words():
    assert DISJOINT_FOLDS == "paired t-test on disjoint folds"
    assert ONE_SPLIT == "paired t-test over seeds on one split (says nothing about other data)"
    assert OVERLAPPING == "Nadeau–Bengio corrected t-test (training sets overlap)"


@quick
@given(st.permutations(list(SCORES)), st.permutations(range(5)))
def test_no_order_changes_a_comparison(names, folds):
    changed = compare({name: [SCORES[name][fold] for fold in folds] for name in names}, "none", None)
    rows = {row.regulariser: row for row in changed}
    for row in compare(SCORES, "none", None):
        assert rows[row.regulariser].adjusted_p == pytest.approx(row.adjusted_p)
        assert verdict(rows[row.regulariser]) == verdict(row)


def test_a_baseline_without_scores_is_refused():
    with pytest.raises(RecordError, match="'l1' is not among the regularisers with scores: none, dropout, maxgain, l2"):
        compare(SCORES, "l1", None)


def test_a_missing_run_is_refused_by_name():
    with pytest.raises(RecordError, match="'maxgain' has 4 scores and the baseline 'none' has 5"):
        compare(SCORES | {"maxgain": SCORES["maxgain"][1:]}, "none", None)


# What it says


def verdicts(scores, overlap=None):
    return {row.regulariser: verdict(row) for row in compare(scores, "none", overlap)}


def test_verdicts():
    # maxgain by hand: differences of 5, 5, -10, 10 and 5 thousandths, t = 3 / sqrt(57.5 / 5) = 0.885, p = 0.426.
    assert verdicts(SCORES) == {
        "none": "the baseline",
        "dropout": "significant: better than none by 3.0 points (p < 0.001, Holm-corrected over 3 comparisons)",
        "maxgain": "not significant: the difference of +0.3 points may be chance "
        "(p = 0.43, Holm-corrected over 3 comparisons)",
        "l2": "significant: worse than none by 2.0 points (p < 0.001, Holm-corrected over 3 comparisons)",
    }


def test_verdict_on_one_split_claims_nothing_about_other_data():
    assert verdicts({name: SCORES[name] for name in ("none", "dropout")}, Overlap())["dropout"] == (
        "significant: better than none by 3.0 points (p < 0.001); it says nothing about other data"
    )


def test_verdict_without_spread_or_difference_or_repeats():
    none = SCORES["none"]
    assert verdicts({"none": none, "copy": none})["copy"] == "not significant: no difference (p = 1)"
    assert verdicts({"none": none, "plus": [score + 0.01 for score in none]})["plus"] == (
        "significant only formally: all 5 pairs differ by the same +1.0 points, "
        "so there is no spread to judge them by (p < 0.001)"
    )
    assert verdicts({"none": [0.9], "dropout": [0.95]}) == {
        "none": "the baseline",
        "dropout": "not tested: one run each cannot tell a difference from chance",
    }


@pytest.mark.parametrize(
    ("p", "text"), [(0.0496, "p = 0.0496"), (0.04999, "p = 0.04999"), (0.0504, "p = 0.05"), (0.976, "p = 0.98")]
)
def test_a_rounded_p_value_never_contradicts_the_verdict(p, text):
    test = paired_t(SLEEP_A, SLEEP_B)
    row = Row("a", "b", summary(SLEEP_A), test, p, significant=p < 0.05, comparisons=1)
    assert f"({text})" in verdict(row)


def test_a_tiny_difference_is_shown():
    test = paired_t([0.7481, 0.7479, 0.7489], [0.7480, 0.7484, 0.7487])
    row = Row("a", "b", summary([0.7]), test, test.p_value, significant=False, comparisons=1)
    assert "the difference of -0.01 points may be chance" in verdict(row)
