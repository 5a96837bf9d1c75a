"""Experiments run what is missing, choose in their order, and keep what they found."""

import math
from dataclasses import replace

import experiments.__main__ as program
import pytest
import torch
from experiments.plain_dropout import PlainDropout
from experiments.plan import BRIDGE, EXPERIMENTS, GAMMA_CURVE, Experiment
from experiments.state import early_choice, read

from experiments import document
from maxgain.study.recipe import RECIPES
from maxgain.study.result import History, Result, export, load
from maxgain.study.running import Machine

TINY = replace(RECIPES["digits"], network="mlp", epochs=7)
QUICK = Experiment(
    name="quick", title="Quick", claim="None.", recipe=TINY, rows=("none", "maxgain"), units=(0, 1), early=True,
    candidates=tuple(replace(TINY, learning_rate=rate) for rate in (1e-5, 1e-2)), grid={"maxgain": (0.1, 2, 4)},
    decide_by="paired",
)  # fmt: skip


def result(recipe, accuracy=0.9, **fields):
    about = {"key": "", "fingerprint": "", "status": "ok", "classes": 10, "test_accuracy": accuracy}
    return Result(recipe=recipe, **(about | fields))


def test_an_experiment_is_run_from_its_candidates_to_its_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results" / "plan-2")
    monkeypatch.setattr("experiments.state.EXPERIMENTS", {"quick": QUICK})
    machine = Machine(device="cpu", jobs=1)
    program.run("quick", None, tmp_path / "work", machine)
    tuning = load(tmp_path / "results" / "plan-2" / "tuning" / "quick.jsonl")
    final = load(tmp_path / "results" / "plan-2" / "quick.jsonl")
    assert len(tuning) == 2 + 3
    assert all(one.test_accuracy is None for one in tuning)
    assert {one.recipe.learning_rate for one in final} == {1e-2}, "1e-5 learns nothing"
    assert {one.recipe.gamma for one in final} <= {None, 2, 4}, "0.1 learns nothing"
    assert {(one.recipe.seed, one.recipe.train_on) for one in final} == {
        (0, "train+validation"),
        (1, "train+validation"),
    }
    state = read(tmp_path / "results")["quick"]
    assert state.progress == "4 of 4 runs"
    assert state.comparison is not None
    capsys.readouterr()
    program.run("quick", None, tmp_path / "work", machine)
    assert not capsys.readouterr().out, "nothing is missing"


def test_a_run_that_is_made_again_replaces_no_recorded_one(tmp_path, monkeypatch):
    experiment = EXPERIMENTS["cifar10"]
    recipe = replace(experiment.recipe, regulariser="none", train_on="train+validation")
    edge = replace(experiment.recipe, regulariser="maxgain=1.5", seed=1000)
    for folder, accuracy in ((tmp_path, 0.8), (tmp_path / "plan-2", 0.9)):
        export([result(recipe, accuracy)], folder / "cifar10.jsonl")
        validated = result(edge, None, validation_accuracy=accuracy)
        export([validated], folder / "tuning" / "cifar10.jsonl")
    state = read(tmp_path)["cifar10"]
    assert [one.test_accuracy for one in state.results] == [0.8]
    assert state.tuned[edge.key].validation_accuracy == 0.8
    assert [(one.test_accuracy, one.validation_accuracy) for one in state.again] == [(0.9, None), (None, 0.9)]


def test_what_repeats_is_told_from_what_does_not():
    state = read(document.ROOT / "results")["cifar10"]
    recorded = next(one for one in state.results if one.recipe.title == "cifar10-none-seed0")
    near, far = (replace_accuracy(recorded, value) for value in (0.885, 0.80))
    text = "\n".join(document.repeats(replace(state, again=[near, far])))
    assert "| 88.50 |" in text
    assert text.count("| inside |") == text.count("| **outside** |") == 1


def replace_accuracy(one, accuracy):
    return Result(**{name: getattr(one, name) for name in Result.__struct_fields__} | {"test_accuracy": accuracy})


@pytest.mark.parametrize(
    ("losses", "chosen"), [((3.0, 1.05, 1.0), 1.5), ((1.0, 2.0, 3.0), 1.25), ((math.inf, 1.2, 1.0), 1.75)]
)
def test_the_early_rule_takes_the_smallest_gamma_near_the_lowest_loss(losses, chosen):
    runs = {
        recipe.gamma: [result(recipe, history=History(train_loss=[loss] * 138))]
        for recipe, loss in zip(GAMMA_CURVE[:3], losses, strict=True)
    }
    assert early_choice(runs) == chosen


def test_plain_dropout_predicts_the_expectation_of_what_it_keeps():
    torch.manual_seed(0)
    layer, x = PlainDropout(0.2), torch.full((100_000,), 3.0)
    kept = layer.train()(x)
    assert set(kept.unique().tolist()) == {0.0, 3.0}
    assert kept.mean() == pytest.approx(2.4, abs=0.02)
    assert layer.eval()(x).unique().tolist() == pytest.approx([2.4])


def test_the_bridge_repeats_recorded_runs():
    recorded = {one.recipe.key for one in read(document.ROOT / "results")["cifar10"].results}
    assert {recipe.key for recipe in BRIDGE} <= recorded


def test_runs_that_are_made_again_are_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "RESULTS", tmp_path / "plan-2")
    monkeypatch.setattr(program, "REPEATS", {"edge": [replace(TINY, seed=seed) for seed in (0, 1)]})
    for _ in range(2):
        program.run("edge", None, tmp_path / "work", Machine(device="cpu", jobs=1))
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert all(one.test_accuracy is None for one in load(tmp_path / "plan-2" / "tuning" / "edge.jsonl"))
