"""The data sets of the study, one row each in `DATASETS`, all loaded into the same three-part form."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from maxgain.errors import DataError

from .._names import Table
from . import formats
from .sources import Digits, Download, Folder, Folds, Released, Source
from .splits import Dataset, cross_validate

CIFAR_SITE = "https://www.cs.toronto.edu/~kriz"
SVHN_SITE = "http://ufldl.stanford.edu/housenumbers"
SINS10_SITE = "https://www.cs.waikato.ac.nz/~ml/sins10/"

CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_CIFAR10_FILES = tuple(f"data_batch_{batch}.bin" for batch in range(1, 6))

# The SHA-256 values are those that independent public catalogues agree on for the published files.
_ROWS: tuple[Source, ...] = (
    Digits(
        name="digits",
        what="handwritten digits, scanned",
        size="1,797 grey images of 8×8, 10 classes",
        remedy="install scikit-learn, which contains it",
        folds=10,
    ),
    Released(
        name="cifar10",
        what="photographs of animals and vehicles",
        size="60,000 colour images of 32×32, 10 classes",
        remedy="run `maxgain data fetch cifar10`",
        folders=("cifar-10-batches-bin",),
        published=CIFAR_SITE,
        read=formats.cifar,
        train_files=dict.fromkeys(_CIFAR10_FILES, 10_000),
        test_files={"test_batch.bin": 10_000},
        train=slice(0, 40_000),
        validation=slice(40_000, 50_000),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        downloads=(
            Download(
                f"{CIFAR_SITE}/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                (*_CIFAR10_FILES, "test_batch.bin"),
            ),
        ),
    ),
    Released(
        name="cifar100",
        what="photographs of animals, plants and things",
        size="60,000 colour images of 32×32, 100 classes",
        remedy="run `maxgain data fetch cifar100`",
        folders=("cifar-100-binary",),
        published=CIFAR_SITE,
        read=partial(formats.cifar, label_bytes=2),
        train_files={"train.bin": 50_000},
        test_files={"test.bin": 10_000},
        train=slice(0, 40_000),
        validation=slice(40_000, 50_000),
        classes=tuple(CIFAR100_CLASSES.split()),
        downloads=(
            Download(
                f"{CIFAR_SITE}/cifar-100-binary.tar.gz",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                ("train.bin", "test.bin"),
            ),
        ),
    ),
    Released(
        name="svhn",
        what="house numbers from street photographs",
        size="630,420 colour images of 32×32, 10 classes",
        remedy="run `maxgain data fetch svhn`",
        folders=("svhn",),
        published=SVHN_SITE,
        read=formats.svhn,
        train_files={"train_32x32.mat": 73_257},
        optional_files={"extra_32x32.mat": 531_131},
        test_files={"test_32x32.mat": 26_032},
        train=slice(10_000, None),
        validation=slice(0, 10_000),
        classes=tuple("0123456789"),
        downloads=tuple(
            Download(f"{SVHN_SITE}/{name}_32x32.mat", sha256, (f"{name}_32x32.mat",))
            for name, sha256 in (
                ("train", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
                ("test", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
                ("extra", "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3"),
            )
        ),
    ),
    Folds(
        name="sins10",
        what="ImageNet photographs in ten independent folds",
        size="100,000 colour images of 96×96, 10 classes",
        remedy=f"put X.bin and y.bin from {SINS10_SITE} into a folder sins10",
        folders=("sins10", "imagenette-folds"),
        published=SINS10_SITE,
        folds=10,
        fold_size=10_000,
    ),
    Folder(
        name="folder",
        what="your own images, one folder for each class",
        size="as many as there are, resized and cropped",
        remedy="choose one that has a folder of images for each class",
    ),
)
DATASETS = Table("dataset", DataError, {source.name: source for source in _ROWS})


def load(
    name: str,
    root: str | Path | None = None,
    fold: int | None = None,
    size: int | None = None,
    cross_validation: int | None = None,
) -> Dataset:
    """The data set `name` from the folder `root`, or from where `data_root` says.

    `fold` chooses one of its disjoint folds, or one of `cross_validation` overlapping ones.
    `size` is the side of the images of a folder.
    """
    source = DATASETS[name]
    if cross_validation is not None:
        return cross_validate(load(name, root, size=size), fold, cross_validation)
    if fold is not None and not 0 <= fold < source.folds:
        has = f"folds 0 to {source.folds - 1}" if source.folds > 1 else "no folds"
        raise DataError(f"{name} has {has}, so there is no fold {fold}.", field="fold")
    if size is not None and not source.any_size:
        raise DataError(f"{name} has images of one size.", field="image_size")
    try:
        return source.load(data_root(root), fold, size)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or name}: {error.strerror or error}.", field="data") from error


def is_there(name: str, root: str | Path | None = None) -> bool:
    """Whether the files of `name` are there."""
    return DATASETS[name].is_there(data_root(root))


def check(name: str, root: str | Path | None = None) -> str:
    """What is wrong with the files of `name`; empty where nothing is."""
    try:
        load(name, root, 0 if DATASETS[name].folds > 1 else None)
    except DataError as error:
        return str(error)
    return ""


def fetch(name: str, root: str | Path | None = None, progress: bool = False) -> Path:
    """Download what is missing or damaged of `name`, and return its folder."""
    return DATASETS[name].fetch(data_root(root), progress)


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets lie: `root`, else $MAXGAIN_DATA, else the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "maxgain"
    return Path(root or os.environ.get("MAXGAIN_DATA") or cache).expanduser()
