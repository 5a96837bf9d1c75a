"""A comparison against scipy and statsmodels, recomputed from the results, and the truth about failed runs."""

import json
import sys
from dataclasses import replace

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from scipy import stats
from statsmodels.stats.multitest import multipletests

from made_results import BASE, made, made_plan, made_result, pack
from maxgain.errors import MissingExtraError
from maxgain.study.comparison import compare

ROWS = ("none", "maxgain", "dropout", "maxgain+dropout")
random = np.random.default_rng(10)
FOLDS = {
    name: np.round(mean + np.linspace(-0.02, 0.02, 10) + random.normal(0, 0.006, 10), 4).tolist()
    for name, mean in zip(ROWS, (0.90, 0.92, 0.91, 0.915), strict=True)
}
MATCHED = (("maxgain", "none"), ("maxgain+dropout", "dropout"))
NONE = [0.80, 0.82, 0.79, 0.81, 0.80, 0.83]
AHEAD = [0.85, 0.868, 0.842, 0.865, 0.848, 0.885]


def answer(scores, **changes):
    return compare(*made(scores, **changes))


def only(comparison):
    (contrast,) = comparison.contrasts
    return contrast


@pytest.mark.parametrize("decide_by", ["paired", "pooled"])
def test_every_number_is_recomputed(decide_by):
    comparison = answer(FOLDS, contrasts=MATCHED, decide_by=decide_by, rope=0.5)
    table = pandas.DataFrame(FOLDS)
    for row in comparison.rows:
        assert row.mean == pytest.approx(table[row.name].mean())
        assert row.standard_error == pytest.approx(stats.sem(table[row.name]))
    frame = table.reset_index(names="unit").melt("unit", var_name="row", value_name="accuracy")
    model = smf.ols("accuracy ~ 0 + C(row) + C(unit)", frame).fit()
    by_pairs = [stats.ttest_rel(table[first], table[second]) for first, second in MATCHED]
    by_model = [model.t_test(f"C(row)[{first}] - C(row)[{second}] = 0") for first, second in MATCHED]
    p = {"paired": [test.pvalue for test in by_pairs], "pooled": [test.pvalue.item() for test in by_model]}
    interval = {
        "paired": [tuple(test.confidence_interval(1 - 0.05 / 2)) for test in by_pairs],
        "pooled": [tuple(test.conf_int(alpha=0.05 / 2)[0]) for test in by_model],
    }
    other = "pooled" if decide_by == "paired" else "paired"
    for index, contrast in enumerate(comparison.contrasts):
        for difference, analysis in ((contrast.difference, decide_by), (contrast.check, other)):
            assert difference.p_holm == pytest.approx(multipletests(p[analysis], method="holm")[1][index], rel=1e-8)
            assert difference.interval == pytest.approx(interval[analysis][index], rel=1e-8)


def test_a_check_that_disagrees_is_named():
    scores = {"none": [0.935, 0.937, 0.936], "maxgain": [0.939, 0.939, 0.941], "dropout": [0.936, 0.938, 0.937]}
    by_model, by_pairs = (answer(scores, over="seed", decide_by=way) for way in ("pooled", "paired"))
    assert (by_model.contrasts[0].verdict, by_pairs.contrasts[0].verdict) == ("established", "inconclusive")
    assert "the check, the paired analysis, is inconclusive (p = 0.0" in by_model.notes[0]
    assert "the check, the pooled analysis, is established (p = 0.0" in by_pairs.notes[0]
    assert answer({"none": NONE, "maxgain": AHEAD}).notes == []


def test_cross_validation_is_corrected_for_overlap_in_both_analyses():
    scores = {name: FOLDS[name] for name in ("none", "maxgain")}
    plain = only(answer(scores))
    for train_on, overlap in (("train+validation", 1 / 9), ("train", 1 / 8)):
        cut = only(answer(scores, recipe=replace(BASE, cross_validation=10, train_on=train_on)))
        for before, after in ((plain.difference, cut.difference), (plain.check, cut.check)):
            assert after.standard_error == pytest.approx(before.standard_error * np.sqrt((1 / 10 + overlap) * 10))


def test_seeds_within_a_fold_are_averaged_before_pairing():
    values = {name: np.round(np.repeat(FOLDS[name], 3) + random.normal(0, 0.01, 30), 4) for name in ("none", "maxgain")}
    comparison = answer({name: row.tolist() for name, row in values.items()}, repeats=3)
    means = {name: row.reshape(10, 3).mean(axis=1) for name, row in values.items()}
    expected = stats.ttest_rel(means["maxgain"], means["none"])
    assert only(comparison).difference.p == pytest.approx(expected.pvalue, rel=1e-8)
    assert (comparison.row("none").planned, only(comparison).difference.n) == (30, 10)


# Failures


