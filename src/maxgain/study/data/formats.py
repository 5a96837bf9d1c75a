"""Readers of the binary formats that data sets are published in: a file in, images and labels out.

A reader knows how many images its file must hold. What does not fit raises `DataError` with the path, what was found
and what was expected. Images come as uint8 (N, C, H, W), labels as bytes counted from 0.
"""

from pathlib import Path

import numpy as np

from maxgain.errors import DataError

from .splits import Bytes


def cifar(path: Path, images: int, classes: int, label_bytes: int = 1) -> tuple[Bytes, Bytes]:
    """A file of CIFAR's binary release: records of `label_bytes` labels and 3×32×32 pixels, plane by plane.

    CIFAR-100 writes two labels, the coarse one first; the last is used.
    """
    record = label_bytes + 3 * 32 * 32
    if (found := size(path)) != images * record:
        raise DataError(f"{path} has {found:,} bytes where {images * record:,} are expected.")
    records = raw(path).reshape(images, record)
    labels = records[:, label_bytes - 1]
    expect_labels(path, labels, range(classes))
    return records[:, label_bytes:].reshape(images, 3, 32, 32), labels


def svhn(path: Path, images: int, classes: int) -> tuple[Bytes, Bytes]:
    """A file of SVHN's cropped digits: a MATLAB file with X (32, 32, 3, N) and labels y from 1 to 10, 10 being 0."""
    from scipy.io import loadmat

    size(path)
    try:
        content = loadmat(path, variable_names=("X", "y"))
        pixels, labels = content["X"], content["y"].ravel()
    except MemoryError:
        raise
    except Exception as error:  # scipy raises whatever its parser trips over
        raise DataError(f"{path} cannot be read as a MATLAB file with X and y ({error}).") from error
    if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, images):
        raise DataError(
            f"{path} has {pixels.dtype} images of shape {pixels.shape} where uint8 (32, 32, 3, {images}) is expected."
        )
    if len(labels) != images:
        raise DataError(f"{path} has {len(labels):,} labels where {images:,} are expected.")
    expect_labels(path, labels, range(1, classes + 1))
    return pixels.transpose(3, 2, 0, 1), (labels % classes).astype(np.uint8)


def size(path: Path) -> int:
    """How many bytes the file at `path` has."""
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error


def raw(path: Path) -> Bytes:
    """The bytes of the file at `path`."""
    size(path)
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from error


def expect_labels(path: Path, labels: Bytes, allowed: range) -> None:
    """Refuse labels that name no class, saying which image has the first one."""
    wrong = np.flatnonzero((labels < allowed.start) | (labels >= allowed.stop))
    if len(wrong):
        raise DataError(
            f"{path} has the label {labels[wrong[0]]} at image {wrong[0]:,} "
            f"where {allowed.start} to {allowed.stop - 1} are possible."
        )
