"""A run in its folder: what it leaves behind, what it refuses, and what it says when it diverges."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import maxgain
from json_values import strictly
from maxgain import measure_gains
from maxgain.errors import MaxGainError, RunError
from maxgain.study import evaluate, files, run_files, runs
from maxgain.study.data import table as datasets
from maxgain.study.recipes import RECIPES, from_json, run_key, to_json
from maxgain.study.run_files import CHECKPOINT, Begun
from maxgain.study.runs import Place, Watcher, chosen_device, perform
from maxgain.study.training import Training
from small_net import each_measure

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], network="mlp", epochs=2, fold=0)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("others", ["", "+batchnorm+dropout"])
@each_measure
def test_promise_01_an_infinite_gamma_is_no_maxgain_at_all(tmp_path, digits, others, measure) -> None:
    without = (others or "+none").removeprefix("+")
    perform(replace(RECIPE, regulariser=without, augment=True), Place(tmp_path / "without"), digits)
    bounded = replace(RECIPE, regulariser=f"maxgain=inf{others}", measure=measure, augment=True)
    result = perform(bounded, Place(tmp_path / "with"), digits)
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    assert result["gamma"] == math.inf


def test_the_same_recipe_gives_the_same_bits_and_another_seed_others(tmp_path, digits) -> None:
    recipe = replace(RECIPE, regulariser="maxgain+batchnorm+dropout", augment=True)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(17)  # what ran before in this process does not matter
        perform(replace(recipe, seed=seed), Place(tmp_path / name), digits)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_a_run_folder_holds_everything(tmp_path, digits) -> None:
    recipe = replace(RECIPE, regulariser="maxgain=1.5+dropout=1", p=math.inf, seed=5, network="cnn")
    returned = perform(recipe, Place(tmp_path / "run"), digits)
    written = {path.name: path for path in (tmp_path / "run").iterdir()}
    left = {".maxgain", "config.json", "metrics.jsonl", "model.safetensors", "predictions.npz", "result.json"}
    assert set(written) == left
    about = {"fingerprint": digits.fingerprint, "data": str(datasets.data_root().absolute()), "device": "cpu"}
    assert strictly(written["config.json"].read_text()) == files.sealed(to_json(recipe) | about)
    assert run_files.read_begun(tmp_path / "run") == Begun(recipe, **about)
    result = files.revived(strictly(written["result.json"].read_text()))
    assert result == returned == run_files.read_result(tmp_path / "run")
    assert from_json(result["config"]) == recipe

    model = run_files.load_model(tmp_path / "run", recipe, digits, CPU)
    stored = safetensors.torch.load_file(written["model.safetensors"])
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    facts = {"recipe": "digits", "regulariser": "maxgain=1.5+dropout=1", "gamma": 1.5, "p": math.inf, "seed": 5}
    facts |= {"fold": 0, "key": run_key(recipe, digits.fingerprint), "fingerprint": digits.fingerprint}
    facts |= {"epochs": 2, "device": "cpu", "torch": torch.__version__, "maxgain": maxgain.__version__}
    assert {name: result[name] for name in facts} == facts
    for part in ("train", "validation", "test"):
        score = evaluate.evaluate(model, getattr(digits, part))
        assert (result[f"{part}_loss"], result[f"{part}_accuracy"]) == (score.loss, score.accuracy)
    for part in ("train", "test"):
        report = measure_gains(model, evaluate.batches(getattr(digits, part).images), math.inf)
        assert result["max_gain"][part] == {name: float(gains.max()) for name, gains in report.gains.items()}
    assert result["seconds"] > 0
    assert result["weights_sha256"] == hashlib.sha256(written["model.safetensors"].read_bytes()).hexdigest()
    kept = run_files.read_predictions(tmp_path / "run", returned)
    assert kept.correct.mean() == result["test_accuracy"]
    assert kept.label.tolist() == digits.test.labels.tolist()
    assert kept.loss.astype(float).mean() == pytest.approx(result["test_loss"], rel=1e-3)
    logits = model.eval()(evaluate.to_float(digits.test.images))
    assert kept.predicted.tolist() == logits.argmax(1).tolist()

    lines = [strictly(line) for line in written["metrics.jsonl"].read_text().splitlines()]
    assert lines == run_files.read_metrics(tmp_path / "run")
    assert [line["epoch"] for line in lines] == [1, 2]
    assert sum(line["seconds"] for line in lines) == pytest.approx(result["seconds"])
    names = {"epoch", "learning_rate", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy"}
    assert set(lines[0]) == names | {"max_gain", "seconds"}
    assert list(lines[0]["max_gain"]) == list(result["max_gain"]["train"])
    assert lines[1]["validation_loss"] == result["validation_loss"]
    some = digits.train.images[: math.ceil(len(digits.train) / 16)]
    sampled = measure_gains(model, [evaluate.to_float(some)], math.inf)
    assert lines[1]["max_gain"] == pytest.approx({name: gains.max() for name, gains in sampled.gains.items()})


def test_a_final_run_trains_on_what_was_held_out_too(tmp_path, digits) -> None:
    result = perform(replace(RECIPE, train_on="train+validation"), Place(tmp_path / "run"), digits)
    assert result["validation_loss"] is None
    assert result["validation_accuracy"] is None
    assert [line["validation_accuracy"] for line in run_files.read_metrics(tmp_path / "run")] == [None, None]
    training = Training(replace(RECIPE, train_on="train+validation"), digits, CPU)
    assert len(training.labels) == len(digits.train) + len(digits.validation)
    assert torch.equal(training.images, torch.cat([digits.train.images, digits.validation.images]))


def test_a_score_that_is_no_number_is_still_strict_json(tmp_path, digits, monkeypatch) -> None:
    nothing = evaluate.Score(math.inf, math.nan)
    monkeypatch.setattr(runs, "evaluate", lambda model, split: nothing)
    monkeypatch.setattr(evaluate.Answers, "score", nothing)
    perform(RECIPE, Place(tmp_path / "run"), digits)
    result = strictly((tmp_path / "run" / "result.json").read_text())
    assert (result["test_loss"], result["test_accuracy"]) == ("inf", None)
    line = strictly((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert (line["validation_loss"], line["validation_accuracy"]) == ("inf", None)


def test_promise_21_a_run_is_not_written_over(tmp_path, digits) -> None:
    perform(RECIPE, Place(tmp_path / "run"), digits)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(RunError, match="holds a run already: go on with --resume, or choose another --out"):
        perform(replace(RECIPE, seed=9), Place(tmp_path / "run"), digits)
    with pytest.raises(MaxGainError, match="is of another recipe: there seed is 0, here 9"):
        perform(replace(RECIPE, seed=9), Place(tmp_path / "run"), digits, resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@contextmanager
def no_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def step(_: Training) -> None:
        raise AssertionError("it trained although the folder cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step)
        yield


def test_a_folder_that_cannot_be_written_is_known_of_before_training(tmp_path, digits, monkeypatch) -> None:
    (tmp_path / "file").touch()
    with no_step(monkeypatch), pytest.raises(RunError, match=r"cannot write in .*run: Not a directory"):
        perform(RECIPE, Place(tmp_path / "file" / "run"), digits)
    with no_step(monkeypatch), pytest.raises(RunError, match=r"cannot write in .*run"):
        perform(RECIPE, Place(Path("/proc/run")), digits)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_impossible_intervals_are_refused(tmp_path, digits, seconds) -> None:
    with pytest.raises(RunError, match="checkpoint-seconds must not be negative"):
        perform(RECIPE, Place(tmp_path / "run", checkpoint_seconds=seconds), digits)


@pytest.mark.parametrize("name", ["gpu", "meta", "privateuseone", "cuda:99", ""])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(RunError, match=f"there is no device '{name}' to train on here: use 'cpu'"):
        chosen_device(name)


@pytest.mark.parametrize(
    ("seconds_to_save", "saved_after"),
    [(0.1, [1, 2, 3, 4, 5, 6, 7]), (2.0, [1, 6, 7])],  # an epoch takes ten seconds, and a twentieth of 40 is 2
    ids=["brief", "long"],
)
def test_saving_takes_a_small_part_of_the_time(tmp_path, digits, monkeypatch, seconds_to_save, saved_after) -> None:
    now, saved, save = [0.0], [], runs.checkpoint.save

    def slow_save(path, training, history) -> None:
        now[0] += seconds_to_save
        saved.append(training.epoch)
        save(path, training, history)

    def epoch_done(metrics) -> None:
        now[0] += 10.0  # of the next one

    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runs.checkpoint, "save", slow_save)
    perform(replace(RECIPE, epochs=7), Place(tmp_path / "run"), digits, watcher=Watcher(epoch_done=epoch_done))
    assert saved == saved_after


# A schedule that is sane for two epochs and then is not.
DIVERGING = replace(RECIPE, epochs=5, milestones=(2,), decay=1e30)


@pytest.mark.filterwarnings("ignore::maxgain.errors.MeasurementWarning")
@pytest.mark.parametrize("seconds", [None, 0.0], ids=["every epoch", "every step"])
@pytest.mark.parametrize("regulariser", ["none", "maxgain"])
def test_a_run_that_diverges_says_when_where_and_what_to_try(tmp_path, digits, regulariser, seconds) -> None:
    hint = {"none": "maxgain in --regulariser", "maxgain": "a tighter --gamma"}[regulariser]
    recipe = replace(DIVERGING, regulariser=regulariser)
    with pytest.raises(RunError) as caught:
        perform(recipe, Place(tmp_path / "run", checkpoint_seconds=seconds), digits)
    gains = run_files.read_metrics(tmp_path / "run")[-1]["max_gain"]
    worst = max(gains, key=lambda name: gains[name])
    assert str(caught.value) == (
        "in epoch 3 the loss or a weight stopped being a finite number; "
        f"after epoch 2 the largest gain was {gains[worst]:.3g}, in layer {worst!r}; "
        f"try a lower --learning-rate (it was 1e+27) or {hint}."
    )
    kept = safetensors.torch.load_file(tmp_path / "run" / CHECKPOINT)
    assert all(tensor.isfinite().all() for name, tensor in kept.items() if name.startswith("model."))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        ".maxgain",
        "config.json",
        "metrics.jsonl",
        CHECKPOINT,
    }


def test_two_processes_do_not_train_in_one_folder(tmp_path, digits) -> None:
    place = Place(tmp_path / "run")
    with files.alone_in(place.folder), pytest.raises(RunError, match="another maxgain is at work in"):
        perform(RECIPE, place, digits, resume=True)
    assert not (place.folder / "config.json").exists()
    perform(RECIPE, place, digits, resume=True)


def test_a_run_that_diverges_at_once_names_a_layer_too(tmp_path, digits) -> None:
    with pytest.raises(RunError, match=r"in epoch 1 .* the gain of layer 'classifier\.fc1' is the first that is not"):
        perform(replace(RECIPE, learning_rate=1e30), Place(tmp_path / "run"), digits)


def test_weights_that_the_last_step_of_an_epoch_spoils_are_not_saved(tmp_path, digits) -> None:
    def spoil(training: Training) -> None:
        if training.epoch == 1 and int(training.position) == training.steps_per_epoch * training.batch_size:
            with torch.no_grad():
                next(training.model.parameters()).fill_(math.nan)

    with pytest.raises(RunError, match="in epoch 2 the loss or a weight stopped being"):
        perform(RECIPE, Place(tmp_path / "run"), digits, watcher=Watcher(stepped=spoil))
    kept = safetensors.torch.load_file(tmp_path / "run" / CHECKPOINT)
    assert all(tensor.isfinite().all() for name, tensor in kept.items() if name.startswith("model."))
