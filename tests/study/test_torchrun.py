"""``torchrun -m maxgain train``: as users start it, killed ranks and new starts included."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from PIL import Image

from maxgain.study.cli.app import main
from torchrun import launch, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo"),
]
# With these, rounding does not grow from step to step, as it does with max-pooling and large steps.
SETTINGS = ["--network", "mlp", "--optimiser", "sgd", "--learning-rate", "0.005"]
TRAIN = ["train", "digits", "--regulariser", "maxgain=2+batchnorm", *SETTINGS]


def model(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def numbers(content: Any) -> list[float]:
    """All numbers in a JSON value but those that say how long something took."""
    if isinstance(content, dict):
        return [number for name, value in content.items() if name != "seconds" for number in numbers(value)]
    if isinstance(content, list):
        return [number for value in content for number in numbers(value)]
    return [content] if isinstance(content, int | float) else []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main([*TRAIN, "--epochs", "3", "--out", str(folder)]) == 0
    return folder


class Two(NamedTuple):
    """What two ranks come to that nobody disturbs."""

    folder: Path
    printed: str

    def expect_same_bits(self, folder: Path) -> None:
        assert (folder / "model.safetensors").read_bytes() == (self.folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("two") / "run"
    done = torchrun(2, "-m", "maxgain", *TRAIN, "--epochs", "3", "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    return Two(folder, done.stdout)


def test_ranks_train_the_network_that_one_process_trains(alone: Path, two: Two) -> None:
    out = two.folder
    shown, result = json.loads(two.printed), json.loads((alone / "result.json").read_text())
    assert shown["machine"] == f"{result['machine'].rpartition(',')[0]}, 1 thread, 2 ranks"
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in alone.iterdir())
    for name, expected in model(alone).items():
        torch.testing.assert_close(model(out)[name], expected, rtol=1e-3, atol=1e-5)
    parts = ("train_loss", "validation_loss", "test_loss", "test_accuracy", "max_gain", "gain_quantiles")
    for part in parts:
        assert numbers(shown[part]) == pytest.approx(numbers(result[part]), rel=1e-3)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (out, alone)]
    for ours, theirs in zip(*lines, strict=True):
        assert numbers(json.loads(ours)) == pytest.approx(numbers(json.loads(theirs)), rel=1e-3)


class Job:
    """A torchrun under way, and its ranks."""

    def __init__(self, out: Path, *options: str) -> None:
        command = launch(2, "-m", "maxgain", *TRAIN, "--epochs", "3", "--out", out, options=options)
        self.out = out
        self.process = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for line in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            variables = Path(f"/proc/{line}/environ").read_bytes().split(b"\0")
            if f"RANK={number}".encode() in variables:
                return int(line)
        raise AssertionError(f"there is no rank {number}")

    def wait_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)

    def epochs(self) -> int:
        path = self.out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def ended(self) -> tuple[int, str]:
        said, _ = self.process.communicate()
        return self.process.returncode, said


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@needs_proc
def test_a_killed_rank_ends_the_job_and_resuming_ends_in_the_same_bits(two: Two, tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.wait_until(lambda: job.epochs() >= 1 and (job.out / "checkpoint.safetensors").exists())
    os.kill(job.rank(1), signal.SIGKILL)
    code, said = job.ended()
    assert code != 0
    assert "maxgain: rank 0 lost the others, so all end here" in said
    assert "gloo" not in said
    assert not (job.out / "result.json").exists()
    done = torchrun(2, "-m", "maxgain", *TRAIN, "--epochs", "3", "--out", job.out, "--resume")
    assert done.returncode == 0, done.stderr
    two.expect_same_bits(job.out)


@needs_proc
def test_an_elastic_restart_goes_on_from_the_checkpoint_to_the_same_bits(two: Two, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", "--max-restarts=1")
    job.wait_until(lambda: job.epochs() >= 1 and (job.out / "checkpoint.safetensors").exists())
    os.kill(job.rank(0), signal.SIGKILL)
    code, said = job.ended()
    assert code == 0, said
    assert "rank 0 lost the others" not in said, "it was the one that was killed"
    two.expect_same_bits(job.out)
    assert job.epochs() == 3


@needs_proc
def test_sigterm_saves_and_resuming_ends_in_the_same_bits(two: Two, tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.wait_until(lambda: job.epochs() >= 1)
    job.process.send_signal(signal.SIGTERM)
    code, said = job.ended()
    assert code != 0
    assert said.count("goes on") == 1, said
    assert (job.out / "checkpoint.safetensors").exists()
    done = torchrun(2, "-m", "maxgain", *TRAIN, "--epochs", "3", "--out", job.out, "--resume")
    assert done.returncode == 0, done.stderr
    two.expect_same_bits(job.out)


def refused(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode != 0
    return [line for line in done.stderr.splitlines() if line.startswith("maxgain: ")]


def test_more_ranks_than_images_in_a_batch_are_refused_in_one_sentence(tmp_path: Path) -> None:
    done = torchrun(3, "-m", "maxgain", *TRAIN, "--batch-size", "2", "--out", tmp_path / "run")
    assert refused(done) == ["maxgain: 3 ranks cannot share a batch of 2: start fewer, or use a larger --batch-size."]
    assert not (tmp_path / "run").exists()


def test_data_that_one_rank_does_not_have_are_refused_in_one_sentence(tmp_path: Path) -> None:
    """Each rank has a $MAXGAIN_DATA of its own, as on machines that are set up differently."""
    script, out = tmp_path / "start.py", tmp_path / "run"
    script.write_text(
        "import os, sys\n"
        "from maxgain.study.cli.app import main\n"
        f"os.environ['MAXGAIN_DATA'] = os.path.join({str(tmp_path)!r}, os.environ['RANK'])\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for number in range(30):
        path = tmp_path / "0" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
    command = [script, "train", "folder", "--network", "mlp", "--image-size", "16", "--batch-size", "8"]
    done = torchrun(2, *command, "--epochs", "1", "--out", out)
    (sentence,) = refused(done)
    assert sentence.startswith("maxgain: rank 1 cannot begin: ")
    assert str(tmp_path / "1") in sentence
    assert not out.exists()


def test_other_commands_are_not_for_torchrun(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "maxgain", "compare", "digits", "--regularisers", "none", "--folds", "2")
    assert refused(done) == ["maxgain: torchrun is for 'maxgain train': start 'maxgain compare' once, without it."]
