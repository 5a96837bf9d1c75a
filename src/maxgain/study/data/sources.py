"""How data sets lie on disk: one class for each kind of release, read into a `Dataset` and fetched where possible."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from maxgain.errors import DataError

from .. import _files
from . import formats
from .splits import Bytes, Dataset, Split, cut, expect_trained, shared_images, stratified_order

SEED = 0
"""Of the draws that split data sets which come without a split; another seed would be another data set."""
PART_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What people call the folders of a split."""
Listing = list[tuple[Path, int]]
"""Image files and their labels."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set on disk: where it lies, and how it is read and fetched."""

    any_size: ClassVar[bool] = False

    name: str
    what: str
    size: str
    remedy: str
    """What to do where it is missing."""
    folders: tuple[str, ...] = ()
    """What its folder may be called."""
    folds: int = 1
    published: str = ""
    """Where it was published."""

    @property
    def required(self) -> tuple[str, ...]:
        """The files it needs."""
        return ()

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """The data set, or one fold of it, from its folder under `root`."""
        raise NotImplementedError

    def fetch(self, root: Path, progress: bool) -> Path:
        """Download what is missing, and return its folder."""
        raise DataError(f"{self.name} cannot be fetched: {self.remedy}.")

    def find(self, root: Path) -> Path | None:
        """Its folder: `root` itself where that has its files, else one of its names under `root`."""
        if any((root / file).is_file() for file in self.required):
            return root
        return next((root / name for name in self.folders if (root / name).is_dir()), None)

    def locate(self, root: Path) -> Path:
        """Its folder, which must be there."""
        if found := self.find(root):
            return found
        raise DataError(
            f"{self.name} is not in {root} (no folder {self.folders[0]}): {self.remedy}, or set MAXGAIN_DATA.",
            field="data",
        )

    def origin(self, where: Path) -> str:
        """Where the files are from: the first line of a file SOURCE beside them, else where they were published."""
        note = where / "SOURCE"
        return note.read_text(encoding="utf-8").partition("\n")[0].strip() if note.is_file() else self.published

    def is_there(self, root: Path) -> bool:
        """Whether all its files are under `root`."""
        where = self.find(root)
        return where is not None and all((where / file).is_file() for file in self.required)


@dataclass(frozen=True, kw_only=True)
class Digits(Source):
    """The digits that scikit-learn carries: 1,797 scans of 8×8 pixels, values 0 to 16 scaled to 0 to 255.

    A stratified order of all images is cut into folds; a fold, or the whole set, is cut 60 : 20 : 20.
    """

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read and cut the scans; `root` is not used."""
        package = find_spec("sklearn")  # importing it would take longer than a short run
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        source, sums = f"scikit-learn {version('scikit-learn')}", {path.name: sha256(path)}
        scans = np.loadtxt(path, delimiter=",")
        images = np.rint(scans[:, :64] * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
        labels = scans[:, 64].astype(np.int64)
        order = stratified_order(labels, SEED)
        chosen = order if fold is None else np.array_split(order, self.folds)[fold]
        train, validation, test = (Split.of([(images[part], labels[part])]) for part in cut(chosen, 0.6, 0.8))
        names = tuple("0123456789")
        return Dataset(self.name, train, validation, test, names, fold, self.folds, source=source, sha256=sums)

    def is_there(self, root: Path) -> bool:
        """Always: scikit-learn has them."""
        return True


@dataclass(frozen=True)
class Download:
    """One published file: a data file itself, or a .tar.gz archive of several."""

    url: str
    sha256: str
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The published file's own name."""
        return PurePosixPath(self.url).name


