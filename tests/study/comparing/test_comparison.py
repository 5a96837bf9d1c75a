"""A comparison against scipy and statsmodels, recomputed from the raw records, and the truth about failed runs."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from scipy import stats
from statsmodels.stats.multitest import multipletests

from maxgain.errors import FileError
from maxgain.study.comparing import sentences
from maxgain.study.comparing.bootstrap import bootstrap
from maxgain.study.comparing.comparison import NOT_RUN, compare
from maxgain.study.comparing.question import Planned, Question, against, contrasts
from maxgain.study.comparing.records import Records
from maxgain.study.comparing.shown import tables
from synthetic_records import failed_run, synthetic_run

ROWS = ("none", "maxgain", "dropout", "maxgain+dropout")
random = np.random.default_rng(10)
FOLDS = {
    name: np.round(mean + np.linspace(-0.02, 0.02, 10) + random.normal(0, 0.006, 10), 4).tolist()
    for name, mean in zip(ROWS, (0.90, 0.92, 0.91, 0.915), strict=True)
}


def planned(record):
    config = record["config"]
    where = config["seed"], config.get("fold")
    return Planned(record["key"], config["regulariser"], *where, fingerprint=record["fingerprint"])


def asked(scores, *, over="fold", baseline="none", seeds=None, **changes):
    """Records with these scores by fold or seed, None for a run that failed, and the question that they answer."""
    runs, failed, rows = [], [], {}
    for name, values in scores.items():
        for unit, score in enumerate(values):
            where = {"fold": unit, "seed": unit} if over == "fold" else {"fold": None, "seed": unit}
            if seeds is not None:
                where["seed"] = 1000 * (unit % seeds) + unit // seeds
                where["fold"] = unit // seeds
            if score is None:
                record = failed_run(name, **where) | {"classes": 10}
                failed.append(record)
            else:
                record = synthetic_run(name, accuracy=score, **where, history=[], classes=10)
                runs.append(record)
            rows.setdefault(name, []).append(planned(record))
    question = Question(
        recipe="digits",
        dataset="digits",
        over=over,
        rows={name: tuple(row) for name, row in rows.items()},
        contrasts=changes.pop("contrasts", against(baseline, list(scores))),
        train_on="train+validation",
        **changes,
    )
    return question, Records(tuple(runs), tuple(failed), ())


def answer(scores, **options):
    return compare(*asked(scores, **options))


def told(comparison):
    return sentences.in_words(comparison)


# Every number, recomputed


def from_raw(found, question):
    """The accuracies of the raw records as a table of rows by fold, and as a frame for statsmodels."""
    by_key = {run["key"]: run for run in found.runs}
    cells = [
        (name, question.unit(run), by_key[run.key]["test_accuracy"])
        for name, runs in question.rows.items()
        for run in runs
        if run.key in by_key
    ]
    frame = pandas.DataFrame(cells, columns=["row", "unit", "accuracy"])
    return frame.pivot(index="unit", columns="row", values="accuracy"), frame


def test_four_rows_and_two_matched_contrasts_by_both_analyses():
    question, found = asked(FOLDS, contrasts=contrasts(["matched"], ROWS), rope=0.005)
    comparison = compare(question, found)
    table, frame = from_raw(found, question)
    assert [row.name for row in comparison.rows] == list(ROWS)
    for row in comparison.rows:
        assert row.summary.mean == pytest.approx(table[row.name].mean())
        assert row.summary.standard_error == pytest.approx(stats.sem(table[row.name]))
        assert (row.done, row.planned, row.failed) == (10, 10, 0)

    pairs = [("maxgain", "none"), ("maxgain+dropout", "dropout")]
    assert [(contrast.first, contrast.second) for contrast in comparison.contrasts] == pairs
    model = smf.ols("accuracy ~ 0 + C(row) + C(unit)", frame).fit()
    by_pairs = [stats.ttest_rel(table[first], table[second]) for first, second in pairs]
    by_model = [model.t_test(f"C(row)[{first}] - C(row)[{second}] = 0") for first, second in pairs]
    for way, p_values in (
        ("paired", [test.pvalue for test in by_pairs]),
        ("pooled", [test.pvalue.item() for test in by_model]),
    ):
        adjusted = multipletests(p_values, method="holm")[1]
        for contrast, p, holm in zip(comparison.contrasts, p_values, adjusted, strict=True):
            difference = getattr(contrast.analyses, way)
            assert difference.p_value == pytest.approx(p, rel=1e-8)
            assert difference.adjusted_p == pytest.approx(holm, rel=1e-8)
    for contrast, test, fitted in zip(comparison.contrasts, by_pairs, by_model, strict=True):
        paired, pooled = contrast.analyses.paired, contrast.analyses.pooled
        assert paired.mean == pytest.approx(pooled.mean) == (table[contrast.first] - table[contrast.second]).mean()
        assert paired.simultaneous_interval == pytest.approx(test.confidence_interval(1 - 0.05 / 2), rel=1e-8)
        assert paired.interval_90 == pytest.approx(test.confidence_interval(0.9), rel=1e-8)
        assert pooled.standard_error == pytest.approx(fitted.sd.item(), rel=1e-8)
        assert pooled.degrees == model.df_resid == 27
        assert pooled.simultaneous_interval == pytest.approx(fitted.conf_int(alpha=0.05 / 2)[0], rel=1e-8)
        unpaired = stats.ttest_ind(table[contrast.first], table[contrast.second], equal_var=False)
        assert contrast.welch.p_value == pytest.approx(unpaired.pvalue, rel=1e-8)
        assert contrast.decided is paired

    for row, cells in zip(ROWS, comparison.matrix, strict=True):
        for other, cell in zip(ROWS, cells, strict=True):
            if row == other:
                assert cell is None
                continue
            lead = table[row] - table[other]
            assert cell.mean == pytest.approx(lead.mean())
            assert (cell.wins, cell.ties, cell.losses) == ((lead > 0).sum(), (lead == 0).sum(), (lead < 0).sum())
            assert cell.p_value == pytest.approx(stats.ttest_rel(table[row], table[other]).pvalue, rel=1e-8)


def test_the_analysis_that_decides_can_be_the_pooled_one():
    comparison = answer(FOLDS, decide_by="pooled")
    for contrast in comparison.contrasts:
        assert contrast.decided is contrast.analyses.pooled
    assert "verdicts follow the model accuracy ~ row + fold, pooled error" in told(comparison).design


def test_cross_validation_is_corrected_for_overlap_in_both_analyses_and_has_no_unpaired_test():
    scores = {name: FOLDS[name] for name in ("none", "maxgain")}
    plain, cut = answer(scores), answer(scores, cross_validation=10)
    for way in ("paired", "pooled"):
        before = getattr(plain.contrasts[0].analyses, way)
        after = getattr(cut.contrasts[0].analyses, way)
        # Trained on nine folds of ten and tested on one: the variance is (1/10 + 1/9) s² instead of s²/10.
        assert after.standard_error == pytest.approx(before.standard_error * np.sqrt((1 / 10 + 1 / 9) * 10))
    assert cut.contrasts[0].welch is None
    assert plain.contrasts[0].welch is not None


def test_seeds_within_a_fold_are_averaged_before_folds_are_paired():
    values = {name: np.round(np.repeat(FOLDS[name], 3) + random.normal(0, 0.01, 30), 4) for name in ("none", "maxgain")}
    comparison = answer({name: row.tolist() for name, row in values.items()}, seeds=3)
    assert len(comparison.contrasts[0].pairs) == 10
    means = {name: row.reshape(10, 3).mean(axis=1) for name, row in values.items()}
    expected = stats.ttest_rel(means["maxgain"], means["none"])
    assert comparison.contrasts[0].decided.p_value == pytest.approx(expected.pvalue, rel=1e-8)
    assert comparison.row("none").summary.standard_error == pytest.approx(stats.sem(means["none"]))
    assert comparison.row("none").planned == 30
    assert "the 3 seeds per fold are averaged before pairing" in told(comparison).design


# Failures


NONE = [0.80, 0.82, 0.79, 0.81, 0.80, 0.83]
THREE_LEFT = [0.85, 0.868, 0.842, None, None, None]


def test_promise_20_a_lead_of_the_survivors_is_no_verdict():
    """A row that diverged on 3 of 6 folds was once called significantly better, by the other three."""
    comparison = answer({"none": NONE, "maxgain": THREE_LEFT})
    (contrast,) = comparison.contrasts
    survivors = stats.ttest_rel(THREE_LEFT[:3], NONE[:3])
    assert contrast.decided.p_value == pytest.approx(survivors.pvalue, rel=1e-8)
    assert contrast.decided.p_value < 0.05
    guessing = stats.ttest_rel([*THREE_LEFT[:3], 0.1, 0.1, 0.1], NONE)
    assert contrast.decided_with_failures.p_value == pytest.approx(guessing.pvalue, rel=1e-8)
    assert (contrast.among_survivors, contrast.verdict) == ("established", "inconclusive")
    words = told(comparison)
    assert words.outcome == "Inconclusive: maxgain (3 of 6 runs) against none."
    assert words.contrasts[0].startswith(
        "inconclusive: on the 3 of 6 folds where both have a score, maxgain is better than none by 5.0 points"
    )
    assert "but 3 of 6 runs of maxgain failed: with failures counted as guessing (10 %)" in words.contrasts[0]
    assert words.contrasts[0].endswith("so nothing is settled")
    assert "maxgain: 3 of 6 runs failed and have no score." in words.gaps


def test_promise_20_a_failure_takes_its_own_pairs_away_and_nobody_elses():
    """The loss of one fold of dropout once moved MaxGain's p from 0.104 to 0.045."""
    whole = {"none": NONE, "maxgain": [0.81, 0.83, 0.79, 0.83, 0.80, 0.84], "dropout": [0.7, 0.7, 0.75, 0.7, 0.7, 0.72]}
    broken = whole | {"dropout": [0.7, None, 0.75, 0.7, 0.7, 0.72]}
    before, after = (answer(scores).contrasts[0] for scores in (whole, broken))
    assert (before.first, after.first) == ("maxgain", "maxgain")
    assert after.analyses.paired.p_value == before.analyses.paired.p_value
    assert after.pairs == before.pairs == (0, 1, 2, 3, 4, 5)
    assert after.failures_as_chance is None


