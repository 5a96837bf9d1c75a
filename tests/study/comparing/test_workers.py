"""Processes tell what they have to tell as the command itself does; threads take turns often, and stop together."""

import sys
import time
import warnings

import pytest
import torch

from maxgain.study import signals
from maxgain.study.comparing import workers
from maxgain.study.comparing.workers import in_processes, in_threads, side_by_side


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


def test_where_one_run_on_a_gpu_fails_the_others_are_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "chosen_device", lambda name: torch.device("cuda"))
    ended = []

    def work(job: str) -> None:
        with signals.deferred() as asked:
            while job == "long" and not asked() and time.monotonic() < late:
                time.sleep(0.01)
            ended.append((job, asked()))
            if job == "bad":
                raise OSError("the disk is full")

    late = time.monotonic() + 20
    with pytest.raises(OSError, match="the disk is full"):
        list(side_by_side(work, ["long", "bad", "never"], 2, "cuda"))
    assert ended == [("bad", False), ("long", True)]
    assert [job for job, _ in side_by_side(work, ["next"], 2, "cuda")] == ["next"]
    assert ended[-1] == ("next", False), "what comes later is not asked"
