"""SVHN is read as it was written, with and without its extra images, and refused when damaged."""

import hashlib
import os

import numpy as np
import pytest
from scipy.io import savemat

from maxgain.errors import DataError
from maxgain.study.data import checksums
from maxgain.study.data import table as datasets
from maxgain.study.data.download import Download
from study_data import assert_split, write_svhn


def test_svhn_puts_train_before_extra_and_reads_label_ten_as_zero(tmp_path, small_svhn):
    _, written = small_svhn
    data = datasets.load("svhn", tmp_path)
    images, labels = (
        np.concatenate(pair) for pair in zip(written["train_32x32.mat"], written["extra_32x32.mat"], strict=True)
    )
    assert_split(data.validation, images[:10], labels[:10])
    assert_split(data.train, images[10:], labels[10:])
    assert_split(data.test, *written["test_32x32.mat"])
    assert data.note == ""
    assert datasets.check("svhn", tmp_path) == []


def test_svhn_without_extra_says_so(tmp_path, small_svhn):
    folder, written = small_svhn
    (folder / "extra_32x32.mat").unlink()
    data = datasets.load("svhn", tmp_path)
    images, labels = written["train_32x32.mat"]
    assert_split(data.validation, images[:10], labels[:10])
    assert_split(data.train, images[10:], labels[10:])
    assert data.note == "svhn without extra_32x32.mat: 20 training images instead of 40"
    assert datasets.check("svhn", tmp_path) == []


def test_svhn_rows_have_the_papers_numbers():
    row = datasets.DATASETS["svhn"]
    assert sum((row.train_files | row.optional_files).values()) == 604_388
    assert (row.train, row.validation) == (slice(10_000, None), slice(0, 10_000))


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_damaged_matlab_file_is_one_sentence(tmp_path, small_svhn, keep):
    path = tmp_path / "svhn/test_32x32.mat"
    os.truncate(path, keep if isinstance(keep, int) else int(keep * path.stat().st_size))
    with pytest.raises(DataError, match=r"test_32x32\.mat cannot be read as a MATLAB file .*: run `maxgain data"):
        datasets.load("svhn", tmp_path)
    assert len(datasets.check("svhn", tmp_path)) == 1


def test_a_damaged_extra_file_is_refused_and_not_taken_for_an_absent_one(tmp_path, small_svhn):
    os.truncate(tmp_path / "svhn/extra_32x32.mat", 1000)
    with pytest.raises(DataError, match=r"extra_32x32\.mat cannot be read"):
        datasets.load("svhn", tmp_path)
    assert len(datasets.check("svhn", tmp_path)) == 1


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((14, 3, 32, 32), np.uint8), np.ones(14), r"\(32, 32, 3, 14\) where uint8 \(32, 32, 3, 15\)"),
        (np.zeros((15, 3, 32, 32), np.float32), np.ones(15), r"single images"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.ones(14), r"labels of shape \(14, 1\) where 15"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.full(15, "1"), "char labels"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.ones(15) * 1j, "label .* where 1 to 10"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.full(15, np.nan), "label nan at image 0 where 1 to 10"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.array([1.0] * 14 + [1.5]), "label 1.5 at image 14 where 1 to 10"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.full(15, np.inf), "label inf at image 0"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.full(15, -1), "label -1 at image 0"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.zeros(15, np.uint8), "label 0 at image 0 where 1 to 10"),
        (np.zeros((15, 3, 32, 32), np.uint8), np.full(15, 11), "label 11 at image 0 where 1 to 10"),
    ],
)
def test_svhn_refuses_what_does_not_fit(tmp_path, small_svhn, images, labels, message):
    write_svhn(tmp_path / "svhn/test_32x32.mat", images, labels)
    with pytest.raises(DataError, match=message):
        datasets.load("svhn", tmp_path)


def test_a_matlab_file_of_something_else_is_one_sentence(tmp_path, small_svhn):
    savemat(tmp_path / "svhn/test_32x32.mat", {"Z": np.zeros(3)})
    with pytest.raises(DataError, match=r"test_32x32\.mat cannot be read as a MATLAB file with X and y .it has no X"):
        datasets.load("svhn", tmp_path)


def test_a_matlab_file_is_judged_by_its_header_before_it_is_unpacked(tmp_path, small_svhn, monkeypatch):
    bomb = {"X": np.zeros((32, 32, 3, 3000), np.uint8), "y": np.ones((15, 1))}
    savemat(tmp_path / "svhn/test_32x32.mat", bomb, do_compression=True)
    monkeypatch.setattr("scipy.io.loadmat", None)
    with pytest.raises(DataError, match=r"\(32, 32, 3, 3000\) where uint8 \(32, 32, 3, 15\)"):
        datasets.DATASETS["svhn"].read(tmp_path / "svhn/test_32x32.mat", 15, 10)


def test_what_is_not_the_published_file_is_a_problem_and_a_note(tmp_path, small_svhn, small):
    folder, _ = small_svhn
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in os.listdir(folder)}
    small("svhn", downloads=tuple(Download(f"http://site/{name}", sums[name], (name,)) for name in sums))
    assert datasets.check("svhn", tmp_path) == []
    assert datasets.load("svhn", tmp_path).note == ""
    content = bytearray((folder / "test_32x32.mat").read_bytes())
    content[20] ^= 1  # in the header's free text, so that no reader could notice
    (folder / "test_32x32.mat").write_bytes(content)
    (problem,) = datasets.check("svhn", tmp_path)
    assert "test_32x32.mat is not the published file, whose SHA-256 is another: run `maxgain data fetch" in problem
    assert datasets.load("svhn", tmp_path).note == "not the published test_32x32.mat, by SHA-256"


def test_a_file_that_changed_since_its_sum_was_written_is_damaged_and_not_used(tmp_path, small_cifar10):
    folder, _ = small_cifar10
    checksums.record(folder, ["data_batch_2.bin", "test_batch.bin"])
    datasets.load("cifar10", tmp_path)
    content = bytearray((folder / "data_batch_2.bin").read_bytes())
    content[1234] ^= 1
    (folder / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(
        DataError, match=r"data_batch_2\.bin is damaged: its SHA-256 .* SHA256SUMS .*: run `maxgain data"
    ):
        datasets.load("cifar10", tmp_path)
    assert len(datasets.check("cifar10", tmp_path)) == 1


@pytest.mark.parametrize("content", [b"rubbish\n", b"\xff" * 100, b"0" * 63 + b"  test_batch.bin\n"])
def test_sums_that_cannot_be_read_are_one_sentence(tmp_path, small_cifar10, content):
    (small_cifar10[0] / "SHA256SUMS").write_bytes(content)
    with pytest.raises(DataError, match="SHA256SUMS, line 1 is not a SHA-256 and the name of a file"):
        datasets.load("cifar10", tmp_path)
