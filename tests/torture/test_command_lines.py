"""Thousands of bad command lines: each is answered in words, soon, and nothing of the user's is touched."""

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import tyro

from maxgain.study.cli import app, flags
from synthetic_records import save, synthetic_records
from torture import command_lines
from torture.harness import Failures, answer, in_a_hurry
from torture.size import many

SHARES = many(2, 20)
EACH = many(70, 150)

FOREIGN = {"config.json": b'{"architectures": ["Llama"]}', "model.safetensors": b"weights of another program"} | {
    ".notes.partial": b"a draft",
    "notes.partial": b"another",
    "results.jsonl": b'{"mine": 1}\n',
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a path may wrongly lead to, a finished run, and a comparison."""
    place = tmp_path_factory.mktemp("place")
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    (place / "zero").symlink_to("/dev/zero")
    (place / "file").write_text("content")
    (place / "empty").mkdir()
    (place / "foreign").mkdir()
    for name, content in FOREIGN.items():
        (place / "foreign" / name).write_bytes(content)
    assert app.main(["train", *command_lines.FAST, "--out", str(place / "run")]) == 0
    save(place / "comparison", synthetic_records({"none": [0.9, 0.8], "maxgain": [0.91, 0.85]}))
    return place


def test_every_command_is_tried_and_every_flag_that_names_a_path_is_known(tmp_path: Path) -> None:
    """A flag that names a folder must never be followed by one outside of the test's own."""
    assert {words[0] for words in command_lines.commands(tmp_path)} == set(app.COMMANDS)
    for command in app.COMMANDS:
        assert set(paths_in(importlib.import_module(f"maxgain.study.cli.{command}").Options)) <= set(
            command_lines.PATHS
        )


def paths_in(options: type) -> Iterator[str]:
    for name, hint in get_type_hints(options, include_extras=True).items():
        kinds = list(flags._types_in(hint))
        for kind in kinds:
            if is_dataclass(kind):
                yield from paths_in(kind)
        if Path in kinds and tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            yield name.replace("_", "-")


@pytest.mark.parametrize("share", range(SHARES))
def test_a_bad_command_line_is_answered_in_words(
    share: int,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXGAIN_DATA", str(tmp_path / "data"))
    codes, failures = [], Failures()
    with in_a_hurry():
        for words in command_lines.bad(place, share, EACH):
            with failures.collected():
                codes.append(answer(words, capsys)[0])
    tried("bad command lines", EACH)
    failures.tell()
    assert codes.count(2) > EACH / 2, "most of them are to be refused"
    assert {path.name: path.read_bytes() for path in (place / "foreign").iterdir()} == FOREIGN
