"""Readers of published formats: a file in, uint8 images (N, C, H, W) and labels from 0 out.

No code runs from a data file: CIFAR is read from its binary release, not from its pickles.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import DataError

from .splits import Bytes

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Without this list Pillow gives a file to whichever decoder takes it, whatever it is called: EPS starts Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def cifar(path: Path, images: int, classes: int, label_bytes: int = 1) -> tuple[Bytes, Bytes]:
    """A file of CIFAR's binary release: `label_bytes` labels, of which the last counts, and 3×32×32 pixels."""
    record = label_bytes + 3 * 32 * 32
    content = raw(path)
    if len(content) != images * record:
        raise DataError(f"{path} has {len(content):,} bytes, expected {images * record:,}.")
    records = content.reshape(images, record)
    labels = records[:, label_bytes - 1]
    expect_labels(path, labels, range(classes))
    return records[:, label_bytes:].reshape(images, 3, 32, 32), labels


def svhn(path: Path, images: int, classes: int) -> tuple[Bytes, Bytes]:
    """A file of SVHN's cropped digits: a MATLAB file with X (32, 32, 3, N) and labels y from 1 to 10, 10 being 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=("X", "y"))
        pixels, labels = content["X"], content["y"].ravel()
    except Exception as error:  # scipy raises whatever its parser trips over
        raise DataError(f"cannot read X and y from {path} as a MATLAB file: {error}.") from error
    expected = (32, 32, 3, images)
    if pixels.dtype != np.uint8 or pixels.shape != expected or labels.shape != (images,):
        found = f"{pixels.dtype} {pixels.shape} and {len(labels)} labels"
        raise DataError(f"{path} has images of {found}, expected uint8 {expected}.")
    expect_labels(path, labels, range(1, classes + 1))
    return pixels.transpose(3, 2, 0, 1), (labels % classes).astype(np.uint8)


def raw(path: Path) -> Bytes:
    """The bytes of a file."""
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


def expect_labels(path: Path, labels: NDArray[Any], allowed: range) -> None:
    """Refuse labels that name no class."""
    wrong = np.flatnonzero(~np.isin(labels, np.arange(allowed.start, allowed.stop)))
    if len(wrong):
        raise DataError(
            f"{path} has label {labels[wrong[0]]} at image {wrong[0]:,}, not {allowed.start} to {allowed.stop - 1}."
        )


def find_files(folder: Path) -> list[Path]:
    """All files in `folder` and below it but hidden ones, in order of path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def read_pictures(paths: Sequence[Path], side: int) -> Bytes:
    """All pictures as (N, 3, side, side), decoded on all cores."""
    images = np.empty((len(paths), 3, side, side), np.uint8)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for index, image in enumerate(pool.map(lambda path: read_picture(path, side), paths)):
            images[index] = image
    return images


def read_picture(path: Path, side: int) -> Bytes:
    """One picture as (3, side, side): its central square as a viewer shows it, upright and on white, resized."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=FORMATS) as file:
            image = ImageOps.exif_transpose(to_bytes(file.convert("RGBA") if file.mode == "P" else file))
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
    except Exception as error:  # the decoders raise many kinds
        raise DataError(f"cannot read {path} as an image ({error}); repair or remove it.") from error
    return np.asarray(square).transpose(2, 0, 1)


def to_bytes(image: Image.Image) -> Image.Image:
    """The picture with 8 bits per channel.

    Pillow itself clips 16-bit pixels at 255, so that nearly all of them become white.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no known white level; save it with 8 or 16 bits")
    return image.convert({"1": "L", "P": "RGB", "PA": "RGBA"}.get(image.mode, image.mode))
