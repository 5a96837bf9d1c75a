"""How data sets lie on disk: one class for each kind of release, told its names and sizes by a row of the table.

A kind finds its folder, reads it into a `Dataset`, says what is wrong with it, and fetches it where that is possible.
Whatever is missing, short or impossible raises `DataError` with the place, what was found and what was expected.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from maxgain.errors import DataError, FileError

from .. import reading
from ..files import folders_in, is_text
from ..wording import clause, counted
from . import checksums, download
from . import formats as readers
from . import images as pictures
from .download import Download
from .splits import Bytes, Dataset, Split, cut, shared_images, stratified_order

# The draw that splits data sets which come without a split. Another seed would be another data set.
SEED = 0

PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What people call the folders of a split. Taken for classes they would be told apart, and nothing else."""
Listing = list[tuple[Path, int]]  # image files and their labels


@dataclass(frozen=True)
class Description:
    """One line of the list of data sets; `present` is None where there is nothing to look for."""

    name: str
    what: str
    size: str
    where: str
    present: bool | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """What every data set says of itself, and what follows from its having a folder with files in it."""

    any_size: ClassVar[bool] = False  # whether the side of the images can be chosen

    name: str
    what: str
    size: str
    remedy: str  # what to do when it is not there
    folders: tuple[str, ...] = ()  # what its folder may be called, the usual name first
    folds: int = 1

    @property
    def required(self) -> tuple[str, ...]:
        """The files it cannot do without."""
        return ()

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read the data set, or one fold of it, from its own folder under `root`."""
        raise NotImplementedError

    def problems(self, where: Path) -> list[str]:
        """What is wrong in its own folder, a sentence for each thing."""
        raise NotImplementedError

    def fetch(self, root: Path, progress: bool) -> Path:
        """Download what is missing or damaged, and return its own folder."""
        raise DataError(f"{self.name} cannot be fetched: {self.remedy}.")

    def find(self, root: Path) -> Path | None:
        """Its own folder: `root` itself where that has its files, else one of its names under `root`."""
        if any((root / file).is_file() for file in self.required):
            return root
        return next((root / name for name in self.folders if (root / name).is_dir()), None)

    def locate(self, root: Path) -> Path:
        """Its own folder, which must be there."""
        if found := self.find(root):
            return found
        raise DataError(
            f"{self.name} is not in {root}, which has no folder {self.folders[0]}: {self.remedy} "
            "(with the same --data), or name the folder that has it with --data or MAXGAIN_DATA."
        )

    def describe(self, root: Path) -> Description:
        """Its line in the list of data sets; files are looked for and not opened."""
        where = self.find(root) or root / self.folders[0]
        present = all((where / file).is_file() for file in self.required)
        return Description(self.name, self.what, self.size, str(where), present)


@dataclass(frozen=True, kw_only=True)
class Released(Source):
    """Files with a published split into training and test images; validation is a stretch of the former."""

    read: Callable[[Path, int, int], tuple[Bytes, Bytes]]  # path, images, classes → images and labels
    train_files: dict[str, int]  # and how many images each holds
    test_files: dict[str, int]
    optional_files: dict[str, int] = field(default_factory=dict)  # more to train on, for those who have it
    train: slice  # of all images in the training files, one file after the other
    validation: slice
    classes: tuple[str, ...]
    downloads: tuple[Download, ...]

    @property
    def required(self) -> tuple[str, ...]:
        """All files but the optional ones."""
        return (*self.train_files, *self.test_files)

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read all files that are there; `note` names the optional ones that are not."""
        where = self.locate(root)
        optional = [file for file in self.optional_files if (where / file).exists()]
        whole = Split.of(self._read(where / file) for file in (*self.train_files, *optional))
        test = Split.of(self._read(where / file) for file in self.test_files)
        train, validation = whole[self.train], whole[self.validation]
        notes = (self._absence(optional, len(train)), self._strangers(where, (*self.required, *optional)))
        return Dataset(self.name, train, validation, test, self.classes, fold, note="; ".join(filter(None, notes)))

    def problems(self, where: Path) -> list[str]:
        """What is wrong with each file that is required or there, its being another than the published one included."""
        optional = [file for file in self.optional_files if (where / file).exists()]
        return self._problems(where, (*self.required, *optional))

    def fetch(self, root: Path, progress: bool) -> Path:
        """Download what has something wrong with it; what is whole is left alone."""
        where = self.find(root) or root / self.folders[0]
        for wanted in self.downloads:
            if self._problems(where, wanted.files):
                self._refuse_strangers(where, wanted.files)
                download.fetch(wanted, where, progress)
                if problems := self._problems(where, wanted.files):
                    raise DataError(f"{wanted.url} was fetched but is not what it should be: {problems[0]}")
        return where

    def _refuse_strangers(self, where: Path, files: Iterable[str]) -> None:
        """In a folder of its own name a data set may replace what is damaged; elsewhere it may be somebody else's."""
        there = [file for file in files if (where / file).exists()]
        if there and where.resolve().name not in self.folders and there[0] not in checksums.known(where):
            raise DataError(f"{where / there[0]} is not {self.name}'s: move it away, or choose another --data.")

    def _strangers(self, where: Path, files: Iterable[str]) -> str:
        """Which files are whole but not the published ones: made from another release, or damaged."""
        strange = [file for file in files if not self._is_published(where / file)]
        return f"not the published {', '.join(strange)}, by SHA-256" if strange else ""

    def _is_published(self, path: Path) -> bool:
        """Whether the file has the published sum, where there is one: an archive's says nothing of a single file."""
        sums = {download.name: download.sha256 for download in self.downloads if not download.is_archive}
        return path.name not in sums or checksums.sha256(path) == sums[path.name]

    def _absence(self, optional: list[str], images: int) -> str:
        absent = {file: count for file, count in self.optional_files.items() if file not in optional}
        if not absent:
            return ""
        complete = images + sum(absent.values())
        return f"{self.name} without {', '.join(absent)}: {images:,} training images instead of {complete:,}"

    def _problems(self, where: Path, files: Iterable[str]) -> list[str]:
        return [problem for file in files for problem in _problems(self._check, where / file)]

    def _check(self, path: Path) -> None:
        self._read(path)
        if not self._is_published(path):
            raise DataError(f"{path} is not the published file, whose SHA-256 is another: {self.remedy}.")

    def _read(self, path: Path) -> tuple[Bytes, Bytes]:
        images = (self.train_files | self.test_files | self.optional_files)[path.name]
        try:
            content = self.read(path, images, len(self.classes))
            checksums.expect_unchanged(path)
            return content
        except DataError as error:
            raise DataError(f"{clause(error)}: {self.remedy}.") from error


