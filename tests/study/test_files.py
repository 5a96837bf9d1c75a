"""Files appear whole or not at all."""

import json
import os

import pytest

from maxgain.errors import RunError
from maxgain.study import files
from maxgain.study.report import figures


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
    files.write_text(path, "old")
    with pytest.raises(TypeError), files.whole_file(path, replace=True) as file:
        file.writelines([b"half of the ne", "not bytes"])
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_one_sentence_and_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RunError, match=r"cannot write .*file: No space left"), files.whole_file(path, replace=True):
        raise OSError(28, os.strerror(28))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write_text(tmp_path / "link", "new", replace=True)
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


def test_promise_21_what_the_program_did_not_write_is_not_replaced(tmp_path):
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    with pytest.raises(RunError, match=r"cannot write .*notes\.json: it exists and maxgain did not write it"):
        files.write_json(tmp_path / "notes.json", {})
    assert names(tmp_path) == ["notes.json"]
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'


def test_what_the_program_wrote_is_known_by_its_beginning_or_because_it_was_claimed(tmp_path):
    from matplotlib.figure import Figure

    for _ in range(2):
        files.write_json(tmp_path / "marked.json", {"maxgain": "1.0", "x": 1})
        figures.save(Figure(), tmp_path, "figure")
    assert names(tmp_path) == ["figure.png", "figure.svg", "marked.json"]
    with files.alone_in(tmp_path / "folder", "any.txt"):
        pass
    for content in ("old", "new"):
        files.write_text(tmp_path / "folder" / "any.txt", content)
    assert (tmp_path / "folder" / "any.txt").read_text() == "new"


def test_what_the_program_wrote_is_known_after_git_gave_it_the_line_ends_of_windows(tmp_path):
    with files.alone_in(tmp_path, "any.txt"):
        files.write_text(tmp_path / "any.txt", "old")
        files.write_json(tmp_path / "marked.json", {"maxgain": "1.0"})
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    files.write_text(tmp_path / "any.txt", "new")
    files.write_json(tmp_path / "marked.json", {"maxgain": "1.1"})
    assert (tmp_path / "any.txt").read_text() == "new"


def test_promise_21_a_folder_with_somebody_elses_files_is_not_taken_over(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    with (
        pytest.raises(RunError, match=r"has a config\.json that maxgain did not write: choose another --out"),
        files.alone_in(tmp_path, "config.json", "result.json"),
    ):
        pass
    assert names(tmp_path) == ["config.json"]
    with files.alone_in(tmp_path, "result.json"):  # what has other names is nobody's concern
        pass
    with pytest.raises(RunError, match=r"has a config\.json"), files.alone_in(tmp_path, "config.json", "result.json"):
        pass  # that one command works in a folder does not give the next one everything in it
    with pytest.raises(RunError, match="maxgain did not write it"):
        files.write_json(tmp_path / "config.json", {})
    assert "Other" in (tmp_path / "config.json").read_text()


def test_a_folder_that_the_first_release_has_worked_in_stays_the_programs(tmp_path):
    (tmp_path / ".maxgain").touch()
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        with files.alone_in(tmp_path, "config.json"):
            files.write_json(tmp_path / "config.json", {"x": 1})
    assert (tmp_path / ".maxgain").read_bytes() == b""


@pytest.mark.parametrize("name", ["a\udcff", "two\nlines"])
def test_a_folder_whose_name_is_no_text_is_refused(tmp_path, name):
    with pytest.raises(RunError, match="its name is not text"), files.alone_in(tmp_path / name):
        pass
    assert names(tmp_path) == []


def test_only_what_killed_writers_of_the_program_left_is_swept(tmp_path):
    (tmp_path / ".0123456789abcdef.maxgain-partial").write_text("half")
    (tmp_path / ".fedcba9876543210.maxgain-partial").mkdir()
    (tmp_path / ".fedcba9876543210.maxgain-partial/X.bin").write_text("half")
    for name in ("mine.partial", ".mine.partial", "maxgain-partial"):
        (tmp_path / name).write_text("kept")
    with files.whole_file(tmp_path / "file") as file:
        files.sweep(tmp_path)  # as another process may at any time
        file.write(b"whole")
    assert names(tmp_path) == [".mine.partial", "file", "maxgain-partial", "mine.partial"]
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_writing_into_a_folder_sweeps_it_first(tmp_path):
    (tmp_path / ".0123456789abcdef.maxgain-partial").write_text("half")
    files.write_text(tmp_path / "file", "x")
    assert names(tmp_path) == ["file"]


def test_promise_14_what_was_written_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    """Every folder that gets a new name is flushed, and after the name is there."""
    flushed = []

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        flushed.append((os.path.relpath(path, tmp_path), sorted(os.listdir(path)) if os.path.isdir(path) else None))

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(tmp_path / "a/b/file", "x")
    folders = [entry for entry in flushed if entry[1] is not None]
    assert folders == [(".", ["a"]), ("a", ["b"]), ("a/b", ["file"])]
    assert len(flushed) == 4, "the file itself"
