"""Where output goes that nobody reads, and that nothing can hold.

What has no buffer fails at once; what has one, when Python ends.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

FULL = "/dev/full"
NOBODY = ""
"""Stands for a pipe whose reader has gone."""

# A process that has imported the command line, which takes seconds, and forks one for each command. Whether output has
# a buffer is decided when Python starts, so there is one process for each case.
FORKS = """
import json, os, runpy, sys
from maxgain.study.cli import app, list, train

answers = os.dup(1)
for line in sys.stdin:
    words, folder, *streams = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        for number, path in enumerate(streams, start=1):
            if path:
                stream = os.open(path, os.O_WRONLY | os.O_CREAT)
            else:
                reading, stream = os.pipe()
                os.close(reading)
            os.dup2(stream, number)
        sys.argv = ["maxgain", *words]
        runpy.run_module("maxgain", run_name="__main__")
    os.write(answers, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

Ended = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Callable[[bool], subprocess.Popen[str]]]:
    started = []

    @cache
    def process(buffered: bool) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, "-c", FORKS], env=environment, stdin=pipe, stdout=pipe, text=True)
        )
        return started[-1]

    yield process
    for one in started:
        one.communicate()
        assert one.returncode == 0


@pytest.fixture
def ended(forks: Callable[[bool], subprocess.Popen[str]], tmp_path: Path) -> Ended:
    """The exit code of a command in a process of its own, and what it says to people."""

    def run(words: str, *, buffered: bool, out: str = "out", err: str = "err") -> tuple[int, str]:
        process = forks(buffered)
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps([words.split(), str(tmp_path), out, err]) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return code, (tmp_path / err).read_text() if err == "err" else ""

    return run


@pytest.mark.parametrize(
    ("command", "buffered"), [("list", False), ("list --json", True), ("train --help", True), ("train digits", True)]
)
def test_a_reader_that_has_gone_ends_a_command_as_it_ends_others(command: str, buffered: bool, ended: Ended) -> None:
    assert ended(command, buffered=buffered, out=NOBODY) == (141, "")


@pytest.mark.parametrize(("command", "buffered"), [("list --json", False), ("list --json", True), ("--version", True)])
def test_output_onto_a_full_disk_is_an_error_in_one_sentence(command: str, buffered: bool, ended: Ended) -> None:
    assert ended(command, buffered=buffered, out=FULL) == (2, "maxgain: No space left on device.\n")


@pytest.mark.parametrize("buffered", [False, True])
def test_a_complaint_that_nobody_can_hear_changes_no_exit_code(buffered: bool, ended: Ended) -> None:
    assert ended("lits", buffered=buffered, err=FULL)[0] == 2


def test_what_matplotlib_reads_of_the_environment_spoils_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results" / "tuning").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[3] / "results" / "tuning" / "cifar10.jsonl", tmp_path / "results" / "tuning")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    done = subprocess.run([sys.executable, "-m", "maxgain", "reproduce"], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "results" / "figures" / "cifar10-tuning.svg").exists()
