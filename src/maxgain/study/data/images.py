"""Image files of any size, read as square arrays of one size.

A file may come from anywhere: only the decoders of the named formats ever see it, and how large its picture is, and how
large it would become, is judged by the header, before anything is decoded.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from maxgain.errors import DataError, FileError

from .. import memory, reading

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Without this list a file is given to whichever decoder takes it, whatever it is called: EPS starts Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

LARGEST_FILE = 512 * reading.MEBIBYTE
LARGEST_PICTURE = 64_000_000
"""Pixels of a picture as it lies on disk, and of the picture that it is resized to."""
LARGEST_SIDE = 4096
"""Of the squares that pictures are made to."""

# How many pictures are decoded ahead of whoever consumes them: enough to keep every core busy, and few in memory.
AHEAD = 256
MOST_THREADS = 16

T = TypeVar("T")


def find(folder: Path) -> list[Path]:
    """All image files in `folder` and below it but hidden ones, in an order that no file system decides."""
    found = []
    try:
        for where, folders, names in os.walk(folder, onerror=_give_up):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(where, name) for name in names if not name.startswith(".")]
        return sorted(path for path in found if path.suffix.lower() in SUFFIXES and path.is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot list {error.filename or folder}: {error.strerror or error}.") from error


def _give_up(error: OSError) -> None:
    """Where a folder cannot be listed: without its images a data set would be another one, and nobody would know."""
    raise error


def read(path: Path, side: int) -> NDArray[np.uint8]:
    """One picture as (3, side, side): its smaller side resized to `side`, then the central square of that."""
    from PIL import Image

    try:
        with reading.opened(path, LARGEST_FILE) as content, Image.open(content, formats=FORMATS) as file:
            width, height = _resized(path, file.size, side)
            image = levels(file).convert("RGB")
    except MemoryError:
        raise
    except (DataError, FileError) as error:
        raise DataError(str(error)) from error
    except Exception as error:  # the decoders raise many kinds, SyntaxError among them
        reason = _reason(error)
        raise DataError(f"{path} cannot be read as an image ({reason}); repair or remove it.") from error
    left, top = (width - side) // 2, (height - side) // 2
    square = image.resize((width, height), Image.Resampling.LANCZOS).crop((left, top, left + side, top + side))
    return np.asarray(square).transpose(2, 0, 1)


def levels(image: "Image.Image") -> "Image.Image":
    """The picture with a byte for each level of grey or colour; `ValueError` where nobody knows which number is white.

    By itself Pillow cuts off at 255 what has 16 bits per pixel, so that nearly all of it is white, and a picture with a
    palette is, as an array, made of the numbers of its colours.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers of 32 bits, of which none is known to be white: save it with 8 or 16")
    return image.convert({"1": "L", "P": "RGB", "PA": "RGBA"}.get(image.mode, image.mode))


def read_all(paths: Sequence[Path], side: int) -> Iterator[NDArray[np.uint8]]:
    """Every picture in turn, decoded on all cores and never more than a few hundred ahead of the consumer."""
    return _on_all_cores(lambda path: read(path, side), paths)


def problems(paths: Sequence[Path], side: int) -> Iterator[str]:
    """What is wrong with each picture that cannot be read and made to that size."""

    def problem(path: Path) -> str | None:
        try:
            read(path, side)
        except DataError as error:
            return str(error)
        return None

    return filter(None, _on_all_cores(problem, paths))


def expect_possible(count: int, side: int) -> None:
    """Refuse a size that no image can have, and more images of it than there is memory for."""
    if not 1 <= side <= LARGEST_SIDE:
        raise DataError(f"images cannot be {side} pixels wide: choose a size from 1 to {LARGEST_SIDE}.")
    needed, there = count * 3 * side**2, memory.physical()
    if needed > there:
        raise DataError(
            f"{count:,} images of {side}×{side} pixels take {needed / 1e9:,.1f} GB of memory, and this machine has "
            f"{there / 1e9:,.1f} GB: choose a smaller --image-size."
        )


def _resized(path: Path, size: tuple[int, int], side: int) -> tuple[int, int]:
    """What a picture of this size becomes when its smaller side is made `side`."""
    if min(size) < 1:
        raise DataError(f"{path} has no pixels; repair or remove it.")
    width, height = (max(side, round(length * side / min(size))) for length in size)
    for (across, down), becomes in ((size, ""), ((width, height), "would become ")):
        if across * down > LARGEST_PICTURE:
            raise DataError(
                f"{path} {becomes or 'is '}{across:,}×{down:,} pixels large, and {LARGEST_PICTURE // 10**6} million "
                "pixels are the most that are decoded; make it smaller or remove it."
            )
    return width, height


def _on_all_cores(function: Callable[[Path], T], paths: Sequence[Path]) -> Iterator[T]:
    with _silent_decoders(), ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        for start in range(0, len(paths), AHEAD):
            yield from pool.map(function, paths[start : start + AHEAD])


@contextmanager
def _silent_decoders() -> Iterator[None]:
    """What Pillow warns about is judged here by stricter limits, or is no matter of the user's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


def _reason(error: Any) -> str:
    """Pillow names the open file by its address, which says nothing to anybody."""
    return "it is none of " + ", ".join(FORMATS) if "cannot identify" in str(error) else str(error) or "damaged"
