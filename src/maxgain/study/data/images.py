"""Image files of any size, read as square arrays of one size."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

# How many pictures are decoded ahead of whoever consumes them: enough to keep every core busy, and few in memory.
AHEAD = 256


def find(folder: Path) -> list[Path]:
    """All image files in `folder` and below it but hidden ones, in an order that no file system decides."""
    try:
        found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror or error}.") from error
    return sorted(path for path in found if not any(p.startswith(".") for p in path.relative_to(folder).parts))


def read(path: Path, side: int) -> NDArray[np.uint8]:
    """One picture as (3, side, side): its smaller side resized to `side`, then the central square of that."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # the decoders raise many kinds, SyntaxError among them
        raise DataError(f"{path} cannot be read as an image ({error}); repair or remove it.") from error
    width, height = (max(side, round(length * side / min(image.size))) for length in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    square = image.resize((width, height), Image.Resampling.LANCZOS).crop((left, top, left + side, top + side))
    return np.asarray(square).transpose(2, 0, 1)


def read_all(paths: Sequence[Path], side: int) -> Iterator[NDArray[np.uint8]]:
    """Every picture in turn, decoded on all cores and never more than a few hundred ahead of the consumer."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), AHEAD):
            yield from pool.map(lambda path: read(path, side), paths[start : start + AHEAD])