def test_a_lead_of_the_survivors_is_no_verdict():
    comparison = answer({"none": NONE, "maxgain": [*AHEAD[:3], None, None, None]})
    contrast = only(comparison)
    assert contrast.difference.p == pytest.approx(stats.ttest_rel(AHEAD[:3], NONE[:3]).pvalue, rel=1e-8)
    guesses = stats.ttest_rel([*AHEAD[:3], 0.1, 0.1, 0.1], NONE)
    assert contrast.with_failures.p == pytest.approx(guesses.pvalue, rel=1e-8)
    assert contrast.difference.p < 0.05 < contrast.with_failures.p
    assert contrast.verdict == "inconclusive"
    assert comparison.title.startswith("Cannot tell maxgain=2 from none: ")
    assert "the verdict is withdrawn" in str(comparison).replace("\n", " ")
    assert (comparison.row("maxgain").failed, comparison.row("maxgain").missing, len(comparison.failed)) == (3, 0, 3)


def test_a_fault_of_the_machine_is_a_missing_run_and_no_guess():
    """A full disk on one of ten folds once turned +2.7 points, p < 0.001, into 'inconclusive'."""
    scores = {"none": FOLDS["none"], "maxgain": [*(np.array(FOLDS["none"][:9]) + 0.027 + 0.001 * np.arange(9)), None]}
    machine, training = (answer(scores, fault=fault) for fault in ("machine", "training"))
    assert (only(machine).verdict, only(machine).with_failures) == ("established", None)
    assert (machine.row("maxgain").failed, machine.row("maxgain").missing) == (0, 1)
    assert (only(training).verdict, training.row("maxgain").failed) == ("inconclusive", 1)
    not_run = compare(made_plan(scores), [result for result in made(scores)[1] if result.status == "ok"])
    assert not_run.contrasts == machine.contrasts


def test_a_finished_run_replaces_the_fault_before_it():
    plan, results = made({"none": NONE, "maxgain": AHEAD})
    stopped = made_result(results[-1].recipe, None, fault="machine", finished="2027-01-01")
    assert compare(plan, [*results, stopped]).contrasts == compare(plan, results).contrasts


def test_a_failure_takes_its_own_pairs_away_and_nobody_elses():
    whole = {"none": NONE, "maxgain": [0.81, 0.83, 0.79, 0.83, 0.80, 0.84], "dropout": [0.7, 0.7, 0.75, 0.7, 0.7, 0.72]}
    before, after = (
        answer(scores).contrasts[0] for scores in (whole, whole | {"dropout": [0.7, None, *whole["dropout"][2:]]})
    )
    assert (after.difference.p, after.difference.n, after.with_failures) == (before.difference.p, 6, None)


def test_a_lead_that_survives_the_failures_stands():
    contrast = only(answer({"none": [0.5, 0.52, 0.51, None, 0.5, 0.53], "maxgain": [0.9, 0.93, 0.9, 0.92, 0.91, 0.94]}))
    assert contrast.with_failures is not None
    assert contrast.verdict == "established"


def test_a_row_without_any_score_costs_the_others_nothing():
    comparison = answer({"none": NONE, "dropout": [None] * 6, "maxgain": AHEAD})
    dropout, maxgain = comparison.contrasts
    assert (comparison.row("dropout").mean, dropout.difference, dropout.verdict) == (None, None, "inconclusive")
    assert (maxgain.verdict, maxgain.difference.p_holm) == ("established", maxgain.difference.p)


# Data


def test_results_of_other_data_are_never_mixed():
    plan, results = made({"none": NONE, "maxgain": AHEAD})
    _, older = made({"none": [0.5] * 6, "maxgain": [0.6] * 6}, result={"data": "old", "finished": "2025-01-01"})
    comparison = compare(plan, [*older, *results])
    assert comparison.rows == compare(plan, results).rows
    assert comparison.notes == ["12 results of other data left out."]
    assert compare(plan, results).notes == []


def test_results_of_other_recipes_are_ignored():
    plan, results = made({"none": NONE, "maxgain": AHEAD})
    others = [made_result(replace(result.recipe, epochs=9), 0.3) for result in results]
    assert compare(plan, results + others).to_json() == compare(plan, results).to_json()


def test_chosen_numbers_are_in_the_label():
    scores = {"none": NONE[:2], "maxgain": AHEAD[:2]}
    same, other = ({"maxgain": {0: {"maxgain": 3.0}, 1: {"maxgain": number}}} for number in (3.0, 4.0))
    assert answer(scores, numbers=same).row("maxgain").label == "maxgain=3"
    assert answer(scores, numbers=other).row("maxgain").label == "maxgain"
    one = {"maxgain": {0: {"maxgain": 3.0}}}
    notes = [" ".join(answer(scores, numbers=numbers).notes) for numbers in (same, one)]
    assert ["default numbers on 1 fold" in note for note in notes] == [False, True]
    assert answer({"none": NONE, "maxgain=2.5": AHEAD}).row("maxgain=2.5").label == "maxgain=2.5"


