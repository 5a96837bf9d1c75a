"""Captured steps on a GPU: the same run alone, beside others, resumed, or eager."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from maxgain.study import run
from maxgain.study.capture import CapturedStep, own_randomness
from maxgain.study.recipe import RECIPES
from maxgain.study.run import perform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPE = replace(
    RECIPES["digits"],
    epochs=4,
    fold=0,
    augment=True,
    cutout=2,
    schedule="triangular",
    regulariser="maxgain=1.5+dropout",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return perform(RECIPE, tmp_path_factory.mktemp("alone"), device="cuda").result


def test_side_by_side(tmp_path, alone):
    recipes = [replace(RECIPE, seed=seed) for seed in (0, 1, 2, 0)]
    with ThreadPoolExecutor(4) as pool:
        tasks = [
            pool.submit(perform, recipe, tmp_path / str(number), device="cuda") for number, recipe in enumerate(recipes)
        ]
        sums = [task.result().result.weights_sha256 for task in tasks]
    assert sums[0] == sums[3] == alone.weights_sha256
    assert len(set(sums)) == 3


def test_resumed_within_an_epoch(tmp_path, monkeypatch, alone):
    stop, taken, call = threading.Event(), [], CapturedStep.__call__

    def counted(self):
        call(self)
        taken.append(1)
        if len(taken) == 9:
            stop.set()

    monkeypatch.setattr(CapturedStep, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, tmp_path, device="cuda", stop=stop)
    assert perform(RECIPE, tmp_path, device="cuda").result.weights_sha256 == alone.weights_sha256
    assert len(taken) == 24


@pytest.mark.parametrize("schedule", ["steps", "triangular"])
def test_graph_and_eager_steps_agree(tmp_path, monkeypatch, schedule):
    recipe = replace(RECIPE, precision="float32", regulariser="maxgain=1.5", schedule=schedule, epochs=2)
    captured = perform(recipe, tmp_path / "captured", device="cuda").result.history.train_loss
    monkeypatch.setattr(run.Training, "fast_step", lambda self: own_randomness(self.generator)(self.step))
    eager = perform(recipe, tmp_path / "eager", device="cuda").result.history.train_loss
    assert captured == pytest.approx(eager, rel=1e-3)


def test_callers_generators(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    perform(replace(RECIPE, regulariser="spectralnorm", epochs=1), tmp_path, device="cuda")
    assert all(map(torch.equal, before, (torch.get_rng_state(), torch.cuda.get_rng_state())))


def test_another_device_is_refused(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, tmp_path, device="cuda", stop=stop)
    with pytest.raises(run.CheckpointError) as caught:
        perform(RECIPE, tmp_path, device="cpu")
    assert caught.value.field == "device"
    assert perform(RECIPE, tmp_path).result.status == "ok"
