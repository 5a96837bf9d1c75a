"""A run in a folder: config, metrics, checkpoint until it ends, then result and weights."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

import maxgain
from maxgain.errors import CheckpointError, MeasurementWarning, RunError

from . import _files
from .capture import stream_for
from .data import Dataset, Split, data_root
from .recipe import Recipe, fill, run_key
from .result import CONFIG, GAIN_EPOCHS, METRICS, RESULT, WEIGHTS, Config, History, Metrics, Result
from .result import Inputs as Inputs
from .result import Run as Run
from .training import DivergedError, Training, copies, evaluate, gains, train

CHECKPOINT = "checkpoint.safetensors"
GAIN_SAMPLE = 1000
"""How many training images the gains of an epoch are taken over, but at most one of sixteen: measuring an image takes a
third of the time of training on it on a CPU, and twice that time on a GPU."""
SMALL = 1_000_000
"""Parameters of a network that a CPU trains fastest with one thread."""
SAVING_SHARE = 0.02
"""How much of the time checkpoints may take."""
SAVING_SECONDS = 600.0
"""How long an epoch may go on without a checkpoint."""


class MachineError(RunError):
    """The disk is full, or memory ran out: nothing that says anything about the training."""


def perform(
    recipe: Recipe,
    folder: str | Path,
    inputs: Inputs | None = None,
    *,
    device: str = "auto",
    test: bool = True,
    on_epoch: Callable[[Metrics], None] = lambda line: None,
    stop: threading.Event | None = None,
) -> Run:
    """Train to the end, from wherever the folder's run stands, and return the run; without `test`, it has no test part.

    Ctrl-C and SIGTERM save the run and raise `KeyboardInterrupt`; so does setting `stop`, for runs in threads. A run
    that diverged leaves a failed result and raises `DivergedError`; a folder of another run is refused. The caller's
    random numbers and threads are afterwards as they were.
    """
    recipe = replace(recipe, regulariser=fill(recipe.regulariser))
    run, inputs = Run(folder), inputs or Inputs()
    dataset = inputs.load(recipe, test)
    key = run_key(recipe, dataset.fingerprint)
    with _files.locked(run.folder), _stop_signals(stop) as stopping, _machine_errors(run.folder):
        begun = run.config if (run.folder / CONFIG).exists() else None
        ended = run.result if (run.folder / RESULT).exists() else None
        for there in (begun, ended):
            if there and (there.recipe.key, there.fingerprint) != (recipe.key, dataset.fingerprint):
                why = f"{run.folder} is of another run: {_difference(there.recipe, recipe)}"
                raise CheckpointError(f"{why}; choose another folder.", field="out")
        if ended and ended.status == "ok":
            return run
        if ended and ended.fault == "training":
            raise DivergedError(ended.error)
        where = find_device(begun.device if begun and device == "auto" else device)
        if begun and begun.device != where.type and (run.folder / CHECKPOINT).exists():
            raise CheckpointError(f"{run.folder} was begun on {begun.device}: continue it there.", field="device")
        with _isolated(where):
            training = Training(recipe, dataset, where, inputs.network)
            size = sum(parameter.numel() for parameter in training.model.parameters())
            # Fixed for the run, whoever continues it: another number of threads would give other bits.
            threads = 1 if size <= SMALL or where.type != "cpu" else torch.get_num_threads()
            config = Config(
                recipe=recipe,
                fingerprint=dataset.fingerprint,
                shape=dataset.shape,
                classes=len(dataset.classes),
                device=where.type,
                threads=begun.threads if begun else threads,
                test=test,
                data=str(data_root(inputs.root).absolute()),
            )
            if where.type == "cpu":
                torch.set_num_threads(config.threads)
            _files.write_json(run.folder / CONFIG, config)
            _Trainer(run.folder, key, dataset, training, on_epoch, stopping).run()
    return run


@dataclass
class _Trainer:
    """Trains one run from its checkpoint to its result."""

    folder: Path
    key: str
    dataset: Dataset
    training: Training
    on_epoch: Callable[[Metrics], None]
    stopping: Callable[[], bool]
    lines: list[Metrics] = field(default_factory=list)
    epoch_began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)
    saving_took: float = 0.0

    def run(self) -> None:
        """Train, score, and write the result; or the failed result of a run that diverged."""
        if (self.folder / CHECKPOINT).exists():
            self._resume()
        _files.write(self.folder / METRICS, b"".join(_files.encode(line) + b"\n" for line in self.lines))
        try:
            for loss, accuracy in train(self.training, self._after_step):
                self._after_epoch(loss, accuracy)
        except DivergedError as error:
            diverged = DivergedError(f"{str(error).removesuffix('.')}; {self._advice()}.")
            self._write_result(status="failed", fault="training", error=str(diverged))
            raise diverged from error
        self._conclude()
        with suppress(OSError):
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        if self.stopping():
            raise KeyboardInterrupt(f"{self.folder} is finished.")

    def _after_step(self) -> None:
        if self.stopping():
            self._save()
            raise KeyboardInterrupt(f"{self.folder} is saved; the same command continues it.")
        if time.monotonic() - self.saved > max(SAVING_SECONDS, self.saving_took / SAVING_SHARE):
            self._save()

    def _after_epoch(self, loss: float, accuracy: float) -> None:
        """Note what the epoch came to, and save, unless that would take too much of the time."""
        training, now = self.training, time.monotonic()
        sample = training.images[: min(GAIN_SAMPLE, -(-len(training.images) // 16))]
        quantiles = gains(training.model, sample, training.recipe.p)
        held_out = (None, None) if training.held_out is None else evaluate(training.model, training.held_out)[:2]
        line = Metrics(
            epoch=training.epoch,
            learning_rate=training.recipe.learning_rate_at(training.epoch - 0.5),
            train_loss=loss,
            train_accuracy=accuracy,
            validation_loss=held_out[0],
            validation_accuracy=held_out[1],
            max_gain={layer: None if math.isnan(row[-1]) else row[-1] for layer, row in quantiles.items()},
            seconds=now - self.epoch_began,
        )
        self.epoch_began = now
        self.lines.append(line)
        with (self.folder / METRICS).open("ab") as file:
            file.write(_files.encode(line) + b"\n")
        if time.monotonic() - self.saved > self.saving_took / SAVING_SHARE:
            self._save()
        self.on_epoch(line)

    def _conclude(self) -> None:
        """Score the trained model on whole parts, and write weights and result."""
        training, model = self.training, self.training.model
        parts = {"train": Split(training.images, training.labels)}
        if len(self.dataset.test):
            parts["test"] = self.dataset.test.to(training.device)
        if training.held_out is not None:
            parts["validation"] = training.held_out
        scores: dict[str, Any] = {"gains": {}}
        for part, split in parts.items():
            loss, accuracy, correct = evaluate(model, split)
            scores |= {f"{part}_loss": loss, f"{part}_accuracy": accuracy}
            if part == "test":
                scores["correct"] = base64.b64encode(np.packbits(correct.cpu().numpy()).tobytes()).decode()
            if part != "validation" and (quantiles := gains(model, split.images, training.recipe.p)):
                scores["gains"][part] = quantiles
        weights = safetensors.torch.save(copies(model.state_dict()))
        _files.write(self.folder / WEIGHTS, weights)
        self._write_result(status="ok", weights_sha256=hashlib.sha256(weights).hexdigest(), **scores)

    def _write_result(self, **outcome: Any) -> None:
        training, dataset = self.training, self.dataset
        commit, clean = code_version()
        on_gpu = training.device.type == "cuda"
        program = Path(sys.argv[0])
        is_ours = program.stem == "maxgain" or program.parts[-2:] == ("maxgain", "__main__.py")
        result = Result(
            key=self.key,
            fingerprint=dataset.fingerprint,
            recipe=training.recipe,
            history=History.of(self.lines, GAIN_EPOCHS),
            classes=len(dataset.classes),
            validation_images=len(dataset.validation),
            seconds=sum(line.seconds for line in self.lines),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            device=torch.cuda.get_device_name(training.device) if on_gpu else "cpu",
            machine=f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
            torch=str(torch.__version__),
            maxgain=maxgain.__version__,
            commit=commit,
            clean=clean,
            precision=training.precision,
            data_source=dataset.source,
            data_sha256=dict(dataset.sha256),
            note=dataset.note,
            command=shlex.join(["maxgain", *sys.argv[1:]]) if is_ours else "",
            **outcome,
        )
        _files.write_json(self.folder / RESULT, result)

    def _save(self) -> None:
        """Write all that is needed to continue to the same bits: a file that is whole or not there."""
        started = time.monotonic()
        self.training.expect_finite()  # the last good state is worth more than the first bad one
        about = {"key": self.key, "history": _files.encode(self.lines).decode()}
        _files.write(self.folder / CHECKPOINT, safetensors.torch.save(self.training.state(), about))
        self.saved = time.monotonic()
        self.saving_took = self.saved - started

    def _resume(self) -> None:
        """Put the training where the checkpoint was saved."""
        path = self.folder / CHECKPOINT
        try:
            with safetensors.safe_open(path, "pt") as file:
                about = file.metadata()
            key, self.lines = about["key"], _files.decode(about["history"].encode(), list[Metrics])
            tensors = safetensors.torch.load(path.read_bytes())
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{path} is damaged; remove it to start the run again.") from error
        if key != self.key:
            raise CheckpointError(f"{path} is of another run; choose another folder.", field="out")
        try:
            self.training.load_state(tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not fit: another version of maxgain wrote it.") from error

    def _advice(self) -> str:
        """What to try after a run that diverged."""
        recipe = self.training.recipe
        known = {name: gain for name, gain in (self.lines[-1].max_gain if self.lines else {}).items() if gain}
        worst = max(known, key=lambda name: known[name], default=None)
        seen = "" if worst is None else f"the largest gain before was {known[worst]:.3g}, in layer {worst!r}; "
        bound = "maxgain" if recipe.gamma is None else "a smaller gamma"
        return f"{seen}try a learning_rate below {recipe.learning_rate_at(self.training.epoch):g}, or {bound}"


def _difference(there: Recipe, here: Recipe) -> str:
    """How the recipe of a folder differs from the one that is asked for, if it does."""
    if there.key == here.key:
        return "it has other data"
    names = [name for name in asdict(here) if getattr(there, name) != getattr(here, name)]
    name = next((name for name in names if name != "name"), "name")
    return f"{name} is {getattr(there, name)!r} there and {getattr(here, name)!r} here"


def find_device(name: str) -> torch.device:
    """The device of that name; 'auto' is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with suppress(RuntimeError, AssertionError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            torch.empty(0, device=device)
            return device
    there = "'cpu', 'cuda' or 'auto'" if torch.cuda.is_available() else "'cpu' or 'auto'; torch finds no GPU"
    raise RunError(f"there is no device {name!r}: use {there}.", field="device")


_cpu = threading.RLock()
"""Held by a run on the CPU, which draws from torch's default generator: such runs of one process take turns."""


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Leave the caller's random numbers and threads as they are."""
    if device.type == "cuda":
        with stream_for(device):
            yield
        return
    with _cpu, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gamma is probably too small", MeasurementWarning)  # the scores show that
        threads = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _stop_signals(stop: threading.Event | None) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C, SIGTERM, SIGHUP or `stop` asks to stop; a second signal raises `KeyboardInterrupt` at once."""
    asked = stop or threading.Event()

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handle)
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""How torch and CUDA's libraries say it where they have no exception for it."""


@contextmanager
def _machine_errors(folder: Path) -> Iterator[None]:
    """Turn a disk that takes no more and a lack of memory into `MachineError`."""
    try:
        yield
    except BrokenPipeError:  # of who shows the progress
        raise
    except OSError as error:
        reason = error.strerror or error
        raise MachineError(f"cannot write in {folder}: {reason}. The same command continues the run.") from error
    except (MemoryError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None:  # a failing capture hides what made it fail
            is_memory = isinstance(cause, MemoryError | torch.OutOfMemoryError)
            if is_memory or any(text in str(cause) for text in _OUT_OF_MEMORY):
                raise MachineError("out of memory: use a smaller batch_size, or fewer runs at once.") from error
            cause = cause.__cause__ or cause.__context__
        raise


@lru_cache(maxsize=1)
def code_version() -> tuple[str, bool | None]:
    """The commit of the code and whether it is unchanged: $MAXGAIN_COMMIT, else that of its own git checkout.

    The variable is for a machine without the checkout: `git describe --always --abbrev=40 --exclude '*' --dirty`.
    """
    if commit := os.environ.get("MAXGAIN_COMMIT"):
        return commit.removesuffix("-dirty"), not commit.endswith("-dirty")
    git = ["git", "-C", str(Path(maxgain.__file__).parent)]
    is_ours = ["ls-files", "--error-unmatch", "__init__.py"]  # else it is the repository of an environment
    try:
        _, commit, changes = (
            subprocess.run([*git, *words], check=True, capture_output=True, text=True, timeout=10).stdout.strip()
            for words in (is_ours, ["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        )
    except (OSError, subprocess.SubprocessError):
        return "", None
    return commit, not changes
