"""Files that appear whole or not at all, JSON that any reader accepts, and a lock on a folder."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from maxgain.errors import FileError, FolderInUseError, MissingFileError, RunError

T = TypeVar("T")
LOCK = ".lock"


def write(path: Path, content: bytes) -> None:
    """Make `path` hold exactly `content`: a process that is killed leaves the old content, never half of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Make `path` hold the value as indented JSON."""
    write(path, msgspec.json.format(encode(value), indent=2) + b"\n")


def encode(value: Any) -> bytes:
    """The value as JSON on one line; infinities are the texts "inf" and "-inf", NaN is null."""
    return msgspec.json.encode(to_builtins(value))


def decode(content: bytes, kind: type[T]) -> T:
    """The value that `encode` wrote; `ValueError` where the content is none of that kind."""
    return msgspec.json.decode(content, type=kind, strict=False)  # which reads "inf" as a number


def read_json(path: Path, kind: type[T]) -> T:
    """The value in a JSON file; `FileError` names the file and what is wrong in it."""
    try:
        return decode(path.read_bytes(), kind)
    except FileNotFoundError as error:
        raise MissingFileError(f"there is no {path}.") from error
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {str(error).rstrip('.')}.") from error


def to_builtins(value: Any) -> Any:
    """The value in the types of JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {name: to_builtins(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtins(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return to_builtins(msgspec.to_builtins(value))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing in the folder, which is made if need be, and free of what they left half."""
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        for partial in folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)
    except Timeout as error:
        raise FolderInUseError(f"another process is writing in {folder}; wait, or choose another folder.") from error
    except OSError as error:
        raise RunError(f"cannot write in {folder}: {error.strerror or error}.", field="out") from error
    try:
        yield
    finally:
        lock.release()
