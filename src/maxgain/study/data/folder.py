"""A folder of images as a data set: ROOT/CLASS/*.jpg, or the same below ROOT/train and ROOT/test."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from maxgain.errors import DataError

from .splits import Bytes, Dataset, Split, checked, stratified

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Without this list Pillow gives a file to whichever decoder takes it, whatever it is called: EPS starts Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
PART_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What people call the folders of a split."""
DEFAULT_SIDE, LARGEST_SIDE = 96, 4096
Listing = list[tuple[Path, int]]
"""Image files and their labels."""


def read_folder(root: Path, side: int | None) -> Dataset:
    """The central square of every image, resized to `side`; `note` names files that are no images.

    Folders train and test with the classes in each are the split; validation may be a third, else the last tenth of a
    stratified order of the training images is held out. Without them all images are cut 80 : 10 : 10.
    """
    side = DEFAULT_SIDE if side is None else side
    if not 1 <= side <= LARGEST_SIDE:
        raise DataError(f"image_size must be from 1 to {LARGEST_SIDE} pixels, not {side}.", field="image_size")
    classes, listings = _list(root)
    parts: list[Split] = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for files in listings:
            paths, labels = zip(*files, strict=True)
            images = np.empty((len(paths), 3, side, side), np.uint8)
            for index, image in enumerate(pool.map(read_picture, paths, repeat(side))):
                images[index] = image
            parts.append(Split(torch.from_numpy(images), torch.tensor(labels)))
    others = [path.suffix.lower() or path.name for path in _files_below(root) if not _is_picture(path)]
    unread = f"files that were not read: {len(others):,} ({', '.join(sorted(set(others)))})" if others else ""
    train, validation, test = parts
    return checked(Dataset("folder", train, validation, test, classes, note=unread, source="a folder of images"))


def _list(root: Path) -> tuple[tuple[str, ...], tuple[Listing, Listing, Listing]]:
    """The names of the classes, and the files for training, validation and testing."""
    split: dict[str, Path] = {}
    for folder in _subfolders(root):  # a folder called train without folders in it is a class: of vehicles
        part = PART_NAMES.get(folder.name.lower())
        if part is not None and _subfolders(folder):
            if part in split:
                raise DataError(f"{root} has both {split[part].name} and {folder.name}; remove one.", field="data")
            split[part] = folder
    if split and not split.keys() >= {"train", "test"}:
        there = " and ".join(folder.name for folder in split.values())
        raise DataError(f"{root} has {there} but needs both train and test, or neither.", field="data")
    pool = split.get("train", root)
    classes = tuple(folder.name for folder in _subfolders(pool))
    if len(classes) < 2:
        raise DataError(
            f"{pool} needs a folder of images for each class, at least 2, but has {len(classes)}.", field="data"
        )
    listed = {part: _listing(folder, classes) for part, folder in {"train": pool, **split}.items()}
    if not split:
        train, validation, test = _stratified(listed["train"], 0.8, 0.9)
    elif "validation" in split:
        train, validation, test = listed["train"], listed["validation"], listed["test"]
    else:
        (train, validation), test = _stratified(listed["train"], 0.9), listed["test"]
    if not (train and validation and test):
        raise DataError(f"{root} has too few images for training, validation and test.", field="data")
    return classes, (train, validation, test)


def _listing(where: Path, classes: tuple[str, ...]) -> Listing:
    if unknown := {folder.name for folder in _subfolders(where)} - set(classes):
        raise DataError(f"{where} has a folder {min(unknown)}, which is no class of the training images.", field="data")
    files: Listing = []
    for label, name in enumerate(classes):
        pictures = [path for path in _files_below(where / name) if _is_picture(path)]
        if not pictures:
            known = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{where / name} has no images ({known}): add some, or remove it.", field="data")
        files += [(path, label) for path in pictures]
    return files


def _stratified(files: Listing, *fractions: float) -> list[Listing]:
    """The files cut at these fractions of a stratified order."""
    labels = np.array([label for _, label in files])
    return [[files[index] for index in part] for part in stratified(labels, *fractions)]


def _subfolders(where: Path) -> list[Path]:
    return sorted(path for path in where.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files_below(folder: Path) -> list[Path]:
    """All files in `folder` and below it but hidden ones, in order of path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


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
