"""One process at a time, by locks that a process which was killed no longer holds."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maxgain.errors import RunError


@contextmanager
def locked(path: Path, flags: int, operation: int) -> Iterator[int]:
    """The open file's descriptor, once no other process holds the file in a way that the `flock` operation excludes."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, operation)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes from working in the folder, which is made if need be, at the same time."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / ".lock", os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise RunError(f"another maxgain is at work in {folder}: wait for it, or choose another --out.") from error
        except OSError as error:
            raise RunError(f"cannot write in {folder}: {error.strerror or error}.") from error
        yield
