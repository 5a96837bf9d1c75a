"""Parts of a comparison, a search or a table, trained apart and merged, give the records that one machine gives."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxgain.errors import RecipeError, RunError
from maxgain.study.cli.app import main
from maxgain.study.comparing import records
from maxgain.study.comparing.jobs import Pairing
from maxgain.study.comparing.shards import Merged, Shard, merge
from maxgain.study.comparing.tuning_rule import Grid
from maxgain.study.files import alone_in
from maxgain.study.predictions import Predictions
from maxgain.study.recipes import recipe_named
from maxgain.study.reproduce.experiments import EXPERIMENTS, Experiment
from maxgain.study.reproduce.running import Budget, Recorded, part_of, run_missing, stages
from maxgain.study.reproduce.state import look
from maxgain.study.run_files import FILES
from maxgain.study.runs import Place
from maxgain.study.training import Training
from reproduce_records import failure_of, record_of

COMPARE = ["compare", "digits", "--network", "mlp", "--epochs", "1", "--regularisers", "none", "maxgain", "--jobs", "1"]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_parts_of_a_plan_are_disjoint_and_complete(count: int) -> None:
    jobs = list(range(20))
    parts = [Shard(number, count).of(jobs, lambda job: job) for number in range(count)]
    assert sorted(job for part in parts for job in part) == jobs
    together = [Shard(number, count).of(jobs, lambda job: job % 5) for number in range(count)]
    assert sorted(job for part in together for job in part) == jobs
    assert all(
        {job % 5 for job in one}.isdisjoint(job % 5 for job in two)
        for one in together
        for two in together
        if one is not two
    )


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/2", "0/0", "0/" + "9" * 5000, "9" * 5000 + "/1"])
def test_a_part_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--shard must be NUMBER/COUNT"):
        Shard.parsed(text)


def what_counts(folder: Path) -> list[list[str]]:
    fields = (
        "key",
        "fingerprint",
        "regulariser",
        "tuned",
        "test_accuracy",
        "test_loss",
        "train_loss",
        "gain_quantiles",
    )
    return sorted([str(run.get(field)) for field in fields] for run in records.read(folder).runs)


def train_in_parts(command: list[str], folder: Path, count: int) -> list[str]:
    """Trains each part, and returns their folders."""
    parts = [str(folder / str(number)) for number in range(count)]
    for number, part in enumerate(parts):
        assert main([*command, "--shard", f"{number}/{count}", "--out", part]) == 0
    return parts


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize("tuned", [[], ["--tuned", "--grid", "gamma=1:3:1"]])
def test_merged_parts_give_the_records_of_one_machine(tuned: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    command, whole, merged = [*COMPARE, "--folds", "2", *tuned], tmp_path / "whole", tmp_path / "merged"
    assert main([*command, "--out", str(whole)]) == 0
    parts = train_in_parts(command, tmp_path, 3)
    assert main(["merge", str(merged), *parts]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", None)  # nothing is trained twice
        assert main([*command, "--out", str(merged)]) == 0
    assert len(what_counts(whole / "results")) == 4
    for room in ("results", "tuning/results"):
        assert what_counts(merged / room) == what_counts(whole / room)
    assert (merged / "comparison.json").read_bytes() == (whole / "comparison.json").read_bytes()
    runs = 10 if tuned else 4
    assert merge(merged, [Path(part) for part in parts]) == Merged(copied=0, known=runs, unfinished=0)


def test_merging_removes_what_was_begun_and_nothing_else(tmp_path: Path, capsys: Any) -> None:
    finished, begun, photos = (tmp_path / name for name in ("part/runs/a", "out/runs/a", "out/runs/b"))
    for folder in (finished, tmp_path / "part/runs/b", begun):
        with alone_in(folder, *FILES):
            (folder / "metrics.jsonl").write_text("")
    for name in "ab":
        (tmp_path / "part/runs" / name / "result.json").write_text("{}")
    photos.mkdir(parents=True)
    (photos / "me.jpg").write_bytes(b"mine")
    with alone_in(begun):
        assert main(["merge", str(tmp_path / "out"), str(tmp_path / "part")]) == 2
    assert "another maxgain is at work in" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "out"), str(tmp_path / "part")]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert (begun / "result.json").exists()
    assert (photos / "me.jpg").read_bytes() == b"mine"


@pytest.mark.usefixtures("_in_this_process")
def test_a_search_in_parts_chooses_what_one_machine_chooses(tmp_path: Path, monkeypatch: Any) -> None:
    command = ["tune", "digits", "--network", "mlp", "--epochs", "1", "--fold", "0", "--regulariser", "maxgain"]
    command += ["--grid", "gamma=1:3:1", "--jobs", "1"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    parts = train_in_parts(command, tmp_path, 2)
    assert not any((Path(part) / "tuned.json").exists() for part in parts), "a part cannot choose"
    assert main(["merge", str(tmp_path / "merged"), *parts]) == 0
    monkeypatch.setattr(Training, "step", None)
    assert main([*command, "--out", str(tmp_path / "merged")]) == 0
    for name in ("tuned.json", "curve.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("more", [["--trials", "3"], ["--grid", "gamma=1:2:1", "--storage", "sqlite:///search.db"]])
def test_a_search_that_needs_to_know_the_other_parts_is_not_cut(more: list[str], tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "out")
    assert main(["tune", "digits", "--regulariser", "maxgain", *more, "--shard", "0/2", "--out", out]) == 2
    assert "--shard" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::maxgain.errors.MeasurementWarning")
@pytest.mark.usefixtures("_in_this_process")
def test_a_part_whose_numbers_could_not_be_chosen_is_not_done(tmp_path: Path, capsys: Any) -> None:
    command = [*COMPARE, "--folds", "1", "--tuned", "--grid", "gamma=1:1:1", "--learning-rate", "1e30"]
    assert main([*command, "--shard", "0/1", "--out", str(tmp_path)]) == 2
    shown, told = capsys.readouterr()
    assert "part 0/1: 0 of " in shown
    assert "no run of part 0/1 succeeded" in told


# The paper's tables


@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_the_parts_of_a_table_are_disjoint_and_complete_and_choose_by_themselves(
    experiment: Experiment, count: int
) -> None:
    tuning, final = experiment.tuning(), experiment.final()
    parts = [part_of(experiment, [*tuning, *final], Shard(number, count)) for number in range(count)]
    assert sorted(job.key for part in parts for job in part) == sorted(job.key for job in [*tuning, *final])
    for part in parts:
        mine = {(job.row, job.recipe.fold) for job in part if job in final}
        needed = [job for job in tuning if (job.row, job.recipe.fold) in mine]
        assert all(job in part for job in needed)


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize("share_results", [True, False])
def test_a_table_in_parts_has_the_records_of_one_machine(share_results: bool, tmp_path: Path, monkeypatch: Any) -> None:
    recipe = replace(recipe_named("digits"), network="mlp", epochs=1)
    grids, seeds = (Grid("gamma", (1.0, 2.0)),), Pairing("seed", (0, 1))
    tiny = Experiment("tiny", "a small one", "", recipe, ("none", "maxgain"), seeds, grids)
    monkeypatch.setitem(EXPERIMENTS, "tiny", tiny)
    monkeypatch.chdir(tmp_path)
    merged, parts = (
        tmp_path / "merged",
        [tmp_path / ("merged" if share_results else f"{number}") for number in range(2)],
    )
    for number, part in enumerate(parts):
        command = ["reproduce", "tiny", "--shard", f"{number}/2", "--results", str(part), "--device", "cpu"]
        assert main(command) == 0
    assert not (tmp_path / "REPRODUCTION.md").exists()
    if not share_results:
        assert merge(merged, parts) == Merged(copied=6, known=0, unfinished=0)
        assert merge(merged, parts) == Merged(copied=0, known=6, unfinished=0)
    state = look(tiny, Recorded.read(merged))
    assert state.is_complete
    assert state.done == state.planned == 4
    whole = Place(tmp_path / "whole", device="cpu")
    for stage, place in stages(tiny, tmp_path / "whole", whole):
        run_missing(stage, place, Budget(None), 1, lambda job, record, seconds: None)
    for room in ("", "tuning"):
        assert what_counts(merged / room) == what_counts(tmp_path / "whole" / room)
    found = records.read(merged)
    assert all(found.predictions(run) is not None for run in found.runs)


@pytest.mark.parametrize("arguments", [["--shard", "0/2"], ["cifar10", "--shard", "0/2", "--dry-run"]])
def test_a_part_of_nothing_is_refused(arguments: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    assert "--shard is for running a part of one experiment" in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no runs"):
        merge(tmp_path / "out", [tmp_path])
    assert not (tmp_path / "out").exists()


def a_table_of_parts(tmp_path: Path) -> tuple[Path, Path]:
    """Two results folders: in the first a run failed twice, and one has predictions that are damaged."""
    jobs = EXPERIMENTS["gains"].final()
    first, second = tmp_path / "first", tmp_path / "second"
    predicted = Predictions.of(np.zeros(9, np.int64), np.zeros(9, np.int64), np.zeros(9, np.float32))
    for job in jobs[:2]:
        records.append(first, record_of(job, predictions_sha256=predicted.sha256), predicted)
    (first / "predictions" / f"{record_of(jobs[1])['key']}.npz").write_bytes(b"damaged")
    for finished in ("at 1", "at 2"):
        records.append(first, failure_of(jobs[2], finished=finished))
    records.append(second, record_of(jobs[3]))
    return first, second


def test_promise_20_failures_are_merged_too_and_each_once(tmp_path: Path) -> None:
    out, parts = tmp_path / "out", a_table_of_parts(tmp_path)
    for copied in (3, 0):
        merged = merge(out, parts)
        assert (merged.copied, merged.known, merged.unfinished) == (copied, 3 - copied, 1)
        found = records.read(out)
        (failures,) = found.failures.values()
        assert [failure["finished"] for failure in failures] == ["at 1", "at 2"]
    state = look(EXPERIMENTS["gains"], Recorded.read(out))
    assert len(state.left) == len(EXPERIMENTS["gains"].final()) - 4, "what failed twice is not tried a third time"


def test_damaged_predictions_are_named_and_their_run_is_merged_without(tmp_path: Path) -> None:
    out, parts = tmp_path / "out", a_table_of_parts(tmp_path)
    (warning,) = merge(out, parts).warnings
    assert "left out: " in warning
    assert "holds no predictions of a run" in warning
    found = records.read(out)
    assert [found.predictions(run) is not None for run in found.runs] == [True, False, False]


def test_a_failure_is_not_passed_on_to_where_the_run_succeeded(tmp_path: Path) -> None:
    out, (first, _) = tmp_path / "out", a_table_of_parts(tmp_path)
    records.append(out, record_of(EXPERIMENTS["gains"].final()[2]))
    merge(out, [first])
    assert not records.read(out).failures


def a_finished_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("result.json", "config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_pipes_devices_and_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    run = a_finished_run(tmp_path / "part" / "runs" / "a")
    (run / "notes").mkdir()
    (run / "notes" / "kept.txt").write_text("kept")
    os.mkfifo(run / "pipe")
    (run / "zeros").symlink_to("/dev/zero")
    (run / "loop").symlink_to(run)
    (run / "nowhere").symlink_to(tmp_path / "nothing")
    assert merge(tmp_path / "out", [tmp_path / "part"]).copied == 1
    there = tmp_path / "out" / "runs" / "a"
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()) == [
        "config.json",
        "model.safetensors",
        "notes/kept.txt",
        "result.json",
    ]


def test_a_run_whose_weights_are_a_device_is_named_and_the_others_are_merged(tmp_path: Path) -> None:
    a_finished_run(tmp_path / "part" / "runs" / "a")
    spoilt = a_finished_run(tmp_path / "part" / "runs" / "b")
    (spoilt / "model.safetensors").unlink()
    (spoilt / "model.safetensors").symlink_to("/dev/zero")
    merged = merge(tmp_path / "out", [tmp_path / "part"])
    assert (merged.copied, merged.unfinished) == (1, 1)
    assert "model.safetensors is a device where a file is expected" in merged.warnings[0]


def test_a_disk_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    a_finished_run(tmp_path / "part" / "runs" / "a")

    def full(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", full)
    assert main(["merge", str(tmp_path / "out"), str(tmp_path / "part")]) == 2
    assert capsys.readouterr().err.endswith("/out/runs/a: No space left on device.\n")


def test_a_run_that_came_out_differently_on_two_machines_is_named(tmp_path: Path) -> None:
    job = EXPERIMENTS["gains"].final()[0]
    for folder, accuracy in (("out", 0.91), ("same", 0.91), ("other", 0.92)):
        records.append(tmp_path / folder, record_of(job, accuracy))
    assert merge(tmp_path / "out", [tmp_path / "same"]).warnings == ()
    (warning,) = merge(tmp_path / "out", [tmp_path / "other"]).warnings
    assert "has other scores in" in warning
    (run,) = records.read(tmp_path / "out").runs
    assert run["test_accuracy"] == 0.91

    for folder, accuracy in (("folder", 0.91), ("part", 0.92)):  # as folders of runs, of which there are no records yet
        path = tmp_path / folder / "runs" / "a" / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record_of(job, accuracy)))
    (warning,) = merge(tmp_path / "folder", [tmp_path / "part"]).warnings
    assert "the run a has other scores in" in warning