def test_promise_20_a_lead_that_survives_the_failures_stands_and_says_so():
    # The failed runs are those of the row that is behind: counting them as guessing leaves it further behind.
    comparison = answer({"none": [0.5, 0.52, 0.51, None, 0.5, 0.53], "maxgain": [0.9, 0.93, 0.9, 0.92, 0.91, 0.94]})
    (contrast,) = comparison.contrasts
    assert contrast.verdict == contrast.among_survivors == "established"
    assert told(comparison).outcome == "Established: maxgain is better than none (5 of 6 runs)."
    assert "so it holds" in told(comparison).contrasts[0]


def test_promise_20_a_row_whose_runs_all_failed_is_named_and_the_others_are_compared():
    comparison = answer(
        {"none": NONE, "dropout": [None] * 6, "maxgain": [v + 0.05 + 0.001 * i for i, v in enumerate(NONE)]}
    )
    row = comparison.row("dropout")
    assert (row.summary, row.done, row.failed, row.planned) == (None, 0, 6, 6)
    by_name = {contrast.first: contrast for contrast in comparison.contrasts}
    assert by_name["dropout"].decided is None
    assert by_name["dropout"].verdict == "inconclusive"
    assert by_name["maxgain"].verdict == "established"
    # What cannot be tested takes no step of Holm's from the others.
    assert by_name["maxgain"].decided.adjusted_p == by_name["maxgain"].decided.p_value
    assert "dropout is not compared: all of its 6 runs failed." in told(comparison).gaps
    assert "dropout (0 of 6 runs) against none" in told(comparison).outcome


