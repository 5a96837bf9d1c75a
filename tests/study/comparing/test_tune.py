"""Tuning: what is tried, that the choice follows the rule and never the test part, that no trial is lost or doubled."""

import errno
import json
import math
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from maxgain.errors import DataError, FileError, RecipeError, RegulariserError, RunError
from maxgain.study import files
from maxgain.study.cli.app import main
from maxgain.study.comparing import engine, tune, tuning_rule
from maxgain.study.comparing.engine import Here
from maxgain.study.comparing.tuning_rule import Dimension, Grid
from maxgain.study.comparing.workers import data_for
from maxgain.study.files import write_text
from maxgain.study.recipes import RECIPES
from maxgain.study.regularisers import REGULARISERS, filled, parse
from maxgain.study.report import figures
from maxgain.study.runs import Place, perform
from one_process import in_this_process
from study_data import picture

QUICK = replace(RECIPES["digits"], network="mlp", epochs=2, fold=0, regulariser="maxgain")
FLAGS = ["--network", "mlp", "--epochs", "2", "--fold", "0"]
GAMMAS = Grid("gamma", (1.0, 2.0, 3.0))


def search(folder: Path, *grids: Grid, trials: int | None = None, **changes) -> tune.Search:
    recipe = replace(QUICK, **changes)
    return tune.Search(recipe, tuning_rule.dimensions(recipe.regulariser, grids), folder, trials)


# What there is to choose


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gamma=1.25:3:0.25", (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)),
        ("rate=0.1:0.3:0.1", (0.1, 0.2, 0.3)),
        ("gamma=1:2.9:1", (1.0, 2.0)),
        ("gamma=2:2:1", (2.0,)),
    ],
)
def test_a_grid_has_both_its_ends(text, values):
    assert Grid.parsed(text).values == values


@pytest.mark.parametrize("text", ["gamma", "gamma=", "gamma=1", "gamma=1:2", "=1:2:1", "gamma=2:1:1", "gamma=1:2:0",
                                  "gamma=1:2:-1", "gamma=a:b:c", "gamma=nan:2:1", "gamma=1:inf:1"])  # fmt: skip
def test_what_is_no_grid_is_refused(text):
    with pytest.raises(RecipeError, match=r"is no grid: write NAME=START:STOP:STEP"):
        Grid.parsed(text)


def test_what_a_text_leaves_open_is_chosen():
    chosen = tuning_rule.dimensions("maxgain+batchnorm+dropout")
    assert [dimension.regulariser for dimension in chosen] == ["maxgain", "dropout"]
    assert tuning_rule.dimensions("maxgain=2+dropout") == tuning_rule.dimensions("dropout")
    assert tuning_rule.dimensions("batchnorm") == tuning_rule.dimensions("none") == ()


def test_a_grid_names_a_regulariser_or_its_parameter():
    expected = (Dimension("maxgain", "gamma", 1, 3, (1, 2, 3)),)
    assert tuning_rule.dimensions("maxgain+dropout", [GAMMAS]) == expected
    assert tuning_rule.dimensions("maxgain+dropout", [Grid("maxgain", (1, 2, 3))]) == expected
    with pytest.raises(RecipeError, match="do not name each number of 'maxgain' once"):
        tuning_rule.dimensions("maxgain", [GAMMAS, Grid("maxgain", (1, 2))])
    with pytest.raises(RecipeError, match="there is no 'gamma' to choose in dropout or maxgain=2"):
        tuning_rule.refuse_unused([GAMMAS], ["dropout", "maxgain=2"])
    with pytest.raises(RegulariserError, match=r"2\.5 is no factor that dropout can have"):
        tuning_rule.dimensions("dropout", [Grid("factor", (0.5, 2.5))])


def test_grids_are_multiplied():
    space = tuning_rule.dimensions("maxgain+dropout", [Grid("gamma", (1, 2)), Grid("factor", (0.1, 0.2))])
    assert [filled("maxgain + dropout", point) for point in tuning_rule.points(space)] == [
        "maxgain=1+dropout=0.1",
        "maxgain=1+dropout=0.2",
        "maxgain=2+dropout=0.1",
        "maxgain=2+dropout=0.2",
    ]


@pytest.mark.parametrize("value", [1e-6, 0.123456, 1.0, 123456.0, 3e6])
def test_a_number_that_is_filled_in_is_read_back(value):
    assert parse(filled("batchnorm+maxgain", {"maxgain": value}))[0].value == value


