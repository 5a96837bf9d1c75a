"""A comparison on the page: its numbers against scipy, and its words against its numbers."""

import re
from dataclasses import replace

import pytest
from scipy import stats

from maxgain.errors import RecordError
from maxgain.study.comparing import sentences, statistics
from maxgain.study.comparing.records import Records
from maxgain.study.report.comparisons import comparisons, possible
from maxgain.study.report.page import build_page
from page_elements import BETTER, LIKE, NONE, Elements, bare_records, built
from synthetic_records import failed_run, synthetic_records


def test_the_tables_have_the_numbers_of_the_paired_tests():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    mean, error = 100 * sum(BETTER) / 5, 100 * stats.sem(BETTER)
    assert shown.rows["maxgain"]["Accuracy, %"] == f"{mean:.2f} (highest mean) ± {error:.2f}"
    assert shown.rows["maxgain"]["Runs"] == "5"
    test = stats.ttest_rel(BETTER, NONE)
    low, high = test.confidence_interval(1 - 0.05 / 2)  # two contrasts
    row = shown.contrasts["maxgain against none"]
    difference = 100 * (sum(BETTER) - sum(NONE)) / 5
    assert row["Difference, points"] == f"{difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
    analyses = [row for row in shown.tables[1][1:] if "paired" in row]
    other = stats.ttest_rel(LIKE, NONE).pvalue
    assert [row[3] for row in analyses] == [f"{other:.3f}", "< 0.001" if test.pvalue < 0.001 else f"{test.pvalue:.3f}"]
    # Holm over two: the smaller p doubles, and the larger stays.
    assert shown.contrasts["dropout against none"]["Holm p"] == f"{max(other, 2 * test.pvalue):.3f}"


def test_verdicts_and_what_they_rest_on_are_said_in_words():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    assert shown.contrasts["dropout against none"]["Verdict"] == "inconclusive"
    assert shown.contrasts["maxgain against none"]["Verdict"] == "established"
    assert "Established: maxgain is better than none. Inconclusive: dropout against none." in shown.text
    assert "3 regularisers on digits, the same 5 disjoint folds" in shown.text
    assert f"2 contrasts, one family: verdicts follow the {statistics.DISJOINT_FOLDS}" in shown.text
    (comparison,) = comparisons(bare_records({"none": NONE, "dropout": LIKE, "maxgain": BETTER})).values()
    for sentence in sentences.in_words(comparison).contrasts:
        assert sentence in shown.text


def test_a_worse_regulariser_is_called_worse():
    shown = built({"none": BETTER, "maxgain": NONE})
    assert shown.contrasts["maxgain against none"]["Verdict"] == "reversed"
    assert "Reversed: maxgain is worse than none." in shown.text


def test_the_best_mean_alone_is_bold():
    text = build_page(bare_records({"none": NONE, "dropout": LIKE, "maxgain": BETTER}))
    assert re.findall(r"<strong>(.*?)</strong>", text) == ["95.22"]


def test_a_difference_without_spread_is_no_finding():
    shown = built({"none": [0.90, 0.91, 0.92], "maxgain": [0.91, 0.92, 0.93]})
    row = shown.contrasts["maxgain against none"]
    assert (row["Holm p"], row["Verdict"]) == ("–", "inconclusive")
    assert {cell for row in shown.tables[1][1:] for cell in row[3:]} == {"–"}
    assert "Nothing was tested: the differences have no spread to judge them by." in shown.text


def test_seeds_on_one_split_are_called_that():
    shown = built({"none": NONE, "maxgain": BETTER}, over="seed")
    assert "the same 5 seeds on one split" in shown.text
    assert statistics.ONE_SPLIT in shown.text
    assert "this says nothing about other data" in shown.text


def test_one_run_each_is_not_tested():
    shown = built({"none": [0.9], "maxgain": [0.99]})
    assert "one run each cannot tell a difference from chance" in shown.text
    assert shown.contrasts["maxgain against none"]["Holm p"] == "–"


def test_a_failure_is_in_the_headline_and_takes_away_its_own_pair_alone():
    scores = {"none": NONE, "dropout": LIKE, "maxgain": [*BETTER[:4], None]}
    shown = built(scores, failed=[failed_run("maxgain", fold=4)])
    assert "maxgain (4 of 5 runs)" in shown.text
    assert "maxgain: 1 of 5 runs failed and have no score." in shown.text
    assert shown.rows["maxgain"]["Runs"] == "4 of 5"
    p_values = [row[3] for row in shown.tables[1][1:] if "paired" in row]
    expected = stats.ttest_rel(LIKE, NONE).pvalue, stats.ttest_rel(BETTER[:4], NONE[:4]).pvalue
    assert p_values == ["< 0.001" if p < 0.001 else f"{p:.3f}" for p in expected]


def test_a_row_whose_runs_all_failed_is_named():
    failed = [failed_run("maxgain", fold=fold) for fold in range(5)]
    shown = built({"none": NONE, "dropout": LIKE}, failed=failed)
    row = shown.rows["maxgain"]
    assert (row["Accuracy, %"], row["Runs"]) == ("–", "0 of 5")
    assert "maxgain is not compared: all of its 5 runs failed." in shown.text


def test_the_matrix_shows_every_row_against_every_row():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    matrix = {name: list(row.values())[1:] for name, row in shown.table("matrix").items()}
    assert list(matrix) == ["none", "dropout", "maxgain"]
    p = stats.ttest_rel(LIKE, NONE).pvalue
    assert matrix["dropout"][0] == f"0.002/1/2, p {p:.3f}"
    assert matrix["maxgain"][0].startswith("+4.825/0/0, p")
    assert matrix["none"][2].startswith("−4.820/0/5, p")
    assert "The row maxgain has the highest mean, and is ahead of none and dropout on every fold." in shown.text


