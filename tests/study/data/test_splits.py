"""Splits are stratified, disjoint and stable, and arrays of one's own become data sets."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maxgain.errors import DataError
from maxgain.study import data
from maxgain.study.data.splits import Dataset, Split, cross_validate, stratified


def make(count, classes=4, start=0):
    """Images that are all different, and labels in turn."""
    pixels = torch.arange(start, start + count)[:, None].expand(count, 4) // torch.tensor([1, 256, 1, 1]) % 256
    return Split(pixels.reshape(count, 1, 2, 2).to(torch.uint8), torch.arange(count) % classes)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200))
def test_every_stretch_has_the_classes_in_proportion(labels):
    parts = stratified(np.array(labels), 0.3, 0.7)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    share = {label: count / len(labels) for label, count in Counter(labels).items()}
    for part in parts:
        found = Counter(np.array(labels)[part])
        assert all(abs(found[label] - share[label] * len(part)) <= len(share) for label in share)


def test_cross_validation():
    dataset = Dataset("x", make(60), make(20, start=60), make(9, start=80), tuple("abcd"))
    folds = [cross_validate(dataset, fold, 4) for fold in range(4)]
    tested = torch.cat([fold.test.images for fold in folds])
    assert torch.equal(tested.flatten(1).unique(dim=0), torch.cat([make(80).images]).flatten(1).unique(dim=0))
    for fold, following in zip(folds, [*folds[1:], folds[0]], strict=True):
        assert [len(fold.train), len(fold.validation), len(fold.test)] == [40, 20, 20]
        assert fold.test.labels.bincount().tolist() == [5] * 4
        assert torch.equal(fold.validation.images, following.test.images)
        assert len(torch.cat([part.images for part in (fold.train, fold.validation, fold.test)]).unique(dim=0)) == 80
    assert folds[0].note == ""
    rare = replace(dataset, classes=tuple("abcde"))
    assert cross_validate(rare, 0, 4).note == "classes with fewer images than folds: e"
    for fold in (None, 4, -1):
        with pytest.raises(DataError) as caught:
            cross_validate(dataset, fold, 4)
        assert caught.value.field == "fold"


def test_fingerprint():
    dataset = Dataset("x", make(6), make(3), make(3), ("a", "b", "c", "d"))
    assert dataset.fingerprint == Dataset("y", make(6), make(3), make(3), ("e", "f", "g", "h"), note="z").fingerprint
    others = [
        Dataset("x", make(7), make(3), make(3), dataset.classes),
        Dataset("x", make(6), make(3), make(3, start=1), dataset.classes),
        Dataset("x", make(6), make(3), make(3), dataset.classes[:3]),
        Dataset("x", Split(make(6).images, make(6).labels.flip(0)), make(3), make(3), dataset.classes),
        dataset.without_test(),
    ]
    assert len({dataset.fingerprint, *(other.fingerprint for other in others)}) == 6


# --- Arrays of one's own


def pair(count=10, dtype=np.uint8, scale=1):
    pixels = np.arange(count * 12).reshape(count, 3, 2, 2) % 200
    return (pixels * scale).astype(dtype), np.arange(count) % 2


class Items:
    """A torch data set."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_arrays():
    pixels, labels = pair()
    made = data.dataset("mine", pair(20), (pixels, labels), classes=["cat", "dog"])
    assert [len(part) for part in (made.train, made.validation, made.test)] == [16, 4, 10]
    assert made.classes == ("cat", "dog")
    assert np.array_equal(made.test.images.numpy(), pixels)
    before = made.test.images.clone()
    pixels[:] = 0
    assert torch.equal(made.test.images, before), "images are not copied"


@pytest.mark.parametrize(
    "images",
    [
        pair()[0],
        pair()[0].astype(">i4"),
        np.asfortranarray(pair()[0]),
        pair()[0] / 255,
        torch.from_numpy(pair()[0] / 255),
        torch.from_numpy(pair()[0]).requires_grad_(False),
        pair()[0].tolist(),
    ],
)
def test_forms_of_the_same_images(images):
    made = data.dataset("mine", pair(), (images, pair()[1]), validation=pair())
    assert np.array_equal(made.test.images.numpy(), pair()[0])


def test_items():
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    chw = torch.from_numpy(pixels).permute(2, 0, 1)
    for image in (chw, pixels, Image.fromarray(pixels)):
        made = data.dataset("mine", Items(*[(image, label % 2) for label in range(10)]), Items((image, 0), (image, 1)))
        assert torch.equal(made.test.images[0], chw)
    grey = data.dataset("grey", Items(*[(pixels[:, :, 0], n % 2) for n in range(10)]), Items((pixels[:, :, 0], 1)))
    assert grey.shape == (1, 2, 2)
    assert "also trained on" in grey.note


@pytest.mark.parametrize(
    "test",
    [
        3,
        np.zeros((4, 3, 2, 2)),
        (np.zeros((4, 2, 2)), np.zeros(4)),
        (np.zeros((4, 3, 2, 2)), np.zeros(3)),
        (np.zeros((4, 3, 2, 2)), np.full(4, 0.5)),
        (np.zeros((4, 3, 2, 2)), np.full(4, -1)),
        (np.zeros((4, 3, 2, 2)), np.full(4, 7)),
        (np.full((4, 3, 2, 2), 1.5), np.zeros(4)),
        (np.full((4, 3, 2, 2), 256), np.zeros(4)),
        (np.full((4, 3, 2, 2), np.nan), np.zeros(4)),
        (np.full((4, 3, 2, 2), "x"), np.zeros(4)),
        (np.zeros((4, 1, 2, 2)), np.zeros(4)),
        (np.zeros((0, 3, 2, 2)), np.zeros(0)),
        Items((torch.zeros(3, 2, 2), 0), (torch.zeros(3, 2, 3), 0)),
    ],
)
def test_refused_parts(test):
    with pytest.raises(DataError):
        data.dataset("mine", pair(), test, classes=["a", "b"])


@pytest.mark.parametrize("name", ["", "digits", "a/b", " a", ".a", "-a"])
def test_refused_names(name):
    with pytest.raises(DataError):
        data.dataset(name, pair(), pair())


def test_labels_and_classes():
    with pytest.raises(DataError, match="least here is 1"):
        data.dataset("mine", (pair()[0], pair()[1] + 1), (pair()[0], pair()[1] + 1))
    with pytest.raises(DataError, match="at least 2 classes"):
        data.dataset("mine", (pair()[0], pair()[1] * 0), (pair()[0], pair()[1] * 0))


def test_channels_that_come_last():
    images = np.zeros((10, 8, 8, 3))
    with pytest.warns(UserWarning, match="permute"):
        data.dataset("mine", (images, np.arange(10) % 2), (images, np.arange(10) % 2))
