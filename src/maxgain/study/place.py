"""Where runs read, write and compute: nothing here decides what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from maxgain.errors import DataError, RunError

from .capture import Speed
from .data import table as datasets
from .data.splits import Dataset, cross_validated
from .recipes import Recipe, run_key, run_name


@dataclass(frozen=True)
class Place:
    """Where a run, or a group of runs, reads, writes and computes."""

    folder: Path
    data: Path | None = None
    device: str = "auto"
    checkpoint_seconds: float | None = None
    """How often to save; None saves after every epoch."""
    speed: Speed = field(default_factory=Speed)
    """How a GPU runs a step."""
    has_test: bool = True
    """Whether runs here have a test part to be scored on; those on which something is chosen have none."""
    records: Path | None = None
    """The folder of the records, if it is not in the folder itself."""
    own: Dataset | None = field(default=None, repr=False, compare=False)
    """The data set itself, where it is none of the table's: see `own.dataset`."""

    @property
    def results(self) -> Path:
        """The folder of the records, where there are many runs."""
        return self.records or self.folder / "results"

    @property
    def for_tuning(self) -> Place:
        """Beside runs whose scores are compared, a place for those that choose their numbers."""
        return replace(self, folder=self.folder / "tuning", has_test=False)

    def of(self, recipe: Recipe, fingerprint: str) -> Place:
        """The place of one of many runs here: another recipe, or other data, has another one."""
        name = f"{run_name(recipe)}-{run_key(recipe, fingerprint)}"
        return replace(self, folder=self.folder / "runs" / name)

    def load_data(self, recipe: Recipe, load: Callable[..., Dataset] = datasets.load) -> Dataset:
        """The data set that a recipe asks for; `load` may know it already."""
        if self.own is not None:
            dataset = _cut(self.own, recipe)
        else:
            dataset = load(recipe.dataset, self.data, recipe.fold, recipe.image_size, recipe.cross_validation)
        return dataset if self.has_test else dataset.without_test()


def _cut(own: Dataset, recipe: Recipe) -> Dataset:
    if recipe.image_size is not None:
        raise DataError(f"{own.name} has images of one size, so {recipe.image_size} cannot be chosen.")
    if recipe.cross_validation is not None:
        return cross_validated(own, recipe.fold, recipe.cross_validation)
    if recipe.fold is not None:
        raise DataError(f"{own.name} has no folds, so fold {recipe.fold} cannot be had.")
    return own


def chosen_device(name: str) -> torch.device:
    """'auto' is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type in ("cpu", "cuda"):
            return device
    except (RuntimeError, AssertionError):
        pass
    raise RunError(f"there is no device {name!r} to train on here: use 'cpu', 'cuda' or 'auto'.")
