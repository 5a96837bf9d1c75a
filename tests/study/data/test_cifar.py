"""CIFAR-10 and CIFAR-100 are read as they were written, split as the paper splits them, and refused when damaged."""

import os

import numpy as np
import pytest
import torch

from maxgain.errors import DataError
from maxgain.study.data import table as datasets
from study_data import assert_split


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
