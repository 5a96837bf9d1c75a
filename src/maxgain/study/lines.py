"""Files of JSON lines, to which several processes add at once, and of which a killed one spoils none but its own."""

import errno
import fcntl
import os
from pathlib import Path

from .files import locked, make_folder
from .reading import is_json


def append_line(path: Path, line: str, beginning: str) -> None:
    """Add a line to a file, which is made if need be, while no other process does; it is then on the disk.

    One write adds it, so that other writers' lines stay whole whatever happens to us. All lines of the program's begin
    alike: see `end_last_line`. `OSError` if it cannot be done.
    """
    make_folder(path.parent)
    with locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as descriptor:
        end_last_line(descriptor, beginning)
        size = os.fstat(descriptor).st_size
        content = line.encode() + b"\n"
        if os.write(descriptor, content) < len(content):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)


def end_last_line(descriptor: int, beginning: str) -> None:
    """Cut off the piece of a line that a killed writer left at the end of a locked file.

    A line that is JSON lacks nothing but its end, and one that does not begin as the program's lines do is somebody
    else's: these get their end and are kept.
    """
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    piece, start = os.pread(descriptor, size, 0).rpartition(b"\n")[2], beginning.encode()
    if is_json(piece) or not (piece.startswith(start) or start.startswith(piece)):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, size - len(piece))