@dataclass(frozen=True, kw_only=True)
class Folds(Source):
    """SINS-10's layout: X.bin with colour images of 96×96, plane by plane, and y.bin with a byte for each label.

    Neither has a header, so the number of images follows from the size, and a smaller file of the same layout serves
    as well. The images are consecutive folds of one size. The first nine tenths of a fold are for training and its
    last tenth for testing; of the training images the last ninth is held out for validation. In SINS-10 itself
    that is 8,000, 1,000 and 1,000, in the order training, validation, testing.
    """

    shape: ClassVar[tuple[int, int, int]] = (3, 96, 96)
    labels: ClassVar[int] = 10

    fold_size: int  # as published; `note` tells other files apart

    @property
    def required(self) -> tuple[str, ...]:
        """Images and labels."""
        return ("X.bin", "y.bin")

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read one fold, and nothing else."""
        where = self.locate(root)
        if fold is None:
            raise DataError(f"{self.name} is used one fold at a time: choose a fold from 0 to {self.folds - 1}.")
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
        return Dataset(self.name, *parts, self._classes(where), fold, self.folds, note)

    def problems(self, where: Path) -> list[str]:
        """What does not fit, if anything: images and labels are only understood together."""
        return _problems(self._open, where) + _problems(self._classes, where)

    def _open(self, where: Path) -> tuple[Bytes, Bytes]:
        """All images, mapped and not read, and all labels."""
        path, pixels = where / "X.bin", int(np.prod(self.shape))
        size, count = readers.size(path), readers.size(where / "y.bin")
        images, rest = divmod(size, pixels)
        if rest:
            raise DataError(f"{path} has {size:,} bytes, which is no whole number of images of {pixels:,} bytes.")
        if images != count:
            raise DataError(f"{path} has {images:,} images where y.bin beside it has {count:,} labels.")
        if images % self.folds or images < 10 * self.folds:
            raise DataError(f"{path} has {images:,} images, not {self.folds} equal folds of 10 images or more.")
        for file in self.required:
            checksums.expect_unchanged(where / file)
        labels = readers.raw(where / "y.bin")
        readers.expect_labels(where / "y.bin", labels, range(self.labels))
        return np.memmap(path, np.uint8, "r", shape=(images, *self.shape)), labels

    def _classes(self, where: Path) -> tuple[str, ...]:
        """The names in classes.txt, a line each; numbers without that file, which is not part of the release."""
        path = where / "classes.txt"
        if not path.exists():
            return tuple(map(str, range(self.labels)))
        try:
            names = tuple(reading.read_bytes(path, reading.MEBIBYTE).decode(errors="replace").splitlines())
        except FileError as error:
            raise DataError(str(error)) from error
        checksums.expect_unchanged(path)
        if len(names) != self.labels:
            raise DataError(f"{path} has {len(names)} lines where {self.labels} names of classes are expected.")
        return names


@dataclass(frozen=True, kw_only=True)
class Folder(Source):
    """Image files of any size in one folder per class: ROOT/CLASS/*.jpg and so on.

    Where the root has folders train/ and test/ with the classes in each, they are the split; validation/ may be a
    third, and without it the last tenth of a seeded stratified order of the training images is held out. `PARTS` has
    other names that they go by, in capitals or not.
    Otherwise all images are cut by such an order: the first 80 % for training, the next 10 % for validation, the last
    10 % for testing.
    """

    any_size: ClassVar[bool] = True
    default_side: ClassVar[int] = 96

    def load(self, root: Path, fold: int | None, side: int | None) -> Dataset:
        """Read every image, its smaller side resized to `side` and its central square cut out."""
        where = self.locate(root)
        side = self.default_side if side is None else side
        pictures.expect_possible(0, side)
        classes, parts = self._list(where)
        pictures.expect_possible(sum(map(len, parts)), side)
        train, validation, test = (self._read(part, side) for part in parts)
        return Dataset(self.name, train, validation, test, classes, fold, note=shared_images(train, validation, test))

    def problems(self, where: Path) -> list[str]:
        """What is wrong with the folder, or else every image that cannot be read."""
        if problems := _problems(self._list, where):
            return problems
        paths = [path for part in self._list(where)[1] for path, _ in part]
        return list(pictures.problems(paths, self.default_side))

    def locate(self, root: Path) -> Path:
        """The root itself."""
        if not root.is_dir():
            raise DataError(f"{root} is not a folder: {self.remedy}.")
        return root

    def describe(self, root: Path) -> Description:
        """Its line in the list of data sets."""
        return Description(self.name, self.what, self.size, "a folder of your own", None)

    def _list(self, where: Path) -> tuple[tuple[str, ...], tuple[Listing, Listing, Listing]]:
        """The names of the classes, and the files for training, validation and testing."""
        # A folder called train that holds images and not classes is a class: there are data sets of vehicles.
        split: dict[str, Path] = {}
        for folder in _folders(where):
            part = PARTS.get(folder.name.lower())
            if part is not None and _folders(folder):
                if part in split:
                    raise DataError(f"{where} has {split[part].name} and {folder.name}, of which one can be {part}.")
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
            raise DataError(f"{where} has {there} but needs both train and test, or neither.")
        if not (train and validation and test):
            raise DataError(f"{where} has too few images for a training, a validation and a test part.")
        return classes, (train, validation, test)

    def _class_names(self, where: Path) -> tuple[str, ...]:
        names = tuple(folder.name for folder in _folders(where))
        if len(names) < 2:
            there = counted(len(names), "folder")
            raise DataError(f"{where} has {there} where one for each class is expected: {self.remedy}.")
        if strange := [name for name in names if not is_text(name)]:
            raise DataError(f"{where} has a folder {strange[0]!a}, which cannot be the name of a class: rename it.")
        return names

    def _files(self, where: Path, classes: tuple[str, ...]) -> Listing:
        if unknown := {folder.name for folder in _folders(where)} - set(classes):
            raise DataError(f"{where} has a folder {min(unknown)}, which is no class of the training images.")
        files = [(path, label) for label, name in enumerate(classes) for path in pictures.find(where / name)]
        labels = {label for _, label in files}
        if empty := [name for label, name in enumerate(classes) if label not in labels]:
            raise DataError(f"{where / empty[0]} has no images: {self.remedy}.")
        return files

    def _read(self, files: Listing, side: int) -> Split:
        paths, labels = zip(*files, strict=True)
        images = np.empty((len(files), 3, side, side), np.uint8)
        for index, image in enumerate(pictures.read_all(paths, side)):
            images[index] = image
        return Split.of([(images, np.array(labels))])


def _problems(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """What `function` complains of, if anything."""
    try:
        function(*arguments)
    except DataError as error:
        return [str(error)]
    return []


def _folders(where: Path) -> list[Path]:
    try:
        return folders_in(where)
    except OSError as error:
        raise DataError(f"cannot list {where}: {error.strerror or error}.") from error


def _stratified(files: Listing, *fractions: float) -> list[Listing]:
    """The files cut at these fractions of a stratified order."""
    order = stratified_order(np.array([label for _, label in files]), SEED)
    return [[files[index] for index in part] for part in cut(order, *fractions)]
