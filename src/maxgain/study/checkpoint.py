"""A training on disk: one file that is whole or not there, and that says so when it is damaged or another run's.

The tensors are stored as safetensors, so no code runs from the file; the rest is JSON in its header, with a checksum
over all of it, since a length alone does not show a flipped bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from maxgain.errors import CheckpointError, FileError, MissingFileError

from . import files, memory, reading
from .files import write_bytes
from .recipes import from_json, to_json
from .run_files import apart, expect_same_data, expect_same_recipe
from .schema import Config, Metrics
from .training import Training

FORMAT = "2"


def save(path: Path, training: Training, history: Iterable[Metrics]) -> None:
    """Writes all that is needed to go on to the same bits, and the metrics so far."""
    tensors = apart(training.state())
    about = files.encode(
        {
            "device": training.device.type,
            "threads": torch.get_num_threads(),
            "recipe": to_json(training.recipe),
            "fingerprint": training.fingerprint,
            "history": list(history),
        }
    )
    header = {"format": FORMAT, "about": about, "sha256": _digest(about, tensors)}
    write_bytes(path, safetensors.torch.save(tensors, header))


def load(path: Path, training: Training) -> list[Metrics]:
    """Puts a fresh training of the same recipe where the saved one was, and returns its metrics so far."""
    tensors, about = _read(path)
    expect_same_recipe(path, from_json(about["recipe"]), training.recipe)
    expect_same_data(path, about["fingerprint"], training.fingerprint)
    if about["device"] != training.device.type:
        raise CheckpointError(
            f"{path} was written on {about['device']}, and only there can the run go on to the same bits: "
            f"use --device {about['device']}."
        )
    torch.set_num_threads(about["threads"])  # another number of them adds up in another order, to other bits
    try:
        with memory.in_words():  # running out of it says nothing of the file
            training.load_state(tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not fit: it was written by another version of maxgain.") from error
    return about["history"]


class _About(TypedDict):
    """What a checkpoint holds beside its tensors."""

    device: str
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    recipe: Config
    fingerprint: str
    history: list[Metrics]


def _read(path: Path) -> tuple[dict[str, Tensor], _About]:
    try:
        reading.expect_regular(path)
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata()
            # Copies, because what is read here is the file itself, mapped, and the file is going to be replaced.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        written, about, digest = header["format"], header["about"], header["sha256"]
    except MissingFileError as error:
        raise CheckpointError(f"there is no checkpoint {path}: leave --resume out to start the run.") from error
    except (FileError, safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint; remove it to start the run again.") from error
    if written != FORMAT:
        raise CheckpointError(f"{path} was written by another version of maxgain, in format {written}.")
    if digest != _digest(about, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit; remove it to start the run again.")
    try:
        return tensors, files.decode(about, _About)
    except ValueError as error:
        raise CheckpointError(f"{path} is no checkpoint of this version of maxgain: {error}.") from error


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
