"""What else is on the page: runs, failures, searches, curves, and what is left out."""

import json
import math
import re
from dataclasses import replace

import pytest

from maxgain.study.comparing import records
from maxgain.study.comparing.records import Records
from maxgain.study.report import page, tunings
from maxgain.study.report.drawing import Axis
from maxgain.study.report.page import build_page
from page_elements import BETTER, LIKE, NONE, Elements, bare_records, built
from synthetic_records import COMMAND, failed_run, synthetic_records, synthetic_run


def test_every_run_has_its_score_command_versions_and_machine():
    found = bare_records({"none": NONE, "maxgain": BETTER})
    other = synthetic_run(
        "maxgain", fold=9, command="maxgain train digits --fold 9", torch="2.11.0", accuracy=0.5, history=[]
    )
    shown = Elements(build_page(replace(found, runs=(*found.runs, other))))
    for told in (COMMAND, "maxgain train digits --fold 9", "torch 2.11.0", "torch 2.13.0", "Synthetic x86_64", "cpu"):
        assert told in shown.text
    for run in (*found.runs, other):
        assert run["key"] in shown.text


def test_failed_runs_are_listed_with_their_error_and_command():
    failed = failed_run("maxgain", fold=3, error="the loss became infinite in epoch 7") | {"command": "maxgain x"}
    shown = built({"none": NONE[:3], "maxgain": LIKE[:3]}, failed=[failed])
    assert "digits, maxgain=2, fold 3, seed 0" in shown.text
    assert "the loss became infinite in epoch 7" in shown.text
    assert "maxgain x" in shown.text


def test_figures_have_text_alternatives(whole):
    drawings = [attributes for tag, attributes in whole.elements if tag == "svg"]
    labelled = [attributes["aria-label"] for attributes in drawings if attributes.get("role") == "img"]
    assert len(labelled) == 4 + 3  # learning curves; gains of two parts and norms
    assert all(attributes.get("aria-hidden") or attributes.get("aria-label") for attributes in drawings)
    assert "After the last epoch: none" in labelled[0]


