"""A training on disk: one file that is whole or not there, and that says so when it is damaged or another run's.

The tensors are stored as safetensors, so no code runs from the file; the rest is JSON in its header, with a checksum
over all of it, since a length alone does not show a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from maxgain.errors import CheckpointError

from .files import write_bytes
from .recipes import to_json
from .train import Training

FORMAT = "1"


def save(path: Path, training: Training, history: Iterable[Mapping[str, Any]]) -> None:
    """Writes all that is needed to go on to the same bits, and the metrics so far."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in _tensors(training).items()}
    about = json.dumps(
        {
            "epoch": training.epoch,
            "device": training.device.type,
            "threads": torch.get_num_threads(),
            "recipe": to_json(training.recipe),
            "history": list(history),
        }
    )
    header = {"format": FORMAT, "about": about, "sha256": _digest(about, tensors)}
    write_bytes(path, safetensors.torch.save(tensors, header))


def load(path: Path, training: Training) -> list[dict[str, Any]]:
    """Puts a fresh training of the same recipe where the saved one was, and returns its metrics so far."""
    tensors, about = _read(path)
    expect_same_recipe(path, about["recipe"], to_json(training.recipe))
    if about["device"] != training.device.type:
        raise CheckpointError(
            f"{path} was written on {about['device']}, and only there can the run go on to the same bits: "
            f"use --device {about['device']}."
        )
    torch.set_num_threads(about["threads"])  # another number of them adds up in another order, to other bits
    try:
        _restore(training, tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} does not fit: it was written with another --data, or by another version of maxgain."
        ) from error
    training.epoch = about["epoch"]
    history: list[dict[str, Any]] = about["history"]
    return history


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata()
            # Copies, because what is read here is the file itself, mapped, and the file is going to be replaced.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        written, about, digest = header["format"], header["about"], header["sha256"]
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}: leave --resume out to start the run.") from error
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint; remove it to start the run anew.") from error
    if written != FORMAT:
        raise CheckpointError(f"{path} was written by another version of maxgain, in format {written}.")
    if digest != _digest(about, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit; remove it to start the run anew.")
    return tensors, json.loads(about)


def expect_same_recipe(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses what was written by a run with other settings, and says which."""
    for key in wanted:
        if saved.get(key) != wanted[key]:
            raise CheckpointError(
                f"{path} is of another recipe: there {key.replace('_', '-')} is {saved.get(key)!r}, "
                f"here {wanted[key]!r}; use the same options, or another --out."
            )


def _tensors(training: Training) -> dict[str, Tensor]:
    """Everything by name, so that saving and restoring cannot disagree about what there is."""
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for index, state in training.optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": value for key, value in state.items() if value is not None}
    for number, constraint in enumerate(training.constraints):
        tensors |= {f"constraint.{number}.{name}": tensor for name, tensor in constraint.state_dict().items()}
    tensors |= {f"loop.{name}": tensor for name, tensor in _loop(training).items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if training.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(training.device)
    return tensors


def _loop(training: Training) -> dict[str, Tensor]:
    names = ("order", "position", "learning_rate", "loss", "hits")
    return {name: getattr(training, name) for name in names}


def _restore(training: Training, tensors: Mapping[str, Tensor]) -> None:
    training.model.load_state_dict(_under("model.", tensors))
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _under("optimiser.", tensors).items():
        index, _, key = name.partition(".")
        states.setdefault(int(index), {})[key] = tensor
    groups = training.optimiser.state_dict()["param_groups"]
    training.optimiser.load_state_dict({"state": states, "param_groups": groups})
    for number, constraint in enumerate(training.constraints):
        constraint.load_state_dict(_under(f"constraint.{number}.", tensors))
    for name, tensor in _loop(training).items():
        tensor.copy_(tensors[f"loop.{name}"])
    # The optimiser has its own copy of the learning rate now; the loop's tensor is the one that changes.
    for group in training.optimiser.param_groups:
        group["lr"] = training.learning_rate
    torch.set_rng_state(tensors["rng.cpu"])
    if training.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], training.device)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
