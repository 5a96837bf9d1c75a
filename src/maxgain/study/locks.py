"""One process at a time, by locks that a process which was killed no longer holds."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maxgain.errors import FolderInUseError, RunError

from .files import CLAIM, claimed, make_folder, marked, sweep
from .wording import is_text


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
def alone_in(folder: Path, *written: str) -> Iterator[None]:
    """Keeps other processes from working in the folder, which is made if need be, at the same time.

    The folder is the program's own from then on, so it must not hold what somebody else called as it is `written`.
    """
    with ExitStack() as stack:
        try:
            if not is_text(str(folder)):
                raise RunError(f"{str(folder)!a} cannot be a folder of results, as its name is not text.")
            paths = [] if claimed(folder) else [folder / name for name in written if (folder / name).exists()]
            if foreign := [path.name for path in paths if not (path.is_file() and marked(path))]:
                raise RunError(f"{folder} has a {foreign[0]} that maxgain did not write: choose another --out.")
            make_folder(folder)
            stack.enter_context(locked(folder / CLAIM, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError as error:
            said = f"another maxgain is at work in {folder}: wait for it, or choose another --out."
            raise FolderInUseError(said) from error
        except OSError as error:
            raise RunError(f"cannot write in {folder}: {error.strerror or error}.") from error
        sweep(folder)
        yield