def test_promise_20_a_mean_of_the_survivors_is_not_called_the_highest():
    scores = {"none": NONE, "dropout": [v - 0.01 for v in NONE], "maxgain": [0.99, *[None] * 5]}
    assert told(answer(scores)).matrix == ()
    first, _ = told(answer(scores | {"batchnorm": [v - 0.02 for v in NONE]})).matrix
    assert first.startswith("The row none has the highest mean of the rows that have a score on every fold, and is")
    tied = told(answer({"none": NONE, "dropout": NONE, "maxgain": [v - 0.01 for v in NONE]})).matrix
    assert tied == ("The rows none and dropout have the highest mean.",)


def test_the_pooled_analysis_tests_and_is_told_of_without_pairs():
    rows = {"none": [*NONE, None], "maxgain": [*[None] * 6, 0.9], "dropout": [0.8, 0.83, 0.79, 0.82, 0.81, 0.83, 0.8]}
    words = told(answer(rows, decide_by="pooled", contrasts=(("maxgain", "none"),)))
    assert "verdicts follow the model accuracy ~ row + fold" in words.design
    alone = {"none": [0.9, None], "maxgain": [None, 0.95], "dropout": [0.9, 0.9]}
    words = told(answer(alone, decide_by="pooled", contrasts=(("maxgain", "none"),)))
    assert "runs without a pair cannot tell a difference of +5.0 points from chance" in words.contrasts[0]


