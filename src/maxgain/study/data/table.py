"""The data sets of the study, one row each in `DATASETS`, all loaded into the same three-part form.

Every data set has a training, a validation and a test part that share no image: what hyper-parameters are chosen on
is never called test. No code runs from a data file: CIFAR comes from its binary release and not from its pickles.
"""

import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from maxgain.errors import DataError

from ..wording import Named, clause
from . import formats as readers
from .download import Download
from .layouts import SEED, Description, Folder, Folds, Released, Source
from .splits import Dataset, Split, cross_validated, cut, expect_fold, stratified_order

__all__ = ["DATASETS", "Dataset", "Description", "Split", "check", "data_root", "describe", "fetch", "load"]


def load(
    name: str,
    root: Path | None = None,
    fold: int | None = None,
    size: int | None = None,
    cross_validation: int | None = None,
) -> Dataset:
    """The data set `name` from the folder `root`, or from where `data_root` says.

    `fold` chooses one of the disjoint folds of a data set that has them, or one of `cross_validation` overlapping ones
    of a data set that has none. `size` is the side of the images where that can be chosen, which is in `folder` alone.
    """
    source = DATASETS[name]
    if cross_validation is not None:
        if source.folds > 1:
            raise DataError(f"{name} has {source.folds} disjoint folds, which are better than cross-validation.")
        expect_fold(fold, cross_validation)
        return cross_validated(load(name, root, size=size), fold, cross_validation)
    if fold is not None and not 0 <= fold < source.folds:
        has = f"folds 0 to {source.folds - 1}" if source.folds > 1 else "no folds"
        raise DataError(f"{name} has {has}, so there is no fold {fold}.")
    if size is not None and not source.any_size:
        raise DataError(f"{name} has images of one size, so {size} cannot be chosen.")
    return source.load(data_root(root), fold, size)


def describe(root: Path | None = None) -> list[Description]:
    """What there is to train on, and whether it is there. Files are looked for and not opened: see `check`."""
    return [source.describe(data_root(root)) for source in DATASETS.values()]


def check(name: str, root: Path | None = None) -> list[str]:
    """What is wrong with the files of `name`, a sentence each: missing, short, or with labels that cannot be."""
    source = DATASETS[name]
    try:
        return source.problems(source.locate(data_root(root)))
    except DataError as error:
        return [str(error)]


def fetch(name: str, root: Path | None = None, progress: bool = True) -> Path:
    """Download what is missing or damaged of `name` and return its folder; what is whole is left alone."""
    return DATASETS[name].fetch(data_root(root), progress)


