"""Writes data sets as they are published, and compares what was read with what was written."""

from collections import Counter

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat


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
