"""Files and folders that appear whole or not at all, that one process works in, and that are nobody else's.

Everything is written under a temporary name beside its destination, flushed to the disk, and renamed at the end: a
process that is killed, a disk that fills up or a power cut leaves the old content or none, never half of the new.

A file that is there already is replaced only if the program wrote it: if a command of ours that works in the folder has
claimed its name (see `alone_in`), or if it says at its beginning that it is ours.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from maxgain.errors import FileError, FolderInUseError, RunError
from maxgain.strict_json import number

from . import reading

SEAL = "sha256"
CLAIM = ".maxgain"
"""The file that names, a line each, what the program writes in a folder that it works in."""
_CLAIM_BEGINS = "# maxgain writes here:\n"
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

HELD = fcntl.LOCK_EX | fcntl.LOCK_NB
"""Shows others that a living process writes a file; raises where another does. A killed process holds nothing."""
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
        if not replace:
            expect_ours(target)
        partial = _beside(target)
        try:
            with partial.open("xb") as file:
                fcntl.flock(file.fileno(), HELD)
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
        partial = _beside(target)
        partial.mkdir()
        descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, HELD)
            yield partial
            flush_folder(partial)
            partial.replace(target)
            flush_folder(target.parent)
        finally:
            os.close(descriptor)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error


def is_text(name: str) -> bool:
    """Whether a name, of a file for example, is text that can be shown and kept: no stray bytes, no control codes."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in name)


def claimed(path: Path) -> bool:
    """Whether a command of ours has claimed the name in the folder, so that what lies there is ours.

    A claim of the first version is empty and is for all names.
    """
    claim = path.parent / CLAIM
    if not claim.is_file():
        return False
    names = _beginning(claim).split(b"\n")
    return names == [b""] or os.fsencode(path.name) in names


def foreign(path: Path) -> bool:
    """Whether there is something by that name which is somebody else's."""
    return path.exists() and not (claimed(path) or (path.is_file() and marked(path)))


def expect_ours(*paths: Path) -> None:
    """`RunError` if one of the files could not be written as it is somebody else's: to be asked before long work."""
    for path in filter(foreign, paths):
        raise RunError(f"cannot write {path}: it exists and maxgain did not write it; choose another name.")


def marked(path: Path, kind: str | None = None) -> bool:
    """Whether the file says at its beginning that it is ours, in the way of its kind, which its suffix tells."""
    mark = MARKS.get(kind or path.suffix.lower())
    if mark is None:
        return False
    return mark in _beginning(path)


def _beginning(path: Path) -> bytes:
    """What a file begins with; one that went through Windows, or through git there, has other line ends."""
    with path.open("rb") as file:
        return file.read(_BEGINNING).replace(b"\r\n", b"\n")


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, hidden ones apart, in order of name; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


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
    with whole_file(path, replace=replace) as file:
        file.write(content.encode())