def test_a_run_that_has_not_been_run_is_no_failure():
    question, found = asked({"none": NONE, "maxgain": [0.85, 0.86, 0.84, 0.87, 0.85, 0.88]})
    comparison = compare(question, replace(found, runs=found.runs[:-2]))
    assert [failure.error for failure in comparison.failures] == [NOT_RUN] * 2
    assert comparison.contrasts[0].failures_as_chance is None
    assert "maxgain: 2 of 6 runs have not been run." in told(comparison).gaps
    assert "on the 4 of 6 folds where both have a score" in told(comparison).contrasts[0]


def test_a_run_that_could_not_be_run_is_a_failure_with_its_reason():
    question, found = asked({"none": NONE, "maxgain": NONE})
    hopeless = Planned(None, "maxgain", 0, 0, "no number could be chosen")
    rows = question.rows | {"maxgain": (hopeless, *question.rows["maxgain"][1:])}
    comparison = compare(replace(question, rows=rows), found)
    assert [(failure.row, failure.error, failure.was_run) for failure in comparison.failures] == [
        ("maxgain", "no number could be chosen", True)
    ]
    assert comparison.row("maxgain").failed == 1


def test_a_fold_with_a_failed_seed_has_no_score():
    scores = {"none": [0.8] * 6, "maxgain": [0.9, 0.91, 0.92, None, 0.9, 0.93]}
    comparison = answer(scores, seeds=2)
    assert comparison.contrasts[0].pairs == (0, 2)
    row = comparison.row("maxgain")
    assert (row.done, row.failed, row.planned) == (5, 1, 6)
    assert list(row.scores) == [0, 2]


def test_when_nothing_succeeded_the_headline_says_so():
    comparison = answer({"none": [None, None], "maxgain": [None, None]})
    assert comparison.runs == ()
    assert told(comparison).outcome == "No run succeeded: all 4 failed or were not run."


# What is undefined


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ({"none": [0.9, 0.91, 0.92], "maxgain": [0.91, 0.92, 0.93]}, "all 3 pairs differ by the same +1.0 points"),
        ({"none": [0.9, 0.91], "maxgain": [0.9, 0.91]}, "both have the same score on every fold"),
        ({"none": [0.9], "maxgain": [0.95]}, "one fold cannot tell a difference of +5.0 points from chance"),
        ({"none": [0.9, None], "maxgain": [None, 0.95]}, "no fold has a score of both maxgain and none"),
    ],
)
def test_without_spread_or_pairs_p_is_undefined_and_null_in_json(scores, why):
    comparison = answer(scores, rope=0.5)
    content = json.loads(json.dumps(sentences.to_json(comparison), allow_nan=False))
    (contrast,) = content["contrasts"]
    for way in ("paired", "pooled"):
        difference = contrast["analyses"][way]
        if difference is not None:
            assert [difference[name] for name in ("p_value", "adjusted_p", "interval", "t")] == [None] * 4
    assert contrast["verdict"] == "inconclusive"
    assert why in content["in_words"]["contrasts"][0]
    assert comparison.tested == 0


