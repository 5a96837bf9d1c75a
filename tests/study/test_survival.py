"""A run that is killed at any moment, interrupted, or out of disk ends, once resumed, in the same bits."""

import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maxgain.errors import RunError
from maxgain.study import checkpoint, runs, signals
from maxgain.study.cli import app as cli
from maxgain.study.recipes import RECIPES, to_json
from maxgain.study.run_files import CHECKPOINT
from maxgain.study.runs import Interrupted, Place, Watcher, perform
from maxgain.study.training import Training

# Every kind of state matters here: momenta, running statistics, the constraint's maxima, three users of the random
# numbers (noise, shifts, flips), the order of the data, and a learning rate that changes on the way.
RECIPE = replace(
    RECIPES["digits"],
    network="mlp",
    regulariser="maxgain+batchnorm+dropout",
    augment=True,
    milestones=(3, 6),
    epochs=8,
    fold=0,
)
COMMAND = [
    *("train", "digits", "--network", "mlp", "--regulariser", RECIPE.regulariser, "--augment"),
    *("--milestones", "3", "6", "--epochs", "8", "--fold", "0"),
]
LEFT_BEHIND = {".maxgain", "config.json", "metrics.jsonl", "model.safetensors", "predictions.npz", "result.json"}

Kept = tuple[bytes, list[dict[str, Any]], dict[str, Any]]


def kept(folder: Path) -> Kept:
    """All that a run leaves behind, but for the time that it took and the command that it was."""
    assert {path.name for path in folder.iterdir()} == LEFT_BEHIND
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    for part in (*lines, result):
        del part["seconds"]
    del result["finished"], result["command"], result["metrics_sha256"], result["sha256"]  # the last is of all others
    result["predictions"] = (folder / "predictions.npz").read_bytes()
    return (folder / "model.safetensors").read_bytes(), lines, result


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    perform(RECIPE, Place(out))
    return kept(out)


# A process that has imported everything and forks one for each line it reads: those start at once, so that twenty of
# them can be killed in seconds. It tells a child's id, when the child's training begins, and how the child ended.
FORKS = """
import json, os, sys, tempfile
from dataclasses import replace
from pathlib import Path
from maxgain.study.recipes import from_json
from maxgain.study.runs import Place, Watcher, perform

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

recipe = from_json(json.loads(sys.argv[1]))
with tempfile.TemporaryDirectory() as folder:  # a process's first run imports what the children then need not
    perform(replace(recipe, epochs=1), Place(Path(folder) / "run"))
say("ready")
for line in sys.stdin:
    out, seconds = json.loads(line)
    child = os.fork()
    if not child:
        watcher = Watcher(started=lambda training: say("begun"))
        perform(recipe, Place(Path(out), checkpoint_seconds=seconds), resume=True, watcher=watcher)
        os._exit(0)
    say("child", child)
    say("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Forks:
    """The test's end of the above."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", FORKS, json.dumps(to_json(RECIPE))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.wait_for("ready")

    def wait_for(self, *words: str) -> list[str]:
        """What is said in the next line that begins with one of these words."""
        assert self.process.stdout
        for line in self.process.stdout:
            if (said := line.split())[0] in words:
                return said
        raise AssertionError(f"the process ended before it said any of {words}")

    def duration(self, out: Path, seconds: float | None) -> float:
        """How long training takes on this machine, as busy as it is."""
        self.start(out, seconds)
        self.wait_for("begun")
        began = time.monotonic()
        self.wait_for("ended")
        return time.monotonic() - began

    def start(self, out: Path, seconds: float | None) -> int:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([str(out), seconds]) + "\n")
        self.process.stdin.flush()
        return int(self.wait_for("child")[1])


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.process.stdin.close()
    forks.process.stdout.close()
    assert forks.process.wait() == 0


@pytest.mark.parametrize("seconds", [None, 0.0, 0.02], ids=["every epoch", "every step", "every 20 ms"])
def test_promise_14_twenty_kills_at_random_moments_change_no_bit(
    tmp_path: Path, uninterrupted: Kept, forks: Forks, seconds: float | None
) -> None:
    chance = random.Random(f"kill {seconds}")
    patience = forks.duration(tmp_path / "whole", seconds) / 2
    out, kills, lengths = tmp_path / "0", 0, set()
    while kills < 20:
        child = forks.start(out, seconds)
        # Most are left to begin; the others are killed before they have, as likely as not.
        said = forks.wait_for("begun", "ended") if chance.random() < 0.8 else ["child"]
        if said[0] != "ended":
            time.sleep(chance.uniform(0, patience))
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(child, signal.SIGKILL)
            said = forks.wait_for("ended")
        ended = int(said[1])
        if ended == -signal.SIGKILL:
            kills += 1
            metrics = out / "metrics.jsonl"
            lengths.add(len(metrics.read_text().splitlines()) if metrics.exists() else 0)
        else:  # a run may get to its end between two kills: then there is one more to kill
            assert ended == 0
            assert kept(out) == uninterrupted
            out = tmp_path / str(kills)
    perform(RECIPE, Place(out), resume=True)
    assert kept(out) == uninterrupted
    assert len(lengths) > 3, "the kills never reached into a run"


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path, since: int = 0) -> int:
    """Waits until the process has saved, and returns when that was."""
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if (saved := (out / CHECKPOINT).stat().st_mtime_ns) > since:
                return saved
        time.sleep(0.002)
    raise AssertionError(f"it ended before it saved: {process.communicate()}")


