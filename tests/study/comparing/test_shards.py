"""Parts of a comparison, trained apart and merged, give the records that one machine gives."""

from pathlib import Path

import pytest

from maxgain.errors import RecipeError, RunError
from maxgain.study.cli.app import main
from maxgain.study.comparing import records
from maxgain.study.comparing.shards import Merged, Shard, merge

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


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/2", "0/0"])
def test_a_part_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--shard must be NUMBER/COUNT"):
        Shard.parsed(text)


def test_merged_parts_give_the_records_of_one_machine(tmp_path: Path) -> None:
    command = [*COMPARE, "--folds", "2"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    for number in range(2):
        assert main([*command, "--shard", f"{number}/2", "--out", str(tmp_path / str(number))]) == 0
    parts = [str(tmp_path / str(number)) for number in range(2)]
    assert main(["merge", str(tmp_path / "merged"), *parts]) == 0
    assert main([*command, "--out", str(tmp_path / "merged")]) == 0
    whole, merged = (records.read(tmp_path / name / "results").runs for name in ("whole", "merged"))
    fields = ("key", "fingerprint", "regulariser", "test_accuracy", "test_loss", "train_loss", "gain_quantiles")
    shown = [sorted([[str(run[field]) for field in fields] for run in runs]) for runs in (whole, merged)]
    assert shown[0] == shown[1]
    assert len(merged) == 4
    assert merge(tmp_path / "merged", [tmp_path / "0", tmp_path / "1"]) == Merged(copied=0, known=4, unfinished=0)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no runs"):
        merge(tmp_path / "out", [tmp_path])
    assert not (tmp_path / "out").exists()
