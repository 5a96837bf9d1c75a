"""Commands that a scheduler, a closed terminal or Ctrl-C asks to stop: they save, say so, and name one that goes on."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maxgain.study import signals
from torture import harness
from torture.size import LARGE

RECIPE = ["digits", "--network", "mlp", "--fold", "0"]
LONG = ["--epochs", "4000"]
COMMANDS = {
    "train": ["train", *RECIPE, *LONG],
    "tune": ["tune", *RECIPE, *LONG, "--regulariser", "maxgain", "--grid", "gamma=1:2:1", "--jobs", "2"],
    "compare": ["compare", *RECIPE[:3], *LONG, "--regularisers", "none", "maxgain", "--folds", "2", "--jobs", "2"],
}
CASES = [
    (command, number, twice)
    for command in COMMANDS
    for number in signals.ASKING
    for twice in (False, True)
    if LARGE or (command, number, twice) == ("train", signal.SIGHUP, False)
]


def as_from_a_terminal() -> None:
    """Nothing is ignored, though these tests may run under nohup, where commands ignore signals."""
    for number in signals.ASKING:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "maxgain.study", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def metrics(folder: Path) -> dict[Path, str]:
    """What every run below the folder tells of its epochs, with the seconds that each took."""
    return {path: path.read_text() for path in folder.rglob("metrics.jsonl")}


def epochs(folder: Path) -> int:
    """How many epochs all runs below the folder have had."""
    return sum(text.count("\n") for text in metrics(folder).values())


def wait_for_an_epoch(process: subprocess.Popen[str], folder: Path) -> None:
    while not epochs(folder):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(("command", "number", "twice"), CASES)
def test_a_command_that_is_stopped_saves_and_names_one_that_goes_on(
    command: str,
    number: signal.Signals,
    twice: bool,
    tmp_path: Path,
    tried: Callable[[str, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*COMMANDS[command], "--out", str(tmp_path / "out")]
    with running(words) as process:
        wait_for_an_epoch(process, tmp_path / "out")
        process.send_signal(number)
        assert process.stderr
        assert process.stderr.readline() == signals.STOPPING
        if twice:
            process.send_signal(number)
        told = process.stderr.read()
        assert process.wait() == 128 + number, told
    assert "Traceback" not in told
    assert told.count("\n") == 1, told
    assert "goes on" in told
    before, done = metrics(tmp_path / "out"), epochs(tmp_path / "out")
    program, *named = shlex.split(told[told.index("maxgain " + command) :].removesuffix(" goes on.\n"))
    assert program == "maxgain"
    with harness.in_a_hurry():  # which presses Ctrl-C before long
        assert harness.answer(named, capsys)[0] == 130
    assert epochs(tmp_path / "out") > done
    if not twice:  # then the last epochs may not have been saved
        after = metrics(tmp_path / "out")
        assert all(after[path].startswith(text) for path, text in before.items()), "no epoch is trained again"
    tried("faults and kills", 1)
