"""Data sets are read as they were written, split as the paper splits them, and refused with a sentence when damaged."""

import hashlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from maxgain.errors import DataError
from maxgain.study.data import checksums
from maxgain.study.data import table as datasets
from maxgain.study.data.download import Download
from maxgain.study.data.splits import Split, stratified_order


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def small(monkeypatch):
    """A row of the table with fewer images, so that whole files can be written and compared."""

    def change(name, **fields):
        row = replace(datasets.DATASETS[name], **fields)
        monkeypatch.setitem(datasets.DATASETS, name, row)
        return row

    return change


@pytest.fixture
def small_cifar10(small, rng, tmp_path):
    """CIFAR-10 with five files of four images and one of three; returns what was written."""
    row = small(
        "cifar10",
        train_files={f"data_batch_{i}.bin": 4 for i in range(1, 6)},
        test_files={"test_batch.bin": 3},
        train=slice(0, 16),
        validation=slice(16, 20),
    )
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    written = {}
    for file, count in (row.train_files | row.test_files).items():
        images = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        (folder / file).write_bytes(b"".join(bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)))
        written[file] = images, labels
    return folder, written


@pytest.fixture
def small_svhn(small, rng, tmp_path):
    """SVHN with 30, 20 and 15 images; the extra file is left to the test."""
    row = small(
        "svhn",
        train_files={"train_32x32.mat": 30},
        optional_files={"extra_32x32.mat": 20},
        test_files={"test_32x32.mat": 15},
        train=slice(10, None),
        validation=slice(0, 10),
        downloads=(),
    )
    folder = tmp_path / "svhn"
    folder.mkdir()
    written = {}
    for file, count in (row.train_files | row.optional_files | row.test_files).items():
        images = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        digits = rng.integers(0, 10, count, dtype=np.uint8)
        written[file] = images, digits
        write_svhn(folder / file, images, np.where(digits == 0, 10, digits))
    return folder, written


def write_svhn(path, images, labels):
    savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]}, do_compression=True)


def write_folds(folder, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "X.bin").write_bytes(images.tobytes())
    (folder / "y.bin").write_bytes(labels.tobytes())


def picture(path, width=40, height=40, colour=(0, 0, 0)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), colour).save(path)


def assert_split(split, images, labels):
    assert split.images.dtype == torch.uint8
    assert split.labels.dtype == torch.int64
    assert split.images.is_contiguous()
    assert np.array_equal(split.images.numpy(), images)
    assert split.labels.tolist() == labels.tolist()


def fingerprints(*splits):
    """How often each labelled image occurs."""
    return Counter(
        (image.numpy().tobytes(), int(label))
        for split in splits
        for image, label in zip(split.images, split.labels, strict=True)
    )


# ---- what all rows share ----


def test_the_list_names_every_data_set_and_knows_which_are_there(tmp_path, small_cifar10):
    rows = {row.name: row for row in datasets.describe(tmp_path)}
    assert list(rows) == list(datasets.DATASETS)
    assert {name: row.present for name, row in rows.items()} == {
        "digits": True,
        "cifar10": True,
        "cifar100": False,
        "svhn": False,
        "sins10": False,
        "folder": None,
    }
    assert rows["cifar10"].where == str(tmp_path / "cifar-10-batches-bin")
    assert rows["svhn"].where == str(tmp_path / "svhn")
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").unlink()
    assert not {row.name: row for row in datasets.describe(tmp_path)}["cifar10"].present


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "sins10"])
def test_a_data_set_that_is_not_there_says_where_it_was_looked_for_and_what_to_do(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} is not in {tmp_path}.*maxgain data .*MAXGAIN_DATA") as error:
        datasets.load(name, tmp_path, fold=0)
    assert datasets.check(name, tmp_path) == [str(error.value)]


