"""Fetching from a server on this machine: checked, unpacked by name, and never half."""

import hashlib
import io
import tarfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from maxgain.errors import DataError
from maxgain.study.data import checksums, download
from maxgain.study.data import table as datasets
from maxgain.study.data.download import Download


class Recorder(SimpleHTTPRequestHandler):
    """Serves a folder and remembers what was asked for."""

    asked: list[str] = []  # noqa: RUF012 - replaced by the fixture

    def log_message(self, *_):
        self.asked.append(self.path.lstrip("/"))


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder that is published at the address `server.url`; `server.asked` lists the requests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "published"
    folder.mkdir()
    handler = type("Handler", (Recorder,), {"asked": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    http.folder, http.asked, http.url = folder, handler.asked, f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def archive(path, members):
    """A .tar.gz with these contents by name; a string is the target of a link."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def publish(server, name, files, sha256=None):
    content = (server.folder / name).read_bytes()
    return Download(f"{server.url}/{name}", sha256 or hashlib.sha256(content).hexdigest(), files)


@pytest.fixture
def cifar(server, monkeypatch):
    """CIFAR-10 with one image per file, published as an archive; returns what its files hold."""
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    contents = {name: bytes([i]) + bytes(range(256)) * 12 for i, name in enumerate(names)}
    members = {f"cifar-10-batches-bin/{name}": content for name, content in contents.items()}
    archive(server.folder / "cifar-10-binary.tar.gz", members | {"cifar-10-batches-bin/readme.html": b"<html>"})
    row = replace(
        datasets.DATASETS["cifar10"],
        train_files=dict.fromkeys(names[:5], 1),
        test_files={"test_batch.bin": 1},
        train=slice(0, 4),
        validation=slice(4, 5),
        downloads=(publish(server, "cifar-10-binary.tar.gz", tuple(names)),),
    )
    monkeypatch.setitem(datasets.DATASETS, "cifar10", row)
    return contents


def files_in(folder):
    return {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != checksums.NAME
    }


def test_an_archive_is_fetched_unpacked_and_loaded(tmp_path, server, cifar):
    root = tmp_path / "data"
    assert datasets.fetch("cifar10", root, progress=False) == root / "cifar-10-batches-bin"
    assert files_in(root) == cifar
    assert [path.name for path in root.rglob("*") if path.is_dir()] == ["cifar-10-batches-bin"]
    assert datasets.check("cifar10", root) == []
    assert datasets.load("cifar10", root).train.labels.tolist() == [0, 1, 2, 3]


def test_what_is_whole_is_not_fetched_again_and_what_is_damaged_is(tmp_path, server, cifar):
    root = tmp_path / "data"
    datasets.fetch("cifar10", root, progress=False)
    datasets.fetch("cifar10", root, progress=False)
    assert len(server.asked) == 1
    (root / "cifar-10-batches-bin/data_batch_3.bin").write_bytes(b"short")
    datasets.fetch("cifar10", root, progress=False)
    assert len(server.asked) == 2
    assert files_in(root) == cifar


def test_an_archive_that_was_fetched_before_an_interruption_is_used(tmp_path, server, cifar):
    waiting = tmp_path / "data/cifar-10-batches-bin/.downloads"
    waiting.mkdir(parents=True)
    (waiting / "cifar-10-binary.tar.gz").write_bytes((server.folder / "cifar-10-binary.tar.gz").read_bytes())
    datasets.fetch("cifar10", tmp_path / "data", progress=False)
    assert server.asked == []
    assert files_in(tmp_path / "data") == cifar


def test_a_wrong_checksum_is_one_sentence_and_keeps_nothing(tmp_path, server, cifar, monkeypatch):
    row = datasets.DATASETS["cifar10"]
    wrong = replace(row, downloads=(replace(row.downloads[0], sha256="0" * 64),))
    monkeypatch.setitem(datasets.DATASETS, "cifar10", wrong)
    with pytest.raises(
        DataError, match=r"cannot download http.*cifar-10-binary\.tar\.gz .*SHA-256 is not the expected"
    ):
        datasets.fetch("cifar10", tmp_path / "data", progress=False)
    assert files_in(tmp_path / "data") == {}


def test_each_published_file_is_fetched_into_its_place(tmp_path, server, monkeypatch):
    from scipy.io import savemat

    for name, digit in (("train", 1), ("test", 2), ("extra", 3)):
        content = {"X": np.full((32, 32, 3, 4), digit, np.uint8), "y": np.full((4, 1), digit, np.uint8)}
        savemat(server.folder / f"{name}_32x32.mat", content)
    files = [f"{name}_32x32.mat" for name in ("train", "test", "extra")]
    row = replace(
        datasets.DATASETS["svhn"],
        train_files={files[0]: 4},
        test_files={files[1]: 4},
        optional_files={files[2]: 4},
        train=slice(2, None),
        validation=slice(0, 2),
        downloads=tuple(publish(server, file, (file,)) for file in files),
    )
    monkeypatch.setitem(datasets.DATASETS, "svhn", row)
    (tmp_path / "data/svhn").mkdir(parents=True)
    (tmp_path / "data/svhn/test_32x32.mat").write_bytes(b"damaged")
    datasets.fetch("svhn", tmp_path / "data", progress=False)
    assert datasets.load("svhn", tmp_path / "data").train.labels.tolist() == [1, 1, 3, 3, 3, 3]
    (tmp_path / "data/svhn/extra_32x32.mat").unlink()
    server.asked.clear()
    datasets.fetch("svhn", tmp_path / "data", progress=False)
    assert server.asked == ["extra_32x32.mat"]


def test_a_file_with_the_right_checksum_and_the_wrong_content_is_named(tmp_path, server, cifar, monkeypatch):
    archive(server.folder / "other.tar.gz", {f"x/{name}": b"short" for name in cifar})
    row = datasets.DATASETS["cifar10"]
    other = replace(row, downloads=(publish(server, "other.tar.gz", row.downloads[0].files),))
    monkeypatch.setitem(datasets.DATASETS, "cifar10", other)
    with pytest.raises(DataError, match=r"other\.tar\.gz was fetched but is not what it should be: .*data_batch_1"):
        datasets.fetch("cifar10", tmp_path / "data", progress=False)


def test_a_server_without_the_file_is_one_sentence(tmp_path, server):
    wanted = Download(f"{server.url}/nowhere.mat", "0" * 64, ("nowhere.mat",))
    with pytest.raises(DataError, match=r"cannot download .*nowhere\.mat into .*: the server answered 404"):
        download.fetch(wanted, tmp_path, progress=False)


def test_no_network_is_one_sentence(tmp_path, server):
    wanted = Download("http://127.0.0.1:9/file.mat", "0" * 64, ("file.mat",))
    with pytest.raises(DataError, match=r"cannot download .*: the connection failed"):
        download.fetch(wanted, tmp_path, progress=False)


def test_a_disk_that_cannot_be_written_is_one_sentence(tmp_path, server):
    (server.folder / "a.mat").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot download .*a\.mat into .*file/data"):
        download.fetch(publish(server, "a.mat", ("a.mat",)), tmp_path / "file" / "data", progress=False)


def test_progress_is_shown_when_it_is_asked_for(tmp_path, server, capfd):
    (server.folder / "a.mat").write_bytes(b"x" * 1000)
    wanted = publish(server, "a.mat", ("a.mat",))
    download.fetch(wanted, tmp_path / "quiet", progress=False)
    assert capfd.readouterr() == ("", "")
    download.fetch(wanted, tmp_path / "loud", progress=True)
    assert "100%" in capfd.readouterr().err


def test_an_archive_cannot_write_anything_but_what_is_expected(tmp_path):
    members = {
        "../escaped": b"1",
        "/absolute": b"2",
        "set/unexpected": b"3",
        "set/wanted": b"4",
        "set/deep/wanted": b"5",
        "../../other": b"6",
    }
    archive(tmp_path / "a.tar.gz", members)
    download.unpack(tmp_path / "a.tar.gz", tmp_path / "in/out", ("wanted",))
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == {
        "a.tar.gz",
        "in/out/wanted",
    }
    assert (tmp_path / "in/out/wanted").read_bytes() == b"4"


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    archive(tmp_path / "a.tar.gz", {"set/wanted": str(tmp_path / "secret")})
    with pytest.raises(DataError, match=r"a\.tar\.gz has no wanted"):
        download.unpack(tmp_path / "a.tar.gz", tmp_path / "out", ("wanted",))
    assert not (tmp_path / "out/wanted").exists()


@pytest.mark.parametrize("damage", [lambda content: b"not gzip", lambda content: content[: len(content) // 2]])
def test_a_damaged_archive_is_one_sentence_and_leaves_no_half_file(tmp_path, damage):
    content = np.random.default_rng(0).bytes(100_000)
    archive(tmp_path / "a.tar.gz", {"set/wanted": content})
    (tmp_path / "a.tar.gz").write_bytes(damage((tmp_path / "a.tar.gz").read_bytes()))
    with pytest.raises(DataError, match=r"cannot unpack .*a\.tar\.gz"):
        download.unpack(tmp_path / "a.tar.gz", tmp_path / "out", ("wanted",))
    assert list(tmp_path.glob("out/*")) == []


def test_every_published_file_has_a_sha256_and_brings_files_that_are_read():
    for source in datasets.DATASETS.values():
        downloads = getattr(source, "downloads", ())
        assert all(len(bytes.fromhex(each.sha256)) == 32 for each in downloads)
        if downloads:
            brought = {file for each in downloads for file in each.files}
            assert brought == {*source.required, *source.optional_files}


class Dripping(BaseHTTPRequestHandler):
    """Announces a large file and sends a byte now and then, for as long as somebody listens."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "9" * 5000 if self.path.startswith("/endless") else "1000000")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.01)

    def log_message(self, *_):
        pass


@pytest.fixture
def dripping(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_server_that_drips_is_given_up(tmp_path, dripping, monkeypatch):
    monkeypatch.setattr(download, "WINDOW", 0.2)
    wanted = Download(f"{dripping}/file.mat", "0" * 64, ("file.mat",))
    with pytest.raises(DataError, match=r"file\.mat .*: the server sent \d+ bytes per second where 1,024 are"):
        download.fetch(wanted, tmp_path, progress=False)
    assert files_in(tmp_path) == {}


def test_a_server_that_never_stops_is_given_up(tmp_path, dripping, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 5)
    wanted = Download(f"{dripping}/file.mat", "0" * 64, ("file.mat",))
    with pytest.raises(DataError, match="the server sends more than the 5 bytes"):
        download.fetch(wanted, tmp_path, progress=False)


def test_a_length_that_is_no_number_of_bytes_is_not_believed(tmp_path, dripping, monkeypatch):
    """Python itself refuses to read so many digits."""
    monkeypatch.setattr(download, "LARGEST", 5)
    wanted = Download(f"{dripping}/endless.mat", "0" * 64, ("endless.mat",))
    with pytest.raises(DataError, match="the server sends more than the 5 bytes"):
        download.fetch(wanted, tmp_path, progress=False)


def test_a_server_that_falls_silent_is_given_up(tmp_path, dripping, monkeypatch):
    monkeypatch.setattr(download, "SILENCE", 0.001)
    wanted = Download(f"{dripping}/file.mat", "0" * 64, ("file.mat",))
    with pytest.raises(DataError, match="the server did not answer in time"):
        download.fetch(wanted, tmp_path, progress=False)


def test_what_interrupted_fetches_left_is_swept_and_sums_are_kept(tmp_path, server):
    (tmp_path / "set/.downloads").mkdir(parents=True)
    (tmp_path / "set/.downloads/tmpab12cd").write_bytes(b"half")
    (server.folder / "a.mat").write_bytes(b"a")
    (server.folder / "b.mat").write_bytes(b"b")
    for name in ("a.mat", "b.mat"):
        download.fetch(publish(server, name, (name,)), tmp_path / "set", progress=False)
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["SHA256SUMS", "a.mat", "b.mat"]
    assert checksums.known(tmp_path / "set") == {
        name: hashlib.sha256(name[:1].encode()).hexdigest() for name in ("a.mat", "b.mat")
    }


def test_promise_21_a_file_of_the_same_name_that_is_not_the_data_sets_is_left_alone(tmp_path, server, cifar):
    (tmp_path / "test_batch.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"test_batch\.bin is not cifar10's: move it away, or choose another --data"):
        datasets.fetch("cifar10", tmp_path, progress=False)
    assert (tmp_path / "test_batch.bin").read_bytes() == b"mine"
