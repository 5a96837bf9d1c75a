"""What can happen to a file between its being written and its being read, by accident or by intent.

Every function yields pairs of words for what was done and the bytes that are left. The same seed gives the same damage.
"""

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = tuple[str, bytes]

STRANGE_VALUES: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    "",
    "x",
    "inf",
    "-inf",
    "nan",
    0,
    -1,
    1.5,
    10**30,
    -(10**30),
    1e308,
    5e-324,
    [1],
    [None],
    {"x": 1},
    {"": {}},
    "</script><script>alert(1)</script>",
    "$\\frac{",
    "a\nb\x00c",
    "x" * 5000,
    [[[[1]]]],
    {"__class__": "os.system"},
)
STRANGE_TEXTS = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"0",
    b"NaN",
    b"-Infinity",
    b"{" * 10_000,
    b"[" * 200_000 + b"]" * 200_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
    b"\x00" * 1000,
    b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",
    b'{"a": 1, "a": 2}',
    b"9" * 10_000,
    b"1e999",
    b'"\\ud800"',
    b"not JSON at all",
    b"\n\n\n",
)


def of_bytes(content: bytes, seed: int, count: int) -> Iterator[Damage]:
    """Flipped bits, missing ends, repeated and swapped stretches, rubbish in between."""
    chance = random.Random(seed)
    size = len(content)
    for number in range(count):
        at, length = chance.randrange(size + 1), chance.randrange(1, 65)
        kind = number % 6
        if kind == 0 and size:
            place = chance.randrange(size)
            flipped = content[place] ^ (1 << chance.randrange(8))
            yield f"bit flipped at byte {place}", content[:place] + bytes([flipped]) + content[place + 1 :]
        elif kind == 1:
            yield f"cut after byte {at}", content[:at]
        elif kind == 2:
            yield f"{length} random bytes at {at}", content[:at] + chance.randbytes(length) + content[at + length :]
        elif kind == 3:
            yield f"{length} bytes missing at {at}", content[:at] + content[at + length :]
        elif kind == 4:
            yield f"{length} bytes twice at {at}", content[: at + length] + content[at:]
        else:
            yield f"zeros from {at} on", content[:at] + bytes(max(0, size - at))


def of_json(content: bytes, seed: int, count: int) -> Iterator[Damage]:
    """Still JSON, but with something strange in the place of one of its values; or with a key more or less."""
    chance = random.Random(seed)
    whole = json.loads(content)
    places = list(_places(whole))
    for _ in range(count):
        changed = copy.deepcopy(whole)
        if not places:
            return
        *way, last = chance.choice(places)
        parent = changed
        for step in way:
            parent = parent[step]
        where = ".".join(map(str, [*way, last]))
        kind = chance.randrange(8)
        if kind == 0:
            del parent[last]
            yield f"{where} missing", json.dumps(changed).encode()
        elif kind == 1 and isinstance(parent, dict):
            parent["surprise"] = chance.choice(STRANGE_VALUES)
            yield f"a key more beside {where}", json.dumps(changed).encode()
        else:
            value = chance.choice(STRANGE_VALUES)
            parent[last] = value
            yield f"{where} is {str(value)[:30]!r}", json.dumps(changed).encode()


def of_json_lines(content: bytes, seed: int, count: int) -> Iterator[Damage]:
    """One of the lines damaged as JSON, or replaced by something else altogether."""
    chance = random.Random(seed)
    lines = content.splitlines()
    for number in range(count):
        index = chance.randrange(len(lines))
        if number % 4 == 0:
            words, line = "replaced", chance.choice(STRANGE_TEXTS).replace(b"\n", b"")
        else:
            words, line = next(of_json(lines[index], chance.randrange(2**32), 1))
        changed = [*lines[:index], line, *lines[index + 1 :]]
        yield f"line {index + 1}: {words}", b"\n".join(changed) + b"\n"


def of_text(_: bytes, seed: int, count: int) -> Iterator[Damage]:
    """Something else altogether."""
    chance = random.Random(seed)
    for text in chance.sample(STRANGE_TEXTS, min(count, len(STRANGE_TEXTS))):
        yield f"replaced by {text[:20]!r}", text


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in inside:
        yield (*way, step)
        yield from _places(item, (*way, step))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**43)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a link to itself": _loop,
    "a link to /dev/zero": _device,
    "a link to nowhere": _dangling,
    "a folder": Path.mkdir,
    "eight tebibytes of nothing": _huge,
}
"""What may lie in the place of a file."""
