"""The files in a run's folder: what they are called, and what they say of a run that was begun or finished."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors.torch
import torch
from torch import Tensor

from maxgain.errors import CheckpointError, FileError, MissingFileError, RunError

from . import files, predictions, reading
from .data.splits import Dataset, Split
from .predictions import Predictions
from .recipes import Recipe, from_json, key, to_json
from .schema import Metrics, Result
from .training import build_model, trained_on
from .wording import clause

if TYPE_CHECKING:
    from .runs import Place

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
WEIGHTS, CHECKPOINT, PREDICTIONS = "model.safetensors", "checkpoint.safetensors", "predictions.npz"
FILES = (CONFIG, METRICS, RESULT, WEIGHTS, CHECKPOINT, PREDICTIONS)


@dataclass(frozen=True)
class Begun:
    """What a run is: its recipe and its data, which decide everything, and where these data were."""

    recipe: Recipe
    fingerprint: str
    data: str
    """The folder of the data sets."""
    device: str
    """What it is trained on: 'cpu' or 'cuda'."""

    def resumed(self, place: Place) -> Place:
        """The place, with the run's own data and device where it names none."""
        data = Path(self.data) if place.data is None and Path(self.data).exists() else place.data
        return replace(place, data=data, device=self.device if place.device == "auto" else place.device)


LARGEST_WEIGHTS = 16 * 1024 * reading.MEBIBYTE
_ABOUT = [field.name for field in fields(Begun) if field.name != "recipe"]


def expect_same_recipe(path: Path, there: Recipe, here: Recipe) -> None:
    """Refuses what was written by a run that computes something else, and says what differs."""
    if key(there) == key(here):
        return
    old, new = to_json(there), to_json(here)
    folder = path if path.is_dir() else path.parent
    name = next(name for name in new if name != "name" and old[name] != new[name])
    raise CheckpointError(
        f"{path} is of another recipe: there {name.replace('_', '-')} is {old[name]!r:.60}, here {new[name]!r:.60}; "
        f"'maxgain train --resume {folder}' goes on with it, and another --out begins a new one."
    )


def expect_same_data(path: Path, there: str, here: str) -> None:
    """Refuses what was written by a run on other data."""
    if there != here:
        raise CheckpointError(
            f"{path} is of other data: the images or labels there have the fingerprint {there[:8]}, and those here "
            f"{here[:8]}; use the same --data, or another --out."
        )


def read_begun(folder: Path) -> Begun:
    """What the run in that folder is."""
    content = _read(folder, CONFIG, dict[str, Any])
    content.pop(files.SEAL, None)
    try:
        about = {name: str(content.pop(name)) for name in _ABOUT}
    except KeyError as error:
        raise RunError(f"{folder / CONFIG} was written by another version of maxgain: it has no {error}.") from error
    return Begun(from_json(content), **about)


def read_result(folder: Path) -> Result:
    """The result of a finished run."""
    return cast("Result", _read(folder, RESULT, Result))


def read_metrics(folder: Path, result: Result | None = None) -> list[Metrics]:
    """A run's epochs so far; a last line that a killed process left incomplete is no epoch.

    Of a finished run, whose `result` is given, they must be the epochs that the result is about.
    """
    try:
        lines = reading.read_bytes(folder / METRICS).splitlines(keepends=True)
        epochs = [files.decode(line, Metrics) for line in lines if line.endswith(b"\n")]
    except (FileError, ValueError) as error:
        reason = clause(error)
        raise RunError(f"{folder} holds no readable {METRICS} ({reason}): is it the folder of a run?") from error
    sealed = None if result is None else result.get("metrics_sha256")
    if sealed is not None and files.checksum(epochs) != sealed:
        raise RunError(f"{folder / METRICS} is damaged or of another run: its checksum is not the one in {RESULT}.")
    return epochs


def read_predictions(folder: Path, result: Result) -> Predictions | None:
    """What a finished run said of every test image; None where it has no test part."""
    sha256 = result.get("predictions_sha256")
    return None if sha256 is None else predictions.read(folder / PREDICTIONS, sha256)


def _read(folder: Path, name: str, schema: Any) -> Any:
    try:
        return files.read_json(folder / name, schema)
    except MissingFileError as error:
        if not folder.exists():
            raise RunError(
                f"there is no folder {folder}: name the one that 'maxgain train' wrote its run into."
            ) from error
        raise RunError(f"{folder} has no {name}: it is not the folder of a finished run.") from error


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own, to be stored: safetensors refuses those that share it, as tied weights do."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True)
class FinishedRun:
    """A run that was trained to the end, with its model and the data that it was trained and tested on."""

    recipe: Recipe
    model: torch.nn.Module
    parts: dict[str, Split]
    """'train' and, unless it has none, 'test'; they lie where the model does."""

    @property
    def title(self) -> str:
        """What the run is called above a table or a figure."""
        return f"{self.recipe.name}, {self.recipe.regulariser}"


def open_run(place: Place) -> FinishedRun:
    """The finished run in a folder, with the data that it was made of."""
    begun, device = read_begun(place.folder), place.chosen_device
    expect_same_recipe(place.folder / RESULT, from_json(read_result(place.folder)["config"]), begun.recipe)
    dataset = data_of(begun, place)
    model = load_model(place.folder, begun.recipe, dataset, device)
    parts = {"train": trained_on(begun.recipe, dataset), "test": dataset.test}
    return FinishedRun(begun.recipe, model, {part: split.to(device) for part, split in parts.items() if len(split)})


def data_of(begun: Begun, place: Place) -> Dataset:
    """The data of a run: from the place's folder of data sets, or else from where they were."""
    dataset = begun.resumed(place).load_data(begun.recipe)
    without = dataset.without_test()
    if without.fingerprint == begun.fingerprint:  # a run on which something was chosen
        return without
    expect_same_data(place.folder, begun.fingerprint, dataset.fingerprint)
    return dataset


def load_model(folder: Path, recipe: Recipe, dataset: Dataset, device: torch.device) -> torch.nn.Module:
    """The trained model of a finished run; refused if it is not the one that the result is about."""
    model = build_model(recipe, dataset, device)
    path = folder / WEIGHTS
    try:
        content = reading.read_bytes(path, LARGEST_WEIGHTS)
    except FileError as error:
        raise RunError(f"{folder} holds no readable {WEIGHTS} ({clause(error)}): is the run finished?") from error
    if hashlib.sha256(content).hexdigest() != read_result(folder).get("weights_sha256"):
        raise RunError(f"{path} is damaged or of another run: its checksum is not the one in {RESULT}.")
    try:
        model.load_state_dict(safetensors.torch.load(content))
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise RunError(f"{path} does not fit the network of its {CONFIG}: {str(error).splitlines()[0]}.") from error
    return model