@pytest.mark.parametrize("row", [row for row in REGULARISERS.values() if row.search], ids=lambda row: row.name)
def test_every_regularisers_range_can_be_searched_and_gridded(row):
    low, high = row.search
    assert 0 < low < high
    assert row.default == row.usual[0] or row.default in row.usual[:4]
    assert all(row.valid(value) and low <= value <= high for value in row.usual)
    (dimension,) = tuning_rule.within_budget(tuning_rule.dimensions(row.name), tuning_rule.BUDGET)
    assert len(set(dimension.values)) == tuning_rule.BUDGET
    assert list(dimension.values) == sorted(dimension.values)


def test_the_papers_dropout_rates_are_in_every_grid():
    for budget in (1, 2, 9, 12):
        (dimension,) = tuning_rule.within_budget(tuning_rule.dimensions("dropout"), budget)
        assert 1 in dimension.values
    pairs = tuning_rule.points(tuning_rule.within_budget(tuning_rule.dimensions("maxgain+dropout"), 9))
    assert {point["maxgain"] for point in pairs} == {1.5, 2, 3}
    assert {point["dropout"] for point in pairs} == {0.5, 1, 1.5}


def test_a_budget_beyond_what_a_person_would_try_is_refused():
    with pytest.raises(RecipeError, match="a grid of 13 values is more than maxgain has, which are 12"):
        tuning_rule.within_budget(tuning_rule.dimensions("maxgain"), 13)


@pytest.mark.parametrize(("budget", "sizes"), [(9, (3, 3)), (8, (4, 2)), (12, (4, 3)), (7, (7, 1)), (1, (1, 1))])
def test_two_numbers_get_as_many_runs_as_one(budget, sizes):
    (one,) = tuning_rule.within_budget(tuning_rule.dimensions("maxgain"), budget)
    two = tuning_rule.within_budget(tuning_rule.dimensions("maxgain+dropout"), budget)
    assert tuple(len(dimension.values) for dimension in two) == sizes
    assert len(tuning_rule.points([one])) == len(tuning_rule.points(two)) == budget


def test_three_numbers_share_a_budget_too():
    three = tuning_rule.within_budget(tuning_rule.dimensions("maxgain+dropout+weightdecay"), 12)
    assert [len(dimension.values) for dimension in three] == [3, 2, 2]
    assert tuning_rule.within_budget((), 9) == ()


def tried(gamma: float, accuracy: float, loss: float, status: str = "complete") -> tuning_rule.Trial:
    return {
        "values": {"maxgain": gamma},
        "status": status,
        "validation_accuracy": accuracy,
        "validation_loss": loss,
    }


def test_the_best_accuracy_is_chosen_then_the_lowest_loss_then_the_smallest_number():
    rows = [tried(1, 0.8, 0.1), tried(2, 0.9, 0.5), tried(4, 0.9, 0.4), tried(3, 0.9, 0.4)]
    assert tuning_rule.best(rows) == rows[3]
    assert tuning_rule.best([{"values": {"maxgain": 1.0}, "status": "pruned"}]) is None
    unknown = {"values": {"maxgain": 1.0}, "status": "complete"}  # as in a record of somebody else's
    assert tuning_rule.best([unknown]) is None
    assert tuning_rule.best([unknown | {"validation_accuracy": 0.9}, rows[3]]) == rows[3]


def test_how_fine_a_choice_is_can_be_said():
    rows = [row | {"validation_images": 40} for row in (tried(1, 0.9, 1), tried(2, 0.875, 1), tried(3, 0.85, 1))]
    pruned = {"values": {"maxgain": 4.0}, "status": "pruned"}
    assert tuning_rule.worth(rows[0], [*rows, pruned]) == (
        "one of the 40 validation images is worth 2.5 points, and 1 of the 2 other trials is that close to it"
    )
    failed = {"values": {"maxgain": 4.0}, "status": "failed"}
    assert tuning_rule.worth(rows[0], [rows[0], failed]).endswith(
        "no other trial came to its end; 1 of 2 trials failed and could not be chosen: the same search tries them again"
    )


# The search


