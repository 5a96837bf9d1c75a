"""The digits that come with scikit-learn, in ten folds."""

from collections import Counter

import pytest
import torch

from maxgain.study.data import table as datasets
from study_data import fingerprints


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