def test_promise_14_a_command_that_is_killed_then_interrupted_then_resumed_ends_in_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, batch_size=4)
    perform(recipe, Place(tmp_path / "whole"))
    out = tmp_path / "run"
    arguments = [*COMMAND, "--batch-size", "4", "--checkpoint-seconds", "0", "--out", str(out)]
    command, pipe = [sys.executable, "-m", "maxgain.study.cli.app", *arguments], subprocess.PIPE

    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        saved = wait_for_checkpoint(process, out)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL

    with subprocess.Popen([*command, "--resume"], stdout=pipe, stderr=pipe, text=True) as process:
        wait_for_checkpoint(process, out, saved)
        process.send_signal(signal.SIGINT)
        shown, told = process.communicate()
    assert process.returncode == 130
    assert "going on after" in shown
    again = shlex.join(["maxgain", *arguments, "--resume"])
    assert told == f"{signals.STOPPING}maxgain: stopped, and what was saved is kept: {again} goes on.\n"
    assert "\x1b" not in shown, "nobody asked for colours or bars in a pipe"
    assert not (out / "result.json").exists()

    assert cli.main([*arguments, "--checkpoint-seconds", "1e9", "--resume"]) == 0
    assert kept(out) == kept(tmp_path / "whole")
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", [None, 1e9], ids=["every epoch", "hardly ever"])
def test_promise_21_ctrl_c_saves_wherever_it_comes(tmp_path: Path, uninterrupted: Kept, seconds: float | None) -> None:
    chance = random.Random(0)
    out, presses, trainings = tmp_path / "run", 0, []
    handler = signal.getsignal(signal.SIGINT)

    def press(_: object) -> None:
        nonlocal presses
        if chance.random() < 0.25:
            presses += 1
            signal.raise_signal(signal.SIGINT)

    def started(training: Training) -> None:
        trainings.append(training)
        press(training)

    watcher = Watcher(started=started, stepped=press, epoch_done=press)
    for _ in range(200):
        try:
            perform(RECIPE, Place(out, checkpoint_seconds=seconds), resume=True, watcher=watcher)
            break
        except Interrupted:
            tensors, about = checkpoint._read(out / CHECKPOINT)
            assert (tensors["loop.epoch"], len(about["history"])) == (trainings[-1].epoch,) * 2
            assert tensors["loop.position"] == trainings[-1].position
        except KeyboardInterrupt:  # pressed before the training began, or twice: no harm done
            pass
    assert kept(out) == uninterrupted
    assert presses > 5
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_the_final_scores_are_taken_loses_nothing(
    tmp_path: Path, uninterrupted: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    arguments = [*COMMAND, "--checkpoint-seconds", "1e9", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_conclude", interrupted)
        assert cli.main(arguments) == 130
    assert "--resume goes on" in capsys.readouterr().err

    def step(_: Training) -> None:
        raise AssertionError("all epochs were done already")

    monkeypatch.setattr(Training, "step", step)
    assert cli.main([*arguments, "--resume"]) == 0
    assert kept(tmp_path / "run") == uninterrupted


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A disk that fills up: what is written beyond this fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_promise_14_a_full_disk_loses_nothing(
    tmp_path: Path, uninterrupted: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def stop(line: dict[str, Any]) -> None:
        if line["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, Place(out), watcher=Watcher(epoch_done=stop))
    before = (out / CHECKPOINT).read_bytes()
    capsys.readouterr()
    with files_no_larger_than(len(before) // 2):
        assert cli.main([*COMMAND, "--out", str(out), "--resume"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"maxgain: cannot write {out / CHECKPOINT}: ")
    assert "--resume" in told
    assert told.count("\n") == 1
    assert (out / CHECKPOINT).read_bytes() == before
    assert {path.name for path in out.iterdir()} == {".maxgain", "config.json", "metrics.jsonl", CHECKPOINT}
    perform(RECIPE, Place(out), resume=True)
    assert kept(out) == uninterrupted


def test_metrics_that_cannot_be_appended_stop_the_run_with_a_sentence(tmp_path: Path, uninterrupted: Kept) -> None:
    out = tmp_path / "run"

    def spoil(line: dict[str, Any]) -> None:
        if line["epoch"] == 2:
            (out / "metrics.jsonl").unlink()
            (out / "metrics.jsonl").mkdir()

    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: .*; nothing saved before is lost: --resume"):
        perform(RECIPE, Place(out), watcher=Watcher(epoch_done=spoil))
    (out / "metrics.jsonl").rmdir()
    perform(RECIPE, Place(out), resume=True)
    assert kept(out) == uninterrupted


def test_what_killed_writers_left_is_swept_away(tmp_path: Path, uninterrupted: Kept) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".0123456789abcdef.maxgain-partial").write_bytes(b"half a check")
    perform(RECIPE, Place(out))
    assert kept(out) == uninterrupted


def test_a_finished_run_is_only_read_again(
    tmp_path: Path, uninterrupted: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    first = perform(RECIPE, Place(out))
    (out / CHECKPOINT).write_bytes(b"what a process leaves that is killed after its result is written")
    monkeypatch.setattr(runs, "Training", None)
    assert perform(RECIPE, Place(out), resume=True) == first
    assert kept(out) == uninterrupted
