"""The data sets of the study, one row each in `DATASETS`: where they lie, how they are read and fetched.

No code runs from a data file: CIFAR is read from its binary release, not from its pickles.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxgain.errors import DataError

from .. import _files
from .._names import Table
from .folder import read_folder
from .splits import Bytes, Dataset, Split, cross_validate, stratified

CIFAR_SITE = "https://www.cs.toronto.edu/~kriz"
SVHN_SITE = "http://ufldl.stanford.edu/housenumbers"
SINS10_SITE = "https://www.cs.waikato.ac.nz/~ml/sins10/"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set on disk: where it lies, and how it is read."""

    name: str
    what: str
    size: str
    remedy: str
    """What to do where it is missing."""
    read: Callable[[Any, Path, int | None, int | None], Dataset]
    """Reads it, from this source, its folder, the number of a fold and the side of its images."""
    files: dict[str, int] = field(default_factory=dict)
    """The files it needs, and how many images each holds; where any will do, none."""
    folders: tuple[str, ...] = ("",)
    """What its folder may be called."""
    folds: int = 1
    classes: int = 10
    published: str = ""
    """Where it was published."""

    @property
    def any_size(self) -> bool:
        """Whether its images are resized."""
        return not self.files

    def find(self, root: Path) -> Path | None:
        """Its folder: `root` itself where that has its files, else one of its names under `root`."""
        if any((root / file).is_file() for file in self.files):
            return root
        return next((root / name for name in self.folders if (root / name).is_dir()), None)

    def dataset(self, where: Path, parts: Sequence[Split], fold: int | None, files: Iterable[str]) -> Dataset:
        """The parts with what is known of their files; a file SOURCE beside them says in its first line where from."""
        sha256, note = {}, where / "SOURCE"
        for file in files:
            with (where / file).open("rb") as content:
                sha256[file] = hashlib.file_digest(content, "sha256").hexdigest()
        source = note.read_text(encoding="utf-8").partition("\n")[0].strip() if note.is_file() else self.published
        (train, validation, test), names = parts, tuple(map(str, range(self.classes)))
        return Dataset(self.name, train, validation, test, names, fold, self.folds, source=source, sha256=sha256)