@pytest.mark.usefixtures("_in_this_process")
def test_a_grid_comes_to_what_plain_runs_come_to(tmp_path):
    curve = tune.run(search(tmp_path / "grid", GAMMAS), Here(1))
    for row, gamma in zip(curve, (1, 2, 3), strict=True):
        plain = perform(replace(QUICK, regulariser=f"maxgain={gamma}"), Place(tmp_path / str(gamma)))
        assert row["values"] == {"maxgain": gamma}
        for score in ("train_accuracy", "train_loss", "validation_accuracy", "validation_loss"):
            assert row[score] == plain[score]


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize("loss", [math.inf, None])
def test_a_trial_without_a_finite_loss_is_a_failure_and_not_a_point_of_the_curve(tmp_path, monkeypatch, loss):
    monkeypatch.setattr(engine, "perform", lambda *run, **how: perform(*run, **how) | {"validation_loss": loss})
    curve = tune.run(search(tmp_path, GAMMAS), Here(1))
    assert [(row["status"], row["error"]) for row in curve] == 3 * [
        ("failed", "its validation loss is not a finite number")
    ]


@pytest.mark.usefixtures("_in_this_process")
def test_a_search_never_sees_the_test_part(tmp_path, monkeypatch):
    seen = []

    def watched(recipe, place, dataset, **how):
        seen.append(len(dataset.test))
        return perform(recipe, place, dataset, **how)

    monkeypatch.setattr(engine, "perform", watched)
    tune.run(search(tmp_path, GAMMAS), Here(1))
    assert seen == [0, 0, 0]
    for path in tmp_path.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        assert result["test_accuracy"] is None
        assert result["test_loss"] is None
        assert set(result["max_gain"]) == set(result["gain_quantiles"]) == {"train"}


@pytest.mark.usefixtures("_in_this_process")
def test_a_finished_search_trains_nothing_and_a_larger_one_only_what_is_new(tmp_path, monkeypatch):
    first = tune.run(search(tmp_path, GAMMAS), Here(1))
    trained = []

    def watched(recipe, place, dataset, **how):
        trained.append(recipe.regulariser)
        return perform(recipe, place, dataset, **how)

    monkeypatch.setattr(engine, "perform", watched)
    assert tune.run(search(tmp_path, GAMMAS), Here(1)) == first
    assert trained == []
    tune.run(search(tmp_path, Grid("gamma", (1.0, 1.5, 2.0, 3.0))), Here(1))
    assert trained == ["maxgain=1.5"]


def test_validation_must_be_held_out(tmp_path):
    with pytest.raises(RecipeError, match="which --train-on train\\+validation trains on"):
        search(tmp_path, GAMMAS, train_on="train+validation")


@pytest.mark.usefixtures("_in_this_process")
def test_a_trial_that_diverges_fails_and_is_tried_again(tmp_path, monkeypatch):
    calls = []

    def diverging(recipe, place, dataset, **how):
        calls.append(recipe.regulariser)
        if recipe.regulariser == "maxgain=2":
            raise RunError("the loss is not a finite number")
        return perform(recipe, place, dataset, **how)

    monkeypatch.setattr(engine, "perform", diverging)
    curve = tune.run(search(tmp_path, GAMMAS), Here(1))
    assert [row["status"] for row in curve] == ["complete", "failed", "complete"]
    assert curve[1]["error"] == "the loss is not a finite number"
    assert "validation_accuracy" not in curve[1]
    assert tuning_rule.best(curve) in (curve[0], curve[2])
    monkeypatch.setattr(engine, "perform", perform)
    again = tune.run(search(tmp_path, GAMMAS), Here(1))
    assert [again[0], again[2]] == [curve[0], curve[2]]
    assert again[1]["status"] == "complete"
    assert calls == ["maxgain=1", "maxgain=2", "maxgain=3"]


@pytest.mark.usefixtures("_in_this_process")
def test_missing_data_stop_a_search_instead_of_failing_its_trials(tmp_path):
    absent = replace(search(tmp_path, GAMMAS, dataset="cifar10", fold=None), data=tmp_path / "nowhere")
    with pytest.raises(DataError, match="cifar10 is not in"):
        tune.run(absent, Here(1))
    assert not (tmp_path / "journal.log").exists()


def fake_training(accuracy_of):
    """Stands in for a training: tells of each epoch's accuracy as a real one would."""

    def training(recipe, place, dataset, *, resume, watcher):
        accuracy, lines = accuracy_of(float(recipe.regulariser.partition("=")[2])), []
        for epoch in range(1, recipe.epochs + 1):
            scores = {"train_loss": 0.1, "train_accuracy": 1.0, "validation_loss": 1.0, "validation_accuracy": accuracy}
            lines.append({"epoch": epoch, "learning_rate": 0.1, **scores, "max_gain": {}, "seconds": 0.1})
            write_text(place.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines), replace=True)
            watcher.epoch_done(lines[-1])
        return {"train_accuracy": 1.0, "train_loss": 0.0, "validation_accuracy": accuracy, "validation_loss": 1.0}

    return training


