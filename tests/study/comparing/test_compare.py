"""Comparisons: what is run, that nothing is run twice, and that only complete pairs are tested."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from PIL import Image

from maxgain.errors import RecipeError, RunError
from maxgain.study import files, signals
from maxgain.study.cli.app import main
from maxgain.study.comparing import engine, records, tuning_rule
from maxgain.study.comparing import jobs as compare
from maxgain.study.comparing.engine import Here
from maxgain.study.comparing.jobs import Job
from maxgain.study.comparing.records import Records
from maxgain.study.comparing.sentences import to_json
from maxgain.study.recipes import RECIPES
from maxgain.study.report import page
from maxgain.study.report.comparisons import comparisons, questions_in
from maxgain.study.runs import Place, perform
from one_process import in_this_process

QUICK = replace(RECIPES["digits"], network="mlp", epochs=2)
FLAGS = ["--network", "mlp", "--epochs", "2"]
REGULARISERS = ("none", "dropout", "maxgain")


# What is to be run


def test_every_regulariser_runs_on_every_fold():
    jobs = compare.plan(QUICK, REGULARISERS, compare.folds(QUICK, 4))
    assert [(job.recipe.fold, job.recipe.regulariser) for job in jobs] == [
        (fold, regulariser) for fold in range(4) for regulariser in REGULARISERS
    ]
    assert len({job.key for job in jobs}) == 12


def test_every_fold_has_a_seed_of_its_own_which_all_rows_share():
    recipe = replace(QUICK, seed=5)
    jobs = compare.plan(recipe, REGULARISERS, compare.folds(recipe, 4))
    assert {(job.recipe.fold, job.recipe.seed) for job in jobs} == {(fold, 5 + fold) for fold in range(4)}


def test_seeds_and_folds_together_are_several_seeds_on_every_fold_and_never_the_same_twice():
    jobs = compare.plan(QUICK, ["none", "maxgain"], compare.folds(QUICK, 10, seeds=3))
    assert len(jobs) == 60
    seeds = {row: [job.recipe.seed for job in jobs if job.row == row] for row in ("none", "maxgain")}
    assert seeds["none"] == seeds["maxgain"]
    assert len(set(seeds["none"])) == 30
    # More seeds leave the runs that there are as they are.
    fewer = compare.plan(QUICK, ["none", "maxgain"], compare.folds(QUICK, 10, seeds=2))
    assert {job.key for job in fewer} < {job.key for job in jobs}


def test_seeds_begin_with_the_recipes_own_and_leave_the_data_alone():
    recipe = replace(QUICK, seed=7, fold=3)
    jobs = compare.plan(recipe, REGULARISERS, compare.seeds(recipe, 3))
    assert {job.recipe.seed for job in jobs} == {7, 8, 9}
    assert {job.recipe.fold for job in jobs} == {3}


def test_folds_that_are_not_there_are_refused():
    with pytest.raises(RecipeError, match="cifar10 has a single split, and cross-validation takes 3 --folds at least"):
        compare.folds(RECIPES["cifar10"], 2)
    with pytest.raises(RecipeError, match="digits has 10 folds, so --folds must be from 1 to 10, not 11"):
        compare.folds(QUICK, 11)


# Tuning by fold


def test_tuning_tries_a_grid_on_every_fold_and_holds_the_validation_part_out():
    jobs = compare.plan(replace(QUICK, train_on="train+validation"), ["none", "maxgain"], compare.folds(QUICK, 2))
    tuning = compare.plan_tuning(jobs, [tuning_rule.Grid.parsed("gamma=1:3:1")], 9)
    assert [(job.recipe.fold, job.recipe.regulariser) for job in tuning] == [
        (fold, f"maxgain={gamma}") for fold in range(2) for gamma in (1, 2, 3)
    ]
    assert {job.recipe.train_on for job in tuning} == {"train"}


def test_each_fold_is_trained_with_what_was_chosen_on_it():
    jobs = compare.plan(QUICK, ["none", "maxgain+batchnorm"], compare.folds(QUICK, 2))
    tuning = compare.plan_tuning(jobs, [tuning_rule.Grid.parsed("gamma=1:3:1")], 9)
    accuracies = [0.8, 0.9, 0.7, 0.9, 0.9, 0.9]
    losses = [0.1, 0.5, 0.1, 0.5, 0.6, 0.4]
    runs = tuple(
        {"key": job.key, "status": "ok", "validation_accuracy": accuracy, "validation_loss": loss}
        for job, accuracy, loss in zip(tuning, accuracies, losses, strict=True)
    )
    assert compare.tuning_runs(tuning) == {"maxgain+batchnorm": 3}
    final = compare.tuned(jobs, tuning, Records(runs, (), ()))
    assert [(job.recipe.fold, job.recipe.regulariser) for job in final] == [
        (0, "none"),
        (0, "maxgain=2+batchnorm"),
        (1, "none"),
        (1, "maxgain=3+batchnorm"),
    ]
    assert [job.row for job in final] == ["none", "maxgain+batchnorm"] * 2
    assert {job.recipe.train_on for job in final} == {jobs[0].recipe.train_on}


def test_seeds_share_a_choice_because_they_share_the_data():
    jobs = compare.plan(QUICK, ["dropout"], compare.seeds(QUICK, 3))
    assert len(compare.plan_tuning(jobs, [], 6)) == 6


def test_every_row_with_something_to_choose_gets_the_same_number_of_runs():
    jobs = compare.plan(QUICK, ["none", "maxgain", "dropout", "maxgain+dropout"], compare.folds(QUICK, 2))
    tuning = compare.plan_tuning(jobs, [], 9)
    assert len(tuning) == 2 * 3 * 9
    assert compare.tuning_runs(tuning) == {"maxgain": 9, "dropout": 9, "maxgain+dropout": 9}


def test_a_row_for_which_nothing_could_be_chosen_has_failed_there_and_nothing_else_has():
    jobs = compare.plan(QUICK, ["none", "maxgain"], compare.folds(QUICK, 1))
    tuning = compare.plan_tuning(jobs, [], 4)
    none, maxgain = compare.tuned(jobs, tuning, Records((), (), ()))
    assert none.error is None
    assert maxgain.error == "no number could be chosen: all 4 tuning runs failed"
    assert maxgain.planned.key is None
    assert compare.missing([none, maxgain], Records((), (), ())) == [none]
    assert compare.tuning_failures(tuning, Records((), (), ())) == {"maxgain": 4}


@pytest.mark.usefixtures("_in_this_process")
def test_tuned_runs_never_score_on_test_before_the_choice_is_made(tmp_path, capsys):
    command = ["compare", "digits", "--regularisers", "none", "maxgain", "--folds", "2", "--tuned", *FLAGS]
    command += ["--grid", "gamma=1:2:1", "--out", str(tmp_path), "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    tuning = records.read(tmp_path / "tuning" / "results").runs
    assert len(tuning) == 4
    assert all(run["test_accuracy"] is None and "test" not in run["max_gain"] for run in tuning)
    final = records.read(tmp_path / "results").runs
    planned = {run["key"] for runs in first["asked"]["rows"].values() for run in runs}
    assert {run["key"] for run in final} == planned
    assert first["asked"]["tuning_runs"] == {"maxgain": 2}
    assert first["asked"]["validation_images"] == 36
    assert "one image is worth 2.8 points" in first["in_words"]["design"]
    for run in final:
        assert run["validation_accuracy"] is None
        assert run["config"]["train_on"] == "train+validation"
        assert run["gamma"] == run["tuned"].get("maxgain")
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == first


# Running


@pytest.mark.usefixtures("_in_this_process")
def test_a_failure_is_recorded_as_a_failure_and_tried_again(tmp_path):
    broken = compare.plan(replace(QUICK, learning_rate=1e30), ["none"], compare.folds(QUICK, 1))
    place = Place(tmp_path)
    for _ in range(2):
        missing = compare.missing(broken, records.read(place.results))
        assert missing == broken
        compare.perform_all(missing, place, Here(1), lambda job, record: None)
    lines = (tmp_path / "results" / "digits.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["failed", "failed"]
    assert "test_accuracy" not in json.loads(lines[0])
    assert json.loads(lines[0])["classes"] == 10


def write_images(folder, draw):
    """Twenty images of each of two classes; `draw` makes one from its class."""
    for label in (0, 1):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(20):
            Image.fromarray(draw(label)).save(folder / f"class{label}" / f"{number}.png")


@pytest.mark.usefixtures("_in_this_process")
def test_promise_18_runs_on_other_data_are_neither_counted_as_recorded_nor_shown(tmp_path, capsys):
    command = ["compare", "folder", "--network", "mlp", "--epochs", "1", "--image-size", "8", "--batch-size", "4"]
    command += ["--regularisers", "none", "maxgain", "--seeds", "2", "--out", str(tmp_path / "out")]
    for name, shade in (("a", 0), ("b", 100)):
        write_images(tmp_path / name, lambda label, shade=shade: np.full((8, 8, 3), shade + 120 * label, np.uint8))
    shown = {}
    for name in ("a", "b", "a"):
        assert main([*command, "--data", str(tmp_path / name)]) == 0
        told = capsys.readouterr().out
        assert f"{4 if name in shown else 0} of them recorded already" in told
        content = json.loads((tmp_path / "out" / "comparison.json").read_text())
        assert shown.setdefault(name, content["rows"]) == content["rows"]
    found = records.read(tmp_path / "out" / "results")
    assert len(found.runs) == 8
    (tmp_path / "out" / "asked.json").unlink()
    for comparison in comparisons(found).values():  # what the page shows where nobody knows what was asked
        assert len({run["fingerprint"] for run in comparison.runs}) == 1
        assert len(comparison.runs) == 4


@pytest.mark.usefixtures("_in_this_process")
def test_a_record_holds_the_result_and_the_learning_curve(tmp_path):
    jobs = compare.plan(QUICK, ["maxgain=1.5"], compare.folds(QUICK, 1))
    compare.perform_all(jobs, Place(tmp_path), Here(1), lambda job, record: None)
    (job,) = compare.identified(jobs, Place(tmp_path))
    run = records.read(tmp_path / "results").find(job.key)
    assert run["gamma"] == 1.5
    assert run["fold"] == 0
    assert 0 < run["test_accuracy"] <= 1
    assert [line["epoch"] for line in run["history"]] == [1, 2]


DIVERGE = ["--learning-rate", "1e30"]


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.filterwarnings("ignore::maxgain.errors.MeasurementWarning")
def test_promise_21_a_comparison_in_which_nothing_succeeded_exits_with_2(tmp_path, capsys):
    command = ["compare", "digits", "--regularisers", "none", "maxgain", "--folds", "2", *FLAGS, *DIVERGE]
    assert main([*command, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "No run succeeded: all 4 failed or were not run." in said.out
    assert "no run succeeded, so there is nothing to compare; the first, of none:" in said.err


@pytest.mark.usefixtures("_in_this_process")
def test_promise_20_a_comparison_in_which_some_failed_says_so_last(tmp_path, capsys, monkeypatch):
    def diverging(recipe, place, dataset, **how):
        if recipe.gamma is not None and recipe.fold == 1:
            raise RunError("the loss became infinite in epoch 1")
        return perform(recipe, place, dataset, **how)

    monkeypatch.setattr(engine, "perform", diverging)
    command = ["compare", "digits", "--regularisers", "none", "maxgain", "--folds", "3", *FLAGS]
    assert main([*command, "--out", str(tmp_path)]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last == "maxgain: 1 of 3 runs failed and have no score."
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert [(failure["row"], failure["error"]) for failure in content["failures"]] == [
        ("maxgain", "the loss became infinite in epoch 1")
    ]
    assert content["contrasts"][0]["pairs"] == [0, 2]


@pytest.mark.usefixtures("_in_this_process")
def test_promise_19_two_comparisons_in_one_folder_are_both_on_the_page_as_the_terminal_had_them(tmp_path, capsys):
    command = ["compare", "digits", *FLAGS, "--out", str(tmp_path), "--json"]
    told = []
    for asked in (
        ["--seeds", "2", "--regularisers", "none", "dropout"],
        ["--folds", "3", "--regularisers", "none", "dropout", "maxgain", "--rope", "1"],
        # Other numbers for a row of the same name.
        ["--folds", "3", "--regularisers", "none", "maxgain", "--tuned", "--grid", "gamma=0.5:0.5:1"],
    ):
        assert main([*command, *asked]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["contrasts"][0]["bootstrap"]["images"] == 359
    shown = comparisons(records.read(tmp_path / "results"), questions_in(tmp_path)[0])
    assert [json.loads(json.dumps(to_json(comparison))) for comparison in shown.values()] == told[::-1]
    page.write(tmp_path, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    for content in told:
        for sentence in (content["in_words"]["outcome"], *content["in_words"]["contrasts"]):
            assert str(escape(sentence)) in html


@pytest.mark.usefixtures("_in_this_process")
def test_promise_18_the_same_comparison_on_other_data_is_another_comparison(tmp_path, capsys):
    random = np.random.default_rng(0)
    write_images(tmp_path / "a", lambda label: np.full((8, 8, 3), 40 + 170 * label, np.uint8))
    write_images(tmp_path / "b", lambda label: random.integers(0, 256, (8, 8, 3), np.uint8))
    command = ["compare", "folder", "--regularisers", "none", "dropout", "--folds", "3", "--network", "mlp"]
    command += ["--image-size", "8", "--epochs", "6", "--learning-rate", "0.01", "--batch-size", "6"]
    command += ["--out", str(tmp_path / "out")]
    told = {}
    for name in ("a", "b"):
        assert main([*command, "--data", str(tmp_path / name)]) == 0
        said = capsys.readouterr().out
        assert "6 runs, 0 of them recorded already" in said
        told[name] = said, json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["summary"]["mean"] for row in told["a"][1]["rows"]] == [1, 1]
    assert all(row["summary"]["mean"] < 0.9 for row in told["b"][1]["rows"]), "it is noise"
    assert "6 records in this folder: of other data, and left out." in told["b"][0]
    shown = comparisons(records.read(tmp_path / "out" / "results"), questions_in(tmp_path / "out")[0])
    assert len(shown) == 2, "the page has one for each"


def test_two_comparisons_do_not_work_in_one_folder(tmp_path, capsys):
    with files.alone_in(tmp_path):
        assert main(["compare", "digits", "--regularisers", "none", "--folds", "1", "--out", str(tmp_path)]) == 2
    assert "another maxgain is at work in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs --regularisers"),
        (["--regularisers", "none"], "needs --folds or --seeds, or both"),
        (["--regularisers", "none", "--folds", "2", "--seeds", "0"], "--seeds must be at least 1"),
        (["--regularisers", "none", "--folds", "2", "--baseline", "dropout"], "baseline 'dropout' is not one of none"),
        (["--regularisers", "none", "--folds", "2", "--regulariser", "dropout"], "did you mean --regularisers?"),
        (["--regularisers", "none", "--folds", "2", "--fold", "1"], "leave out --fold"),
        (["--regularisers", "nome", "--folds", "2"], "did you mean 'none'?"),
        (["--regularisers", "maxgain", "--folds", "2", "--grid", "gamma=1:2:1"], "needs --tuned"),
        (["--regularisers", "none", "--folds", "2", "--tuned", "--grid", "gamma=1:2:1"], "no 'gamma' to choose"),
        (["--regularisers", "maxgain", "--folds", "2", "--budget", "4"], "needs --tuned"),
        (["--regularisers", "none", "none", "--folds", "2"], "none and none are the same regulariser"),
        (["--regularisers", "maxgain", "maxgain=2", "--folds", "2"], "maxgain and maxgain=2 are the same regulariser"),
        (
            ["--regularisers", "maxgain+dropout", "dropout+maxgain", "--folds", "2", "--tuned"],
            "maxgain+dropout and dropout+maxgain are the same regulariser",
        ),
        (["--regularisers", "maxgain", "--folds", "2", "--tuned", "--budget", "0"], "--budget must be at least 1"),
        (["--regularisers", "none", "--folds", "2", "--jobs", "0"], "--jobs must be at least 1"),
        (["--regularisers", "none", "maxgain", "--folds", "2", "--rope", "0"], "--rope must be a number of percentage"),
        (["--regularisers", "none", "maxgain", "--folds", "2", "--contrasts", "maxgain"], "write FIRST:SECOND"),
        (
            ["--regularisers", "none", "maxgain", "--folds", "2", "--contrasts", "matched", "--baseline", "none"],
            "leave out --baseline",
        ),
    ],
)
def test_what_makes_no_sense_is_answered_with_a_sentence(flags, message, capsys, tmp_path):
    assert main(["compare", "digits", "--out", str(tmp_path / "none"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# Stopping and going on


def begin(command: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "maxgain.study.cli.app", *command]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(what, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.01)


def recorded_runs(folder: Path) -> int:
    return len(records.read(folder / "results").runs)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_a_comparison_that_is_stopped_and_killed_ends_like_one_that_is_not(tmp_path, capsys, monkeypatch):
    flags = ["--network", "mlp", "--epochs", "6"]
    recipe = replace(QUICK, epochs=6, train_on="train+validation")
    jobs = compare.plan(recipe, REGULARISERS, compare.folds(recipe, 4))
    whole = Place(tmp_path / "whole")
    for job in jobs:
        compare.run_recorded(job, whole)

    folder = tmp_path / "killed"
    command = ["compare", "digits", "--regularisers", *REGULARISERS, "--folds", "4", *flags, "--json"]
    killed = begin([*command, "--jobs", "1", "--out", str(folder)])
    wait_for(lambda: recorded_runs(folder) >= 2)
    orphans = children(killed.pid)
    killed.kill()
    killed.communicate()
    assert 2 <= recorded_runs(folder) < len(jobs), "it was killed half-way"
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))

    before = recorded_runs(folder)
    stopped = begin([*command, "--jobs", "2", "--out", str(folder)])
    wait_for(lambda: recorded_runs(folder) > before)
    stopped.send_signal(signal.SIGTERM)
    told = stopped.communicate()[1]
    assert stopped.returncode == 128 + signal.SIGTERM
    assert recorded_runs(folder) < len(jobs), "it was stopped before its end"
    asked, kept = told.splitlines()
    assert asked + "\n" == signals.STOPPING
    _, *going_on = shlex.split(kept[kept.index("maxgain compare") :].removesuffix(" goes on."))

    in_this_process(monkeypatch)
    tables = []
    for words in (going_on, [*command, "--out", str(folder)], [*command, "--out", str(whole.folder)]):
        assert main(words) == 0
        tables.append(json.loads(capsys.readouterr().out))
        monkeypatch.setattr(engine, "side_by_side", lambda work, jobs, *how: iter_nothing(jobs))
    assert tables[0] == tables[1] == tables[2]
    assert tables[0]["contrasts"][0]["pairs"] == [0, 1, 2, 3]
    lines = (folder / "results" / "digits.jsonl").read_text().splitlines()
    assert len(lines) == len(jobs), "no run was recorded twice"


def iter_nothing(jobs: list[Job]) -> Iterator[tuple]:
    assert not list(jobs), "this was trained already"
    yield from ()


def test_a_failure_says_whether_training_or_its_machine_is_at_fault(tmp_path):
    (tmp_path / "file").write_text("")
    for learning_rate, folder in ((1e30, tmp_path / "diverges"), (1e-3, tmp_path / "file" / "in the way")):
        place = Place(folder, device="cpu", records=tmp_path / "results")
        recipe = replace(QUICK, learning_rate=learning_rate)
        (job,) = compare.identified(compare.plan(recipe, ["none"], compare.seeds(recipe, 1)), place)
        compare.run_recorded(job, place)
    assert [run["fault"] for run in records.read(tmp_path / "results").failed] == ["training", "machine"]
