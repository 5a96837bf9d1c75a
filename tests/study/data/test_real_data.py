"""The published data sets themselves, where MAXGAIN_DATA says that they are."""

import os
from pathlib import Path

import pytest
import torch

from maxgain.study.data import table as datasets
from study_data import fingerprints


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