def test_sampling_error_of_the_test_set_from_the_bits():
    images, scores = 36, {"none": [30 / 36, 27 / 36], "maxgain": [33 / 36, 33 / 36]}
    plan, results = made(scores, over="seed", result={"images": images})
    right = {result.key: random.permutation(images) < round(images * result.test_accuracy) for result in results}
    for result in results:
        result.correct = pack(right[result.key])
    none, maxgain = (np.mean([right[result.key] for result in results[start : start + 2]], axis=0) for start in (0, 2))
    assert only(compare(plan, results)).sampling_error == pytest.approx((maxgain - none).std() / np.sqrt(images))
    assert only(answer(scores)).sampling_error is None, "folds have test images of their own"


def test_without_a_test_part_validation_accuracy_is_compared():
    plan, results = made({"none": NONE, "maxgain": AHEAD}, recipe=replace(BASE, train_on="train"))
    for result in results:
        result.validation_accuracy, result.test_accuracy = result.test_accuracy, None
    comparison = compare(plan, results)
    assert (comparison.score, comparison.row("none").scores[1]) == ("validation", 0.82)


# What is shown


@pytest.mark.parametrize(
    ("scores", "changes", "start"),
    [
        ({"none": NONE, "maxgain=2.5": AHEAD}, {},
         "maxgain=2.5 better than none: +5.13 points of accuracy (95 % CI +4.80 to +5.47)"),
        ({"none": AHEAD, "maxgain=2.5": NONE}, {},
         "maxgain=2.5 worse than none: −5.13 points of accuracy (95 % CI −5.47 to −4.80)"),
        ({"none": NONE, "maxgain=2.5": [0.81, 0.82, 0.80, 0.80, 0.81, 0.82]}, {},
         "Cannot tell maxgain=2.5 from none: +0.17 points of accuracy (95 % CI −0.87 to +1.20)"),
        ({"none": NONE, "maxgain=2.5": [v + (-1) ** i / 1000 for i, v in enumerate(NONE)]}, {"rope": 1.0},
         "No difference that matters between maxgain=2.5 and none (±1 points): 0.00 points"),
        ({"none": NONE, "maxgain=2.5": [v + 0.01 for v in NONE]}, {}, "Cannot tell maxgain=2.5 from none: +1.00"),
        ({"none": NONE, "maxgain": AHEAD, "dropout": NONE, "batchnorm": [v + 0.01 for v in AHEAD]}, {},
         "maxgain=2 and batchnorm better than none: +5.13 to +6.13 points of accuracy. Cannot tell dropout from none"),
        ({"none": NONE, "dropout": NONE, "maxgain": AHEAD, "maxgain+dropout": AHEAD}, {"contrasts": MATCHED},
         "maxgain=2 and maxgain=2+dropout better than their baselines: +5.13 points of accuracy"),
        ({"none": [None] * 2, "maxgain": [None] * 2}, {}, "No result: none of the 4 runs has finished"),
        ({"none": [0.1, 0.103], "maxgain": [0.1, 0.1]}, {"recipe": replace(BASE, optimiser="sgd", learning_rate=0.1)},
         "No run learned anything: 0 of 4 scores clearly above chance (10 %). Try the optimizer adam, or a "),
        ({"none": NONE}, {}, "none has test accuracy 80.83 ± 0.60 %"),
    ],
)  # fmt: skip
def test_the_title_has_the_number(scores, changes, start):
    comparison = answer(scores, **changes)
    assert comparison.title.startswith(start)
    assert start.partition(":")[0] in str(comparison).replace("\n", " ")


def test_one_row_that_learns_is_enough():
    assert answer({"none": [0.1, 0.1], "maxgain": [0.1, 0.5]}).title.startswith("Cannot tell maxgain=2 from none: ")


@pytest.mark.parametrize("contrasts", [None, MATCHED, (*MATCHED, ("maxgain", "dropout")), ()])
def test_the_text_fits_80_columns_and_the_frame_has_the_same_numbers(contrasts):
    scores = FOLDS | {"maxgain=1.5+batchnorm+gaussiandropout": FOLDS["maxgain"]}
    if contrasts is not None:
        scores |= {"maxgain+dropout": [None, *FOLDS["maxgain+dropout"][1:]]}
    comparison = answer(scores, contrasts=contrasts)
    text = str(comparison)
    assert max(map(len, text.splitlines())) <= 80
    frame = comparison.to_frame()
    for contrast in comparison.contrasts:
        assert contrast.verdict in text
        label = comparison.row(contrast.first).label
        (line,) = frame[(frame.row == label) & (frame.baseline == contrast.second)].index
        assert frame.difference[line] == contrast.difference.mean
        assert frame.p[line] == contrast.difference.p_holm
    assert list(dict.fromkeys(frame.row)) == [row.label for row in comparison.rows]
    assert frame["mean"].notna().all()


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pip install pandas"):
        answer({"none": NONE}).to_frame()


def test_json_is_strict_and_has_the_numbers():
    comparison = answer({"none": NONE, "maxgain": [*AHEAD[:5], None]})
    content = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert content["contrasts"][0]["difference"]["mean"] == only(comparison).difference.mean
    assert content["title"] == comparison.title
    assert content["plan"]["rows"] == ["none", "maxgain"]