def read_digits(source: Source, where: Path, fold: int | None, side: int | None) -> Dataset:
    """The digits that scikit-learn carries: 1,797 scans of 8×8 pixels, values 0 to 16 scaled to 0 to 255.

    A stratified order of all images is cut into folds; a fold, or the whole set, is cut 60 : 20 : 20.
    """
    scans = np.loadtxt(where / "digits.csv.gz", delimiter=",")
    images = np.rint(scans[:, :64] * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = scans[:, 64].astype(np.int64)
    (order,) = stratified(labels)
    chosen = order if fold is None else np.array_split(order, source.folds)[fold]
    cuts = np.split(chosen, [round(0.6 * len(chosen)), round(0.8 * len(chosen))])
    parts = [Split(torch.from_numpy(images[cut]), torch.from_numpy(labels[cut])) for cut in cuts]
    made = source.dataset(where, parts, fold, source.files)
    return replace(made, source=f"scikit-learn {version('scikit-learn')}")


def read_folds(source: Source, where: Path, fold: int | None, side: int | None) -> Dataset:
    """One fold of SINS-10's layout: X.bin with colour images of 96×96, plane by plane, and y.bin with a byte per label.

    The images are consecutive folds of one size, each cut 8 : 1 : 1 in order. A smaller file of the same layout serves
    as well; `note` says so.
    """
    if fold is None:
        raise DataError(f"{source.name} is used one fold at a time: choose fold 0 to {source.folds - 1}.", field="fold")
    path, labels = where / "X.bin", np.fromfile(where / "y.bin", np.uint8)
    found, count = path.stat().st_size, len(labels)
    expected = count * 3 * 96 * 96
    if found != expected:
        raise ValueError(f"{path} has {found:,} bytes, expected {expected:,} for {count:,} labels")
    if count % source.folds or count < 10 * source.folds:
        raise ValueError(f"{path} has {count:,} images, not {source.folds} equal folds of 10 or more")
    expect_labels(where / "y.bin", labels, range(source.classes))
    images = np.memmap(path, np.uint8, "r", shape=(count, 3, 96, 96))
    size, published = count // source.folds, source.files[path.name] // source.folds
    chosen = slice(fold * size, (fold + 1) * size)
    whole = Split.of([(images[chosen], labels[chosen])])
    test = size * 9 // 10
    validation = test - test // 9
    made = source.dataset(where, (whole[:validation], whole[validation:test], whole[test:]), fold, source.files)
    note = f"{where.name} is not {source.name} itself: folds of {size:,} images instead of {published:,}"
    return made if size == published else replace(made, note=note)


def read_released(source: Released, where: Path, fold: int | None, side: int | None) -> Dataset:
    """All files that are there; `note` names what differs from the published set."""
    counts = source.files | {file: count for file, count in source.optional.items() if (where / file).exists()}
    contents = {file: source.read_file(where / file, count, source.classes) for file, count in counts.items()}
    test = Split.of([contents.pop(source.test)])
    whole, notes = Split.of(contents.values()), []
    train = whole[source.train]
    made = source.dataset(where, (train, whole[source.validation], test), fold, counts)
    if absent := source.optional.keys() - counts.keys():
        complete = len(train) + sum(source.optional[file] for file in absent)
        without = f"{source.name} without {', '.join(sorted(absent))}"
        notes.append(f"{without}: {len(train):,} training images instead of {complete:,}")
    known = {PurePosixPath(url).name: sha256 for url, sha256 in source.downloads.items()}  # or of an archive
    if altered := [file for file, found in made.sha256.items() if known.get(file, found) != found]:
        notes.append(f"not the published {', '.join(altered)}, by SHA-256")
    return replace(made, note="; ".join(notes))


@dataclass(frozen=True, kw_only=True)
class Released(Source):
    """Files with a published split into training and test images; validation is a stretch of the former."""

    read: Callable[[Any, Path, int | None, int | None], Dataset] = read_released
    read_file: Callable[[Path, int, int], tuple[Bytes, Bytes]]
    """Reads a file, from its path and the numbers of images and classes."""
    optional: dict[str, int] = field(default_factory=dict)
    """More training images, for those who have them."""
    test: str
    """The file that is tested on; all others are trained on."""
    train: slice
    validation: slice
    downloads: dict[str, str]
    """SHA-256 by address: of a data file, or of a .tar.gz archive of all files."""


# --- Published formats: a file in, uint8 images (N, C, H, W) and labels from 0 out; ValueError where it is damaged


def cifar(path: Path, images: int, classes: int, label_bytes: int = 1) -> tuple[Bytes, Bytes]:
    """A file of CIFAR's binary release: `label_bytes` labels, of which the last counts, and 3×32×32 pixels."""
    record = label_bytes + 3 * 32 * 32
    content = np.fromfile(path, np.uint8)
    if len(content) != images * record:
        raise ValueError(f"{path} has {len(content):,} bytes, expected {images * record:,}")
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
        raise ValueError(f"cannot read X and y from {path} as a MATLAB file: {error}") from error
    expected = (32, 32, 3, images)
    if pixels.dtype != np.uint8 or pixels.shape != expected or labels.shape != (images,):
        found = f"{pixels.dtype} {pixels.shape} and {len(labels)} labels"
        raise ValueError(f"{path} has images of {found}, expected uint8 {expected}")
    expect_labels(path, labels, range(1, classes + 1))
    return pixels.transpose(3, 2, 0, 1), (labels % classes).astype(np.uint8)


def expect_labels(path: Path, labels: NDArray[Any], allowed: range) -> None:
    """Refuse labels that name no class."""
    wrong = np.flatnonzero(~np.isin(labels, allowed))
    if len(wrong):
        found, last = labels[wrong[0]], allowed.stop - 1
        raise ValueError(f"{path} has label {found} at image {wrong[0]:,}, not {allowed.start} to {last}")


# --- The rows


_SKLEARN = find_spec("sklearn")  # not imported: that would take longer than a short run
_IN_SKLEARN = (str(Path(_SKLEARN.origin).with_name("datasets") / "data"),) if _SKLEARN and _SKLEARN.origin else ()

# The SHA-256 values are those that independent public catalogues agree on for the published files.
_ROWS: tuple[Source, ...] = (
    Source(
        name="digits",
        read=read_digits,
        what="handwritten digits, scanned",
        size="1,797 grey images of 8×8, 10 classes",
        remedy="install scikit-learn, which contains it",
        files={"digits.csv.gz": 1797},
        folders=_IN_SKLEARN,
        folds=10,
    ),
    Released(
        name="cifar10",
        what="photographs of animals and vehicles",
        size="60,000 colour images of 32×32, 10 classes",
        remedy="run `maxgain data fetch cifar10`",
        folders=("cifar-10-batches-bin",),
        published=CIFAR_SITE,
        read_file=cifar,
        files=dict.fromkeys([*(f"data_batch_{batch}.bin" for batch in range(1, 6)), "test_batch.bin"], 10_000),
        test="test_batch.bin",
        train=slice(0, 40_000),
        validation=slice(40_000, 50_000),
        downloads={
            f"{CIFAR_SITE}/cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
        },
    ),
    Released(
        name="cifar100",
        what="photographs of animals, plants and things",
        size="60,000 colour images of 32×32, 100 classes",
        remedy="run `maxgain data fetch cifar100`",
        folders=("cifar-100-binary",),
        published=CIFAR_SITE,
        read_file=partial(cifar, label_bytes=2),
        files={"train.bin": 50_000, "test.bin": 10_000},
        test="test.bin",
        train=slice(0, 40_000),
        validation=slice(40_000, 50_000),
        classes=100,
        downloads={
            f"{CIFAR_SITE}/cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
        },
    ),
    Released(
        name="svhn",
        what="house numbers from street photographs",
        size="630,420 colour images of 32×32, 10 classes",
        remedy="run `maxgain data fetch svhn`",
        folders=("svhn",),
        published=SVHN_SITE,
        read_file=svhn,
        files={"train_32x32.mat": 73_257, "test_32x32.mat": 26_032},
        optional={"extra_32x32.mat": 531_131},
        test="test_32x32.mat",
        train=slice(10_000, None),
        validation=slice(0, 10_000),
        downloads={
            f"{SVHN_SITE}/train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            f"{SVHN_SITE}/test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            f"{SVHN_SITE}/extra_32x32.mat": "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
        },
    ),
    Source(
        name="sins10",
        read=read_folds,
        what="ImageNet photographs in ten independent folds",
        size="100,000 colour images of 96×96, 10 classes",
        remedy=f"put X.bin and y.bin from {SINS10_SITE} into a folder sins10",
        files={"X.bin": 100_000, "y.bin": 100_000},
        folders=("sins10", "imagenette-folds"),
        published=SINS10_SITE,
        folds=10,
    ),
    Source(
        name="folder",
        read=lambda source, where, fold, side: replace(read_folder(where, side), fold=fold),
        what="your own images, one folder for each class",
        size="as many as there are, resized and cropped",
        remedy="choose one with a folder of images for each class",
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
    source, root = DATASETS[name], data_root(root)
    if cross_validation is not None:
        return cross_validate(load(name, root, size=size), fold, cross_validation)
    if fold is not None and not 0 <= fold < source.folds:
        has = f"folds 0 to {source.folds - 1}" if source.folds > 1 else "no folds"
        raise DataError(f"{name} has {has}, so there is no fold {fold}.", field="fold")
    if size is not None and not source.any_size:
        raise DataError(f"{name} has images of one size.", field="image_size")
    where = source.find(root)
    if where is None:
        if not any(source.folders):
            raise DataError(f"there is no folder {root}: {source.remedy}.", field="data")
        missing = f"no folder {' or '.join(source.folders)}"
        raise DataError(f"{name} is not in {root} ({missing}): {source.remedy}, or set MAXGAIN_DATA.", field="data")
    try:
        return source.read(source, where, fold, size)
    except (OSError, ValueError) as error:
        text = str(error)
        if isinstance(error, OSError):
            text = f"cannot read {error.filename or name}: {error.strerror or error}"
        raise DataError(f"{text}: {source.remedy}.", field="data") from error


def is_there(name: str, root: str | Path | None = None) -> bool:
    """Whether the files of `name` are there."""
    where = DATASETS[name].find(data_root(root))
    return where is not None and all((where / file).is_file() for file in DATASETS[name].files)


def check(name: str, root: str | Path | None = None) -> str:
    """What is wrong with the files of `name`; empty where nothing is."""
    try:
        load(name, root, 0 if DATASETS[name].folds > 1 else None)
    except DataError as error:
        return str(error)
    return ""


def fetch(name: str, root: str | Path | None = None, progress: bool = False) -> Path:
    """Download what is missing or damaged of `name`, check its SHA-256, and return its folder."""
    import pooch

    source, root = DATASETS[name], data_root(root)
    if not isinstance(source, Released):
        raise DataError(f"{name} cannot be fetched: {source.remedy}.")
    pooch.get_logger().setLevel("ERROR")
    where = source.find(root) or root / source.folders[0]
    for url, sha256 in source.downloads.items():
        path, is_archive = where / PurePosixPath(url).name, url.endswith(".tar.gz")
        if is_archive and not check(name, root):  # pooch itself leaves other files alone that are whole
            continue
        try:
            pooch.retrieve(url, f"sha256:{sha256}", fname=path.name, path=where, progressbar=progress)
            if is_archive:
                unpack(path, where, source.files)
                path.unlink()
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:  # requests raises OSError, pooch ValueError
            raise DataError(f"cannot download {url} into {where}: {error}.") from error
    return where


def unpack(archive: Path, folder: Path, files: Iterable[str]) -> None:
    """Write the members of `archive` that are called so, and nothing else, into `folder`."""
    with tarfile.open(archive) as tar:
        members = {PurePosixPath(member.name).name: member for member in tar if member.isfile()}
        for file in files:
            if file not in members or (content := tar.extractfile(members[file])) is None:
                raise DataError(f"{archive} has no {file}.")
            _files.write(folder / file, content.read())


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets lie: `root`, else $MAXGAIN_DATA, else the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "maxgain"
    return Path(root or os.environ.get("MAXGAIN_DATA") or cache).expanduser()
