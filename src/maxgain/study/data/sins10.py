"""SINS-10 made from ImageNet, for those who have the one and cannot get the other.

The paper says how the images were prepared but not which synsets make up its ten classes, so the classes come from
the user, and so does the draw: the result is a data set of SINS-10's kind and layout, not the published files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxgain.errors import DataError, FileError

from .. import reading
from ..files import whole_file, whole_folder, write_bytes, write_text
from . import checksums
from . import images as pictures
from .splits import stratified_order

CLASSES = 10
FOLDS = 10
SIDE = 96


def build(
    imagenet: Path, mapping: Path, out: Path, per_class: int = 10_000, seed: int = 0, progress: bool = True
) -> Path:
    """Write X.bin, y.bin and classes.txt into the new folder `out`, all of them or none.

    `imagenet` has one folder of images per synset. `mapping` is a JSON file {class: [synset, ...]} with ten classes,
    labelled in its order. From each class `per_class` images are drawn, resized so that the smaller side is 96, and
    cut to the central 96×96. Every fold, and the training and test part of every fold, has all classes alike.
    Images are written as they are read: memory does not grow with their number.
    """
    from tqdm import tqdm

    if per_class < FOLDS or per_class % FOLDS:
        raise DataError(f"{per_class} images per class do not make {FOLDS} equal folds: choose a multiple of {FOLDS}.")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed must be a whole number from 0 to {2**32 - 1}, not {seed}.")
    classes = _read_mapping(mapping)
    rng = np.random.default_rng(seed)
    drawn = [_draw(imagenet, name, synsets, per_class, rng) for name, synsets in classes.items()]
    paths = [path for files in drawn for path in files]
    labels = np.repeat(np.arange(CLASSES, dtype=np.uint8), per_class)
    order = stratified_order(labels, seed)
    with whole_folder(out) as folder:
        with whole_file(folder / "X.bin") as images:
            for image in tqdm(
                pictures.read_all([paths[index] for index in order], SIDE),
                total=len(order),
                unit="image",
                disable=not progress,
            ):
                images.write(image.tobytes())
        write_bytes(folder / "y.bin", labels[order].tobytes())
        write_text(folder / "classes.txt", "".join(f"{name}\n" for name in classes))
        checksums.record(folder, ("X.bin", "y.bin", "classes.txt"))
    return out


def _read_mapping(path: Path) -> dict[str, list[str]]:
    """The classes and their synsets, or a sentence on what is wrong with them."""
    try:
        mapping: Any = reading.read_json(path, object, limit=reading.MEBIBYTE)
    except FileError as error:
        raise DataError(str(error)) from error
    if not _is_mapping(mapping):
        raise DataError(f'{path} has to map names of classes to lists of synsets, as {{"dog": ["n02084071"], ...}}.')
    if len(mapping) != CLASSES:
        raise DataError(f"{path} has {len(mapping)} classes where {CLASSES} are needed.")
    synsets = [synset for members in mapping.values() for synset in members]
    if repeated := next((synset for synset, count in Counter(synsets).items() if count > 1), None):
        raise DataError(f"{path} names the synset {repeated} more than once.")
    return dict(mapping)


def _is_mapping(content: object) -> bool:
    return isinstance(content, Mapping) and all(
        name.isprintable() and name.strip() and isinstance(synsets, list) and synsets and all(map(_is_synset, synsets))
        for name, synsets in content.items()
    )


def _is_synset(content: object) -> bool:
    """Whether `content` can be the name of a folder: nothing that leads elsewhere."""
    return isinstance(content, str) and content not in ("", ".", "..") and "/" not in content and content.isprintable()


def _draw(imagenet: Path, name: str, synsets: Sequence[str], count: int, rng: np.random.Generator) -> list[Path]:
    """`count` images of one class, drawn from all of its synsets together."""
    for synset in synsets:
        if not (imagenet / synset).is_dir():
            raise DataError(f"{imagenet} has no folder {synset}, which the class {name} asks for.")
    files = [path for synset in synsets for path in pictures.find(imagenet / synset)]
    if len(files) < count:
        raise DataError(f"the class {name} has {len(files):,} images where {count:,} are needed.")
    return [files[index] for index in rng.permutation(len(files))[:count]]
