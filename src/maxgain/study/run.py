"""A run in a folder: config, metrics, checkpoint until it ends, then result and weights."""

from __future__ import annotations

import base64
import hashlib
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import maxgain
from maxgain import measure_gains, operator_norms
from maxgain.errors import CheckpointError, DataError, FileError, MeasurementWarning, RecipeError, RunError
from maxgain.lipschitz.norms import NormReport
from maxgain.measure import GainReport

from . import _files
from . import data as datasets
from .capture import stream_for
from .data import Dataset, Split
from .networks import NETWORKS, Builder
from .recipe import Recipe, run_key, to_json
from .regularisers import spell
from .result import GAIN_EPOCHS, RESULT, History, Metrics, Result, code_version, command_line
from .training import EVALUATION_BATCH, DivergedError, Score, Training, build_model, evaluate, gains, to_float, train

CONFIG, METRICS = "config.json", "metrics.jsonl"
CHECKPOINT, WEIGHTS = "checkpoint.safetensors", "model.safetensors"
GAIN_SAMPLE = 1000
"""How many training images the gains of an epoch are taken over, but at most one of sixteen: measuring an image takes a
third of the time of training on it on a CPU, and twice that time on a GPU."""
SMALL = 1_000_000
"""Parameters of a network that a CPU trains fastest with one thread."""
SAVING_SHARE = 0.02
"""How much of the time checkpoints may take."""
SAVING_SECONDS = 600.0
"""How long an epoch may go on without a checkpoint."""


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
            dataset = datasets.load(recipe.dataset, self.root, recipe.fold, recipe.image_size, recipe.cross_validation)
        elif recipe.image_size is not None and dataset.name not in datasets.DATASETS:
            raise DataError(f"{dataset.name} has images of one size.", field="image_size")
        elif recipe.cross_validation is not None and dataset.fold != recipe.fold:
            dataset = datasets.cross_validate(dataset, recipe.fold, recipe.cross_validation)
        elif recipe.fold != dataset.fold:
            raise DataError(f"{dataset.name} has no fold {recipe.fold}.", field="fold")
        return dataset if test else dataset.without_test()


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


class MachineError(RunError):
    """The disk is full, or memory ran out: nothing that says anything about the training."""


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
            raise RecipeError(f"the network in {self.folder} is your own: pass its function.", field="network")
        with torch.random.fork_rng(devices=[]):
            model = build_model(config.recipe, config.shape, config.classes, torch.device("cpu"), network)
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


