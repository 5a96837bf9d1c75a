"""What a run's folder holds: the records in its files, and the run that is read from them."""

from __future__ import annotations

import base64
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn

from maxgain import measure_gains, operator_norms
from maxgain.errors import DataError, FileError, RecipeError
from maxgain.lipschitz.norms import NormReport
from maxgain.measure import GainReport

from . import _files
from . import data as datasets
from .data import Dataset, Split
from .networks import NETWORKS, Builder
from .recipe import Recipe
from .training import EVALUATION_BATCH, build_model, to_float

CONFIG, METRICS, RESULT, WEIGHTS = "config.json", "metrics.jsonl", "result.json", "model.safetensors"
GAIN_EPOCHS = 10
"""How many epochs of gains a result keeps; metrics.jsonl has all of them."""

Score = Literal["test", "validation"]
Number = float | None
Quantiles = tuple[Number, Number, Number, Number, Number]
"""Minimum, quartiles and maximum; None where no gain is finite."""


class Config(msgspec.Struct, kw_only=True):
    """What a run's folder was begun for."""

    recipe: Recipe
    fingerprint: str
    shape: tuple[int, int, int]
    classes: int
    device: str
    threads: int
    test: bool
    data: str = ""
    """The folder of the data sets."""


class Metrics(msgspec.Struct, kw_only=True):
    """One epoch, a line of metrics.jsonl."""

    epoch: int
    learning_rate: float
    train_loss: Number
    train_accuracy: float
    """In training mode, on the batches as they were trained on."""
    validation_loss: Number = None
    validation_accuracy: Number = None
    max_gain: dict[str, Number] = {}
    """Largest gain of each layer on a sample of the training images, in evaluation mode."""
    seconds: float