@pytest.mark.parametrize("call", [datasets.load, datasets.check, datasets.fetch])
def test_an_unknown_data_set_is_answered_with_the_known_ones(call):
    with pytest.raises(DataError, match="no data set 'mnist': there are digits, cifar10, cifar100, svhn"):
        call("mnist")


@pytest.mark.parametrize(
    ("name", "fold", "message"),
    [("digits", 10, "folds 0 to 9"), ("digits", -1, "folds 0 to 9"), ("cifar10", 1, "cifar10 has no folds")],
)
def test_a_fold_that_does_not_exist_is_refused(name, fold, message):
    with pytest.raises(DataError, match=message):
        datasets.load(name, fold=fold)


def test_a_size_is_refused_where_it_would_be_ignored():
    with pytest.raises(DataError, match="digits has images of one size"):
        datasets.load("digits", size=96)


@pytest.mark.parametrize("name", ["digits", "sins10", "folder"])
def test_what_cannot_be_fetched_says_what_to_do(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} cannot be fetched: (it comes with|put X\.bin|name a folder)"):
        datasets.fetch(name, tmp_path)


def test_the_root_is_what_was_asked_for_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXGAIN_DATA", "/from/environment")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.data_root(Path("/asked/for")) == Path("/asked/for")
    assert datasets.data_root() == Path("/from/environment")
    monkeypatch.delenv("MAXGAIN_DATA")
    assert datasets.data_root() == tmp_path / "maxgain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert datasets.data_root() == Path.home() / ".cache/maxgain"


def test_joined_splits_have_the_images_of_both_in_order():
    a = Split(torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 1]))
    b = Split(torch.ones(1, 1, 3, 3, dtype=torch.uint8), torch.tensor([2]))
    joined = a.join(b)
    assert len(joined) == 3
    assert joined.labels.tolist() == [0, 1, 2]
    assert joined.images.sum((1, 2, 3)).tolist() == [0, 0, 9]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1000), st.integers(1, 7))
def test_every_stretch_of_a_stratified_order_has_the_classes_in_proportion(counts, seed, stretches):
    labels = np.repeat(np.arange(len(counts)), counts)
    order = stratified_order(labels, seed)
    assert sorted(order) == list(range(len(labels)))
    for stretch in np.array_split(order, stretches):
        for label, count in enumerate(counts):
            share = count / len(labels)
            slack = 1 + share * len(counts)  # half an image of each class at either end
            assert abs((labels[stretch] == label).sum() - share * len(stretch)) <= slack


def test_a_stratified_order_of_equal_classes_has_each_class_once_a_round():
    labels = np.arange(60) % 6
    rounds = labels[stratified_order(labels, seed=3)].reshape(10, 6)
    assert all(sorted(each) == list(range(6)) for each in rounds)


def test_a_stratified_order_is_the_same_again_and_another_with_another_seed():
    labels = np.arange(50) % 5
    assert np.array_equal(stratified_order(labels, 1), stratified_order(labels, 1))
    assert not np.array_equal(stratified_order(labels, 1), stratified_order(labels, 2))


# ---- digits ----


@pytest.fixture(scope="module")
def scans():
    from sklearn.datasets import load_digits

    return load_digits()


def test_digits_are_scikit_learns_with_sixteenths_made_bytes(scans):
    data = datasets.load("digits")
    expected = Counter(
        (bytes(round(value * 255 / 16) for value in image.ravel()), int(label))
        for image, label in zip(scans.images, scans.target, strict=True)
    )
    assert fingerprints(data.train, data.validation, data.test) == expected
    assert (data.shape, data.classes, data.fold, data.folds) == ((1, 8, 8), tuple("0123456789"), None, 10)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [1078, 360, 359]


