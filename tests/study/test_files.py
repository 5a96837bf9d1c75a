"""Files appear whole or not at all."""

import json
import os

import pytest

from maxgain.errors import RunError
from maxgain.study import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_what_is_read_and_nothing_is_left_beside_it(tmp_path):
    files.write_bytes(tmp_path / "a", b"\x00\xff")
    files.write_text(tmp_path / "b", "γ = 2\n")
    files.write_json(tmp_path / "c", {"γ": [1, None, 0.5]})
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert (tmp_path / "b").read_text(encoding="utf-8") == "γ = 2\n"
    assert json.loads((tmp_path / "c").read_text(encoding="utf-8")) == {"γ": [1, None, 0.5]}
    assert names(tmp_path) == ["a", "b", "c"]


def test_a_written_file_has_the_permissions_of_any_other_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_text(tmp_path / "whole", "")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_parent_folders_are_made_and_strings_are_accepted(tmp_path):
    files.write_text(f"{tmp_path}/some/where/file", "x")
    assert (tmp_path / "some/where/file").read_text() == "x"


def test_promise_14_a_writer_that_fails_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), files.whole_file(path) as file:
        file.writelines([b"half of the ne", "not bytes"])
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_one_sentence_and_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RunError, match=r"cannot write .*file: No space left"), files.whole_file(path):
        raise OSError(28, os.strerror(28))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("path", ["", "/dev/null"])
def test_what_is_not_a_file_is_not_replaced(tmp_path, path):
    with pytest.raises(RunError, match="not an ordinary file"):
        files.write_text(path or tmp_path, "x")
    assert not os.path.isfile("/dev/null")


def test_a_folder_that_is_really_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        files.write_text(tmp_path / "file" / "inside", "x")


@pytest.mark.parametrize("content", [{"value": object()}, [{1: 2}], {"value": b"bytes"}])
def test_what_is_not_json_is_refused_and_writes_nothing(tmp_path, content):
    with pytest.raises(RunError, match="cannot write"):
        files.write_json(tmp_path / "file", content)
    assert names(tmp_path) == []


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_appears_with_everything_in_it(tmp_path, exists):
    if exists:
        (tmp_path / "out").mkdir()
    with files.whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        assert exists or not (tmp_path / "out").exists()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["a"]


def test_promise_14_a_folder_whose_filling_fails_does_not_appear(tmp_path):
    with pytest.raises(TypeError), files.whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text(1)
    assert names(tmp_path) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "kept").write_text("old")
    with pytest.raises(RunError, match="not an empty folder"), files.whole_folder(tmp_path):
        pass
    assert names(tmp_path) == ["kept"]