@dataclass(frozen=True, kw_only=True)
class Released(Source):
    """Files with a published split into training and test images; validation is a stretch of the former."""

    read: Callable[[Path, int, int], tuple[Bytes, Bytes]]
    """Reads a file, from its path and the numbers of images and classes."""
    train_files: dict[str, int]
    """And how many images each holds."""
    test_files: dict[str, int]
    optional_files: dict[str, int] = field(default_factory=dict)
    """More training images, for those who have them."""
    train: slice
    validation: slice
    classes: tuple[str, ...]
    downloads: tuple[Download, ...]

    @property
    def required(self) -> tuple[str, ...]:
        """All files but the optional ones."""
        return (*self.train_files, *self.test_files)

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read all files that are there; `note` names what differs from the published set."""
        where = self.locate(root)
        optional = [file for file in self.optional_files if (where / file).exists()]
        whole = Split.of(self._read(where / file) for file in (*self.train_files, *optional))
        test = Split.of(self._read(where / file) for file in self.test_files)
        train, validation = whole[self.train], whole[self.validation]
        sums = {file: sha256(where / file) for file in (*self.required, *optional)}
        notes = []
        if absent := {file: count for file, count in self.optional_files.items() if file not in optional}:
            complete = len(train) + sum(absent.values())
            notes.append(
                f"{self.name} without {', '.join(absent)}: {len(train):,} training images instead of {complete:,}"
            )
        if other := [file for file, known in self._published().items() if sums.get(file, known) != known]:
            notes.append(f"not the published {', '.join(other)}, by SHA-256")
        return Dataset(
            self.name, train, validation, test, self.classes, fold,
            note="; ".join(notes), source=self.origin(where), sha256=sums,
        )  # fmt: skip

    def fetch(self, root: Path, progress: bool) -> Path:
        """Download what is missing or damaged; what is whole is left alone."""
        where = self.find(root) or root / self.folders[0]
        for download in self.downloads:
            if not all(self._is_whole(where / file) for file in download.files):
                fetch(download, where, progress)
        return where

    def _published(self) -> dict[str, str]:
        """SHA-256 of published files; an archive's says nothing of a file in it."""
        return {item.name: item.sha256 for item in self.downloads if item.name in item.files}

    def _is_whole(self, path: Path) -> bool:
        known = self._published().get(path.name)
        try:
            self._read(path)
        except DataError:
            return False
        return known is None or sha256(path) == known

    def _read(self, path: Path) -> tuple[Bytes, Bytes]:
        images = (self.train_files | self.test_files | self.optional_files)[path.name]
        try:
            return self.read(path, images, len(self.classes))
        except DataError as error:
            raise DataError(f"{str(error).removesuffix('.')}: {self.remedy}.", field="data") from error


