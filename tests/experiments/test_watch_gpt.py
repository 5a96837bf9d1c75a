"""The watched GPTs: a run is recorded, a spike is found, and the record is written line by line."""

import json

import pytest
from experiments.watch_gpt import EXAMPLE, SIZES, Job, jobs, main, run

from experiments import watch_figure, watch_gpt


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


def made(remedy, rate, seed):
    """A run of 40 steps; without a remedy those at 0.1 spike at step 30, 8 steps after an alarm."""
    breaks = remedy == "none" and rate == 0.1
    alarm = {"step": 22, "kind": "jump", "layer": "a", "others": 0, "gain": 3.0, "before": 1.0}
    return {
        "remedy": remedy, "rate": rate, "seed": seed, "spike": 30 if breaks else None, "last": 5.0 if breaks else 2.0,
        "alarms": [alarm] if breaks else [], "gradient_alarms": [],
        "losses": [3.0] * 30 + [5.0 if breaks else 2.0] * 10, "gradients": [1.0] * 5,
        "gains": {"gain/a": [1.0] * 5, "gain/b": [2.0] * 5}, "seconds": 1.0,
    }  # fmt: skip


def test_the_record_is_thinned_to_what_the_figure_and_the_table_need(tmp_path, monkeypatch, capsys):
    runs = [made(job.remedy, job.rate, job.seed) for job in jobs(SIZES["cpu"], 3)][:-3]  # the last seed is not whole
    raw = [{"steps": 40}, *runs]
    (tmp_path / "raw").write_text("\n".join(map(json.dumps, raw)))
    monkeypatch.setattr(watch_figure, "RECORD", tmp_path / "record.jsonl")
    monkeypatch.setattr(watch_figure, "FIGURE", tmp_path / "figure.svg")
    for arguments in ([str(tmp_path / "raw")], []):
        watch_figure.main(arguments)
        table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
        assert ["| 0.1", "none", "2", "5.00 (5.00 to 5.00)", "2", "2", "8, 8", "a, a"] in [row[:8] for row in table]
        assert b"gain of every layer" in (tmp_path / "figure.svg").read_bytes()
    kept = list(map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines()))
    assert len(kept) == 46
    assert ["gains" in run for run in kept].count(True) == 2
    assert kept[1]["losses"] == [3.0, 3.0, 3.0, 2.0]