class History(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All epochs of a run, one list per column."""

    epoch: list[int] = []
    learning_rate: list[float] = []
    train_loss: list[Number] = []
    train_accuracy: list[float] = []
    validation_loss: list[Number] = []
    validation_accuracy: list[Number] = []
    seconds: list[float] = []
    gain_epochs: list[int] = []
    """The epochs that `max_gain` is of."""
    max_gain: dict[str, list[Number]] = {}

    @classmethod
    def of(cls, lines: Sequence[Metrics], gain_epochs: int | None = None) -> History:
        """The lines as columns; gains of at most `gain_epochs` epochs, evenly spaced."""
        most = len(lines) if gain_epochs is None else min(gain_epochs, len(lines))
        kept = sorted({round(index * (len(lines) - 1) / max(1, most - 1)) for index in range(most)})
        columns = {name: [getattr(line, name) for line in lines] for name in Metrics.__struct_fields__}
        gains = columns.pop("max_gain")
        layers = gains[0] if gains else {}
        return cls(
            **columns,
            gain_epochs=[lines[index].epoch for index in kept],
            max_gain={layer: [gains[index].get(layer) for index in kept] for layer in layers},
        )


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a run came to. Scores are of whole parts of the data, in evaluation mode."""

    key: str
    """What the run computes, and on which data: `recipe.run_key`."""
    fingerprint: str
    """The data: `Dataset.fingerprint`."""
    recipe: Recipe
    status: Literal["ok", "failed"]
    error: str = ""
    fault: Literal["", "training", "machine"] = ""
    """Why a run failed: its training diverged, which is a result, or the machine did, which is none."""
    train_loss: Number = None
    train_accuracy: Number = None
    validation_loss: Number = None
    validation_accuracy: Number = None
    """None where the validation part was trained on."""
    test_loss: Number = None
    test_accuracy: Number = None
    """None where the run has no test part, as in tuning."""
    gains: dict[str, dict[str, Quantiles]] = {}
    """By part of the data and layer."""
    operator_norms: dict[str, Number] = {}
    """Of older records; `Run.operator_norms` computes them."""
    history: History = msgspec.field(default_factory=History)
    correct: str = ""
    """Which test images were classified correctly: base64 of numpy.packbits."""
    classes: int
    validation_images: int | None = None
    tuned: dict[str, float] = {}
    """The numbers that were chosen for this run, by regulariser, in older records."""
    weights_sha256: str = ""
    seconds: float = 0.0
    finished: str = ""
    device: str = ""
    machine: str = ""
    torch: str = ""
    maxgain: str = ""
    commit: str = ""
    """Commit of the code; empty where it is not known."""
    clean: bool | None = None
    """Whether the code was that commit's, unchanged."""
    precision: str = ""
    data_source: str = ""
    data_sha256: dict[str, str] = {}
    """Of each file of the data."""
    note: str = ""
    command: str = ""

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 1 / self.classes if self.classes else 0.0


def correct_images(result: Result) -> NDArray[np.bool_]:
    """Which test images were classified correctly; packing padded them to whole bytes."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(result.correct), np.uint8))
    images = round(bits.sum() / result.test_accuracy) if result.test_accuracy else len(bits)
    return bits[:images].astype(bool)


def is_guess(result: Result, score: Score) -> bool:
    """Whether neither the score nor the training accuracy exceeds chance by more than three standard errors."""
    chance = result.chance
    images = len(correct_images(result)) if score == "test" and result.correct else result.validation_images
    limit = chance + 3 * math.sqrt(chance * (1 - chance) / images) if images else chance
    return max(getattr(result, f"{score}_accuracy") or 0.0, result.train_accuracy or 0.0) <= limit


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data and the network that a recipe names, or one's own."""

    root: Path | None = None
    """folder of the data sets (default: $MAXGAIN_DATA, or a cache folder)"""
    dataset: Dataset | None = None
    """one's own data, or data that are loaded already"""
    network: Builder | None = None
    """one's own network"""

    def load(self, recipe: Recipe, test: bool = True) -> Dataset:
        """The data that a recipe names, or the fold of one's own that it asks for; without its test part for tuning."""
        dataset = self.dataset
        if dataset is None:
            with _reading:
                dataset = read_data(recipe.dataset, self.root, recipe.fold, recipe.image_size, recipe.cross_validation)
        elif recipe.image_size is not None and dataset.name not in datasets.DATASETS:
            raise DataError(f"{dataset.name} has images of one size.", field="image_size")
        elif recipe.cross_validation is not None and dataset.fold != recipe.fold:
            dataset = datasets.cross_validate(dataset, recipe.fold, recipe.cross_validation)
        elif recipe.fold != dataset.fold:
            raise DataError(f"{dataset.name} has no fold {recipe.fold}.", field="fold")
        return dataset if test else dataset.without_test()


read_data, _reading = lru_cache(maxsize=1)(datasets.load), threading.Lock()
"""Keeps the data for the next run, until `cache_clear`; threads that start at once wait for one of them to read."""


class Run:
    """A run in its folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"<Run in {self.folder}>"

    @property
    def config(self) -> Config:
        """What the run was begun for."""
        return _files.read_json(self.folder / CONFIG, Config)

    @property
    def recipe(self) -> Recipe:
        """What the run computes."""
        return self.config.recipe

    @property
    def result(self) -> Result:
        """What the run came to, once it is finished."""
        return _files.read_json(self.folder / RESULT, Result)

    @property
    def history(self) -> History:
        """All epochs so far, with the gains of each."""
        try:
            lines = (self.folder / METRICS).read_bytes().splitlines(keepends=True)
            # A killed process may leave an incomplete last line.
            return History.of([_files.decode(line, Metrics) for line in lines if line.endswith(b"\n")])
        except (OSError, ValueError) as error:
            raise FileError(f"cannot read {self.folder / METRICS}: {error}.") from error

    def model(self, network: Callable[..., Any] | None = None) -> nn.Module:
        """The trained model in evaluation mode, on the CPU; a network of one's own needs its function again."""
        config, path = self.config, self.folder / WEIGHTS
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}. Is the run finished?") from error
        if hashlib.sha256(content).hexdigest() != self.result.weights_sha256:
            raise FileError(f"{path} is damaged or of another run: its SHA-256 is not the one in {RESULT}.")
        if network is None and config.recipe.network not in NETWORKS:
            raise RecipeError(f"the network in {self.folder} is your own: call model(FUNCTION).", field="network")
        with torch.random.fork_rng(devices=[]):
            model = build_model(config.recipe, config.shape, config.classes, network)
        try:
            model.load_state_dict(safetensors.torch.load(content))
        except RuntimeError as error:
            raise RecipeError(f"the network in {self.folder} has other layers.", field="network") from error
        return model.eval()

    def dataset(self, dataset: Dataset | None = None, data: str | Path | None = None) -> Dataset:
        """The data that the run was trained and scored on; one's own have to be passed again."""
        config = self.config
        if dataset is None and config.recipe.dataset not in datasets.DATASETS:
            raise DataError(f"the data of the run in {self.folder} are your own: pass them.", field="data")
        inputs = Inputs(root=Path(data or config.data) if data or config.data else None, dataset=dataset)
        found = inputs.load(config.recipe, config.test)
        if found.fingerprint != config.fingerprint:
            raise DataError(f"{found.name} is not the data of the run in {self.folder}.", field="data")
        return found

    def gains(
        self,
        part: Literal["train", "validation", "test"] = "test",
        dataset: Dataset | None = None,
        network: Callable[..., Any] | None = None,
    ) -> GainReport:
        """Every image's gain in every layer of the trained model."""
        split: Split = getattr(self.dataset(dataset), part)
        batches = (to_float(images) for images in torch.split(split.images, EVALUATION_BATCH))
        return measure_gains(self.model(network), batches, self.recipe.p)

    def operator_norms(self, network: Callable[..., Any] | None = None, tolerance: float = 1e-2) -> NormReport:
        """The ℓ2 operator norm of every layer of the trained model, to this relative accuracy."""
        return operator_norms(self.model(network), torch.zeros(1, *self.config.shape), tolerance=tolerance)


def load(path: str | Path) -> list[Result]:
    """The results in a run's folder, in all runs below a folder, or in a .jsonl export."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.rglob(RESULT))
        if not files:
            raise FileError(f"there is no finished run in {path}.")
        return [_files.read_json(file, Result) for file in files]
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}.") from error
    results = []
    for number, line in enumerate(lines, start=1):
        try:
            results.append(_files.decode(line, Result))
        except ValueError as error:
            raise FileError(f"cannot read {path}, line {number}: {str(error).rstrip('.')}.") from error
    return results


def export(results: Iterable[Result], path: str | Path) -> None:
    """Write the results into one file, a line of JSON each, which `load` reads."""
    _files.write(Path(path), b"".join(_files.encode(result) + b"\n" for result in results))
