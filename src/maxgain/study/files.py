"""Files and folders that appear whole or not at all.

Everything is written under a temporary name beside its destination, flushed to the disk, and renamed at the
end: a process that is killed, or a disk that fills up, leaves the old content or none, never half of the new.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from maxgain.errors import RunError

from . import codec

_SUFFIX = ".partial"


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file to write to that becomes `path` when the block ends, and vanishes when the block raises.

    Parent folders are made. A link is followed: what it points to is replaced, not the link. A disk that
    cannot be written to raises `RunError`.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise RunError(f"cannot write {path}: it exists and is not an ordinary file; choose another name.")
    partial = _beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A new folder to fill that becomes `path` when the block ends, and vanishes when the block raises.

    `path` must not exist yet, or be an empty folder: what belongs together is never mixed with older files.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(f"cannot write {path}: it exists already and is not an empty folder; choose another name.")
    partial = _beside(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Make `path` hold exactly `content`."""
    with whole_file(path) as file:
        file.write(content)


def write_text(path: str | Path, content: str) -> None:
    """Make `path` hold exactly `content`, as UTF-8 and with the line ends it has."""
    write_bytes(path, content.encode())


def write_json(path: str | Path, content: Any) -> None:
    """Make `path` hold `content` as indented JSON that any reader accepts."""
    try:
        text = codec.encode(content, indent=2)
    except ValueError as error:
        raise RunError(f"cannot write {path}: {error}.") from error
    write_text(path, text + "\n")


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left half written in `folder`."""
    for partial in folder.glob(f".*{_SUFFIX}"):
        with suppress(OSError):
            partial.unlink()


def _beside(target: Path) -> Path:
    """A hidden name in the same folder, hence on the same disk, that no other writer uses."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{_SUFFIX}")