def test_the_baseline_can_be_chosen():
    found = bare_records({"none": NONE, "maxgain": BETTER})
    shown = Elements(build_page(found, baseline="maxgain"))
    assert shown.contrasts["none against maxgain"]["Verdict"] == "reversed"
    with pytest.raises(RecordError, match="did you mean 'maxgain'"):
        build_page(found, baseline="maxgian")


def test_folds_and_seeds_of_one_recipe_are_two_comparisons():
    folds = bare_records({"none": NONE, "maxgain": BETTER})
    seeds = bare_records({"none": LIKE, "maxgain": BETTER}, over="seed")
    both = comparisons(Records(folds.runs + seeds.runs, (), ()))
    assert [(found.question.over, len(found.question.units)) for found in both.values()] == [("fold", 5), ("seed", 5)]
    alone = [next(iter(comparisons(part).values())) for part in (folds, seeds)]
    assert [found.contrasts for found in both.values()] == [found.contrasts for found in alone]


def test_runs_with_other_settings_are_not_compared_with_each_other():
    long = bare_records({"none": NONE, "maxgain": BETTER}, epochs=20)
    short = bare_records({"none": LIKE, "maxgain": NONE}, epochs=5)
    both = comparisons(Records(long.runs + short.runs, (), ()))
    assert sorted(both) == ["digits (epochs 20)", "digits (epochs 5)"]


def test_two_runs_of_one_row_on_one_fold_are_told_apart_by_their_numbers_and_never_mixed():
    found = bare_records({"none": NONE, "maxgain": BETTER})
    others = bare_records({"maxgain": LIKE}, config={"regulariser": "maxgain=8"}).runs
    (comparison,) = comparisons(Records((*found.runs, *others), (), ())).values()
    assert [row.name for row in comparison.rows] == ["none", "maxgain=2", "maxgain=8"]
    assert list(comparison.row("maxgain=8").scores.values()) == LIKE


def test_the_page_depends_on_what_is_recorded_and_on_nothing_else(whole_page):
    found = bare_records({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    backwards = replace(found, runs=found.runs[::-1])
    assert Elements(build_page(found)).tables[:3] == Elements(build_page(backwards)).tables[:3]
    assert build_page(synthetic_records({"none": NONE, "maxgain": BETTER})) == whole_page


def test_a_row_says_its_numbers_and_where_they_come_from():
    shown = built({"none": NONE, "maxgain": BETTER})
    assert shown.rows["maxgain"]["Number"] == "γ = 2 (default, not tuned)"
    assert shown.rows["none"]["Number"] == "none"
    assert (
        built({"none": NONE, "dropout=0.5": LIKE}).rows["dropout=0.5"]["Number"] == "factor = 0.5 (as given, not tuned)"
    )


def test_a_number_that_was_chosen_is_not_called_a_default():
    """The folder of the reproduction's records knows no more than these: its γ of 1.5 was called a default."""
    row = "maxgain+dropout"
    config, tuned = {"regulariser": "maxgain=1.5+dropout"}, {"maxgain": 1.5}
    chosen = bare_records({row: BETTER}, config=config, tuned=tuned).runs
    found = Records((*bare_records({"none": NONE}).runs, *chosen), (), ())
    words = "γ chosen on the validation part{}; factor default"
    assert Elements(build_page(found)).rows[row]["Number"] == f"γ = 1.5, factor = 1 ({words.format('')})"
    (question,) = possible(found)
    asked = replace(question, tuning_runs={row: 5})
    shown = Elements(build_page(found, asked=[asked]))
    assert shown.rows[row]["Number"] == f"γ = 1.5, factor = 1 ({words.format(', 5 runs')})"
    earlier = Elements(build_page(found, asked=[replace(asked, chosen={})]))
    assert earlier.rows[row]["Number"] == "γ = 1.5, factor = 1 (chosen on the validation part, 5 runs)"


def test_a_comparison_begins_with_what_was_established_and_says_when():
    shown = built({"none": NONE, "maxgain": BETTER}, finished="2026-05-31T23:30:00+00:00")
    assert "Established: maxgain is better than none. 10 finished runs · 31 May 2026 · maxgain 0.1.0" in shown.text


def test_a_score_leads_to_its_run_and_a_run_to_its_command(whole_page):
    anchors = re.findall(r'<td><a href="#(r\d+)">', whole_page)
    assert len(anchors) == 10
    for number, anchor in enumerate(anchors):
        row = re.search(rf'<tr id="{anchor}">(.*)', whole_page)[1]
        assert ("maxgain" if number % 2 else "none") in row
        assert 'href="#m0"' in row
    assert re.search(r'id="m0">.*?<pre>.*?compare', whole_page, re.DOTALL)


def test_intervals_lie_on_one_axis_with_zero():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    zeros = {a["style"] for tag, a in shown.elements if tag == "td" and "style" in a}
    assert len(zeros) == 1
    zero = float(re.search(r"--zero: ([\d.]+)px", zeros.pop())[1])
    marks = [float(a["cx"]) for tag, a in shown.elements if a.get("class") == "mean"]
    assert marks[0] == pytest.approx(zero, abs=0.1)  # dropout's mean difference is none
    assert marks[1] > zero


def test_comparisons_that_differ_in_their_seeds_are_told_apart():
    found = [bare_records({"none": NONE, "maxgain": BETTER}, seed=seed).runs for seed in (0, 7)]
    asked = [next(possible(Records(runs, (), ()))) for runs in found]
    answers = comparisons(Records((*found[0], *found[1]), (), ()), asked)
    assert list(answers) == ["digits (first seed 7)", "digits (first seed 0)"]
