"""What all rows of the table of data sets share: names, folders, folds, splits and their order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxgain.errors import DataError
from maxgain.study.data import table as datasets
from maxgain.study.data.splits import Split, stratified_order


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