def test_the_folds_of_digits_share_no_image_and_leave_none_out(scans):
    folds = [datasets.load("digits", fold=fold) for fold in range(10)]
    whole = datasets.load("digits")
    parts = [(data.train, data.validation, data.test) for data in folds]
    together = sum((fingerprints(*each) for each in parts), Counter())
    assert together == fingerprints(whole.train, whole.validation, whole.test)
    assert sorted({sum(map(len, each)) for each in parts}) == [179, 180]
    assert [data.fold for data in folds] == list(range(10))


@pytest.mark.parametrize("fold", [None, 0, 9])
def test_every_part_of_digits_has_all_classes_alike(fold):
    data = datasets.load("digits", fold=fold)
    total = len(data.train) + len(data.validation) + len(data.test)
    for part, share in ((data.train, 0.6), (data.validation, 0.2), (data.test, 0.2)):
        assert len(part) == pytest.approx(share * total, abs=1)
        counts = part.labels.bincount(minlength=10)
        assert counts.max() - counts.min() <= (8 if fold is None else 2)


def test_digits_are_the_same_every_time():
    first, second = (datasets.load("digits", fold=4).train for _ in range(2))
    assert torch.equal(first.images, second.images)


# ---- CIFAR ----


def test_cifar10_is_read_as_written(tmp_path, small_cifar10):
    folder, written = small_cifar10
    data = datasets.load("cifar10", tmp_path)
    images = np.concatenate([written[f"data_batch_{i}.bin"][0] for i in range(1, 6)])
    labels = np.concatenate([written[f"data_batch_{i}.bin"][1] for i in range(1, 6)])
    assert_split(data.train, images[:16], labels[:16])
    assert_split(data.validation, images[16:], labels[16:])
    assert_split(data.test, *written["test_batch.bin"])
    assert (data.classes[0], data.classes[9], len(data.classes)) == ("airplane", "truck", 10)
    assert (data.fold, data.folds, data.note) == (None, 1, "")
    assert datasets.check("cifar10", tmp_path) == []
    assert torch.equal(datasets.load("cifar10", folder).test.images, data.test.images)


