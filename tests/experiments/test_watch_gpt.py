"""The watched GPTs: a run is recorded, a spike is found, and the record is written line by line."""

import json
import math
import warnings

import pytest
import torch
from experiments.watch_gpt import EXAMPLE, SIZES, Job, jobs, main, train

from experiments import watch_figure

TEXT = EXAMPLE["standard_library"](SIZES["tiny"].text)


@pytest.fixture(scope="module")
def side_by_side():
    """A run of each remedy, and one that breaks."""
    some = [Job("none", 0.1, 0), Job("cap", 0.1, 0), Job("qk-norm", 0.1, 0), Job("none", 1e5, 0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(some, SIZES["tiny"], TEXT, [None] * 4)


def test_a_run_keeps_losses_alarms_and_the_gains_of_every_layer(side_by_side):
    for record in side_by_side[:3]:
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        assert len(record["losses"]) == 60
        assert set(map(len, record["gains"].values())) == {8} == {len(record["gradients"])}
        assert {"gain/blocks.0.qkv[q]", "gain/blocks.0.down", "gain/head"} < record["gains"].keys()


def test_a_run_is_the_same_alone_and_as_the_example_trains_it(side_by_side, monkeypatch):
    for record in side_by_side[:2]:
        job = Job(record["remedy"], record["rate"], record["seed"])
        assert train([job], SIZES["tiny"], TEXT, [None]) == [record]
        starts = torch.randint(len(TEXT) - 16, (60, 4), generator=torch.Generator().manual_seed(0))
        rows = iter(starts.unsqueeze(-1))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randint", lambda *_, rows=rows, **__: next(rows))
            torch.manual_seed(0)
            gamma = EXAMPLE["CAPPED"] if job.remedy == "cap" else math.inf
            example = EXAMPLE["train"](EXAMPLE["GPT"](16, 1, 2, 16), TEXT, 60, 0.1, gamma=gamma, batch=4)
        assert example.losses == pytest.approx(record["losses"], rel=1e-3)
        assert example.gradients[::8] == pytest.approx(record["gradients"], rel=1e-3)


def test_a_run_that_breaks_is_a_spike_and_ends(side_by_side):
    record = side_by_side[3]
    assert record["spike"] is not None
    assert len(record["losses"]) == 50
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


def test_a_seed_has_sixteen_runs():
    assert {job.seed for job in jobs(SIZES["gpu"], 2)} == {2}
    assert len(set(jobs(SIZES["gpu"], 2))) == 16


@pytest.mark.slow
def test_the_record_has_a_line_for_the_machine_and_one_for_each_run(tmp_path):
    main(["--out", str(tmp_path / "record.jsonl"), "--size", "tiny", "--seeds", "1"])
    machine, *runs = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    assert machine["steps"] == 60
    assert {(one["remedy"], one["rate"]) for one in runs} == {(job.remedy, job.rate) for job in jobs(SIZES["tiny"], 0)}


def test_a_seed_that_does_not_end_in_time_is_left_out(tmp_path, capsys):
    main(["--out", str(tmp_path / "record.jsonl"), "--size", "tiny", "--seeds", "2", "--seconds", "0"])
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1
    assert capsys.readouterr().out == "time was up during seed 0\n"


def made(remedy, rate, seed):
    """A run of 40 steps; without a remedy those at 0.1 spike at step 30, 8 steps after an alarm."""
    breaks = remedy == "none" and rate == 0.1
    alarm = {"step": 22, "kind": "jump", "layer": "a", "others": 0, "gain": 3.0, "before": 1.0}
    return {
        "remedy": remedy, "rate": rate, "seed": seed, "spike": 30 if breaks else None, "last": 5.0 if breaks else 2.0,
        "alarms": [alarm] if breaks else [], "gradient_alarms": [],
        "losses": [3.0] * 30 + [5.0 if breaks else 2.0] * 10, "gradients": [1.0] * 5,
        "gains": {"gain/a": [1.0] * 5, "gain/b[q]": [2.0] * 5}, "seconds": 1.0,
    }  # fmt: skip


def test_the_record_is_thinned_to_what_the_figure_and_the_table_need(tmp_path, monkeypatch, capsys):
    some = [job for seed in range(3) for job in jobs(SIZES["cpu"], seed)][:-3]  # the last seed is not whole
    runs = [made(job.remedy, job.rate, job.seed) for job in some]
    raw = [{"steps": 40}, *runs]
    (tmp_path / "raw").write_text("\n".join(map(json.dumps, raw)))
    monkeypatch.setattr(watch_figure, "RECORD", tmp_path / "record.jsonl")
    monkeypatch.setattr(watch_figure, "FIGURE", tmp_path / "figure.svg")
    for arguments in ([str(tmp_path / "raw")], []):
        watch_figure.main(arguments)
        lines = capsys.readouterr().out.splitlines()
        table = [line.split(" | ") for line in lines]
        assert ["| 0.1", "none", "2", "5.00 (5.00 to 5.00)", "2", "2", "8, 8", "a, a"] in [row[:8] for row in table]
        assert "1. spiked without a remedy: 2; warned: 2; constant rate and q or k named first: 0 of 2" in lines
        assert "4. bad without a remedy: 2; cap lower than none: 2; QK-norm lower than the cap: 0" in lines
        assert b"gain of every layer" in (tmp_path / "figure.svg").read_bytes()
    kept = list(map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines()))
    assert len(kept) == 46
    assert ["gains" in run for run in kept].count(True) == 2
    assert kept[1]["qk"] == [2.0] * 5
    assert kept[1]["losses"] == [3.0, 3.0, 3.0, 2.0]
