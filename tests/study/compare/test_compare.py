"""Comparisons: what is run, that nothing is run twice, and that only complete pairs are tested."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from maxgain.errors import RecipeError, RunError
from maxgain.study import locks
from maxgain.study.cli.app import main
from maxgain.study.compare import jobs as compare
from maxgain.study.compare import records, statistics
from maxgain.study.compare import tuning_rule as choice
from maxgain.study.compare.jobs import Job, Pairing, Place
from maxgain.study.compare.records import Records
from maxgain.study.recipes import RECIPES, to_json

QUICK = replace(RECIPES["digits"], network="mlp", epochs=2)
FLAGS = ["--network", "mlp", "--epochs", "2"]
REGULARISERS = ("none", "dropout", "maxgain")


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(work, jobs, processes) -> Iterator[tuple]:
        for job in jobs:
            yield job, work(job)

    monkeypatch.setattr(compare, "in_processes", one_by_one)


# What is to be run


def test_every_regulariser_runs_on_every_fold():
    jobs = compare.plan(QUICK, REGULARISERS, compare.folds(QUICK, 4))
    assert [(job.recipe.fold, job.recipe.regulariser) for job in jobs] == [
        (fold, regulariser) for fold in range(4) for regulariser in REGULARISERS
    ]
    assert {job.recipe.seed for job in jobs} == {0}
    assert len({job.key for job in jobs}) == 12


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


def test_a_regulariser_twice_is_refused():
    with pytest.raises(RecipeError, match="names a regulariser twice"):
        compare.plan(QUICK, ["none", "none"], compare.seeds(QUICK, 2))


# What the records show


def recorded(scores: dict[str, list[float | None]], jobs: list[Job]) -> Records:
    """Records with these scores of each regulariser, one a fold; None is a run that failed."""
    runs, failed = [], []
    for job in jobs:
        score = scores[job.regulariser][job.recipe.fold]
        record = {"key": job.key, "regulariser": job.regulariser, "config": to_json(job.recipe), "recipe": "digits"}
        if score is None:
            failed.append(record | {"status": "failed", "error": "it diverged"})
        else:
            runs.append(record | {"status": "ok", "test_accuracy": score})
    return Records(tuple(runs), tuple(failed), ())


def shown(scores: dict[str, list[float | None]], baseline: str = "none") -> compare.Comparison:
    pairing = Pairing("fold", tuple(range(len(scores[baseline]))))
    jobs = compare.plan(QUICK, list(scores), pairing)
    return compare.comparison(jobs, recorded(scores, jobs), baseline, pairing)


def test_regularisers_are_tested_on_their_pairs():
    scores = {"none": [0.90, 0.91, 0.89, 0.93], "dropout": [0.92, 0.92, 0.93, 0.94]}
    comparison = shown(scores)
    assert comparison.test == "paired t-test on disjoint folds"
    expected = stats.ttest_rel(scores["dropout"], scores["none"]).pvalue
    assert comparison.rows["dropout"].adjusted_p == pytest.approx(expected)
    assert comparison.failures == ()


def test_a_failed_run_leaves_its_fold_out_for_all():
    scores = {"none": [0.90, 0.91, 0.89, 0.93], "dropout": [0.92, None, 0.93, 0.94], "maxgain": [0.9, 0.8, 0.9, 0.91]}
    comparison = shown(scores)
    assert comparison.pairs == (0, 2, 3)
    assert [(job.regulariser, job.recipe.fold, why) for job, why in comparison.failures] == [
        ("dropout", 1, "it diverged")
    ]
    expected = stats.ttest_rel([0.92, 0.93, 0.94], [0.90, 0.89, 0.93]).pvalue
    assert comparison.rows["dropout"].test.p_value == pytest.approx(expected)
    assert comparison.rows["none"].summary.n == comparison.rows["maxgain"].summary.n == 3


def test_a_regulariser_that_never_succeeds_does_not_keep_the_others_from_being_compared():
    comparison = shown({"none": [0.90, 0.91, 0.89], "dropout": [None, None, None], "maxgain": [0.9, 0.8, 0.9]})
    assert comparison.pairs == (0, 1, 2)
    assert set(comparison.rows) == {"none", "maxgain"}
    assert len(comparison.failures) == 3


@pytest.mark.parametrize(
    "scores",
    [
        {"none": [None, None], "dropout": [0.9, 0.8]},
        {"none": [None, None], "dropout": [None, None]},
        {"none": [None, 0.9], "dropout": [0.9, None]},
    ],
)
def test_nothing_is_tested_where_nothing_can_be_paired(scores):
    comparison = shown(scores)
    assert comparison.rows == {}
    assert comparison.test is None


def test_a_comparison_over_seeds_says_that_it_is_about_one_split():
    pairing = compare.seeds(QUICK, 3)
    jobs = compare.plan(QUICK, ["none", "dropout"], pairing)
    runs = tuple({"key": job.key, "test_accuracy": 0.9 + 0.01 * index} for index, job in enumerate(jobs))
    assert "over seeds on one split" in compare.comparison(jobs, Records(runs, (), ()), "none", pairing).test


def test_overlapping_folds_of_a_single_split_get_the_corrected_test():
    scores = {"none": [0.90, 0.91, 0.89, 0.93], "dropout": [0.92, 0.92, 0.93, 0.94]}
    recipe = RECIPES["cifar10"]
    pairing = compare.folds(recipe, 4)
    jobs = compare.plan(recipe, list(scores), pairing)
    assert {job.recipe.cross_validation for job in jobs} == {4}
    comparison = compare.comparison(jobs, recorded(scores, jobs), "none", pairing)
    assert comparison.test == "Nadeau–Bengio corrected t-test (training sets overlap)"
    # One fold of four is tested on, one is for validation, and two are trained on.
    expected = statistics.corrected_t(scores["dropout"], scores["none"], 1 / 2)
    assert comparison.rows["dropout"].test.p_value == expected.p_value
    plain = stats.ttest_rel(scores["dropout"], scores["none"]).pvalue
    assert expected.p_value > plain
    both = replace(jobs[0].recipe, train_on="train+validation")
    assert statistics.overlap("fold", to_json(both)).test_fraction_ratio == pytest.approx(1 / 3)


# Tuning by fold


def test_tuning_tries_a_grid_on_every_fold_and_holds_the_validation_part_out():
    jobs = compare.plan(replace(QUICK, train_on="train+validation"), ["none", "maxgain"], compare.folds(QUICK, 2))
    tuning = compare.plan_tuning(jobs, [choice.Grid.parsed("gamma=1:3:1")])
    assert [(job.recipe.fold, job.recipe.regulariser) for job in tuning] == [
        (fold, f"maxgain={gamma}") for fold in range(2) for gamma in (1, 2, 3)
    ]
    assert {job.recipe.train_on for job in tuning} == {"train"}


def test_each_fold_is_trained_with_what_was_chosen_on_it():
    jobs = compare.plan(QUICK, ["none", "maxgain+batchnorm"], compare.folds(QUICK, 2))
    tuning = compare.plan_tuning(jobs, [choice.Grid.parsed("gamma=1:3:1")])
    accuracies = [0.8, 0.9, 0.7, 0.9, 0.9, 0.9]
    losses = [0.1, 0.5, 0.1, 0.5, 0.6, 0.4]
    runs = tuple(
        {"key": job.key, "status": "ok", "validation_accuracy": accuracy, "validation_loss": loss}
        for job, accuracy, loss in zip(tuning, accuracies, losses, strict=True)
    )
    final = compare.tuned(jobs, tuning, Records(runs, (), ()))
    assert [(job.recipe.fold, job.recipe.regulariser) for job in final] == [
        (0, "none"),
        (0, "maxgain=2+batchnorm"),
        (1, "none"),
        (1, "maxgain=3+batchnorm"),
    ]
    assert [job.regulariser for job in final] == ["none", "maxgain+batchnorm"] * 2
    assert {job.recipe.train_on for job in final} == {"train+validation"}


def test_seeds_share_a_choice_because_they_share_the_data():
    jobs = compare.plan(QUICK, ["dropout"], compare.seeds(QUICK, 3))
    assert len(compare.plan_tuning(jobs, [])) == choice.SMALL_GRID


def test_a_regulariser_whose_tuning_failed_throughout_is_named():
    jobs = compare.plan(QUICK, ["maxgain"], compare.folds(QUICK, 1))
    tuning = compare.plan_tuning(jobs, [])
    with pytest.raises(RunError, match="nothing could be chosen for maxgain on fold 0, as all 4 runs"):
        compare.tuned(jobs, tuning, Records((), (), ()))


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
    assert [run["key"] for row in first["rows"] for run in final if run["key"] in row["runs"]]
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
        compare.perform_all(missing, place, 1, lambda job, record: None)
    lines = (tmp_path / "results" / "digits.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["failed", "failed"]
    assert "test_accuracy" not in json.loads(lines[0])
    ((job, why),) = compare.comparison(broken, records.read(place.results), "none", compare.folds(QUICK, 1)).failures
    assert job == broken[0]
    assert "not a number" in why or "finite" in why


@pytest.mark.usefixtures("_in_this_process")
def test_a_record_holds_the_result_and_the_learning_curve(tmp_path):
    jobs = compare.plan(QUICK, ["maxgain=1.5"], compare.folds(QUICK, 1))
    compare.perform_all(jobs, Place(tmp_path), 1, lambda job, record: None)
    run = records.read(tmp_path / "results").find(jobs[0].key)
    assert run["gamma"] == 1.5
    assert run["fold"] == 0
    assert 0 < run["test_accuracy"] <= 1
    assert [line["epoch"] for line in run["history"]] == [1, 2]


def test_two_comparisons_do_not_work_in_one_folder(tmp_path, capsys):
    with locks.alone_in(tmp_path):
        assert main(["compare", "digits", "--regularisers", "none", "--folds", "1", "--out", str(tmp_path)]) == 2
    assert "another maxgain is at work in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs --regularisers"),
        (["--regularisers", "none"], "needs either --folds or --seeds"),
        (["--regularisers", "none", "--folds", "2", "--seeds", "2"], "needs either --folds or --seeds"),
        (["--regularisers", "none", "--folds", "2", "--baseline", "dropout"], "baseline 'dropout' is not one of none"),
        (["--regularisers", "none", "--folds", "2", "--regulariser", "dropout"], "did you mean --regularisers?"),
        (["--regularisers", "none", "--folds", "2", "--fold", "1"], "leave out --fold"),
        (["--regularisers", "nome", "--folds", "2"], "did you mean 'none'?"),
        (["--regularisers", "maxgain", "--folds", "2", "--grid", "gamma=1:2:1"], "needs --tuned"),
        (["--regularisers", "none", "--folds", "2", "--tuned", "--grid", "gamma=1:2:1"], "no 'gamma' to choose"),
        (["--regularisers", "none", "--folds", "2", "--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_answered_with_a_sentence(flags, message, capsys, tmp_path):
    assert main(["compare", "digits", "--out", str(tmp_path / "none"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# Stopping and going on


def begin(command: list[str]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "maxgain.study.cli.app", *command], env=environment, stderr=subprocess.PIPE, text=True
    )


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
    recipe = replace(QUICK, epochs=6)
    jobs = compare.plan(recipe, REGULARISERS, compare.folds(recipe, 4))
    whole = Place(tmp_path / "whole")
    for job in jobs:
        compare._recorded(job, whole)

    folder = tmp_path / "killed"
    command = ["compare", "digits", "--regularisers", *REGULARISERS, "--folds", "4", *flags, "--json"]
    killed = begin([*command, "--jobs", "2", "--out", str(folder)])
    wait_for(lambda: recorded_runs(folder) >= 2)
    orphans = children(killed.pid)
    killed.kill()
    killed.communicate()
    assert 2 <= recorded_runs(folder) < len(jobs), "it was killed half-way"
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))

    before = recorded_runs(folder)
    stopped = begin([*command, "--jobs", "1", "--out", str(folder)])
    wait_for(lambda: recorded_runs(folder) > before)
    stopped.send_signal(signal.SIGINT)
    assert "stopped" in stopped.communicate()[1]
    assert stopped.returncode == 130
    assert recorded_runs(folder) < len(jobs), "it was stopped before its end"

    tables = []
    for place in (folder, folder, whole.folder):
        assert main([*command, "--jobs", "1", "--out", str(place)]) == 0
        tables.append(json.loads(capsys.readouterr().out))
        monkeypatch.setattr(compare, "in_processes", lambda work, jobs, processes: iter_nothing(jobs))
    assert tables[0] == tables[1] == tables[2]
    assert tables[0]["compared"] == [0, 1, 2, 3]
    lines = (folder / "results" / "digits.jsonl").read_text().splitlines()
    assert len(lines) == len(jobs), "no run was recorded twice"


def iter_nothing(jobs: list[Job]) -> Iterator[tuple]:
    assert not jobs, "this was trained already"
    yield from ()