def test_the_validation_images_of_cifar10_are_40000_to_49999(tmp_path):
    """Files of the published size, empty but for the images at the edges of the parts, which get a label each."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    marks = {0: 1, 39_999: 2, 40_000: 3, 49_999: 4}
    for batch in range(5):
        records = np.memmap(folder / f"data_batch_{batch + 1}.bin", np.uint8, "w+", shape=(10_000, 3073))
        for index, mark in marks.items():
            if index // 10_000 == batch:
                records[index % 10_000] = mark
    np.memmap(folder / "test_batch.bin", np.uint8, "w+", shape=(10_000, 3073))[[0, -1]] = 5
    data = datasets.load("cifar10", tmp_path)
    for part, length, first, last in (
        (data.train, 40_000, 1, 2),
        (data.validation, 10_000, 3, 4),
        (data.test, 10_000, 5, 5),
    ):
        assert len(part) == length
        assert (int(part.labels[0]), int(part.labels[-1])) == (first, last)
        assert (int(part.images[0].min()), int(part.images[-1].max())) == (first, last)
        assert int(part.labels[1:-1].max()) == 0


def test_cifar100_uses_the_fine_labels(tmp_path, small, rng):
    small(
        "cifar100",
        train_files={"train.bin": 6},
        test_files={"test.bin": 2},
        train=slice(0, 4),
        validation=slice(4, 6),
    )
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    images = rng.integers(0, 256, (8, 3, 32, 32), dtype=np.uint8)
    fine = np.array([99, 0, 50, 3, 98, 97, 1, 2], np.uint8)
    records = [bytes([19 - i, y]) + x.tobytes() for i, (x, y) in enumerate(zip(images, fine, strict=True))]
    (folder / "train.bin").write_bytes(b"".join(records[:6]))
    (folder / "test.bin").write_bytes(b"".join(records[6:]))
    data = datasets.load("cifar100", tmp_path)
    assert_split(data.train, images[:4], fine[:4])
    assert_split(data.validation, images[4:6], fine[4:6])
    assert_split(data.test, images[6:], fine[6:])
    assert (len(set(data.classes)), data.classes[0], data.classes[99]) == (100, "apple", "worm")


def test_cifar_rows_expect_the_published_sizes():
    """3,073 and 3,074 bytes a record: what makes 30,730,000, 153,700,000 and 30,740,000 bytes on disk."""
    ten, hundred = datasets.DATASETS["cifar10"], datasets.DATASETS["cifar100"]
    assert set((ten.train_files | ten.test_files).values()) == {10_000}
    assert hundred.train_files | hundred.test_files == {"train.bin": 50_000, "test.bin": 10_000}
    assert (hundred.train, hundred.validation) == (slice(0, 40_000), slice(40_000, 50_000))


def test_a_truncated_file_is_named_with_both_sizes(tmp_path, small_cifar10):
    os.truncate(tmp_path / "cifar-10-batches-bin/data_batch_3.bin", 1000)
    message = r"data_batch_3\.bin has 1,000 bytes where 12,292 are expected: run `maxgain data fetch cifar10`"
    with pytest.raises(DataError, match=message):
        datasets.load("cifar10", tmp_path)


def test_a_missing_file_is_named(tmp_path, small_cifar10):
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin is missing: run `maxgain data fetch cifar10`"):
        datasets.load("cifar10", tmp_path)


def test_a_folder_in_the_place_of_a_file_is_one_sentence(tmp_path, small_cifar10):
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").unlink()
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").mkdir()
    with pytest.raises(DataError, match=r"test_batch\.bin"):
        datasets.load("cifar10", tmp_path)


def test_an_impossible_label_is_named_with_its_image(tmp_path, small_cifar10):
    path = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[3 * 3073] = 10
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_2\.bin has the label 10 at image 3 where 0 to 9 are possible"):
        datasets.load("cifar10", tmp_path)


def test_check_lists_every_problem_and_not_only_the_first(tmp_path, small_cifar10):
    folder, _ = small_cifar10
    (folder / "data_batch_1.bin").unlink()
    os.truncate(folder / "data_batch_4.bin", 5)
    first, second = datasets.check("cifar10", tmp_path)
    assert "data_batch_1.bin is missing" in first
    assert "data_batch_4.bin has 5 bytes" in second


# ---- SVHN ----


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


# ---- SINS-10 ----


@pytest.fixture
def folds(rng):
    """Ten folds of twenty images."""
    return rng.integers(0, 256, (200, 3, 96, 96), dtype=np.uint8), rng.integers(0, 10, 200, dtype=np.uint8)


@pytest.mark.parametrize("folder", ["sins10", "imagenette-folds", "."])
def test_a_fold_is_its_stretch_of_the_file(tmp_path, folds, folder):
    images, labels = folds
    write_folds(tmp_path / folder, images, labels)
    data = datasets.load("sins10", tmp_path, fold=7)
    assert_split(data.train, images[140:156], labels[140:156])
    assert_split(data.validation, images[156:158], labels[156:158])
    assert_split(data.test, images[158:160], labels[158:160])
    assert (data.fold, data.folds, data.shape) == (7, 10, (3, 96, 96))
    assert data.note.endswith("is not sins10 itself: folds of 20 images instead of 10,000")
    assert data.classes == tuple("0123456789")
    assert datasets.check("sins10", tmp_path) == []


def test_sins10_itself_has_8000_1000_and_1000_images_in_a_fold(tmp_path):
    (tmp_path / "X.bin").touch()
    os.truncate(tmp_path / "X.bin", 100_000 * 3 * 96 * 96)
    labels = np.zeros(100_000, np.uint8)
    labels[[90_000, 98_000, 99_000]] = 1, 2, 3
    labels.tofile(tmp_path / "y.bin")
    data = datasets.load("sins10", tmp_path, fold=9)
    parts = (data.train, data.validation, data.test)
    assert [len(part) for part in parts] == [8000, 1000, 1000]
    assert [int(part.labels[0]) for part in parts] == [1, 2, 3]
    assert data.note == ""


def test_sins10_has_to_be_told_which_fold(tmp_path, folds):
    write_folds(tmp_path, *folds)
    with pytest.raises(DataError, match="one fold at a time: choose a fold from 0 to 9"):
        datasets.load("sins10", tmp_path)


def test_names_of_classes_are_read_where_they_are_given(tmp_path, folds):
    write_folds(tmp_path, *folds)
    names = [f"kind {i}" for i in range(10)]
    (tmp_path / "classes.txt").write_text("\n".join(names) + "\n")
    assert datasets.load("sins10", tmp_path, fold=0).classes == tuple(names)
    (tmp_path / "classes.txt").write_text("dog\n")
    with pytest.raises(DataError, match=r"classes\.txt has 1 lines where 10"):
        datasets.load("sins10", tmp_path, fold=0)
    assert len(datasets.check("sins10", tmp_path)) == 1


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (200 * 27_648 - 1, np.zeros(200), "5,529,599 bytes, which is no whole number of images of 27,648 bytes"),
        (199 * 27_648, np.zeros(200), "199 images where y.bin beside it has 200 labels"),
        (201 * 27_648, np.zeros(201), "201 images, not 10 equal folds of 10 images or more"),
        (50 * 27_648, np.zeros(50), "50 images, not 10 equal folds"),
        (0, np.zeros(0), "0 images, not 10 equal folds"),
        (200 * 27_648, np.full(200, 10), "y.bin has the label 10 at image 0 where 0 to 9 are possible"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, pixels, labels, message):
    (tmp_path / "X.bin").touch()
    os.truncate(tmp_path / "X.bin", pixels)
    labels.astype(np.uint8).tofile(tmp_path / "y.bin")
    with pytest.raises(DataError, match=message):
        datasets.load("sins10", tmp_path, fold=0)
    assert len(datasets.check("sins10", tmp_path)) == 1


def test_labels_that_are_missing_are_named(tmp_path):
    (tmp_path / "X.bin").touch()
    with pytest.raises(DataError, match=r"y\.bin is missing"):
        datasets.load("sins10", tmp_path, fold=0)


# ---- folders of images ----


def test_a_folder_with_a_split_keeps_it(tmp_path):
    for part, shade in (("train", 10), ("val", 20), ("test", 30)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(2):
                picture(tmp_path / part / name / f"{i}.png", colour=(shade + i, label, 200))
    data = datasets.load("folder", tmp_path, size=8)
    assert data.classes == ("cat", "dog")
    assert data.shape == (3, 8, 8)
    for split, shade in ((data.train, 10), (data.validation, 20), (data.test, 30)):
        assert split.labels.tolist() == [0, 0, 1, 1]
        colours = split.images[:, :, 3, 3].tolist()
        assert colours == [[shade, 0, 200], [shade + 1, 0, 200], [shade, 1, 200], [shade + 1, 1, 200]]
    assert datasets.check("folder", tmp_path) == []


def test_a_folder_without_validation_holds_a_tenth_of_training_out(tmp_path):
    for name in ("cat", "dog"):
        for i in range(20):
            picture(tmp_path / "train" / name / f"{i}.png", colour=(i, 0, 0))
        picture(tmp_path / "test" / name / "a.png")
    data = datasets.load("folder", tmp_path, size=4)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [36, 4, 2]
    assert data.validation.labels.bincount().tolist() == [2, 2]
    assert fingerprints(data.train, data.validation).most_common(1)[0][1] == 1


def test_a_folder_without_a_split_is_cut_the_same_way_every_time(tmp_path):
    for label, name in enumerate(("cat", "dog", "train")):
        for i in range(20):
            picture(tmp_path / name / f"{i}.png", colour=(i, label, 0))
    data, again = (datasets.load("folder", tmp_path, size=4) for _ in range(2))
    assert data.classes == ("cat", "dog", "train")
    for part, count in ((data.train, 16), (data.validation, 2), (data.test, 2)):
        assert part.labels.bincount().tolist() == [count] * 3
        assert part.images[:, 1, 0, 0].tolist() == part.labels.tolist()
    assert len(fingerprints(data.train, data.validation, data.test)) == 60
    assert torch.equal(data.train.images, again.train.images)


def test_the_central_square_of_a_picture_is_kept(tmp_path, rng):
    """The smaller side is 8 already, so that nothing is resized and pixels can be compared."""
    pixels = rng.integers(0, 256, (8, 14, 3), dtype=np.uint8)
    for part in ("train", "val", "test"):
        for name in ("tall", "wide"):
            (tmp_path / part / name).mkdir(parents=True)
            image = pixels if name == "wide" else pixels.transpose(1, 0, 2)
            Image.fromarray(image).save(tmp_path / part / name / "x.PNG")
    tall, wide = datasets.load("folder", tmp_path, size=8).train.images.numpy()
    assert np.array_equal(wide, pixels[:, 3:11].transpose(2, 0, 1))
    assert np.array_equal(tall, pixels.transpose(1, 0, 2)[3:11].transpose(2, 0, 1))


def test_a_picture_is_resized_by_its_smaller_side(tmp_path):
    """Red, green and blue bands of 50, 100 and 50 in 200×100: the central square is the green one, at any size."""
    image = np.zeros((100, 200, 3), np.uint8)
    image[:, :50, 0] = image[:, 50:150, 1] = image[:, 150:, 2] = 255
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(image).save(tmp_path / part / name / "x.png")
    red, green, blue = datasets.load("folder", tmp_path, size=20).train.images[0, :, :, 2:-2]
    assert green.min() >= 250  # away from the edges, where the filter mixes the bands
    assert max(red.max(), blue.max()) <= 5
    assert datasets.load("folder", tmp_path).shape == (3, 96, 96)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_pictures_of_every_mode_become_colour_images(tmp_path, mode):
    suffix = "tif" if mode in ("CMYK", "I;16") else "png"
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            picture(tmp_path / part / name / "x.jpg")
            Image.new(mode, (10, 10)).save(tmp_path / part / name / f"y.{suffix}")
    assert datasets.load("folder", tmp_path, size=5).train.images.shape == (4, 3, 5, 5)


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    for name in ("a", "b"):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png")
    (tmp_path / "a/3.png").write_bytes((tmp_path / "a/3.png").read_bytes()[:60])
    (tmp_path / "b/5.png").write_text("not a picture")
    with pytest.raises(DataError, match=r"(a/3|b/5)\.png cannot be read as an image .*; repair or remove it"):
        datasets.load("folder", tmp_path)
    problems = datasets.check("folder", tmp_path)
    assert len(problems) == 2
    assert all(any(name in problem for problem in problems) for name in ("a/3.png", "b/5.png"))


def test_files_that_are_hidden_or_no_pictures_are_passed_over(tmp_path):
    for name in ("a", "b"):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png")
        (tmp_path / name / "notes.txt").write_text("x")
        (tmp_path / name / "._0.png").write_text("x")
    (tmp_path / ".cache").mkdir()
    data = datasets.load("folder", tmp_path, size=4)
    assert len(data.train) + len(data.validation) + len(data.test) == 20


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has 0 folders where one for each class is expected: name a folder"),
        (["a/0.png"], "has 1 folders where one for each class"),
        (["a/0.png", "b/notes.txt"], "b has no images"),
        (["a/0.png", "b/0.png"], "too few images"),
        (["train/a/0.png", "val/a/0.png"], "has train and val but needs both train and test, or neither"),
        (["train/a/0.png", "train/b/0.png", "test/c/0.png"], "test has a folder c, which is no class of the training"),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], "test/b has no images"),
    ],
)
def test_folders_that_make_no_data_set_are_refused(tmp_path, files, message):
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(path) if path.suffix == ".png" else path.touch()
    with pytest.raises(DataError, match=message):
        datasets.load("folder", tmp_path)
    assert len(datasets.check("folder", tmp_path)) == 1


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="nowhere is not a folder: name a folder"):
        datasets.load("folder", tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(DataError, match="choose a size from 1 to 4096"):
        datasets.load("folder", tmp_path, size=size)


# ---- the real thing ----


def real(name):
    """The folder with the real data sets, or a reason to skip."""
    root = os.environ.get("MAXGAIN_DATA")
    if not root:
        pytest.skip("MAXGAIN_DATA does not say where real data sets are")
    if not {row.name: row.present for row in datasets.describe(Path(root))}[name]:
        pytest.skip(f"no {name} in {root}")
    return Path(root)


def test_real_cifar10():
    root = real("cifar10")
    data = datasets.load("cifar10", root)
    parts = (data.train, data.validation, data.test)
    assert [len(part) for part in parts] == [40_000, 10_000, 10_000]
    assert torch.cat([part.labels for part in parts]).bincount().tolist() == [6000] * 10
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert data.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # frog, truck, truck, deer, ...
    assert datasets.check("cifar10", root) == []


def test_real_svhn():
    root = real("svhn")
    data = datasets.load("svhn", root)
    extra = (root / "svhn/extra_32x32.mat").exists()
    assert len(data.train) + len(data.validation) == 73_257 + 531_131 * extra
    assert (len(data.validation), len(data.test)) == (10_000, 26_032)
    assert data.test.labels.bincount().tolist() == [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]
    assert bool(data.note) is not extra


def test_real_folds_share_no_image():
    root = real("sins10")
    data = [datasets.load("sins10", root, fold=fold) for fold in (0, 1)]
    sizes = [len(d.train) + len(d.validation) + len(d.test) for d in data]
    assert sizes in ([1339, 1339], [10_000, 10_000])
    assert len(data[0].train) + len(data[0].validation) == sizes[0] * 9 // 10
    assert not fingerprints(data[0].train, data[0].validation) & fingerprints(data[0].test)
    assert data[0].test.labels.bincount(minlength=10).min() > 0


def test_cross_validation_tests_every_image_once_and_leaves_the_test_part_alone(small_cifar10):
    folder, _ = small_cifar10
    whole = datasets.load("cifar10", folder.parent)
    pool = whole.train.join(whole.validation)
    tested = []
    for fold in range(4):
        cut = datasets.load("cifar10", folder.parent, fold, cross_validation=4)
        parts = [cut.train, cut.validation, cut.test]
        assert sorted(image.tobytes() for part in parts for image in part.images.numpy()) == sorted(
            image.tobytes() for image in pool.images.numpy()
        )
        assert len(cut.train) == pytest.approx(len(pool) / 2, abs=2)
        tested += [image.tobytes() for image in cut.test.images.numpy()]
    assert sorted(tested) == sorted(image.tobytes() for image in pool.images.numpy())


def test_cross_validation_into_more_folds_than_images_is_refused(small_cifar10):
    folder, _ = small_cifar10
    with pytest.raises(DataError, match="cifar10 has too few images for 100000-fold cross-validation"):
        datasets.load("cifar10", folder.parent, 0, cross_validation=100_000)


def test_cross_validation_is_refused_where_there_are_disjoint_folds_or_no_such_fold():
    with pytest.raises(DataError, match="digits has 10 disjoint folds"):
        datasets.load("digits", fold=0, cross_validation=3)
    with pytest.raises(DataError, match="3-fold cross-validation has no fold 3"):
        datasets.load("cifar10", fold=3, cross_validation=3)
