"""Small data sets in the layouts of the published ones."""

from dataclasses import replace

import numpy as np
import pytest

from maxgain.study.data import table as datasets
from study_data import write_svhn


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
