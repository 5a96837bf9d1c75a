"""What a run came to: its result, how files hold results, and which code made it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

import maxgain
from maxgain.errors import FileError

from . import _files
from .recipe import Recipe

RESULT = "result.json"
GAIN_EPOCHS = 10
"""How many epochs of gains a result keeps; metrics.jsonl has all of them."""

Number = float | None
Quantiles = tuple[Number, Number, Number, Number, Number]
"""Minimum, quartiles and maximum; None where no gain is finite."""


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


def command_line() -> str:
    """The command line that made the run; empty in Python."""
    program = Path(sys.argv[0])
    is_ours = program.stem == "maxgain" or program.parts[-2:] == ("maxgain", "__main__.py")
    return shlex.join(["maxgain", *sys.argv[1:]]) if is_ours else ""


@lru_cache(maxsize=1)
def code_version() -> tuple[str, bool | None]:
    """The commit of the code and whether it is unchanged: $MAXGAIN_COMMIT, else that of its own git checkout.

    The variable is for a machine without the checkout: `git describe --always --abbrev=40 --exclude '*' --dirty`.
    """
    if commit := os.environ.get("MAXGAIN_COMMIT"):
        return commit.removesuffix("-dirty"), not commit.endswith("-dirty")
    package = Path(maxgain.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else it is the repository of an environment
        return git("rev-parse", "HEAD"), not git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return "", None
