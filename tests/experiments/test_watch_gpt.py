"""The watched GPTs: a run is recorded, a spike is found, and the record is written line by line."""

import json

import pytest
from experiments.watch_gpt import EXAMPLE, SIZES, Job, jobs, main, run

from experiments import watch_gpt


@pytest.mark.parametrize("remedy", watch_gpt.REMEDIES)
def test_a_run_keeps_losses_alarms_and_the_gains_of_every_layer(remedy):
    record = json.loads(json.dumps(run(Job(remedy, 0.01, 0), SIZES["tiny"], "cpu"), allow_nan=False))
    assert len(record["losses"]) == 60
    assert set(map(len, record["gains"].values())) == {8} == {len(record["gradients"])}
    assert {"gain/blocks.0.qkv[q]", "gain/blocks.0.down", "gain/head"} < record["gains"].keys()
    if remedy == "cap":
        assert max(record["gains"]["gain/blocks.0.qkv[q]"]) < 2.5


def test_a_run_that_breaks_is_a_spike():
    record = run(Job("none", 1e5, 0), SIZES["tiny"], "cpu")
    assert record["spike"] is not None
    assert record["alarms"][0]["kind"] == "not finite"
    assert record["gradient_alarms"]


@pytest.mark.parametrize(
    ("losses", "spike"),
    [
        ([5.0] * 10 + [2.0] * 20, None),
        ([2.0] * 20 + [8.0], 20),
        ([2.0] * 20 + [3.0] * 9, 25),
        ([2.0, float("nan")] * 9, 9),
    ],
)
def test_spikes(losses, spike):
    assert EXAMPLE["spike_of"](losses) == spike


def test_every_seed_has_its_sixteen_runs_in_a_row():
    assert [job.seed for job in jobs(SIZES["gpu"], 2)] == [0] * 16 + [1] * 16
    assert len(set(jobs(SIZES["gpu"], 2))) == 32


@pytest.mark.slow
def test_the_record_has_a_line_for_the_machine_and_one_for_each_run(tmp_path):
    main(["--out", str(tmp_path / "record.jsonl"), "--size", "tiny", "--seeds", "1", "--workers", "2"])
    machine, *runs = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    assert machine["steps"] == 60
    assert {(one["remedy"], one["rate"]) for one in runs} == {(job.remedy, job.rate) for job in jobs(SIZES["tiny"], 1)}
