"""Data sets are read as they are published, and refused where they are short or wrong."""

import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from maxgain.errors import DataError
from maxgain.study import data
from maxgain.study.data.folder import read_picture
from maxgain.study.data.sources import unpack

RNG = np.random.default_rng(0)


def images(count, side=32):
    return RNG.integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def expect(split, pixels, labels):
    assert (split.images.dtype, split.labels.dtype) == (torch.uint8, torch.int64)
    assert split.images.is_contiguous()
    assert np.array_equal(split.images.numpy(), pixels)
    assert split.labels.tolist() == list(labels)


def change(monkeypatch, name, **changes):
    monkeypatch.setitem(data.DATASETS, name, replace(data.DATASETS[name], **changes))


# --- Digits


def test_digits(digits):
    whole = data.load("digits")
    assert [len(part) for part in (whole.train, whole.validation, whole.test)] == [1078, 360, 359]
    assert whole.train.labels.bincount().float().std() < 3, "classes are not in proportion"
    assert whole.fingerprint.startswith("745288a6c850")
    assert digits.fingerprint.startswith("c2d5a2558f9b")
    folds = [data.load("digits", fold=fold) for fold in range(10)]
    every = torch.cat([part.images for fold in folds for part in (fold.train, fold.validation, fold.test)])
    assert len(every) == 1797


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"fold": 10}, "fold"),
        ({"fold": -1}, "fold"),
        ({"size": 16}, "image_size"),
        ({"fold": 5, "cross_validation": 5}, "fold"),
    ],
)
def test_refused_requests(call, field):
    with pytest.raises(DataError) as caught:
        data.load("digits", **call)
    assert caught.value.field == field


def test_unknown_name():
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        data.load("cifar_10")


# --- CIFAR