def test_an_undefined_difference_takes_no_step_of_holms():
    scores = {"none": NONE, "same": [v + 0.01 for v in NONE], "maxgain": [0.81, 0.84, 0.80, 0.82, 0.82, 0.84]}
    question, found = asked({"none": NONE, "dropout": scores["same"], "maxgain": scores["maxgain"]})
    contrast = compare(question, found).contrasts[1]
    assert contrast.decided.adjusted_p == contrast.decided.p_value
    assert contrast.decided.simultaneous_interval == pytest.approx(contrast.decided.interval)


def test_a_negligible_difference_can_be_established_and_equivalent_at_once():
    scores = {"none": NONE, "maxgain": [v + 0.001 + 0.0001 * (i % 3) for i, v in enumerate(NONE)]}
    (contrast,) = answer(scores, rope=0.005).contrasts
    assert (contrast.verdict, contrast.equivalent) == ("established", True)
    close = {"none": NONE, "maxgain": [v + 0.001 * (-1) ** i for i, v in enumerate(NONE)]}
    comparison = answer(close, rope=0.005)
    assert comparison.contrasts[0].verdict == "equivalent"
    assert told(comparison).outcome == "Equivalent within ±0.5 points: maxgain and none."


def test_an_interval_inside_the_region_of_equivalence_is_not_rounded_to_its_end():
    """±0.5 points, and an interval to 0.47: '+0.5' would say that it is not inside."""
    close = {"none": NONE, "maxgain": [v + 0.0052 * (-1) ** i for i, v in enumerate(NONE)]}
    comparison = answer(close, rope=0.005)
    low, high = (100 * end for end in comparison.contrasts[0].decided.interval_90)
    assert 0.45 < high < 0.5
    assert f"(90 % interval {low:+.2f} to {high:+.2f})" in told(comparison).contrasts[0]


# The test set's own sampling error


def test_predictions_add_the_test_sets_own_sampling_error():
    question, found = asked({"none": [0.8, 0.82, 0.81], "maxgain": [0.85, 0.87, 0.84]}, over="seed")
    right = {
        run["key"]: np.random.default_rng(n).random(100) < run["test_accuracy"] for n, run in enumerate(found.runs)
    }
    comparison = compare(question, found, lambda record: right[record["key"]])
    differences = [
        right[a.key].astype(float) - right[b.key]
        for a, b in zip(question.rows["maxgain"], question.rows["none"], strict=True)
    ]
    assert comparison.contrasts[0].bootstrap == bootstrap(differences)
    assert "runs and 100 test images drawn anew: standard error" in told(comparison).sampling[0]


def test_without_all_predictions_there_is_no_bootstrap():
    question, found = asked({"none": [0.8, 0.82, 0.81], "maxgain": [0.85, 0.87, 0.84]}, over="seed")
    assert compare(question, found).contrasts[0].bootstrap is None
    right = np.ones(10, dtype=bool)
    partly = compare(question, found, lambda record: right if record["seed"] else None)
    assert partly.contrasts[0].bootstrap is None


def test_folds_have_their_images_in_their_spread_and_draw_none_again():
    """Where folds differ in nothing but their images, drawing these too would say 1.4 times the standard error."""
    question, found = asked({"none": [0.8, 0.82, 0.81], "maxgain": [0.85, 0.87, 0.84]})
    comparison = compare(question, found, lambda record: np.arange(100) < 100 * record["test_accuracy"])
    assert comparison.contrasts[0].bootstrap is None
    assert comparison.contrasts[0].decided.standard_error > 0
    assert not told(comparison).sampling


def test_predictions_that_cannot_be_read_are_named_and_done_without():
    question, found = asked({"none": [0.8, 0.82, 0.81], "maxgain": [0.85, 0.87, 0.84]}, over="seed")

    def damaged(record):
        raise FileError(f"{record['seed']}.npz is damaged.")

    comparison = compare(question, found, damaged)
    assert comparison.contrasts[0].bootstrap is None
    assert comparison.contrasts[0].decided is not None
    assert comparison.notes == ("Left out: 0.npz is damaged.",)


