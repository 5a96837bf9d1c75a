"""Thousands of bad command lines: each is answered in words, soon, and nothing of the user's is touched."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from maxgain.study.cli import app
from synthetic_records import save, synthetic_records
from torture import command_lines
from torture.harness import answer, in_a_hurry
from torture.size import many

SHARES = many(2, 20)
EACH = many(150, 150)

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
    with in_a_hurry():
        codes = [answer(words, capsys)[0] for words in command_lines.bad(place, share, EACH)]
    tried("bad command lines", len(codes))
    assert codes.count(2) > len(codes) / 2, "most of them are to be refused"
    assert {path.name: path.read_bytes() for path in (place / "foreign").iterdir()} == FOREIGN
