"""The watched GPTs: a run is recorded, a spike is found, and the record is written line by line."""

import json

import pytest
from experiments.watch_gpt import EXAMPLE, SIZES, jobs, main, train

from experiments import watch_figure, watch_gpt

TEXT = EXAMPLE["standard_library"](50_000)
RATES = SIZES["gpu"]["rates"]


@pytest.mark.parametrize("remedy", ["none", "cap", "qk-norm"])
def test_a_run_keeps_losses_alarms_and_gains(remedy):
    record = train({"remedy": remedy, "rate": 0.1, "seed": 0}, SIZES["tiny"], TEXT)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert len(record["losses"]) == 6
    if remedy == "none":
        assert set(map(len, record["gains"].values())) == {8}
        assert {"gain/blocks.0.qkv[q]", "gain/blocks.0.down", "gain/head"} < record["gains"].keys()
        q, k = (record["gains"][f"gain/blocks.0.qkv[{part}]"] for part in "qk")
        assert record["qk"][3] == pytest.approx((q[3] + k[3]) / 2, rel=1e-3)


def test_a_run_that_breaks_is_a_spike_and_ends():
    record = train({"remedy": "none", "rate": 1e5, "seed": 0}, SIZES["tiny"], TEXT)
    assert record["spike"] is not None
    assert len(record["losses"]) == 5
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
    names = [watch_figure.name_of(job) for job in jobs(RATES, 2)]
    assert len(set(names)) == 16
    assert {seed for *_, seed in names} == {2}


def test_what_is_recorded_is_not_run_again(tmp_path, monkeypatch):
    def once(job, *_):
        trained.append(job)
        if len(trained) == 5:
            raise KeyboardInterrupt
        return job | {"spike": None, "alarms": []}

    trained = []
    monkeypatch.setattr(watch_gpt, "train", once)
    options = [str(tmp_path / "record.jsonl"), "--size", "tiny", "--seeds", "1"]
    with pytest.raises(KeyboardInterrupt):
        main(options)
    main(options)
    machine, *runs = watch_gpt.read(tmp_path / "record.jsonl")
    assert machine["steps"] == 60
    assert [run["rate"] for run in runs] == [job["rate"] for job in jobs(SIZES["tiny"]["rates"], 0)]
    assert len(trained) == 17


def made(remedy, rate, seed):
    """A run of 40 steps; without a remedy those at 0.1 spike at step 30, 8 steps after an alarm."""
    breaks = remedy == "none" and rate == 0.1
    alarm = {"step": 22, "kind": "jump", "layer": "a", "others": 0, "gain": 3.0, "before": 1.0}
    return {
        "remedy": remedy, "rate": rate, "seed": seed, "spike": 30 if breaks else None, "last": 5.0 if breaks else 2.0,
        "alarms": [alarm] if breaks else [], "gradient_alarms": [], "losses": [3.0] * 3 + [5.0 if breaks else 2.0],
        "qk": [2.0] * 5, "gains": {"gain/a": [1.0] * 5, "gain/b[q]": [2.0] * 5},
    }  # fmt: skip


def test_a_record_is_counted_and_drawn(tmp_path, monkeypatch, capsys):
    some = [job for seed in range(3) for job in jobs(SIZES["cpu"]["rates"], seed)][:-3]  # the last seed is not whole
    record = [{"steps": 40}, *(made(**job) for job in some)]
    (tmp_path / "record.jsonl").write_text("\n".join(map(json.dumps, record)))
    monkeypatch.setattr(watch_figure, "FIGURE", tmp_path / "figure.svg")
    watch_figure.main(tmp_path / "record.jsonl")
    lines = capsys.readouterr().out.splitlines()
    table = [line.split(" | ") for line in lines]
    assert ["| 0.1", "none", "2", "5.00 (5.00 to 5.00)", "2", "2", "8, 8", "a, a"] in [row[:8] for row in table]
    assert "1. spiked without a remedy: 2; warned: 2; constant rate and q or k named first: 0 of 2" in lines
    assert "4. bad without a remedy: 2; cap lower than none: 2; QK-norm lower than the cap: 0" in lines
    assert b"gain of every layer" in (tmp_path / "figure.svg").read_bytes()


def test_the_plans_outcome_is_what_the_record_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch_figure, "FIGURE", tmp_path / "figure.svg")
    watch_figure.main()
    said = capsys.readouterr().out
    assert "spiked without a remedy: 16; warned: 8" in said
    outcome = (watch_figure.ROOT / "experiments" / "PLAN-WATCH.md").read_text(encoding="utf-8")
    cells = {cell.split(",")[0].replace("*", "").strip() for line in outcome.splitlines() for cell in line.split("|")}
    rows = [line.split(" | ") for line in said.partition("without seed 0")[0].splitlines() if line.startswith("| 0.")]
    assert [row[3] for row in rows if len(row) > 4 and row[3] not in cells] == []
