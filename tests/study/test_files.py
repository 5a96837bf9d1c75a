"""Files appear whole or not at all; JSON is strict; one process writes in a folder."""

import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from maxgain.errors import FileError, FolderInUseError, MissingFileError, RunError
from maxgain.study import _files


class Numbers(msgspec.Struct):
    values: list[float | None]


def test_write_replaces_whole(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b"
    _files.write(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            _files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in path.parent.iterdir()] == ["b"]
    _files.write(path, b"new")
    assert path.read_bytes() == b"new"


def test_sweep(tmp_path):
    (tmp_path / ".result.json.0123.partial").touch()
    (tmp_path / "result.json").touch()
    with _files.locked(tmp_path):
        pass
    assert {file.name for file in tmp_path.iterdir()} <= {"result.json", ".lock"}


def test_json_holds_every_number():
    text = _files.encode(Numbers([1.5, math.inf, -math.inf, math.nan, None, 1e300]))
    assert text == b'{"values":[1.5,"inf","-inf",null,null,1e300]}'
    assert _files.decode(text, Numbers).values == [1.5, math.inf, -math.inf, None, None, 1e300]


def test_read_json(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(MissingFileError):
        _files.read_json(path, Numbers)
    _files.write_json(path, Numbers([math.inf]))
    assert _files.read_json(path, Numbers).values == [math.inf]
    for content in (b"", b"{", b'{"values": ["a"]}', b"[]", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"x\.json"):
            _files.read_json(path, Numbers)


def test_lock(tmp_path):
    with _files.locked(tmp_path):
        with pytest.raises(FolderInUseError), _files.locked(tmp_path):
            pass
        code = "from pathlib import Path; from maxgain.study._files import locked; locked(Path('.')).__enter__()"
        environment = {**os.environ, "PYTHONPATH": str(Path(_files.__file__).parents[2])}
        other = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert "FolderInUseError" in other.stderr
    with _files.locked(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write"), _files.locked(tmp_path / "file"):
        pass