def test_ids_are_unique_and_references_lead_somewhere(whole):
    ids = [attributes["id"] for _, attributes in whole.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    inside = {
        reference
        for _, attributes in whole.elements
        for name, value in attributes.items()
        for reference in re.findall(r"#([\w-]+)", value or "")
        if name in ("href", "clip-path")
    }
    assert inside
    assert inside <= set(ids)


def test_what_a_record_does_not_have_is_left_out():
    shown = built({"none": NONE, "maxgain": BETTER}, gain_quantiles={}, command=None, machine=None)
    assert "maxgain is better than none" in shown.text
    for heading in ("Learning curves", "operator norms", "Gains of two runs", "How numbers were chosen"):
        assert heading not in shown.text


def test_a_record_with_norms_but_no_gains_and_a_time_that_nobody_can_read_has_a_page():
    runs = [synthetic_run("none", seed=0, finished="yesterday"), synthetic_run("none", seed=1, finished="2026-05-31")]
    del runs[0]["max_gain"]
    assert "31 May 2026" in build_page(Records(tuple(runs), (), ()))


def test_final_runs_that_hold_nothing_out_have_no_validation_curves():
    found = synthetic_records({"none": NONE}, operator_norms={})
    runs = tuple(
        run | {"history": [line | {"validation_loss": None, "validation_accuracy": None} for line in run["history"]]}
        for run in found.runs
    )
    text = build_page(replace(found, runs=runs))
    assert "training loss" in text
    assert "validation loss" not in text


def test_a_search_is_drawn_with_its_numbers_and_its_choice(tmp_path):
    scores = {"train_accuracy": 0.99, "train_loss": 0.02, "validation_accuracy": 0.9125, "validation_loss": 0.3}
    curve = [{"values": {"maxgain": value}, "status": "complete", **scores} for value in (1.5, 2.0)]
    curve.append({"values": {"maxgain": 9.0}, "status": "pruned", "epochs": 3})
    tuned = {"recipe": "digits", "asked": "maxgain", "regulariser": "maxgain=2", "values": {"maxgain": 2.0}}
    for name, content in (("curve", curve), ("tuned", tuned)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    page.write(tmp_path, tmp_path / "report.html")
    shown = Elements((tmp_path / "report.html").read_text())
    assert "γ for MaxGain on digits: 2 " in shown.text
    assert "Chosen: maxgain=2." in shown.text
    assert "3 trials" in shown.text
    assert "0 finished runs" not in shown.text
    drawn = next(a["aria-label"] for tag, a in shown.elements if a.get("role") == "img")
    assert "against γ, 2 points" in drawn
    headings, *rows = shown.tables[0]
    assert headings[0] == "γ"
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1.5", "91.25", ""),
        ("2.0", "91.25", "chosen"),
        ("9.0", "–", "pruned"),
    ]


def test_notes_about_the_data_are_passed_on():
    assert "Note: half of SVHN." in built({"none": NONE}, note="half of SVHN").text


def test_one_run_has_a_page_with_its_score_curves_gains_and_command():
    run = synthetic_run("maxgain", accuracy=0.9725)
    shown = Elements(build_page(Records((run,), (), ()), alone={run["key"]}))
    assert "MaxGain (γ = 2) on digits: 97.25 % on the test set" in shown.text
    labels = [a["aria-label"] for _, a in shown.elements if a.get("role") == "img"]
    assert sum("by epoch" in label for label in labels) == 2
    assert COMMAND in shown.text


def test_a_comparison_and_a_run_by_itself_of_one_recipe_are_both_on_the_page():
    found = synthetic_records({"none": NONE, "maxgain": BETTER})
    run = synthetic_run("maxgain", fold=None, seed=7, accuracy=0.9725)
    shown = Elements(build_page(Records((*found.runs, run), (), ()), alone={run["key"]}))
    assert "maxgain is better than none" in shown.text
    assert "MaxGain (γ = 2) on digits: 97.25 % on the test set" in shown.text


def test_the_numbers_of_a_logarithmic_axis_are_short_enough_to_be_seen():
    axis = Axis.over([3e-6, 0.2], 226, 26, logarithmic=True)
    assert axis.texts(axis.ticks()) == ["1e-5", "0.0001", "0.001", "0.01", "0.1"]


EXTREMES = (0.0, 5e-324, 1e-150, 1.0, math.nextafter(1, 2), 2.0**63, 1e308, math.inf, -1e308, -1.0)


@pytest.mark.parametrize("one", EXTREMES)
@pytest.mark.parametrize("other", EXTREMES)
def test_axes_hold_whatever_a_record_may_say(one, other):
    ways = [False, True] if min(one, other) > 0 else [False]
    for logarithmic in ways:
        axis = Axis.over([one, other], 0, 100, logarithmic=logarithmic)
        ticks = axis.ticks()
        assert 1 < len(ticks) < 12
        assert len(axis.texts(ticks)) == len(ticks)
        assert all(0 <= axis(value) <= 100 for value in (one, other, *ticks))


def tuning_run(gamma, fold, accuracy, **changes):
    """A run of `compare --tuned` that tries a number on a fold."""
    return synthetic_run(f"maxgain={gamma:g}", fold=fold, accuracy=accuracy, tuned={"maxgain": gamma}, **changes) | {
        "regulariser": "maxgain"
    }


def test_promise_18_tuning_runs_of_other_settings_or_data_are_not_averaged(tmp_path):
    tried = [tuning_run(gamma, fold, 0.9) for gamma in (1.0, 2.0) for fold in range(2)]
    tried += [tuning_run(3.0, 0, 0.99), tuning_run(1.0, 0, 0.1, epochs=5)]
    for run in tried:
        records.append(tmp_path / "tuning" / "results", run)
    found, problems = tunings.read(tmp_path, Records((), (), ()))
    assert not problems
    assert [search.title for search in found] == ["digits, maxgain, mean over 2 folds", "digits, maxgain (search 2)"]
    by_gamma = {row["values"]["maxgain"]: row for row in found[0].curve}
    assert [by_gamma[gamma].get("validation_accuracy") for gamma in (1.0, 2.0, 3.0)] == [0.9, 0.9, None]
    assert by_gamma[3.0]["status"] == "unfinished"
    elsewhere = [run | {"fingerprint": "other", "key": f"other {run['key']}"} for run in tried[:4]]
    searches = tunings._by_fold(Records((*tried[:4], *elsewhere), (), ()), ())
    assert "on other data too" in searches[0].outcome
    assert len(searches) == 2


def test_tuning_runs_of_other_seeds_are_not_averaged():
    tried = [
        tuning_run(gamma, fold, 0.9 if begin else 0.5, seed=begin + fold)
        for begin in (0, 50)
        for gamma in (1.0, 2.0)
        for fold in range(2)
    ]
    searches = tunings._by_fold(Records(tuple(tried), (), ()), ())
    assert [[row["validation_accuracy"] for row in search.curve] for search in searches] == [[0.5, 0.5], [0.9, 0.9]]
    assert "or with other seeds" in searches[1].outcome
