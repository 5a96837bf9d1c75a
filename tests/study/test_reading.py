"""Files that somebody else may have written: read whole and checked, or refused in a sentence with path and place."""

import os
from pathlib import Path

import msgspec
import pytest

from maxgain.errors import FileError, MissingFileError
from maxgain.study import reading


class Row(msgspec.Struct):
    name: str
    epochs: int
    scores: dict[str, float] = {}  # noqa: RUF012 - msgspec makes a new one for every row


GOOD = b'{"name": "a", "epochs": 3, "scores": {"loss": 1}}'
BAD = {
    "nothing": (b"", "is not JSON"),
    "null": (b"null", "expected `object`, got `null`"),
    "a list": (b"[1, 2]", "expected `object`, got `array`"),
    "a text": (b'"x"', "got `str`"),
    "a missing key": (b'{"name": "a"}', "missing required field `epochs`"),
    "a text for a number": (b'{"name": "a", "epochs": "3"}', "at epochs: expected `int`, got `str`"),
    "a fraction for a count": (b'{"name": "a", "epochs": 1.5}', "at epochs: expected `int`, got `float`"),
    "truth for a number": (b'{"name": "a", "epochs": true}', "at epochs: expected `int`, got `bool`"),
    "null inside": (b'{"name": "a", "epochs": 1, "scores": {"loss": null}}', r"at scores\[...\]: expected `float`"),
    "NaN": (b'{"name": "a", "epochs": 1, "scores": {"loss": NaN}}', "is not JSON"),
    "a number beyond all": (b'{"name": "a", "epochs": 1, "scores": {"loss": 1e999}}', "out of range"),
    "a whole number beyond all": (b'{"name": "a", "epochs": ' + b"9" * 400 + b"}", "it has a number beyond"),
    "a whole number beyond reason": (b'{"name": "a", "epochs": -' + b"9" * 30 + b"}", "it has a number beyond"),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, "nested deeper than"),
    "moderate nesting": (b'{"x":' * 100 + b"1" + b"}" * 100, "nested deeper than"),
    "half of it": (GOOD[:20], "is not JSON"),
    "bytes that are no text": (b'{"name": "\xff\xfe"}', "is not JSON"),
    "half a character": (b'{"name": "\\ud800"}', "is not JSON"),
    "rubbish after it": (GOOD + b"}", "is not JSON"),
}


@pytest.mark.parametrize("kind", BAD)
def test_json_that_does_not_fit_is_refused_with_path_and_place(tmp_path: Path, kind: str) -> None:
    content, complaint = BAD[kind]
    path = tmp_path / "row.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=complaint) as caught:
        reading.read_json(path, Row)
    assert str(path) in str(caught.value)


def test_json_that_fits_is_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "row.json").write_bytes(GOOD)
    assert reading.read_json(tmp_path / "row.json", Row) == Row("a", 3, {"loss": 1.0})


def test_what_is_nested_as_deeply_as_allowed_is_read() -> None:
    assert reading.parsed(b"[" * reading.DEEPEST + b"1" + b"]" * reading.DEEPEST, list[object])
    with pytest.raises(ValueError, match="nested"):
        reading.parsed(b"[" * (reading.DEEPEST + 1) + b"1" + b"]" * (reading.DEEPEST + 1), list[object])


def test_a_line_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"null", b"", b"[" * 100_000, GOOD, GOOD[:9]]))
    lines = list(reading.read_lines(path, Row))
    assert [line.number for line in lines] == [1, 2, 4, 5, 6]
    assert [line.problem is None for line in lines] == [True, False, False, True, False]
    assert [line.cut_short for line in lines] == [False] * 4 + [True]


def test_a_last_line_without_its_end_is_read_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD + b"\n" + GOOD)
    assert [line.problem for line in reading.read_lines(tmp_path / "rows.jsonl", Row)] == [None, None]


def test_too_large_a_file_or_line_is_never_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # a file with nothing but a hole in it
    with pytest.raises(FileError, match=r"1,099,511,627,776 bytes where .* are the most"):
        reading.read_json(path, Row)
    with pytest.raises(FileError, match="are the most"):
        list(reading.read_lines(path, Row))
    monkeypatch.setattr(reading, "LARGEST_DOCUMENT", 100)
    path.write_bytes(b"x" * 1000 + b"\n" + GOOD + b"\n" + b"x" * 1000)
    problems = [line.problem for line in reading.read_lines(path, Row)]
    assert problems == ["it has more than 100 bytes", None, "it has more than 100 bytes"]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL = {
    "pipe": (make_pipe, "is a pipe where a file is expected"),
    "folder": (Path.mkdir, "is a folder where a file is expected"),
    "device": (make_link_to_device, "is a device where a file is expected"),
    "loop": (make_loop, "cannot be read: .*symbolic links"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    make, complaint = SPECIAL[kind]
    make(tmp_path / "it")
    with pytest.raises(FileError, match=complaint):
        reading.read_bytes(tmp_path / "it")


def test_a_missing_file_is_a_kind_of_its_own_and_a_senseless_name_none(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="is missing"):
        reading.read_bytes(tmp_path / "nowhere")
    with pytest.raises(FileError, match="cannot be the name of a file"):
        reading.read_bytes(Path("a\0b"))


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert reading.read_bytes(tmp_path / "link") == b"content"