@pytest.fixture
def cifar100(tmp_path, monkeypatch):
    """A CIFAR-100 of 12 and 5 images, and what was written."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    written = {}
    for name, count in (("train.bin", 12), ("test.bin", 5)):
        pixels, labels = images(count), RNG.integers(0, 100, count, dtype=np.uint8)
        records = np.concatenate([labels[:, None] * 0 + 7, labels[:, None], pixels.reshape(count, -1)], axis=1)
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())
        written[name] = pixels, labels
    small = {"train.bin": 12, "test.bin": 5}
    change(monkeypatch, "cifar100", files=small, train=slice(0, 8), validation=slice(8, 12))
    return tmp_path, written


@pytest.mark.parametrize("inside", [False, True])
def test_cifar(cifar100, inside):
    root, written = cifar100
    loaded = data.load("cifar100", root / "cifar-100-binary" if inside else root)
    pixels, labels = written["train.bin"]
    expect(loaded.train, pixels[:8], labels[:8])
    expect(loaded.validation, pixels[8:], labels[8:])
    expect(loaded.test, *written["test.bin"])
    assert len(loaded.classes) == 100
    content = (root / "cifar-100-binary" / "test.bin").read_bytes()
    assert loaded.sha256["test.bin"] == hashlib.sha256(content).hexdigest()
    assert data.check("cifar100", root) == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: os.truncate(path, 1000),
        lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    ],
)
def test_damaged_cifar(cifar100, damage):
    root, _ = cifar100
    damage(root / "cifar-100-binary" / "test.bin")
    with pytest.raises(DataError, match=r"test\.bin.*maxgain data fetch cifar100"):
        data.load("cifar100", root)
    assert data.check("cifar100", root)


def test_where_files_are_from(cifar100):
    root = cifar100[0]
    assert data.load("cifar100", root).source == data.DATASETS["cifar100"].published
    next(root.rglob("train.bin")).with_name("SOURCE").write_text("an attic\nfound in 2026\n")
    assert data.load("cifar100", root).source == "an attic"


def test_missing_folder(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="cifar-10-batches-bin") as caught:
        data.load("cifar10", tmp_path)
    assert caught.value.field == "data"
    monkeypatch.setenv("MAXGAIN_DATA", str(tmp_path))
    assert data.data_root() == tmp_path
    assert data.data_root("~/data") == Path("~/data").expanduser()
    present = {name: data.is_there(name) for name in data.DATASETS}
    assert (present["digits"], present["cifar10"]) == (True, False)


# --- SVHN


@pytest.fixture
def svhn(tmp_path, monkeypatch):
    folder = tmp_path / "svhn"
    folder.mkdir()
    written = {}
    for name, count in (("train", 30), ("extra", 20), ("test", 15)):
        pixels, labels = images(count), RNG.integers(1, 11, count, dtype=np.uint8)
        savemat(
            folder / f"{name}_32x32.mat", {"X": pixels.transpose(2, 3, 1, 0), "y": labels[:, None]}, do_compression=True
        )
        written[name] = pixels, labels % 10
    change(
        monkeypatch,
        "svhn",
        files={"train_32x32.mat": 30, "test_32x32.mat": 15},
        optional={"extra_32x32.mat": 20},
        train=slice(10, None),
        validation=slice(0, 10),
        downloads={},
    )
    return tmp_path, written


def test_svhn(svhn):
    root, written = svhn
    loaded = data.load("svhn", root)
    pixels, labels = (np.concatenate(pair) for pair in zip(written["train"], written["extra"], strict=True))
    expect(loaded.validation, pixels[:10], labels[:10])
    expect(loaded.train, pixels[10:], labels[10:])
    expect(loaded.test, *written["test"])
    assert loaded.note == ""
    (root / "svhn/extra_32x32.mat").unlink()
    assert data.load("svhn", root).note == "svhn without extra_32x32.mat: 20 training images instead of 40"


def test_svhn_that_is_not_the_published_file(svhn, monkeypatch):
    change(monkeypatch, "svhn", downloads={"http://x/test_32x32.mat": "0" * 64})
    assert "not the published test_32x32.mat" in data.load("svhn", svhn[0]).note


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"MATLAB 5.0 MAT-file",
        {"X": np.zeros((32, 32, 3, 15), np.uint8)},
        {"X": np.zeros((32, 32, 3, 14), np.uint8), "y": np.ones((15, 1))},
        {"X": np.zeros((32, 32, 3, 15)), "y": np.ones((15, 1))},
        {"X": np.zeros((32, 32, 3, 15), np.uint8), "y": np.ones((14, 1))},
        {"X": np.zeros((32, 32, 3, 15), np.uint8), "y": np.full((15, 1), 11)},
    ],
)
def test_damaged_svhn(svhn, content):
    path = svhn[0] / "svhn/test_32x32.mat"
    path.write_bytes(content) if isinstance(content, bytes) else savemat(path, content)
    with pytest.raises(DataError, match=r"test_32x32\.mat"):
        data.load("svhn", svhn[0])


# --- SINS-10's layout


@pytest.fixture
def folds(tmp_path):
    pixels, labels = images(200, 96), RNG.integers(0, 10, 200, dtype=np.uint8)
    folder = tmp_path / "sins10"
    folder.mkdir()
    (folder / "X.bin").write_bytes(pixels.tobytes())
    (folder / "y.bin").write_bytes(labels.tobytes())
    return tmp_path, pixels, labels


def test_folds(folds):
    root, pixels, labels = folds
    loaded = data.load("sins10", root, fold=3)
    for part, where in (
        (loaded.train, slice(60, 76)),
        (loaded.validation, slice(76, 78)),
        (loaded.test, slice(78, 80)),
    ):
        expect(part, pixels[where], labels[where])
    assert (loaded.fold, loaded.folds) == (3, 10)
    assert "folds of 20 images instead of 10,000" in loaded.note
    with pytest.raises(DataError) as caught:
        data.load("sins10", root)
    assert caught.value.field == "fold"


@pytest.mark.parametrize(("name", "size"), [("X.bin", 96), ("y.bin", 199), ("y.bin", 0)])
def test_damaged_folds(folds, name, size):
    os.truncate(folds[0] / "sins10" / name, size)
    with pytest.raises(DataError, match=r"X\.bin"):
        data.load("sins10", folds[0], fold=0)


# --- A folder of images


def picture(path, colour=(0, 0, 0), size=(12, 12)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_folder_with_a_split(tmp_path):
    for part, shade in (("train", 10), ("Val", 20), ("testing", 30)):
        for label, name in enumerate(("cat", "dog")):
            for number in range(2):
                picture(tmp_path / part / name / f"{number}.png", (shade + number, label, 200))
    picture(tmp_path / "train/cat/.hidden.png")
    loaded = data.load("folder", tmp_path, size=8)
    assert (loaded.classes, loaded.shape) == (("cat", "dog"), (3, 8, 8))
    for split, shade in ((loaded.train, 10), (loaded.validation, 20), (loaded.test, 30)):
        assert split.labels.tolist() == [0, 0, 1, 1]
        assert split.images[:, 0, 3, 3].tolist() == [shade, shade + 1] * 2
    assert loaded.note == ""
    picture(tmp_path / "testing/cat/again.png", (10, 0, 200))
    assert data.load("folder", tmp_path, size=8).note == "1 of the 5 test images are also trained on"


def test_folder_without_a_split(tmp_path):
    for label, name in enumerate(("cat", "dog", "train")):
        for number in range(20):
            picture(tmp_path / name / f"{number}.png", (number, label, 0))
    loaded, again = (data.load("folder", tmp_path, size=4) for _ in range(2))
    for part, count in ((loaded.train, 16), (loaded.validation, 2), (loaded.test, 2)):
        assert part.labels.bincount().tolist() == [count] * 3
        assert part.images[:, 1, 0, 0].tolist() == part.labels.tolist()
    assert loaded.fingerprint == again.fingerprint


@pytest.mark.parametrize(
    "files",
    [
        [],
        ["cat/a.png"],
        ["train/cat/a.png", "train/dog/a.png"],
        ["train/cat/a.png", "train/dog/a.png", "test/cat/a.png", "test/cow/a.png"],
        ["train/cat/a.png", "train/dog/a.png", "test/cat/a.png", "Test/cat/a.png"],
        ["cat/a.png", "dog/a.png"],
        ["cat/a.png", "dog/a.txt"],
    ],
)
def test_refused_folders(tmp_path, files):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        picture(tmp_path / file) if file.endswith("png") else (tmp_path / file).touch()
    with pytest.raises(DataError) as caught:
        data.load("folder", tmp_path, size=4)
    assert caught.value.field == "data"


@pytest.mark.parametrize("side", [0, 5000])
def test_refused_sizes(tmp_path, side):
    with pytest.raises(DataError) as caught:
        data.load("folder", tmp_path, size=side)
    assert caught.value.field == "image_size"


def test_pictures(tmp_path):
    wide = RNG.integers(0, 256, (8, 14, 3), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(wide.transpose(1, 0, 2)).save(tmp_path / "tall.bmp")
    shades = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    wide_square, tall_square, deep = (read_picture(tmp_path / name, 8) for name in ("wide.png", "tall.bmp", "deep.png"))
    assert np.array_equal(wide_square, wide[:, 3:11].transpose(2, 0, 1))
    assert np.array_equal(tall_square, wide_square.transpose(0, 2, 1))
    assert np.array_equal(deep[0], shades // 257), "16 bits are clipped"


@pytest.mark.parametrize("content", [b"", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x89PNG\r\n\x1a\n" + b"0" * 50])
def test_damaged_pictures(tmp_path, content):
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.png"):
        read_picture(path, 8)


def test_unreadable_folder(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        data.load("folder", tmp_path)


# --- Downloads


def archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_fetch(cifar100, monkeypatch, tmp_path):
    root, written = cifar100
    folder = root / "cifar-100-binary"
    members = {f"cifar-100-binary/{name}": (folder / name).read_bytes() for name in written}
    sha256 = archive(tmp_path / "published.tar.gz", {**members, "../escape": b"x", "cifar-100-binary/other": b"x"})
    before = data.load("cifar100", root).fingerprint
    fetched = []

    def retrieve(url, known_hash, fname, path, progressbar):
        fetched.append(url)
        assert known_hash == f"sha256:{sha256}"
        target = Path(path) / fname
        target.write_bytes((tmp_path / "published.tar.gz").read_bytes())
        return str(target)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    change(monkeypatch, "cifar100", downloads={"http://x/cifar.tar.gz": sha256})
    assert data.fetch("cifar100", root) == folder
    assert not fetched, "what is whole is left alone"
    os.truncate(folder / "train.bin", 100)
    data.fetch("cifar100", root)
    assert len(fetched) == 1
    assert {path.name for path in folder.iterdir()} == {"train.bin", "test.bin"}
    assert data.load("cifar100", root).fingerprint == before


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("hash of downloaded file does not match")])
def test_failing_download(tmp_path, monkeypatch, error):
    def retrieve(*args, **kwargs):
        raise error

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError, match="cannot download"):
        data.fetch("cifar10", tmp_path)
    with pytest.raises(DataError, match=r"put X\.bin"):
        data.fetch("sins10", tmp_path)


def test_archive_without_its_files(tmp_path):
    archive(tmp_path / "a.tar.gz", {"a/test.bin": b""})
    with pytest.raises(DataError, match=r"train\.bin"):
        unpack(tmp_path / "a.tar.gz", tmp_path, ["train.bin"])


# --- The published sets


@pytest.mark.parametrize(
    ("name", "sizes", "fingerprint"),
    [("cifar10", [40_000, 10_000, 10_000], "b9716b95ce80"), ("cifar100", [40_000, 10_000, 10_000], "d8e6c97c9c4f")],
)
def test_real_data(name, sizes, fingerprint):
    if "MAXGAIN_DATA" not in os.environ:
        pytest.skip("needs MAXGAIN_DATA, a folder with the real data sets")
    if not data.is_there(name):
        pytest.skip(f"no {name} in MAXGAIN_DATA")
    loaded = data.load(name)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == sizes
    assert loaded.fingerprint.startswith(fingerprint), "results of these data are of another fingerprint"
