"""Files and folders that appear whole or not at all, and that never take the place of somebody else's.

Everything is written under a temporary name beside its destination, flushed to the disk, and renamed at the end: a
process that is killed, a disk that fills up or a power cut leaves the old content or none, never half of the new.

A file that is there already is replaced only if the program wrote it: if it lies in a folder that a command of ours has
worked in (see `locks.alone_in`), or says at its beginning that it is ours.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from maxgain.errors import RunError

from . import codec

CLAIM = ".maxgain"
"""A folder that this file lies in belongs to the program."""
MARKS = {
    ".html": b'<meta name="generator" content="maxgain">',
    ".png": b"Software\x00maxgain",
    ".svg": b"<dc:title>maxgain</dc:title>",
    ".json": b'{\n  "maxgain": "',
    ".md": b"<!-- Made by `maxgain",
}
"""What a file of ours has at its beginning, by its suffix."""
_BEGINNING = 4096
_SUFFIX = ".maxgain-partial"

_swept: set[Path] = set()


@contextmanager
def whole_file(path: str | Path, *, replace: bool = False) -> Iterator[BinaryIO]:
    """A binary file to write to that becomes `path` when the block ends, and vanishes when the block raises.

    Parent folders are made. A link is followed: what it points to is replaced, not the link. A disk that
    cannot be written to raises `RunError`, and so does a file that is not the program's, unless `replace`.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise RunError(f"cannot write {path}: it exists and is not an ordinary file; choose another name.")
        if not replace and target.exists() and not (claimed(target.parent) or marked(target)):
            raise RunError(f"cannot write {path}: it exists and maxgain did not write it; choose another name.")
        make_folder(target.parent)
        _sweep_once(target.parent)
        partial = _beside(target)
        try:
            with partial.open("xb") as file:
                _hold(file.fileno())
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
            flush_folder(target.parent)
        finally:
            with suppress(OSError):
                partial.unlink()
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A new folder to fill that becomes `path` when the block ends, and vanishes when the block raises.

    `path` must not exist yet, or be an empty folder: what belongs together is never mixed with older files.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise RunError(f"cannot write {path}: it exists already and is not an empty folder; choose another name.")
        make_folder(target.parent)
        _sweep_once(target.parent)
        partial = _beside(target)
        partial.mkdir()
        descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _hold(descriptor)
            yield partial
            flush_folder(partial)
            partial.replace(target)
            flush_folder(target.parent)
        finally:
            os.close(descriptor)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error


def claimed(folder: Path) -> bool:
    """Whether a command of ours has worked in the folder, so that what lies there is ours."""
    return (folder / CLAIM).is_file()


def marked(path: Path, kind: str | None = None) -> bool:
    """Whether the file says at its beginning that it is ours, in the way of its kind, which its suffix tells."""
    mark = MARKS.get(kind or path.suffix.lower())
    if mark is None:
        return False
    with path.open("rb") as file:
        return mark in file.read(_BEGINNING)


def make_folder(folder: Path) -> None:
    """Makes the folder and those that it lies in, so that a power cut does not undo it."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Brings to the disk which files the folder has, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: str | Path, content: bytes, *, replace: bool = False) -> None:
    """Make `path` hold exactly `content`."""
    with whole_file(path, replace=replace) as file:
        file.write(content)


def write_text(path: str | Path, content: str, *, replace: bool = False) -> None:
    """Make `path` hold exactly `content`, as UTF-8 and with the line ends it has."""
    write_bytes(path, content.encode(), replace=replace)


def write_json(path: str | Path, content: Any, *, replace: bool = False) -> None:
    """Make `path` hold `content` as indented JSON that any reader accepts."""
    try:
        text = codec.encode(content, indent=2)
    except ValueError as error:
        raise RunError(f"cannot write {path}: {error}.") from error
    write_text(path, text + "\n", replace=replace)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left half written in `folder`; what is being written is left alone."""
    with suppress(OSError):
        for partial in folder.glob(f".*{_SUFFIX}"):
            with suppress(OSError):
                _remove_unless_held(partial)


def _sweep_once(folder: Path) -> None:
    if folder not in _swept:
        _swept.add(folder)
        sweep(folder)


def _remove_unless_held(partial: Path) -> None:
    descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _hold(descriptor)
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    finally:
        os.close(descriptor)


def _hold(descriptor: int) -> None:
    """Shows others that a living process writes this; raises where another does. A killed process holds nothing."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _beside(target: Path) -> Path:
    """A hidden name in the same folder, hence on the same disk, that no other writer and no other program uses."""
    return target.with_name(f".{secrets.token_hex(8)}{_SUFFIX}")
