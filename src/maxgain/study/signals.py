"""Being asked to stop, by Ctrl-C, SIGTERM or SIGHUP, all alike: the first signal asks, and the second insists.

A command says at once that it is stopping, even while the main thread is inside a long operation, where Python runs no
handler. A training asks between two steps whether it is to stop, and saves itself first.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPING = "maxgain: stopping … (once more stops at once)\n"


@dataclass
class _State:
    """What has been asked of this process."""

    asked: int | None = None
    """The number of the first signal that asked it to stop."""
    patient: int = 0
    """How many blocks want to be asked instead of interrupted."""
    announced: bool = False
    """Whether a thread looks after the second signal."""


_state = _State()
_counting = threading.Lock()


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Turns being asked to stop into a question that can be asked between two steps.

    Where no command listens to signals, a second one raises `KeyboardInterrupt`, and the block leaves no trace.
    """
    with _handled():
        with _counting:  # several runs may train in threads of one process
            _state.patient += 1
        try:
            yield lambda: _state.asked is not None
        finally:
            with _counting:
                _state.patient -= 1


def defer_for_good() -> None:
    """Makes this process one that is only ever asked: a worker, which ends when its run has saved itself."""
    _state.patient += 1
    for number in ASKING:
        signal.signal(number, _handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


@contextmanager
def asking() -> Iterator[Callable[[], None]]:
    """What asks all runs of this process to stop, as a signal does; after the block it is forgotten."""
    asked: list[int] = []

    def ask() -> None:
        if _state.asked is None:
            _state.asked = signal.SIGINT
            asked.append(signal.SIGINT)

    try:
        yield ask
    finally:
        if asked:
            _state.asked = None


@contextmanager
def held() -> Iterator[None]:
    """Keeps the signals that ask from processes that are started in the block, until they are prepared for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ending() -> Iterator[None]:
    """Ctrl-C in the block ends the process in a sentence: for imports, half of which is no state to go on from."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    _say("maxgain: stopped before anything was begun.\n")
    os._exit(128 + number)


@contextmanager
def listening(last_words: Callable[[], str]) -> Iterator[None]:
    """For as long as a command runs: the first signal is answered at once, the second ends the process.

    Outside of `deferred` the first signal also raises `KeyboardInterrupt`. `last_words` are a sentence for the second:
    what is kept, and how to go on. A thread says both, which hears of signals from the operating system's own handler,
    whatever the main thread does.
    """
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    with _handled():
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread = threading.Thread(target=_announce, args=(reading, last_words), daemon=True)
        _state.announced = True
        thread.start()
        try:
            yield
        finally:
            _state.announced = False
            signal.set_wakeup_fd(before)
            os.close(writing)  # which ends the thread
            thread.join()
            os.close(reading)


def exit_code() -> int:
    """What a process that was asked to stop exits with, as shells have it: 130 after Ctrl-C, 143 after SIGTERM."""
    # Where the signal interrupted an exec of text, as in the making of a dataclass, CPython would die of SIGINT at its
    # end, caught or not. The next exec of text forgets that.
    exec("")
    return 128 + (_state.asked or signal.SIGINT)


@contextmanager
def _handled() -> Iterator[None]:
    """Our handler for all signals that ask, unless it is in place already."""
    in_place = any(signal.getsignal(number) is _handle for number in ASKING)
    if in_place or threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays ignored: a process that was started by nohup is to outlive its terminal.
    known = {number: signal.getsignal(number) for number in ASKING}
    before = {number: handler for number, handler in known.items() if handler not in (signal.SIG_IGN, None)}
    _state.asked = None
    for number in before:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    first = _state.asked is None
    if first:
        _state.asked = number
    if not (_state.patient if first else _state.announced):
        raise KeyboardInterrupt


def _announce(reading: int, last_words: Callable[[], str]) -> None:
    heard = False
    while number := os.read(reading, 1):
        if number[0] not in ASKING:
            continue
        if heard:
            _say(f"maxgain: {last_words()}\n", reset=True)
            os._exit(128 + number[0])
        heard = True
        _say(STOPPING)


def _say(text: str, *, reset: bool = False) -> None:
    """Writes past all buffers and locks, which the main thread may hold."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    codes = "\x1b[?25h\n" if reset else "\n"  # a progress bar hides the cursor and ends in no line end
    with suppress(OSError):
        os.write(2, ((codes if terminal else "") + text).encode())