# Whatever else


def test_a_row_is_called_by_its_numbers_but_for_factors_of_1_that_nobody_named():
    """A table that says dropout=1 and, below, dropout, looks as if there were two of them."""
    comparison = answer({name: [0.8, 0.9] for name in ("none", "dropout", "maxgain+dropout", "concretedropout=1")})
    assert [row.label for row in comparison.rows] == ["none", "dropout", "maxgain=2+dropout", "concretedropout=1"]
    chosen = answer({"none": [0.8], "dropout": [0.9]}, chosen={"dropout": ("dropout",)})
    assert chosen.rows[1].label == "dropout=1"
    row = "maxgain+dropout"
    partly = answer({"none": [0.8], row: [0.9]}, tuning_runs={row: 5}, chosen={row: ("maxgain",)})
    assert told(partly).choices == ("maxgain+dropout, chosen: maxgain=2+dropout",)


def test_a_row_for_which_nothing_could_be_chosen_is_called_by_no_number():
    question, found = asked({"none": [0.8, 0.9], "maxgain": [0.8, 0.9]}, chosen={"maxgain": ("maxgain",)})
    runs = [replace(run, key=None, error="no number could be chosen") for run in question.rows["maxgain"]]
    partly = replace(question, rows=question.rows | {"maxgain": (question.rows["maxgain"][0], runs[1])})
    assert compare(partly, found).rows[1].label == "maxgain=2"
    nowhere = replace(question, rows=question.rows | {"maxgain": tuple(runs)})
    assert compare(nowhere, found).rows[1].label == "maxgain"


def test_which_seeds_the_folds_had_is_said():
    question, found = asked({"none": NONE, "maxgain": NONE})
    assert "6 disjoint folds, each with its own seed, which all rows share;" in told(compare(question, found)).design
    rows = {name: tuple(replace(run, seed=7) for run in runs) for name, runs in question.rows.items()}
    assert (
        "all with seed 7, so that the result is about one initialisation;"
        in told(compare(replace(question, rows=rows), found)).design
    )
    mixed = rows | {"none": question.rows["none"]}
    assert "with seeds that differ between the rows" in told(compare(replace(question, rows=mixed), found)).design


def test_rows_that_were_not_trained_on_the_same_folds_are_not_said_to_be():
    question, found = asked({"none": NONE, "maxgain": NONE})
    fewer = replace(question, rows=question.rows | {"none": question.rows["none"][:2]})
    assert "on digits, 6 disjoint folds, of which some rows lack some;" in told(compare(fewer, found)).design
    twice = (*question.rows["none"], replace(question.rows["none"][0], seed=9))
    uneven = replace(question, rows=question.rows | {"none": twice})
    assert "; the seeds of a row on one fold are averaged before pairing;" in told(compare(uneven, found)).design
    alone = told(answer({"maxgain": NONE}, baseline="maxgain")).design
    assert alone.startswith("The regulariser maxgain on digits, 6 disjoint folds, each with its own seed; trained")


def test_intervals_are_said_to_hold_together_by_the_analysis_that_tests_several():
    """Here the paired test has no spread for maxgain, and the pooled model borrows dropout's."""
    comparison = answer({"none": [0.9, 0.8, 0.7], "maxgain": [0.9, 0.8, 0.7], "dropout": [0.8, 0.8, 0.75]})
    titles = [column.title for column in tables(comparison)[1].columns]
    assert "paired 95 % interval" in titles
    assert "pooled 95 % together" in titles


def test_no_difference_of_more_than_100_points_is_called_possible():
    comparison = answer({"none": [0.5, 0.9], "maxgain": [0.6, 0.5]})
    assert comparison.contrasts[0].decided.simultaneous_interval[0] < -1
    assert "anything from -100.0 to +100.0 points is possible" in told(comparison).contrasts[0]


def test_neither_the_order_of_the_records_nor_records_of_other_runs_change_anything():
    question, found = asked(FOLDS, contrasts=contrasts(["matched"], ROWS))
    others = tuple(synthetic_run(name, fold=fold, accuracy=0.1, epochs=3) for name in ROWS for fold in range(10))
    mixed = Records((*others, *found.runs[::-1]), (), ())
    assert compare(question, mixed).to_json() == compare(question, found).to_json()