def write_json(path: str | Path, content: Any, *, replace: bool = False) -> None:
    """Make `path` hold `content` as indented JSON that any reader accepts."""
    try:
        text = encode(content, indent=2)
    except ValueError as error:
        raise RunError(f"cannot write {path}: {error}.") from error
    write_text(path, text + "\n", replace=replace)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left half written in `folder`; what is being written is left alone."""
    with suppress(OSError):
        for partial in folder.glob(f".*{_SUFFIX}"):
            with suppress(OSError):
                _remove_unless_held(partial)


def _remove_unless_held(partial: Path) -> None:
    descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, HELD)
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    finally:
        os.close(descriptor)


def _beside(target: Path) -> Path:
    """A hidden name in the same folder, so on the same disk, that no other writer and no other program uses."""
    make_folder(target.parent)
    if target.parent not in _swept:
        _swept.add(target.parent)
        sweep(target.parent)
    return target.with_name(f".{secrets.token_hex(8)}{_SUFFIX}")


# --- One process at a time, by locks that a process which was killed no longer holds -------------------------------


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

    What is `written` there is the program's own from then on, so somebody else must not have called a file like that.
    """
    with ExitStack() as stack:
        try:
            if not is_text(str(folder)):
                raise RunError(f"{str(folder)!a} cannot be a folder of results, as its name is not text.")
            for path in filter(foreign, (folder / name for name in written)):
                raise RunError(f"{folder} has a {path.name} that maxgain did not write: choose another --out.")
            make_folder(folder)
            beginning = "" if (folder / CLAIM).exists() else _CLAIM_BEGINS
            claim = stack.enter_context(locked(folder / CLAIM, os.O_RDWR | os.O_CREAT | os.O_APPEND, HELD))
            new = [name for name in written if beginning or not claimed(folder / name)]
            os.write(claim, "".join([beginning, *(f"{name}\n" for name in new)]).encode())
        except BlockingIOError as error:
            said = f"another maxgain is at work in {folder}: wait for it, or choose another --out."
            raise FolderInUseError(said) from error
        except OSError as error:
            raise RunError(f"cannot write in {folder}: {error.strerror or error}.") from error
        sweep(folder)
        yield


# --- JSON that any reader accepts: the one rule for writing numbers and reading them back -----------------------------
#
# It knows no infinity. Numbers are written as `maxgain.strict_json` has it, and exactly the texts "inf" and "-inf" are
# read back as numbers.


def plain(value: Any, where: str = "the value") -> Any:
    """The value in the types of strict JSON; `ValueError` says what in it JSON cannot hold."""
    match value:
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return float(value)  # numpy's are floats too, but not to every checker
        case str():  # the name of a file may be no text, and half a character cannot be written
            return value.encode(errors="backslashreplace").decode()
        case float():
            return number(value)
        case Mapping():
            if strange := [name for name in value if not isinstance(name, str)]:
                raise ValueError(f"{where} has a field called {strange[0]!r}, but names must be texts")
            return {plain(name): plain(item, name) for name, item in value.items()}
        case list() | tuple():
            return [plain(item, where) for item in value]
        case _:
            raise ValueError(f"{where} is of the type {type(value).__name__}, which JSON cannot hold")


def revived(value: Any) -> Any:
    """What `plain` was made of, tuples as lists."""
    match value:
        case dict():
            return {name: revived(item) for name, item in value.items()}
        case list():
            return [revived(item) for item in value]
        case "inf" | "-inf":
            return float(value)
        case _:
            return value


def checksum(value: Any) -> str:
    """The SHA-256 of a value, however it is laid out in a file."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True, allow_nan=False).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with a checksum of all of it, by which `expect_seal` knows whether a bit of it was flipped."""
    unsealed = {name: value for name, value in content.items() if name != SEAL}
    return {**unsealed, SEAL: checksum(unsealed)}


def expect_seal(content: Mapping[str, Any]) -> None:
    """`ValueError` if the content is not what was sealed; what was never sealed is taken as it is."""
    if SEAL in content and content[SEAL] != sealed(content)[SEAL]:
        raise ValueError("it is damaged: its checksum does not fit")


def encode(value: Any, *, indent: int | None = None) -> str:
    """A value as strict JSON, on one line unless it is indented for people."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=indent is None, allow_nan=False)


def decode(text: str | bytes, schema: Any = object) -> Any:
    """The value that `encode` wrote; `ValueError` if the text is not strict JSON, or not what the schema describes."""
    value = revived(reading.parsed(text, object))
    reading.converted(value, schema)  # which also drops what the schema does not know, so only its judgement is used
    return value


def read_json(path: Path, schema: Any = object) -> Any:
    """The value in a file; `FileError` says in a sentence what is wrong with it, a broken seal included."""
    try:
        value = decode(reading.read_bytes(path), schema)
        if isinstance(value, dict):
            expect_seal(value)
        return value
    except ValueError as error:
        raise FileError(f"{path} cannot be used: {error}.") from error
