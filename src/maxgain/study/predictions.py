"""What a run said of every test image: the class that it took it for, and its loss. It is small enough to be kept."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import FileError

from . import reading
from .files import write_bytes

KINDS = {"predicted": ("uint8", "uint16"), "label": ("uint8", "uint16"), "loss": ("float16",)}
"""The arrays of a file, one number per image, and the types that they may have."""
LARGEST = 256 * reading.MEBIBYTE

_UNREADABLE = (ValueError, KeyError, EOFError, OSError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""What numpy and zipfile answer a damaged file with."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """One number of each kind per image of the test part, in its order."""

    predicted: NDArray[np.unsignedinteger]
    label: NDArray[np.unsignedinteger]
    loss: NDArray[np.float16]
    """In nats, to three digits."""

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each image was classified right."""
        right: NDArray[np.bool_] = self.predicted == self.label
        return right

    @property
    def sha256(self) -> str:
        """Of what is predicted, however it is compressed."""
        digest = hashlib.sha256()
        for name in KINDS:
            array = getattr(self, name)
            digest.update(f"{name} {array.dtype.name} {len(array)} ".encode())
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    @classmethod
    def of(cls, predicted: NDArray[np.int64], labels: NDArray[np.int64], losses: NDArray[np.float32]) -> Predictions:
        """The same numbers in fewer bytes."""
        small = np.uint8 if max(predicted.max(initial=0), labels.max(initial=0)) < 256 else np.uint16
        with np.errstate(over="ignore"):  # a loss that has no room is infinite
            return cls(predicted.astype(small), labels.astype(small), losses.astype(np.float16))


def write(path: Path, predictions: Predictions) -> None:
    """Makes the file at `path` hold the predictions; the same ones make the same bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **{name: getattr(predictions, name) for name in KINDS})
    write_bytes(path, content.getvalue(), replace=True)


def read(path: Path, sha256: str) -> Predictions:
    """The predictions in a file that somebody else may have written; damage is named."""
    try:
        arrays = _arrays(reading.read_bytes(path, LARGEST))
        found = Predictions(**{name: arrays[name] for name in KINDS})
    except _UNREADABLE as error:
        raise FileError(f"{path} holds no predictions of a run ({error}): remove it.") from error
    if found.sha256 != sha256:
        raise FileError(f"{path} is damaged or of another run, as its checksum does not fit: remove it.")
    return found


def _arrays(content: bytes) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        if sum(entry.file_size for entry in packed.infolist()) > LARGEST:
            raise ValueError(f"unpacked it has more than {LARGEST:,} bytes")
        arrays = {
            name: np.lib.format.read_array(io.BytesIO(packed.read(f"{name}.npy")), allow_pickle=False) for name in KINDS
        }
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.name not in KINDS[name] or len(array) != len(arrays["label"]):
            raise ValueError(f"{name} is not one number per image")
    return arrays