def test_promise_18_records_of_other_data_are_counted_and_left_out():
    question, found = asked({"none": NONE, "maxgain": NONE})
    other = [
        run | {"fingerprint": "other", "key": f"other{n}", "test_accuracy": 1.0} for n, run in enumerate(found.runs)
    ]
    comparison = compare(question, replace(found, runs=(*other, *found.runs)))
    assert comparison.rows == compare(question, found).rows
    assert comparison.notes == ("12 records in this folder: of other data, and left out.",)


def test_notes_about_the_data_are_passed_on_once():
    question, found = asked({"none": NONE, "maxgain": NONE})
    noted = replace(found, runs=tuple(run | {"note": "half of SVHN"} for run in found.runs))
    assert compare(question, noted).notes == ("Note: half of SVHN.",)


def test_tuning_runs_that_failed_are_part_of_the_result():
    question, found = asked({"none": NONE, "maxgain": NONE})
    tuned = replace(question, tuning_runs={"maxgain": 9}, tuning_failures={"maxgain": 2})
    assert told(compare(tuned, found)).gaps == ("maxgain: 2 tuning runs failed and had no say in its numbers.",)
    assert tuned == replace(tuned, tuning_failures={}), "the same question, when they are tried again"


def test_what_was_chosen_is_said_by_fold_where_it_differs():
    question, found = asked({"none": NONE, "maxgain": NONE})
    rows = question.rows | {
        "maxgain": tuple(
            replace(run, regulariser=f"maxgain={1 + fold % 2}", error="all failed" if fold == 5 else None)
            for fold, run in enumerate(question.rows["maxgain"])
        )
    }
    tuned = replace(question, rows=rows, tuning_runs={"maxgain": 9}, validation_images=40)
    words = told(compare(tuned, found))
    assert words.choices == ("maxgain, chosen by fold: maxgain=1; maxgain=2; maxgain=1; maxgain=2; maxgain=1; nothing",)
    assert (
        "Numbers were chosen on every fold, on the validation part, of which one image is worth 2.5 points, with the "
        "same budget of 9 runs each; nothing was chosen for none." in words.design
    )
    assert told(compare(replace(question, tuning_runs={"maxgain": 9}), found)).choices == (
        "maxgain, chosen: maxgain=2",
    )


def test_an_interval_that_reaches_over_zero_beside_an_established_difference_is_explained():
    spread = np.array([-0.012, -0.004, 0.0, 0.004, 0.012])
    baseline = 0.9 + np.zeros(5)
    clear = {f"maxgain={gamma}": (0.95 + spread).tolist() for gamma in (2, 3, 4)}
    comparison = answer({"none": baseline.tolist(), **clear, "dropout": (0.912 + spread).tolist()}, over="seed")
    last = comparison.contrasts[-1]
    low, high = last.decided.simultaneous_interval
    assert last.verdict == "established"
    assert low < 0 < high
    sentences_by_row = dict(zip((c.first for c in comparison.contrasts), told(comparison).contrasts, strict=True))
    assert "is wider, as it holds together with the others" in sentences_by_row["dropout"]
    assert "is wider" not in sentences_by_row["maxgain=2"]


def test_the_pooled_analysis_does_not_claim_to_rest_on_the_pairs_alone():
    scores = {
        "none": [0.90, 0.905, None, 0.91, 0.902],
        "maxgain": [0.95, None, 0.953, 0.949, 0.951],
        "dropout": [0.91, 0.913, 0.909, 0.92, 0.912],
    }
    comparison = answer(scores, over="seed", decide_by="pooled", contrasts=(("maxgain", "none"),))
    pairs = [scores["maxgain"][seed] - scores["none"][seed] for seed in (0, 3, 4)]
    assert comparison.contrasts[0].decided.mean != pytest.approx(np.mean(pairs), abs=1e-6)
    (sentence,) = told(comparison).contrasts
    assert "with a score of both on 3 of 5 seeds, maxgain is better than none" in sentence
