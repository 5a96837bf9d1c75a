"""JSON that any reader accepts, which knows no infinity: the one rule for writing numbers and reading them back.

Numbers are written as `maxgain.strict_json` has it, and exactly the texts ``"inf"`` and ``"-inf"`` are read back as
numbers.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxgain.errors import FileError
from maxgain.strict_json import number

from . import reading

SEAL = "sha256"


def plain(value: Any, where: str = "the value") -> Any:
    """The value in the types of strict JSON; `ValueError` says what in it JSON cannot hold."""
    match value:
        case None | bool() | int():
            return value
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


def read(path: Path, schema: Any = object) -> Any:
    """The value in a file; `FileError` says in a sentence what is wrong with it, a broken seal included."""
    try:
        value = decode(reading.read_bytes(path), schema)
        if isinstance(value, dict):
            expect_seal(value)
        return value
    except ValueError as error:
        raise FileError(f"{path} cannot be used: {error}.") from error
