"""Processes tell what they have to tell as the command itself does, and threads take turns often."""

import sys
import warnings

import pytest

from maxgain.study.comparing.workers import in_processes, in_threads


def warned(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn(text, stacklevel=1)
    return text


def test_a_warning_in_another_process_is_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(in_processes(warned, ["something is odd."], 1)) == [("something is odd.", "something is odd.")]
    assert capfd.readouterr().err == "maxgain: warning: something is odd.\n"


def test_threads_take_turns_more_often_than_python_has_it_and_only_as_long_as_they_work() -> None:
    before = sys.getswitchinterval()
    among = [interval for _, interval in in_threads(lambda _: sys.getswitchinterval(), range(3), 2)]
    assert max(among) < before
    assert sys.getswitchinterval() == before
