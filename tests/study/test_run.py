"""A run in a folder: what it leaves, how it resumes, what it refuses, and what it does not touch."""

import base64
import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from maxgain.errors import CheckpointError, DataError, FileError, FolderInUseError, RunError
from maxgain.study import _files, data, run
from maxgain.study.recipe import RECIPES, run_key
from maxgain.study.result import CONFIG, METRICS, RESULT, WEIGHTS, Inputs, Run, export, load
from maxgain.study.run import CHECKPOINT, code_version, perform
from maxgain.study.training import DivergedError, evaluate

RECIPE = replace(RECIPES["digits"], network="mlp", epochs=3, fold=0, regulariser="maxgain=1.5+dropout")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return perform(RECIPE, tmp_path_factory.mktemp("run"), device="cpu")


# --- What a run leaves behind


def test_files(finished, digits):
    assert {path.name for path in finished.folder.iterdir()} - {".lock"} == {CONFIG, METRICS, RESULT, WEIGHTS}
    result = finished.result
    assert result.key == run_key(RECIPE, digits.fingerprint)
    assert (result.status, result.fault, result.classes, result.validation_images) == ("ok", "", 10, 36)
    assert (result.device, result.precision, result.torch) == ("cpu", "float32", torch.__version__)
    assert result.data_source.startswith("scikit-learn")
    assert list(result.data_sha256) == ["digits.csv.gz"]
    assert result.gains.keys() == {"train", "test"}
    assert set(result.gains["test"]) == {f"classifier.fc{n}" for n in (1, 2, 3)}
    for layer, norm in finished.operator_norms().norms.items():
        assert result.gains["test"][layer][4] <= norm * 1.02


def test_model_and_scores(finished, digits):
    result, model = finished.result, finished.model()
    assert not model.training
    loss, accuracy, right = evaluate(model, digits.test)
    assert (loss, accuracy) == (result.test_loss, result.test_accuracy)
    correct = np.unpackbits(np.frombuffer(base64.b64decode(result.correct), np.uint8), count=len(digits.test))
    assert correct.tolist() == right.int().tolist()
    gains = finished.gains("test")
    assert gains.quantiles()["classifier.fc1"] == result.gains["test"]["classifier.fc1"]


def test_history(finished):
    history = finished.history
    assert history.epoch == history.gain_epochs == [1, 2, 3]
    assert history == finished.result.history
    assert history.train_loss[-1] < history.train_loss[0]
    assert history.learning_rate == [1e-3] * 3
    assert all(len(column) == 3 for column in history.max_gain.values())


@pytest.mark.parametrize(
    ("epochs", "kept"), [(0, []), (1, [1]), (3, [1, 2, 3]), (100, [1, 12, 23, 34, 45, 56, 67, 78, 89, 100])]
)
def test_gain_epochs(epochs, kept):
    lines = [
        run.Metrics(epoch=n + 1, learning_rate=1, train_loss=1, train_accuracy=1, max_gain={"a": n + 1}, seconds=1)
        for n in range(epochs)
    ]
    history = run.History.of(lines, 10)
    assert history.gain_epochs == kept
    assert history.max_gain == ({"a": kept} if kept else {})


def test_trained_on_validation_and_without_test(tmp_path, digits):
    result = perform(replace(RECIPE, train_on="train+validation"), tmp_path, device="cpu", test=False).result
    assert result.validation_accuracy is result.test_accuracy is None
    assert result.correct == ""
    assert result.fingerprint == digits.without_test().fingerprint


def test_load_and_export(finished, tmp_path):
    result = finished.result
    assert load(finished.folder) == [result]
    for name in ("b/seed1", "a"):
        _files.write(tmp_path / name / RESULT, _files.encode(result))
    assert load(tmp_path) == [result, result]
    other = msgspec.structs.replace(result, recipe=replace(RECIPE, p=math.inf), test_loss=None)
    export([result, other], tmp_path / "results.jsonl")
    assert load(tmp_path / "results.jsonl") == [result, other]


@pytest.mark.parametrize("content", [b"{", b"[]\n", b'{"key": "a"}\n', b"\xff\n", b"null"])
def test_load_names_the_line(finished, tmp_path, content):
    path = tmp_path / "results.jsonl"
    path.write_bytes(_files.encode(finished.result) + b"\n" + content)
    with pytest.raises(FileError, match="line 2"):
        load(path)


def test_load_of_nothing(tmp_path):
    with pytest.raises(FileError):
        load(tmp_path)
    with pytest.raises(FileError):
        load(tmp_path / "missing.jsonl")


def test_damaged_weights(tmp_path):
    made = perform(replace(RECIPE, epochs=1), tmp_path, device="cpu")
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(FileError, match="SHA-256"):
        made.model()


# --- Resuming


