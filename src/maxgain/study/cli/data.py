"""maxgain data: what data sets there are, and whether they are here and whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from maxgain.errors import DataError

from ..data import sins10
from ..data import table as datasets
from ..recipes import RECIPES
from ..tables import Column, Table
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain data list": "what there is, and what of it is here",
    "maxgain data fetch cifar10": "download a data set and check it against its checksum",
    "maxgain data check svhn --data ~/data": "is a data set that lies elsewhere whole?",
}


@dataclass(frozen=True, kw_only=True)
class Action(Common):
    """What all of these take."""

    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""

    def _where(self) -> tuple[str, ...]:
        """What the next command needs to find the same data."""
        return () if self.data is None else ("--data", str(self.data))


@dataclass(frozen=True, kw_only=True)
class List(Action):
    """List the data sets, and say which are here."""

    def run(self, screen: Screen) -> Any:
        """Shows one row per data set."""
        rows = datasets.describe(self.data)
        here = {None: "your own", True: "yes", False: "no"}
        columns = (
            Column("name"),
            Column("here"),
            Column("what it is", prose=True),
            Column("size", spare=1, prose=True),
        )
        content = tuple((row.name, here[row.present], row.what, row.size) for row in rows)
        screen.show(Table(f"Data sets in {datasets.data_root(self.data)}", columns, content))
        away = next((row.name for row in rows if row.present is False), None)
        steps = {} if away is None else {typed("data", "fetch", away): "download one, and check it"}
        screen.end(steps={typed("train", "digits", "--regulariser", "maxgain"): "digits needs no download"} | steps)
        return [asdict(row) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Fetch(Action):
    """Download a data set, or what is missing of it, and check it against its checksum."""

    name: tyro.conf.Positional[str]
    """the data set"""

    def run(self, screen: Screen) -> Any:
        """Shows where the data set lies now."""
        folder = datasets.fetch(self.name, self.data, progress=screen.watched)
        screen.show(f"{self.name} is in {folder}")
        screen.end(steps={typed("data", "check", self.name, *self._where()): "is it whole?"})
        return {"name": self.name, "folder": str(folder)}


@dataclass(frozen=True, kw_only=True)
class Check(Action):
    """Say which files of a data set are missing, short or wrong."""

    name: tyro.conf.Positional[str]
    """the data set"""

    def run(self, screen: Screen) -> Any:
        """Shows that all is well, or raises with what is not."""
        problems = datasets.check(self.name, self.data)
        if problems:
            raise DataError("\n".join(problems))
        fold = 0 if datasets.DATASETS[self.name].folds > 1 else None
        note = datasets.load(self.name, self.data, fold).note
        screen.show(f"{self.name} is whole" + (f"; note: {note}" if note else ""))
        if self.name in RECIPES:
            screen.end(steps={typed("train", self.name, "--regulariser", "maxgain", *self._where()): "train on it"})
        return {"name": self.name, "problems": problems, "note": note}


@dataclass(frozen=True, kw_only=True)
class BuildSins10(Action):
    """Make SINS-10 as the paper describes it, from an ImageNet tree and a mapping of ten classes to synsets."""

    imagenet: tyro.conf.Positional[Path]
    """the folder with one folder of images per synset"""
    mapping: tyro.conf.Positional[Path]
    """a JSON file: {"class name": ["n01440764", ...], ...}"""
    per_class: int = 10_000
    """images of each class"""
    seed: int = 0
    """of the draw of the images and of the folds"""

    def run(self, screen: Screen) -> Any:
        """Shows where the data set lies now."""
        out = datasets.data_root(self.data) / "sins10"
        sins10.build(
            self.imagenet, self.mapping, out, per_class=self.per_class, seed=self.seed, progress=screen.watched
        )
        screen.show(f"sins10 is in {out}")
        screen.end(steps={typed("data", "check", "sins10", *self._where()): "is it whole?"})
        return {"folder": str(out)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """List, fetch, check and build data sets."""

    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[List, tyro.conf.subcommand("list", description=List.__doc__)]
        | Annotated[Fetch, tyro.conf.subcommand("fetch", description=Fetch.__doc__)]
        | Annotated[Check, tyro.conf.subcommand("check", description=Check.__doc__)]
        | Annotated[BuildSins10, tyro.conf.subcommand("build-sins10", description=BuildSins10.__doc__)]
    ]

    @property
    def json(self) -> bool:
        """Whether the output is for machines."""
        return self.action.json


def run(options: Options, screen: Screen) -> Any:
    """Does what was asked for."""
    return options.action.run(screen)
