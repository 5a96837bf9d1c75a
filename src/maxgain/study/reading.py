"""One way to read a file that somebody else may have written.

Only a regular file is opened, so that no pipe or device is waited for. No more is read than a file of its kind can
need. JSON is strict, nested no deeper than anything the program writes, and checked against a schema: any type that
msgspec understands. What is wrong is said in one sentence, with the path and the place in the file.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from maxgain.errors import FileError, MissingFileError

MEBIBYTE = 2**20
LARGEST_DOCUMENT = 64 * MEBIBYTE
"""Of one JSON text: a file, or a line of a file of records."""
LARGEST_RECORDS = 4096 * MEBIBYTE
"""Of a file with one JSON text per line."""
DEEPEST = 24
"""How deeply JSON may be nested; what the program writes stays under half of it."""
LARGEST_NUMBER = 2**64
"""Of whole numbers."""

T = TypeVar("T")


def expect_regular(path: Path, limit: int | None = None) -> int:
    """Refuse a path that is no regular file, or one of more than `limit` bytes; return how many it has."""
    with _in_words(path):
        about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise FileError(f"{path} is {_kind(about.st_mode)} where a file is expected.")
    if limit is not None and about.st_size > limit:
        raise FileError(f"{path} has {about.st_size:,} bytes where {limit:,} are the most that can be read.")
    return about.st_size


@contextmanager
def opened(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """The regular file at `path`, open for reading."""
    expect_regular(path, limit)
    with _in_words(path):
        # A pipe that took the file's place since it was looked at is not waited for.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    with file:
        yield file


def read_bytes(path: Path, limit: int = LARGEST_DOCUMENT) -> bytes:
    """All that is in the file."""
    with opened(path, limit) as file, _in_words(path):
        content = file.read(limit + 1)
    if len(content) > limit:
        raise FileError(f"{path} grew beyond {limit:,} bytes while it was read.")
    return content


def read_json(path: Path, schema: type[T], limit: int = LARGEST_DOCUMENT) -> T:
    """The file's JSON, as `schema` wants it."""
    try:
        return parsed(read_bytes(path, limit), schema)
    except ValueError as error:
        raise FileError(f"{path} cannot be used: {error}.") from error


@dataclass(frozen=True)
class Line(Generic[T]):
    """One line of a file of JSON lines: what it holds, or what is wrong with it."""

    number: int
    content: T | None
    problem: str | None = None
    cut_short: bool = False
    """Whether it is the last line, not ended and no JSON: what a writer that was killed leaves."""


def read_lines(path: Path, schema: type[T]) -> Iterator[Line[T]]:
    """Every line of the file but empty ones; a line that cannot be used is told of and the rest is read."""
    for number, text in enumerate(_texts(path), start=1):
        if text is None:
            yield Line(number, None, f"it has more than {LARGEST_DOCUMENT:,} bytes")
        elif text.strip():
            try:
                yield Line(number, parsed(text, schema))
            except ValueError as error:
                cut_short = not text.endswith(b"\n") and not is_json(text)
                yield Line(number, None, str(error), cut_short)


def parsed(text: str | bytes, schema: type[T]) -> T:
    """The strict JSON in a text, as `schema` wants it; `ValueError` says what is wrong and where."""
    return converted(_decoded(text), schema)


def converted(content: Any, schema: type[T]) -> T:
    """Content that came from JSON, as `schema` wants it; `ValueError` says what is wrong and where."""
    try:
        return msgspec.convert(content, schema)
    except msgspec.ValidationError as error:
        raise ValueError(_placed(str(error))) from error


def _texts(path: Path) -> Iterator[bytes | None]:
    """The file's lines; None for one that is too long."""
    with opened(path, LARGEST_RECORDS) as file, _in_words(path):
        while text := file.readline(LARGEST_DOCUMENT + 1):
            if len(text) <= LARGEST_DOCUMENT:
                yield text
                continue
            while text and not text.endswith(b"\n"):
                text = file.readline(LARGEST_DOCUMENT)
            yield None


def _decoded(text: str | bytes) -> Any:
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({_placed(str(error))})") from error
    except RecursionError as error:
        raise ValueError(f"its JSON is nested deeper than {DEEPEST} levels") from error
    _expect_moderate(content)
    return content


def _expect_moderate(content: Any) -> None:
    """Refuse deep nesting and numbers that no float could hold, which would be noticed much later.

    Level by level, because a function that calls itself could be brought to its own limit.
    """
    level = [content]
    for _ in range(DEEPEST + 1):
        if any(isinstance(value, int) and abs(value) > LARGEST_NUMBER for value in level):
            raise ValueError(f"it has a number beyond {LARGEST_NUMBER}")
        nested = [value for value in level if isinstance(value, dict | list)]
        level = [item for value in nested for item in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ValueError(f"its JSON is nested deeper than {DEEPEST} levels")


def _placed(complaint: str) -> str:
    """A complaint of msgspec's with the place first: "at rows[2].mean: expected `float`, got `str`"."""
    said, _, place = complaint.partition(" - at `$")
    said = said if said[:2].isupper() else said[:1].lower() + said[1:]  # JSON stays JSON
    place = re.sub(r"^\.", "", place.rstrip("`"))
    return f"at {place}: {said}" if place else said


def is_json(text: bytes) -> bool:
    """Whether a text is strict JSON, whatever it says."""
    try:
        _decoded(text)
    except ValueError:
        return False
    return True


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing.") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a path with a null character
        raise FileError(f"{str(path)!r} cannot be the name of a file.") from error


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "something else")
