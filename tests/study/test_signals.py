"""Ctrl-C, SIGTERM and SIGHUP ask a process to stop, all alike; whoever asks twice is not kept waiting."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxgain.study import signals

ALL = pytest.mark.parametrize("number", signals.ASKING, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def no_trace_is_left() -> Iterator[None]:
    before = [signal.getsignal(number) for number in signals.ASKING]
    yield
    assert [signal.getsignal(number) for number in signals.ASKING] == before
    assert (signals._state.patient, signals._state.announced) == (0, False)


@ALL
def test_a_block_that_defers_is_asked_and_not_interrupted(number: signal.Signals) -> None:
    with signals.deferred() as asked:
        assert not asked()
        signal.raise_signal(number)
        assert asked()
    with signals.deferred() as asked:
        assert not asked(), "the next run is another matter"


@ALL
def test_asked_twice_a_block_is_interrupted(number: signal.Signals) -> None:
    with signals.deferred():
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@ALL
def test_a_command_is_interrupted_and_says_so_first(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with signals.listening(lambda: "the end."):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        code = signals.exit_code()
    assert code == 128 + number
    assert capfd.readouterr().err == signals.STOPPING


def test_a_command_that_defers_goes_on_until_it_is_ready(capfd: pytest.CaptureFixture[str]) -> None:
    with signals.listening(lambda: "the end."), signals.deferred() as asked:
        signal.raise_signal(signal.SIGTERM)
        assert asked()
    assert capfd.readouterr().err == signals.STOPPING


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listening(lambda: "the end."), signals.deferred() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert not asked()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    seen = []

    def work() -> None:
        with signals.listening(lambda: "the end."), signals.deferred() as asked:
            seen.append(asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


# A main thread that is inside one long operation, as a step of a large network is, and hears of no signal.
BUSY = """
import hashlib, sys
from maxgain.study import signals
with signals.listening(lambda: "it is over."), signals.deferred():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@ALL
def test_a_busy_process_answers_the_first_signal_and_ends_at_the_second(number: signal.Signals) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stderr.readline() == signals.STOPPING
        process.send_signal(number)
        assert process.stderr.read() == "maxgain: it is over.\n"
    assert process.returncode == 128 + number


@pytest.mark.parametrize("module", ["maxgain", "maxgain.study"])
def test_ctrl_c_while_torch_is_imported_is_answered_with_a_sentence(module: str, tmp_path: Path) -> None:
    """A torch that is never done with being imported stands in for the real one, which takes seconds."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(1000)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-m", module, "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which is ignored in the background
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1]
    assert (process.returncode, told) == (130, "maxgain: stopped before anything was begun.\n")


def test_a_signal_while_a_dataclass_is_made_ends_in_its_own_exit_code(tmp_path: Path) -> None:
    code = "import sys; from maxgain.study import signals; signals._state.asked = 15\n"
    code += "try: exec('raise KeyboardInterrupt')\nexcept KeyboardInterrupt: sys.exit(signals.exit_code())"
    (tmp_path / "interrupted.py").write_text(code)
    ended = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, check=False)
    assert ended.returncode == 143
