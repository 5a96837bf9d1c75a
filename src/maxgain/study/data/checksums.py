"""SHA-256 of data files: what tells a flipped bit from the file that was fetched or made.

Whoever fetches or makes a data set leaves SHA256SUMS beside it, in the form of the tool of that name, so that anybody
can run `sha256sum --check` there. A file that is named in it and has another sum is damaged, and is not used.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from maxgain.errors import DataError, FileError, MissingFileError

from .. import reading
from ..files import write_text

NAME = "SHA256SUMS"


def sha256(path: Path) -> str:
    """The file's sum; a file that did not change is not read again by the same process."""
    try:
        about = path.stat()
        reading.expect_regular(path)
        return _sha256(path, about.st_ino, about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except FileError as error:
        raise DataError(str(error)) from error


def expect_unchanged(path: Path) -> None:
    """Refuse a file whose sum is not the one in the SHA256SUMS beside it; without a sum there is nothing to refuse."""
    expected = known(path.parent).get(path.name)
    if expected is not None and sha256(path) != expected:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in {NAME} beside it.")


def known(folder: Path) -> dict[str, str]:
    """The sums in the folder's SHA256SUMS, by file; none without that file."""
    path = folder / NAME
    try:
        text = reading.read_bytes(path, reading.MEBIBYTE).decode(errors="replace")
    except MissingFileError:
        return {}
    except FileError as error:
        raise DataError(str(error)) from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    found = [(number, re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)) for number, line in lines]
    if wrong := next((number for number, match in found if match is None), None):
        raise DataError(f"{path}, line {wrong} is not a SHA-256 and the name of a file.")
    return {match[2]: match[1] for _, match in found if match}


def record(folder: Path, names: Iterable[str]) -> None:
    """Write the sums of these files into the folder's SHA256SUMS, beside those of others."""
    try:
        before = known(folder)
    except DataError:  # damaged, and about to be replaced
        before = {}
    sums = before | {name: sha256(folder / name) for name in names}
    write_text(folder / NAME, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())), replace=True)


@lru_cache(maxsize=64)
def _sha256(path: Path, *version: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
