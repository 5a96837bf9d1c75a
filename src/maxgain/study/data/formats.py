"""Readers of the binary formats that data sets are published in: a file in, images and labels out.

A reader knows how many images its file must hold. What does not fit raises `DataError` with the path, what was found
and what was expected. Images come as uint8 (N, C, H, W), labels as bytes counted from 0.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import DataError, FileError

from .. import reading
from .splits import Bytes

_NUMBERS = ("double", "single", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


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
    from scipy.io import loadmat, whosmat

    size(path)
    kinds = {name: (kind, shape) for name, shape, kind in _matlab(whosmat, path)}
    if missing := [name for name in ("X", "y") if name not in kinds]:
        raise DataError(f"{path} cannot be read as a MATLAB file with X and y (it has no {missing[0]}).")
    # What a compressed file grows to is judged by its header, before it is unpacked.
    kind, shape = kinds["X"]
    if kind != "uint8" or shape != (32, 32, 3, images):
        raise DataError(f"{path} has {kind} images of shape {shape} where uint8 (32, 32, 3, {images}) is expected.")
    kind, shape = kinds["y"]
    if kind not in _NUMBERS or shape not in ((images, 1), (1, images)):
        raise DataError(f"{path} has {kind} labels of shape {shape} where {images:,} numbers are expected.")
    content = _matlab(loadmat, path, variable_names=("X", "y"))
    pixels, labels = content["X"], content["y"].ravel()
    expect_labels(path, labels, range(1, classes + 1))
    return pixels.transpose(3, 2, 0, 1), (labels % classes).astype(np.uint8)


def _matlab(function: Any, path: Path, **how: Any) -> Any:
    try:
        return function(path, **how)
    except MemoryError:
        raise
    except Exception as error:  # scipy raises whatever its parser trips over
        raise DataError(f"{path} cannot be read as a MATLAB file with X and y ({error}).") from error


def size(path: Path) -> int:
    """How many bytes the regular file at `path` has."""
    try:
        return reading.expect_regular(path)
    except FileError as error:
        raise DataError(str(error)) from error


def raw(path: Path) -> Bytes:
    """The bytes of the regular file at `path`."""
    size(path)
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def expect_labels(path: Path, labels: NDArray[Any], allowed: range) -> None:
    """Refuse labels that name no class, saying which image has the first one."""
    wrong = np.flatnonzero(~np.isin(labels, np.arange(allowed.start, allowed.stop)))
    if len(wrong):
        raise DataError(
            f"{path} has the label {labels[wrong[0]]} at image {wrong[0]:,} "
            f"where {allowed.start} to {allowed.stop - 1} are possible."
        )