SLOW = replace(RECIPE, epochs=15, network="cnn", augment=True, regulariser="lipschitz-2=2+dropout")
"""Long enough to be killed; with random numbers, optimizer and power iteration to restore."""
COMMAND = """
import sys
from maxgain.study.recipe import Recipe
from maxgain.study.run import perform
perform(Recipe(**eval(sys.argv[1])), sys.argv[2], device="cpu")
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return perform(SLOW, tmp_path_factory.mktemp("slow"), device="cpu").result


def start(folder):
    recipe = repr(vars(SLOW))
    environment = {**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", COMMAND, recipe, folder], env=environment, stderr=subprocess.PIPE)


def wait_for_epochs(folder, count):
    deadline = time.monotonic() + 60
    path = folder / METRICS
    while not (folder / CHECKPOINT).exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def expect_same(result, whole):
    assert result.weights_sha256 == whole.weights_sha256
    for name in ("train_loss", "validation_loss", "max_gain", "epoch"):
        assert getattr(result.history, name) == getattr(whole.history, name)


def test_promise_14_killed_run_ends_in_the_same_bits(tmp_path, uninterrupted):
    process = start(tmp_path)
    wait_for_epochs(tmp_path, 2)
    process.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / RESULT).exists()
    expect_same(perform(SLOW, tmp_path, device="cpu").result, uninterrupted)
    assert not (tmp_path / CHECKPOINT).exists()
    assert Run(tmp_path).history.epoch == list(range(1, 16))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_promise_15_signals_save(tmp_path, finished, monkeypatch, name):
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="the same command continues it"):
        perform(RECIPE, tmp_path, device="cpu", on_epoch=lambda line: signal.raise_signal(number))
    assert signal.getsignal(number) is before
    assert Run(tmp_path).history.epoch == [1]
    begun, begin = [], run.Training.begin_epoch
    monkeypatch.setattr(run.Training, "begin_epoch", lambda self: (begun.append(self.epoch), begin(self)))
    expect_same(perform(RECIPE, tmp_path, device="cpu").result, finished.result)
    assert begun == [2], "an epoch was begun again"


@pytest.mark.parametrize(
    "regulariser", ["none", "maxgain=1+batchnorm", "variationaldropout", "spectralnorm", "weightnorm"]
)
@pytest.mark.parametrize("schedule", ["steps", "triangular"])
def test_promise_14_stopped_within_an_epoch(tmp_path, monkeypatch, regulariser, schedule):
    recipe = replace(RECIPE, epochs=2, regulariser=regulariser, schedule=schedule, cutout=2, optimiser="sgd")
    whole = perform(recipe, tmp_path / "whole", device="cpu").result
    stop, steps, step = threading.Event(), [], run.Training.step
    monkeypatch.setattr(
        run.Training, "step", lambda self: (step(self), steps.append(1), len(steps) == 9 and stop.set())
    )
    with pytest.raises(KeyboardInterrupt, match="continues it"):
        perform(recipe, tmp_path / "part", device="cpu", stop=stop)
    assert (len(steps), len(Run(tmp_path / "part").history.epoch)) == (9, 1)
    part = perform(recipe, tmp_path / "part", device="cpu").result
    assert part.weights_sha256 == whole.weights_sha256
    assert part.history.train_loss == whole.history.train_loss
    assert len(steps) == 12


def test_finished_run_is_not_trained_again(finished, monkeypatch):
    monkeypatch.setattr(run.Training, "step", None)
    assert perform(RECIPE, finished.folder, device="cpu").result == finished.result


def test_second_signal_interrupts_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        perform(RECIPE, tmp_path, device="cpu", on_epoch=lambda line: [signal.raise_signal(2) for _ in range(2)])
    assert not str(caught.value), "the run was saved first"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- Refusals


def test_promise_14_folder_of_another_run(finished, tmp_path):
    with pytest.raises(CheckpointError, match="seed") as caught:
        perform(replace(RECIPE, seed=7), finished.folder, device="cpu")
    assert caught.value.field == "out"
    with pytest.raises(CheckpointError, match="other data"):
        perform(RECIPE, finished.folder, Inputs(dataset=data.load("digits", fold=0).without_test()), device="cpu")
    # A result without its config, or a checkpoint alone, is as much another run's.
    for name in (RESULT, CONFIG):
        other = tmp_path / name
        other.mkdir()
        (other / name).write_bytes((finished.folder / name).read_bytes())
        with pytest.raises(CheckpointError):
            perform(replace(RECIPE, network="cnn"), other, device="cpu")


def test_another_device_is_refused_and_changes_nothing(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, tmp_path, device="cpu", stop=stop)
    of_a_gpu = (tmp_path / CONFIG).read_bytes().replace(b'"cpu"', b'"cuda"')
    (tmp_path / CONFIG).write_bytes(of_a_gpu)
    with pytest.raises(CheckpointError) as caught:
        perform(RECIPE, tmp_path, device="cpu")
    assert caught.value.field == "device"
    assert (tmp_path / CONFIG).read_bytes() == of_a_gpu


def test_checkpoint_of_another_run(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, tmp_path, device="cpu", stop=stop)
    (tmp_path / CONFIG).unlink()
    with pytest.raises(CheckpointError, match="another run"):
        perform(replace(RECIPE, seed=1), tmp_path, device="cpu")
    (tmp_path / CONFIG).unlink()
    (tmp_path / CHECKPOINT).write_bytes((tmp_path / CHECKPOINT).read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        perform(RECIPE, tmp_path, device="cpu")


def test_folder_in_use(tmp_path):
    with _files.locked(tmp_path), pytest.raises(FolderInUseError):
        perform(RECIPE, tmp_path, device="cpu")


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_unknown_device(tmp_path, device):
    with pytest.raises(RunError) as caught:
        perform(RECIPE, tmp_path, device=device)
    assert caught.value.field == "device"
    assert not (tmp_path / CONFIG).exists()


# --- Failures


def test_promise_14_diverged_run_is_a_result(tmp_path):
    recipe = replace(RECIPE, regulariser="none", optimiser="sgd", learning_rate=1e20)
    for _ in range(2):  # the second time without training
        with pytest.raises(DivergedError, match="learning_rate"):
            perform(recipe, tmp_path, device="cpu")
        (result,) = load(tmp_path)
        assert (result.status, result.fault, result.test_accuracy) == ("failed", "training", None)
        assert "epoch 1" in result.error


def test_promise_14_full_disk_is_the_machine_and_loses_nothing(tmp_path, monkeypatch):
    whole = perform(RECIPE, tmp_path / "whole", device="cpu").result
    write, written = _files.write, []

    def full(path, content):
        written.append(path.name)
        if written.count(CHECKPOINT) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(run, "SAVING_SHARE", math.inf)  # after every epoch
    with monkeypatch.context() as patch:
        patch.setattr(_files, "write", full)
        with pytest.raises(run.MachineError, match="space"):
            perform(RECIPE, tmp_path / "full", device="cpu")
    assert not (tmp_path / "full" / RESULT).exists()
    assert perform(RECIPE, tmp_path / "full", device="cpu").result.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("out of memory"), RuntimeError("not enough memory")]
)
def test_out_of_memory_is_the_machine(tmp_path, monkeypatch, error):
    def step(self):
        raise error

    monkeypatch.setattr(run.Training, "step", step)
    with pytest.raises(run.MachineError, match="memory"):
        perform(RECIPE, tmp_path, device="cpu")


def test_other_errors_are_no_fault_of_the_machine(tmp_path, monkeypatch):
    def step(self):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(run.Training, "step", step)
    with pytest.raises(RuntimeError, match="shapes"):
        perform(RECIPE, tmp_path, device="cpu")


# --- What a run does not touch


def test_callers_random_numbers_and_threads(tmp_path, finished):
    before = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    try:
        torch.set_num_threads(2)
        result = perform(RECIPE, tmp_path, device="cpu").result
        assert torch.get_num_threads() == 2
        stop = threading.Event()
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            perform(replace(RECIPE, seed=1), tmp_path / "stopped", device="cpu", stop=stop)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.rand(3), expected)
    assert result.weights_sha256 == finished.result.weights_sha256, "the caller's threads change the bits"


def test_runs_in_threads_take_turns(tmp_path, finished):
    results = {}

    def work(name):
        results[name] = perform(RECIPE, tmp_path / name, device="cpu").result

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result.weights_sha256 for result in results.values()} == {finished.result.weights_sha256}


# --- Data of one's own


def test_own_data_are_cross_validated(tmp_path, digits):
    train, test = ((part.images, part.labels) for part in (digits.train, digits.test))
    own = data.dataset("mine", train, test)
    recipe = replace(RECIPE, dataset="mine", fold=1, cross_validation=3)
    cut = data.cross_validate(own, 1, 3)
    assert perform(recipe, tmp_path, Inputs(dataset=own), device="cpu").result.fingerprint == cut.fingerprint
    assert Inputs(dataset=cut).load(recipe) is cut
    with pytest.raises(DataError):
        Inputs(dataset=own).load(replace(RECIPE, fold=1))


# --- Where the code is from


def test_code_version(monkeypatch, tmp_path):
    code_version.cache_clear()
    monkeypatch.setenv("MAXGAIN_COMMIT", "abc")
    assert code_version() == ("abc", True)
    code_version.cache_clear()
    monkeypatch.setenv("MAXGAIN_COMMIT", "abc-dirty")
    assert code_version() == ("abc", False)
    code_version.cache_clear()
    monkeypatch.delenv("MAXGAIN_COMMIT")
    package = tmp_path / "site-packages" / "maxgain"
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(run.maxgain, "__file__", str(package / "__init__.py"))
    assert code_version() == ("", None), "the repository of an environment is not the code's"
    code_version.cache_clear()


def test_json_is_strict(finished):
    for name in (CONFIG, RESULT):
        json.loads((finished.folder / name).read_text(), parse_constant=pytest.fail)


def test_folder_recipe_learns_on_a_cpu(tmp_path):
    digits = data.load("digits").train
    for number, (image, label) in enumerate(zip(digits.images[:240], digits.labels[:240], strict=True)):
        folder = tmp_path / "images" / str(int(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).resize((40, 30)).save(folder / f"{number}.png")
    recipe = replace(RECIPES["folder"], epochs=6)
    result = perform(recipe, tmp_path / "run", Inputs(root=tmp_path / "images"), device="cpu").result
    assert result.validation_accuracy + result.test_accuracy > 0.7  # guessing is 0.2