@dataclass(frozen=True, kw_only=True)
class Folds(Source):
    """SINS-10's layout: X.bin with colour images of 96×96, plane by plane, and y.bin with a byte for each label.

    The images are consecutive folds of one size, each cut 8 : 1 : 1 in order. A smaller file of the same layout serves
    as well; `note` says so.
    """

    shape: ClassVar[tuple[int, int, int]] = (3, 96, 96)
    labels: ClassVar[int] = 10

    fold_size: int
    """As published."""

    @property
    def required(self) -> tuple[str, ...]:
        """Images and labels."""
        return ("X.bin", "y.bin")

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read one fold, and nothing else."""
        where = self.locate(root)
        if fold is None:
            raise DataError(f"{self.name} is used one fold at a time: choose fold 0 to {self.folds - 1}.", field="fold")
        images, labels = self._open(where)
        size = len(labels) // self.folds
        chosen = slice(fold * size, (fold + 1) * size)
        whole = Split.of([(images[chosen], labels[chosen])])
        test = size * 9 // 10
        validation = test - test // 9
        parts = whole[:validation], whole[validation:test], whole[test:]
        note = ""
        if size != self.fold_size:
            note = f"{where.name} is not {self.name} itself: folds of {size:,} images instead of {self.fold_size:,}"
        names, sums = self._class_names(where), {file: sha256(where / file) for file in self.required}
        return Dataset(self.name, *parts, names, fold, self.folds, note, self.origin(where), sums)

    def _open(self, where: Path) -> tuple[Bytes, Bytes]:
        """All images, mapped and not read, and all labels."""
        path, labels = where / "X.bin", formats.raw(where / "y.bin")
        size, count = path.stat().st_size, len(labels)
        if size != count * int(np.prod(self.shape)):
            raise DataError(
                f"{path} has {size:,} bytes, expected {count * int(np.prod(self.shape)):,} for {count:,} labels."
            )
        if count % self.folds or count < 10 * self.folds:
            raise DataError(f"{path} has {count:,} images, not {self.folds} equal folds of 10 or more.")
        formats.expect_labels(where / "y.bin", labels, range(self.labels))
        return np.memmap(path, np.uint8, "r", shape=(count, *self.shape)), labels

    def _class_names(self, where: Path) -> tuple[str, ...]:
        """The lines of classes.txt; numbers without that file, which is not part of the release."""
        path = where / "classes.txt"
        names = path.read_text(encoding="utf-8").splitlines() if path.exists() else map(str, range(self.labels))
        return tuple(names)


@dataclass(frozen=True, kw_only=True)
class Folder(Source):
    """Image files of any size in one folder per class: ROOT/CLASS/*.jpg.

    Where the root has folders train and test with the classes in each, they are the split; validation may be a third,
    else the last tenth of a stratified order of the training images is held out. Otherwise all images are cut
    80 : 10 : 10.
    """

    any_size: ClassVar[bool] = True
    default_side: ClassVar[int] = 96

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read the central square of every image, resized to `side`; `note` names files that are no images."""
        where, side = self.locate(root), self.default_side if side is None else side
        if not 1 <= side <= 4096:
            raise DataError(f"image_size must be from 1 to 4096 pixels, not {side}.", field="image_size")
        classes, parts = self._list(where)
        train, validation, test = (
            Split.of(
                [(formats.read_pictures([path for path, _ in part], side), np.array([label for _, label in part]))]
            )
            for part in parts
        )
        expect_trained(train, validation, test, classes)
        others = [path.suffix.lower() or path.name for path in formats.find_files(where) if not _is_picture(path)]
        unread = f"files that were not read: {len(others):,} ({', '.join(sorted(set(others)))})" if others else ""
        notes = filter(None, [shared_images(train, validation, test), unread])
        return Dataset(
            self.name, train, validation, test, classes, fold, note="; ".join(notes), source="a folder of images"
        )

    def locate(self, root: Path) -> Path:
        """The root itself."""
        if not root.is_dir():
            raise DataError(f"{root} is not a folder: {self.remedy}.", field="data")
        return root

    def _list(self, where: Path) -> tuple[tuple[str, ...], tuple[Listing, Listing, Listing]]:
        """The names of the classes, and the files for training, validation and testing."""
        split: dict[str, Path] = {}
        for folder in _subfolders(where):  # a folder called train without folders in it is a class: of vehicles
            part = PART_NAMES.get(folder.name.lower())
            if part is not None and _subfolders(folder):
                if part in split:
                    raise DataError(f"{where} has both {split[part].name} and {folder.name}; remove one.", field="data")
                split[part] = folder
        if not split:
            classes = self._class_names(where)
            train, validation, test = _stratified(self._files(where, classes), 0.8, 0.9)
        elif "train" in split and "test" in split:
            classes = self._class_names(split["train"])
            train, test = (self._files(split[name], classes) for name in ("train", "test"))
            if held_out := split.get("validation"):
                validation = self._files(held_out, classes)
            else:
                train, validation = _stratified(train, 0.9)
        else:
            there = " and ".join(folder.name for folder in split.values())
            raise DataError(f"{where} has {there} but needs both train and test, or neither.", field="data")
        if not (train and validation and test):
            raise DataError(f"{where} has too few images for training, validation and test.", field="data")
        return classes, (train, validation, test)

    def _class_names(self, where: Path) -> tuple[str, ...]:
        names = tuple(folder.name for folder in _subfolders(where))
        if len(names) < 2:
            raise DataError(
                f"{where} needs a folder of images for each class, at least 2, but has {len(names)}.", field="data"
            )
        return names

    def _files(self, where: Path, classes: tuple[str, ...]) -> Listing:
        if unknown := {folder.name for folder in _subfolders(where)} - set(classes):
            raise DataError(
                f"{where} has a folder {min(unknown)}, which is no class of the training images.", field="data"
            )
        files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in formats.find_files(where / name)
            if _is_picture(path)
        ]
        labels = {label for _, label in files}
        if empty := [name for label, name in enumerate(classes) if label not in labels]:
            known = ", ".join(sorted(formats.SUFFIXES))
            raise DataError(f"{where / empty[0]} has no images ({known}): add some, or remove it.", field="data")
        return files


def _subfolders(where: Path) -> list[Path]:
    return sorted(path for path in where.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in formats.SUFFIXES


def _stratified(files: Listing, *fractions: float) -> list[Listing]:
    """The files cut at these fractions of a stratified order."""
    order = stratified_order(np.array([label for _, label in files]), SEED)
    return [[files[index] for index in part] for part in cut(order, *fractions)]


def fetch(download: Download, folder: Path, progress: bool) -> None:
    """Download a published file into `folder`, check its SHA-256, and unpack it where it is an archive."""
    import pooch

    pooch.get_logger().setLevel("ERROR")
    try:
        known = f"sha256:{download.sha256}"
        pooch.retrieve(download.url, known, fname=download.name, path=folder, progressbar=progress)
        if download.name not in download.files:
            unpack(folder / download.name, folder, download.files)
            (folder / download.name).unlink()
    except (OSError, ValueError, tarfile.TarError, EOFError) as error:  # requests raises OSError, pooch ValueError
        raise DataError(f"cannot download {download.url} into {folder}: {error}.") from error


def unpack(archive: Path, folder: Path, files: Iterable[str]) -> None:
    """Write the members FOLDER/file of `archive`, for each of `files` and for nothing else, into `folder`."""
    wanted = set(files)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)  # only ever compared: an archive cannot write outside of the folder
            if member.isfile() and len(path.parts) == 2 and path.name in wanted:
                source = tar.extractfile(member)
                assert source is not None, "a regular member has content"
                _files.write(folder / path.name, source.read())
                wanted.remove(path.name)
    if wanted:
        raise DataError(f"{archive} has no {', '.join(sorted(wanted))}.")


def sha256(path: Path) -> str:
    """The file's SHA-256; a file that did not change is not read twice."""
    try:
        about = path.stat()
        return _sha256(path, about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


@lru_cache(maxsize=64)
def _sha256(path: Path, *version: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