@pytest.mark.usefixtures("_in_this_process")
def test_tpe_finds_a_good_gamma_and_gives_hopeless_trials_up(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "perform", fake_training(lambda gamma: 1 - abs(gamma - 3) / 10))
    curve = tune.run(search(tmp_path, trials=25, epochs=8), Here(1))
    assert len(curve) == 25
    assert tuning_rule.best(curve)["values"]["maxgain"] == pytest.approx(3, abs=0.3)
    pruned = [row for row in curve if row["status"] == "pruned"]
    assert pruned
    assert all(2 <= row["epochs"] < 8 for row in pruned)


@pytest.mark.usefixtures("_in_this_process")
def test_a_grid_is_tried_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "perform", fake_training(lambda gamma: 1 / gamma))
    gammas = Grid("gamma", tuple(float(gamma) for gamma in range(1, 11)))
    assert {row["status"] for row in tune.run(search(tmp_path, gammas, epochs=8), Here(1))} == {"complete"}


@pytest.mark.usefixtures("_in_this_process")
def test_any_storage_of_optuna_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "perform", fake_training(lambda gamma: 1 / gamma))
    url = f"sqlite:///{tmp_path}/trials.db"
    first = replace(search(tmp_path / "a", GAMMAS), storage=url)
    curve = tune.run(first, Here(1))
    assert len(curve) == 3
    assert tune.run(replace(first, folder=tmp_path / "b"), Here(1)) == curve
    assert not list(tmp_path.glob("b/runs/*")), "another folder found all done in the storage"


@pytest.mark.usefixtures("_in_this_process")
def test_the_trial_of_another_searcher_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "perform", fake_training(lambda gamma: 1 / gamma))
    shared = search(tmp_path, GAMMAS)
    with files.alone_in(tmp_path, *tune.FILES):
        study = tune._study(shared)
    study.enqueue_trial({"maxgain": 2.0}, user_attrs={"point": {"maxgain": 2.0}, "searcher": "another machine"})
    elsewhere = study.ask()
    curve = tune.run(shared, Here(1))
    assert [row["values"]["maxgain"] for row in curve] == [1, 3]
    study.tell(elsewhere, 0.5)
    assert len(study.get_trials()) == 3


@pytest.mark.usefixtures("_in_this_process")
def test_two_searches_do_not_work_in_one_folder(tmp_path, capsys):
    command = ["tune", "digits", "--regulariser", "maxgain", "--grid", "gamma=1:2:1", *FLAGS, "--out", str(tmp_path)]
    with files.alone_in(tmp_path):
        assert main(command) == 2
    assert "another maxgain is at work in" in capsys.readouterr().err


# The command


@pytest.mark.usefixtures("_in_this_process")
def test_the_command_writes_what_was_chosen_and_the_curve(tmp_path, capsys):
    command = ["tune", "digits", "--regulariser", "maxgain+batchnorm", "--grid", "gamma=1:3:1", *FLAGS]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert told == tuned
    assert tuned["regulariser"] == f"maxgain={tuning_rule.best(curve)['values']['maxgain']:g}+batchnorm"
    assert tuned["asked"] == "maxgain+batchnorm"
    assert tuned["validation_images"] == 36
    assert tuned["trials"] == {"complete": 3, "pruned": 0, "failed": 0}
    assert not [name for name in tuned if name.startswith("test")]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "log loss" in (tmp_path / "curve.svg").read_text()
    curve[0]["validation_loss"] += 1
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    assert main(["report", str(tmp_path)]) == 2, "what was changed since is not shown"
    assert "are not of one search, or one of them is damaged" in capsys.readouterr().err


