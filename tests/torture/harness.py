"""Commands run in this process, as fast as can be, and judged by how they answer."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

import pytest

from maxgain.study.bench.running import Row
from maxgain.study.cli import app, bench
from maxgain.study.data import download
from maxgain.study.training import Training
from one_process import in_this_process

PATIENCE = 30
"""Seconds after which a command counts as hanging."""
STEPS = 40
"""Of training, after which somebody presses Ctrl-C: what trains is not what is tried."""
TIMED = {"maxgain": "0", "machine": "none", "rows": [asdict(Row("GPT", "eager", "MaxGain", 2.0, 1.1, 1.0, 1.2, None))]}
"""What `maxgain bench` would have timed."""


class HangError(BaseException):
    """A command took too long; no handler of errors is meant to catch it."""


class Failures:
    """What failed among many tries: one that fails does not hide the next."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def collected(self, what: str = "") -> Iterator[None]:
        """Notes a failure in the block, and goes on."""
        try:
            yield
        except AssertionError as error:
            self.told.append(": ".join(filter(None, (what, str(error)))))

    def tell(self) -> None:
        """Fails where anything did, and says it all."""
        assert not self.told, "\n".join([f"{len(self.told)} failed:", *self.told])


@contextmanager
def impatience() -> Iterator[None]:
    """Raises where the block takes too long."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, handler)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def in_a_hurry(most: int = STEPS) -> Iterator[None]:
    """No processes, no network, and hardly any training."""
    step, steps = Training.step, 0

    def counted(training: Training) -> None:
        nonlocal steps
        steps += 1
        if steps % most == 0:
            raise KeyboardInterrupt
        step(training)

    def offline(*_: Any, **__: Any) -> None:
        raise download.DataError("there is no network in this test.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", counted)
        in_this_process(patch)
        patch.setattr(download, "_retrieve", offline)
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where no cluster is; without an address one would be started
        patch.setattr(bench, "measure", lambda settings: iter([TIMED]))  # nobody times here
        yield


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """A command's exit code and what it wrote to standard error; an AssertionError where it did not behave."""
    try:
        with impatience(), warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)  # which a command shows, where the suite would stop at it
            code = app.main(words)
    except SystemExit as stopped:  # help
        code = int(stopped.code or 0)
    except HangError:
        raise AssertionError(f"{words} took more than {PATIENCE} s") from None
    except BaseException as error:
        raise AssertionError(f"{words} ended in a traceback: {type(error).__name__}: {str(error)[:300]}") from error
    told = capsys.readouterr().err
    complaints = [line for line in told.splitlines() if line and not line.startswith("maxgain: warning: ")]
    assert code in (0, 2, 130), f"{words} exits with {code}: {told[:500]}"
    assert "Traceback" not in told, f"{words}: {told[:2000]}"
    if code == 2 and words:
        assert told.startswith("maxgain: "), f"{words} says {told[:500]!r}"
        assert complaints, f"{words} says nothing"
    return code, told
