"""SINS-10's files: a fold is its stretch of them."""

import os

import numpy as np
import pytest

from maxgain.errors import DataError
from maxgain.study.data import table as datasets
from study_data import assert_split, write_folds


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
