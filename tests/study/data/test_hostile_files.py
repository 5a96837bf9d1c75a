"""Data files that were made to do harm, or that are no files at all: refused in a sentence, at once."""

import errno
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxgain.errors import DataError
from maxgain.study import memory
from maxgain.study.data import images, sins10
from maxgain.study.data import table as datasets

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(ran) print\nshowpage\n%%EOF\n"


def png(path: Path, width: int, height: int) -> Path:
    """A black PNG of any size in a few bytes, as a compressor would never have been given it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compressor = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return path


@pytest.fixture
def never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1), (13_000, 13_000), (8_001, 8_000)])
@pytest.mark.usefixtures("never_decoded")
def test_a_picture_that_is_or_becomes_too_large_is_refused_by_its_header(tmp_path: Path, size: tuple[int, int]) -> None:
    path = png(tmp_path / "x.png", *size)
    with pytest.raises(DataError, match=r"x\.png (is|would become) .* 64 million pixels are the most") as caught:
        list(images.read_all([path], 96))
    assert list(images.problems([path], 96)) == [str(caught.value)]


@pytest.mark.usefixtures("never_decoded")
def test_a_header_that_claims_more_than_any_picture_has_is_one_sentence(tmp_path: Path) -> None:
    path = png(tmp_path / "x.png", 1, 1)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.png cannot be read as an image \(Image size"):
        images.read(path, 96)


def test_a_long_picture_that_fits_is_still_read(tmp_path: Path) -> None:
    assert images.read(png(tmp_path / "x.png", 1, 6_000), 96).shape == (3, 96, 96)


@pytest.mark.parametrize("name", ["0.png", "0.jpg", "0.tif"])
def test_only_the_named_formats_are_decoded_whatever_a_file_is_called(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ghostscript(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", ghostscript)
    (tmp_path / name).write_bytes(EPS)
    with pytest.raises(DataError, match=r"0\.\w+ cannot be read as an image \(it is none of BMP, GIF, JPEG, PNG"):
        images.read(tmp_path / name, 96)


@pytest.mark.parametrize("kind", ["pcx", "tga", "ico", "dds", "sgi", "msp", "jp2", "pdf"])
def test_every_other_format_that_pillow_writes_is_refused(tmp_path: Path, kind: str) -> None:
    mode = "1" if kind == "msp" else "RGB"
    Image.new(mode, (16, 16)).save(tmp_path / f"x.{kind}")
    (tmp_path / f"x.{kind}").rename(tmp_path / "x.png")
    with pytest.raises(DataError, match="none of"):
        images.read(tmp_path / "x.png", 8)


def test_bytes_at_random_in_a_picture_end_in_a_picture_or_a_sentence(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for kind in ("bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp"):
        path = tmp_path / f"x.{kind}"
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(path)
        whole = path.read_bytes()
        for _ in range(25):
            content = bytearray(whole)
            for place in rng.integers(0, min(len(content), 200), 3):
                content[place] = rng.integers(256)
            path.write_bytes(content[: rng.integers(1, len(content) + 1)])
            with suppress(DataError):
                assert next(images.read_all([path], 8)).shape == (3, 8, 8)


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        for number in range(10):
            path = tmp_path / name / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return tmp_path


def test_pipes_loops_and_devices_among_pictures_are_passed_over(class_folders: Path) -> None:
    os.mkfifo(class_folders / "a/pipe.png")
    (class_folders / "a/loop.png").symlink_to("loop.png")
    (class_folders / "a/zero.png").symlink_to("/dev/zero")
    (class_folders / "b/around").symlink_to(class_folders)
    assert len(datasets.load("folder", class_folders, size=4).train) == 16


def test_pictures_in_a_folder_that_cannot_be_listed_are_not_passed_over(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = next(folder for folder in class_folders.iterdir() if folder.is_dir()) / "more"
    locked.mkdir()
    listed = os.scandir

    def scandir(path: str | os.PathLike[str]) -> Any:
        if Path(path) == locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"cannot list .*more: Permission denied"):
        datasets.load("folder", class_folders, size=4)


@pytest.mark.parametrize("name", ["a\udcff", "line\nbreak", "bell\a"])
def test_a_class_whose_name_is_no_text_is_refused(class_folders: Path, name: str) -> None:
    (class_folders / "b").rename(class_folders / name)
    with pytest.raises(DataError, match="cannot be the name of a class: rename it"):
        datasets.load("folder", class_folders, size=4)


def test_images_that_no_memory_could_hold_are_refused_before_any_is_read(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "read_all", None)
    monkeypatch.setattr(memory, "physical", lambda: 10**8)
    with pytest.raises(DataError, match=r"20 images of 4096×4096 pixels take 1\.0 GB .* choose a smaller --image-size"):
        datasets.load("folder", class_folders, size=4096)


@pytest.mark.parametrize("file", ["X.bin", "y.bin", "classes.txt"])
def test_a_pipe_in_the_place_of_a_data_file_is_not_waited_for(tmp_path: Path, file: str) -> None:
    np.zeros(100 * 3 * 96 * 96, np.uint8).tofile(tmp_path / "X.bin")
    np.zeros(100, np.uint8).tofile(tmp_path / "y.bin")
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(DataError, match=r"is a pipe where a file is expected|is not in"):
        datasets.load("sins10", tmp_path, fold=0)


def test_labels_that_go_on_for_ever_are_judged_by_their_size(tmp_path: Path) -> None:
    np.zeros(100 * 3 * 96 * 96, np.uint8).tofile(tmp_path / "X.bin")
    (tmp_path / "y.bin").touch()
    os.truncate(tmp_path / "y.bin", 2**42)
    with pytest.raises(DataError, match=r"has 100 images where y.bin beside it has 4,398,046,511,104 labels"):
        datasets.load("sins10", tmp_path, fold=0)


def test_a_home_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(DataError, match="~nobody-of-that-name names no folder"):
        datasets.load("cifar10", Path("~nobody-of-that-name"))


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_that_is_none_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(DataError, match="seed must be a whole number from 0 to 4294967295"):
        sins10.build(tmp_path, tmp_path, tmp_path / "out", seed=seed)


def test_a_mapping_with_very_many_synsets_is_answered_at_once(tmp_path: Path) -> None:
    names = ", ".join(f'"n{number}"' for number in range(60_000))
    classes = ", ".join(f'"{number}": ["m{number}"]' for number in range(9))
    (tmp_path / "mapping.json").write_text(f'{{{classes}, "many": [{names}, "n0"]}}')
    with pytest.raises(DataError, match="names the synset n0 more than once"):
        sins10.build(tmp_path, tmp_path / "mapping.json", tmp_path / "out")