def perform(
    recipe: Recipe,
    folder: str | Path,
    inputs: Inputs | None = None,
    *,
    device: str = "auto",
    test: bool = True,
    on_epoch: Callable[[Metrics], None] | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Train to the end, from wherever the folder's run stands, and return the run.

    Ctrl-C and SIGTERM save the run and raise `KeyboardInterrupt`; so does setting `stop`, for runs in threads. A run
    that diverged leaves a failed result and raises `DivergedError`. The caller's random numbers and threads are
    afterwards as they were.

    Args:
        recipe: What to compute.
        folder: Where the run is kept; the same call continues it. A folder of another run is refused.
        inputs: Where the data of recipes are, or data and a network of one's own.
        device: cpu, cuda, or auto.
        test: Whether the run is scored on the test part.
        on_epoch: Called after each epoch.
        stop: Asks the run to save itself and stop.
    """
    folder, recipe = Path(folder), replace(recipe, regulariser=spell(recipe.chosen))
    inputs = inputs or Inputs()
    dataset, run = inputs.load(recipe, test), Run(folder)
    with _stop_signals(stop) as stopping, _no_memory_errors(), _files.locked(folder):
        config = _expect_own(run, recipe, dataset.fingerprint)
        if (folder / RESULT).exists():
            result = run.result
            if result.status == "ok":
                return run
            if result.fault == "training":
                raise DivergedError(result.error)
        where = find_device(config.device if config and device == "auto" else device)
        if config and config.device != where.type and (folder / CHECKPOINT).exists():
            raise CheckpointError(f"{folder} was begun on {config.device}: continue it there.", field="device")
        with _isolated(where):
            training = Training(recipe, dataset, where, inputs.network)
            threads = config.threads if config else _threads(training)
            if where.type == "cpu":
                torch.set_num_threads(threads)
            about = Config(
                recipe=recipe,
                fingerprint=dataset.fingerprint,
                shape=dataset.shape,
                classes=len(dataset.classes),
                device=where.type,
                threads=threads,
                test=test,
                data=str(datasets.data_root(inputs.root).absolute()),
            )
            with _writing(folder):
                _files.write_json(folder / CONFIG, about)
            _Performance(folder, dataset, training, on_epoch, stopping).perform()
    return run


@dataclass
class _Performance:
    """A run that is under way."""

    folder: Path
    dataset: Dataset
    training: Training
    on_epoch: Callable[[Metrics], None] | None
    stopping: Callable[[], bool]
    lines: list[Metrics] = field(default_factory=list)
    saved: float = field(default_factory=time.monotonic)
    saving_took: float = 0.0

    def perform(self) -> None:
        """Train from the checkpoint, if there is one, to the result."""
        if (self.folder / CHECKPOINT).exists():
            self.lines = self._load_checkpoint()
        with _writing(self.folder):
            _files.write(self.folder / METRICS, b"".join(_files.encode(line) + b"\n" for line in self.lines))
        try:
            self._fit()
        except DivergedError as error:
            diverged = DivergedError(f"{str(error).removesuffix('.')}; {self._advice()}.")
            self._write_result(status="failed", fault="training", error=str(diverged))
            raise diverged from error
        self._conclude()
        with suppress(OSError):
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        if self.stopping():
            raise KeyboardInterrupt(f"{self.folder} is finished.")

    def _fit(self) -> None:
        """Train the epochs that are left, and save after each one, or after some where that would take too long."""
        training, began = self.training, time.monotonic()
        before = sum(line.seconds for line in self.lines)

        def after_step() -> None:
            if self.stopping():
                self._save()
                raise KeyboardInterrupt(f"{self.folder} is saved; the same command continues it.")
            if time.monotonic() - self.saved > max(SAVING_SECONDS, self.saving_took / SAVING_SHARE):
                self._save()

        for score in train(training, after_step):
            elapsed = before + time.monotonic() - began
            line = self._measure(score, elapsed - sum(line.seconds for line in self.lines))
            self.lines.append(line)
            with _writing(self.folder), (self.folder / METRICS).open("ab") as file:
                file.write(_files.encode(line) + b"\n")
            if time.monotonic() - self.saved > self.saving_took / SAVING_SHARE:
                self._save()
            if self.on_epoch is not None:
                self.on_epoch(line)

    def _measure(self, score: Score, seconds: float) -> Metrics:
        training = self.training
        held_out = None if training.held_out is None else evaluate(training.model, training.held_out)[0]
        sample = training.images[: min(GAIN_SAMPLE, -(-len(training.images) // 16))]
        quantiles = gains(training.model, sample, training.recipe.p)
        line = Metrics(
            epoch=training.epoch,
            learning_rate=training.recipe.learning_rate_at(training.epoch - 0.5),
            **score.named("train"),
            **(held_out.named("validation") if held_out else {}),
            max_gain={layer: row[-1] for layer, row in quantiles.items()},
            seconds=seconds,
        )
        return _files.decode(_files.encode(line), Metrics)  # as a resumed run reads it

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
            score, correct = evaluate(model, split)
            scores |= score.named(part)
            if part == "test":
                scores["correct"] = base64.b64encode(np.packbits(correct.cpu().numpy()).tobytes()).decode()
            if part != "validation" and (quantiles := gains(model, split.images, training.recipe.p)):
                scores["gains"][part] = quantiles
        weights = safetensors.torch.save(_copies(model.state_dict()))
        with _writing(self.folder):
            _files.write(self.folder / WEIGHTS, weights)
        self._write_result(status="ok", weights_sha256=hashlib.sha256(weights).hexdigest(), **scores)

    def _write_result(self, **outcome: Any) -> None:
        training, dataset = self.training, self.dataset
        commit, clean = code_version()
        on_gpu = training.device.type == "cuda"
        result = Result(
            key=run_key(training.recipe, dataset.fingerprint),
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
            command=command_line(),
            **outcome,
        )
        with _writing(self.folder):
            _files.write_json(self.folder / RESULT, result)

    def _save(self) -> None:
        """Write all that is needed to continue to the same bits: a file that is whole or not there."""
        started = time.monotonic()
        self.training.expect_finite()  # the last good state is worth more than the first bad one
        about = _About(key=self.training.recipe.key, fingerprint=self.dataset.fingerprint, history=self.lines)
        content = safetensors.torch.save(_copies(self.training.state()), {"about": _files.encode(about).decode()})
        with _writing(self.folder):
            _files.write(self.folder / CHECKPOINT, content)
        self.saved = time.monotonic()
        self.saving_took = self.saved - started

    def _load_checkpoint(self) -> list[Metrics]:
        path, training = self.folder / CHECKPOINT, self.training
        try:
            content = path.read_bytes()
            about = _files.decode(_header(content)["__metadata__"]["about"].encode(), _About)
            tensors = safetensors.torch.load(content)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{path} is damaged; remove it to start the run again.") from error
        if (about.key, about.fingerprint) != (training.recipe.key, self.dataset.fingerprint):
            raise CheckpointError(f"{path} is of another run; choose another folder.", field="out")
        try:
            training.load_state(tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not fit: another version of maxgain wrote it.") from error
        return about.history

    def _advice(self) -> str:
        """What to try after a run that diverged."""
        recipe = self.training.recipe
        known = {name: gain for name, gain in (self.lines[-1].max_gain if self.lines else {}).items() if gain}
        worst = max(known, key=lambda name: known[name], default=None)
        seen = "" if worst is None else f"the largest gain before was {known[worst]:.3g}, in layer {worst!r}; "
        bound = "maxgain" if recipe.gamma is None else "a smaller gamma"
        return f"{seen}try a learning_rate below {recipe.learning_rate_at(self.training.epoch):g}, or {bound}"


class _About(msgspec.Struct):
    """What a checkpoint holds beside its tensors."""

    key: str
    fingerprint: str
    history: list[Metrics]


def _header(content: bytes) -> Any:
    """The header of a safetensors file: its length in eight bytes, then JSON."""
    return msgspec.json.decode(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _expect_own(run: Run, recipe: Recipe, fingerprint: str) -> Config | None:
    """The folder's config, if there is one; refuses a folder of another recipe or other data."""
    config = run.config if (run.folder / CONFIG).exists() else None
    result = run.result if (run.folder / RESULT).exists() else None
    known: tuple[Config | Result | None, ...] = (config, result)
    for there in known:
        if there is None:
            continue
        if there.recipe.key != recipe.key:
            old, new = to_json(there.recipe), to_json(recipe)
            name = next((name for name in new if name != "name" and old[name] != new[name]), "recipe")
            raise CheckpointError(
                f"{run.folder} is of another recipe: {name} is {old.get(name)!r} there and {new.get(name)!r} here; "
                "choose another folder.",
                field="out",
            )
        if there.fingerprint != fingerprint:
            raise CheckpointError(
                f"{run.folder} is of other data; pass the same data, or choose another folder.", field="out"
            )
    return config


def _threads(training: Training) -> int:
    """How many threads of a CPU the run uses, whoever calls: another number would give other bits."""
    size = sum(parameter.numel() for parameter in training.model.parameters())
    return 1 if size <= SMALL or training.device.type != "cpu" else torch.get_num_threads()


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
    asked = threading.Event()

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
        yield lambda: asked.is_set() or (stop is not None and stop.is_set())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise MachineError(f"cannot write in {folder}: {reason}. The same command continues the run.") from error


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""How torch and CUDA's libraries say it where they have no exception for it."""


@contextmanager
def _no_memory_errors() -> Iterator[None]:
    """Turn running out of memory into `MachineError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None:  # a failing capture hides what made it fail
            if isinstance(cause, MemoryError | torch.OutOfMemoryError) or any(
                text in str(cause) for text in _OUT_OF_MEMORY
            ):
                raise MachineError("out of memory: use a smaller batch_size, or fewer runs at once.") from error
            cause = cause.__cause__ or cause.__context__
        raise


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: safetensors refuses those that share it, as tied weights do."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
