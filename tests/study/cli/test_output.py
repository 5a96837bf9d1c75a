"""Where output goes that nobody reads, and that nothing can hold.

What has no buffer fails at once; what has one, when Python ends.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def ended(words: str, *, buffered: bool, out: int = subprocess.PIPE, err: int = subprocess.PIPE) -> tuple[int, bytes]:
    """The exit code of a command, and what it says to people, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "maxgain", *words.split()]
    done = subprocess.run(command, env=environment, stdout=out, stderr=err, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "buffered"), [("list", False), ("list --json", True), ("train --help", True), ("train digits", True)]
)
def test_a_reader_that_has_gone_ends_a_command_as_it_ends_others(
    command: str, buffered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(command, buffered=buffered, out=writing) == (141, b"")
    finally:
        os.close(writing)


@pytest.mark.parametrize(("command", "buffered"), [("list --json", False), ("list --json", True), ("--version", True)])
def test_output_onto_a_full_disk_is_an_error_in_one_sentence(command: str, buffered: bool) -> None:
    with open("/dev/full", "wb") as full:
        assert ended(command, buffered=buffered, out=full.fileno()) == (2, b"maxgain: No space left on device.\n")


@pytest.mark.parametrize("buffered", [False, True])
def test_a_complaint_that_nobody_can_hear_changes_no_exit_code(buffered: bool) -> None:
    with open("/dev/full", "wb") as full:
        assert ended("lits", buffered=buffered, err=full.fileno())[0] == 2


def test_what_matplotlib_reads_of_the_environment_spoils_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results" / "tuning").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[3] / "results" / "tuning" / "cifar10.jsonl", tmp_path / "results" / "tuning")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    assert ended("reproduce", buffered=True) == (0, b"")
    assert (tmp_path / "results" / "figures" / "cifar10-tuning.svg").exists()