def test_the_figure_shows_the_trials_that_came_to_an_end():
    rows = [tried(1, 0.8, 0.5), tried(2, 0.9, 0.4)]
    rows = [row | {"train_accuracy": 1.0, "train_loss": 0.1} for row in rows]
    figure = figures.tuning_curve([*rows, {"values": {"maxgain": 9.0}, "status": "pruned"}], {"maxgain": "gamma"})
    accuracy, loss = figure.axes
    assert [line.get_label() for line in accuracy.lines] == ["train", "validation"]
    assert accuracy.lines[1].get_xydata().tolist() == [[1, 0.8], [2, 0.9]]
    assert loss.lines[1].get_xydata().tolist() == [[1, 0.5], [2, 0.4]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "'none' leaves no number open to choose"),
        (["--regulariser", "maxgain", "--grid", "rate=0.1:0.2:0.1"], "there is no 'rate' to choose in maxgain"),
        (["--regulariser", "maxgain", "--grid", "gamma=1"], "is no grid"),
        (["--regulariser", "maxgain", "--grid", "gamma=1:2:1", "--trials", "3"], "leave out --trials or --grid"),
        (["--regulariser", "maxgain", "--trials", "0"], "--trials must be at least 1"),
        (["--regulariser", "maxgain", "--jobs", "0"], "--jobs must be at least 1"),
        (["--regulariser", "maxgain", "--storage", "nonsense"], "cannot keep the search in nonsense"),
    ],
)
def test_what_makes_no_sense_is_answered_with_a_sentence(flags, message, capsys, tmp_path):
    assert main(["tune", "digits", "--out", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


# Going on


def test_a_search_that_is_killed_ends_like_one_that_is_not(tmp_path, capsys, monkeypatch):
    space = {"trials": 8, "epochs": 4}
    in_this_process(monkeypatch)
    expected = tune.run(search(tmp_path / "whole", **space), Here(1))

    folder = tmp_path / "killed"
    command = ["tune", "digits", "--regulariser", "maxgain", "--network", "mlp", "--epochs", "4", "--fold", "0"]
    command += ["--trials", "8", "--jobs", "1", "--out", str(folder), "--json"]
    killed = subprocess.Popen([sys.executable, "-m", "maxgain.study.cli.app", *command])
    deadline = time.monotonic() + 120
    while len(list(folder.glob("runs/*/result.json"))) < 2:
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    study = tune._study(search(folder, **space))
    assert len(tune.curve(study)) < len(expected), "it was killed half-way"
    with (folder / "journal.log").open("a") as journal:
        journal.write('{"op_code":4,"wor')  # as a process leaves it that is killed while it writes

    assert main(command) == 0
    capsys.readouterr()
    assert json.loads((folder / "curve.json").read_text()) == expected
    kept = optuna.load_study(study_name=study.study_name, storage=tune._journal(folder / "journal.log")).get_trials()
    done = [str(trial.user_attrs["point"]) for trial in kept if trial.state is not TrialState.FAIL]
    assert len(done) == len(set(done)) == len(expected), "no trial was lost or doubled"


def test_a_journal_that_a_full_disk_cut_anywhere_in_a_line_goes_on(tmp_path):
    study = tune._study(search(tmp_path))
    study.enqueue_trial({"maxgain": 1.0})
    whole = (tmp_path / "journal.log").read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last + 1, len(whole) - 1, 7):
        (tmp_path / "journal.log").write_bytes(whole[:end])
        tune._study(search(tmp_path)).enqueue_trial({"maxgain": 2.0})
        waiting = tune._study(search(tmp_path)).get_trials()
        assert [trial.system_attrs["fixed_params"] for trial in waiting] == [{"maxgain": 2.0}]


def test_promise_18_a_search_on_other_data_in_the_same_folder_is_another_search(tmp_path):
    names = []
    for shade, root in enumerate(
        (tmp_path / "a", tmp_path / "b", tmp_path / "b")
    ):  # the last time the images are others
        for number in range(20):
            picture(root / f"class{number % 2}" / f"{number}.png", colour=(shade, number, 0))
        found = replace(search(tmp_path, dataset="folder", fold=None, image_size=8), data=root)
        names.append(found.name)
        data_for(found.recipe, found.place)  # which is kept for the next run of this process
    assert len(set(names)) == 3


def test_a_journal_whose_trial_lost_a_score_is_refused(tmp_path):
    study = tune._study(search(tmp_path))
    trial = study.ask()
    trial.set_user_attr("point", {"maxgain": 1.0})
    trial.set_user_attr("outcome", {"validation_accuracy": 0.9})
    study.tell(trial, 0.9)
    with pytest.raises(RunError, match=r"cannot keep the search in .*: its trial 0 has no "):
        tune._study(search(tmp_path))


def test_a_journal_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    study = tune._study(search(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(optuna.storages.journal.JournalFileBackend, "append_logs", full)
    with pytest.raises(FileError, match=r"cannot write .*journal.log: No space left on device; the same command goes"):
        study.enqueue_trial({"maxgain": 1.0})


def test_a_search_can_be_sent_to_a_worker_while_its_journal_is_locked(tmp_path):
    lock = tune._JournalLock(tmp_path / "journal.log")
    lock.acquire()
    sent = pickle.loads(pickle.dumps(lock))
    lock.release()
    assert (sent.path, sent.held) == (lock.path, None)