def data_root(root: Path | None = None) -> Path:
    """Where data sets lie: `root`, else $MAXGAIN_DATA, else the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "maxgain"
    chosen = Path(root or os.environ.get("MAXGAIN_DATA") or cache)
    try:
        return chosen.expanduser()
    except RuntimeError as error:  # a user who does not exist, or has no home
        raise DataError(f"{chosen} names no folder: {clause(error)}.") from error


@dataclass(frozen=True, kw_only=True)
class Digits(Source):
    """The digits that scikit-learn carries: 1,797 scans of 8×8 pixels, their values 0 to 16 made 0 to 255.

    A seeded stratified order of all images is cut into consecutive folds. A fold, or the whole set where no fold is
    chosen, is cut once more: the first 60 % for training, the next 20 % for validation, the last 20 % for testing.
    """

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read and cut the scans, wherever `root` is."""
        package = find_spec("sklearn")  # to import it would take longer than a short run
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
        scans = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
        images = np.rint(scans[:, :64] * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
        labels = scans[:, 64].astype(np.int64)
        order = stratified_order(labels, SEED)
        chosen = order if fold is None else np.array_split(order, self.folds)[fold]
        parts = cut(chosen, 0.6, 0.8)
        train, validation, test = (
            Split(torch.from_numpy(images[part]), torch.from_numpy(labels[part])) for part in parts
        )
        return Dataset(self.name, train, validation, test, tuple("0123456789"), fold, self.folds)

    def problems(self, where: Path) -> list[str]:
        """None: there is no file."""
        return []

    def locate(self, root: Path) -> Path:
        """Anywhere: there is no folder."""
        return root

    def describe(self, root: Path) -> Description:
        """Its line in the list of data sets: always there."""
        return Description(self.name, self.what, self.size, "inside scikit-learn", True)


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

# The SHA-256 values are those that independent public catalogues agree on for the published files.
_ROWS: dict[str, Source] = {
    source.name: source
    for source in (
        Digits(
            name="digits",
            what="handwritten digits, scanned",
            size="1,797 grey images of 8×8, 10 classes",
            remedy="it comes with scikit-learn and is ready to use",
            folds=10,
        ),
        Released(
            name="cifar10",
            what="photographs of animals and vehicles",
            size="60,000 colour images of 32×32, 10 classes",
            remedy="run `maxgain data fetch cifar10`",
            folders=("cifar-10-batches-bin",),
            read=readers.cifar,
            train_files={f"data_batch_{batch}.bin": 10_000 for batch in range(1, 6)},
            test_files={"test_batch.bin": 10_000},
            train=slice(0, 40_000),
            validation=slice(40_000, 50_000),
            classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            downloads=(
                Download(
                    url=f"{CIFAR_SITE}/cifar-10-binary.tar.gz",
                    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                    files=(*(f"data_batch_{batch}.bin" for batch in range(1, 6)), "test_batch.bin"),
                ),
            ),
        ),
        Released(
            name="cifar100",
            what="photographs of animals, plants and things",
            size="60,000 colour images of 32×32, 100 classes",
            remedy="run `maxgain data fetch cifar100`",
            folders=("cifar-100-binary",),
            read=partial(readers.cifar, label_bytes=2),
            train_files={"train.bin": 50_000},
            test_files={"test.bin": 10_000},
            train=slice(0, 40_000),
            validation=slice(40_000, 50_000),
            classes=tuple(CIFAR100_CLASSES.split()),
            downloads=(
                Download(
                    url=f"{CIFAR_SITE}/cifar-100-binary.tar.gz",
                    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                    files=("train.bin", "test.bin"),
                ),
            ),
        ),
        Released(
            name="svhn",
            what="house numbers from street photographs",
            size="630,420 colour images of 32×32, 10 classes",
            remedy="run `maxgain data fetch svhn`",
            folders=("svhn",),
            read=readers.svhn,
            train_files={"train_32x32.mat": 73_257},
            optional_files={"extra_32x32.mat": 531_131},
            test_files={"test_32x32.mat": 26_032},
            train=slice(10_000, None),
            validation=slice(0, 10_000),
            classes=tuple("0123456789"),
            downloads=(
                Download(
                    url=f"{SVHN_SITE}/train_32x32.mat",
                    sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                    files=("train_32x32.mat",),
                ),
                Download(
                    url=f"{SVHN_SITE}/test_32x32.mat",
                    sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                    files=("test_32x32.mat",),
                ),
                Download(
                    url=f"{SVHN_SITE}/extra_32x32.mat",
                    sha256="a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
                    files=("extra_32x32.mat",),
                ),
            ),
        ),
        Folds(
            name="sins10",
            what="ImageNet photographs in ten independent folds",
            size="100,000 colour images of 96×96, 10 classes",
            remedy=f"put X.bin and y.bin from {SINS10_SITE} into a folder sins10, or make them from ImageNet with "
            "`maxgain data build-sins10`",
            folders=("sins10", "imagenette-folds"),
            folds=10,
            fold_size=10_000,
        ),
        Folder(
            name="folder",
            what="your own images, one folder for each class",
            size="as many as there are, resized and cropped",
            remedy="name a folder that has one folder of images for each class with --data",
        ),
    )
}
DATASETS = Named("data set", DataError, _ROWS)
