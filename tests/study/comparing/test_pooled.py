"""All rows in one additive model, and two rows without pairs."""

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from maxgain.study.comparing.statistics import Design, as_family, paired, pooled, verdict, welch
from score_examples import FOLDS, SLEEP_A, SLEEP_B, accuracies, quick

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
