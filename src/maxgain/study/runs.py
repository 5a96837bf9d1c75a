"""A run in a folder: config.json, metrics.jsonl, model.safetensors and result.json, and a checkpoint until it ends."""

from __future__ import annotations

import contextlib
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

import maxgain
from maxgain import operator_norms
from maxgain.errors import RunError
from maxgain.measure import GainReport

from . import checkpoint, codec, memory, signals
from .capture import Speed, stream_for
from .data import table as datasets
from .data.splits import Dataset, Split
from .evaluate import Score, evaluate, gains, largest, to_float
from .files import write_bytes, write_json, write_text
from .locks import alone_in
from .recipes import Recipe, from_json, key, run_name, to_json
from .regularisers import spelt
from .schema import Metrics, Result
from .train import DivergedError, Epoch, Training, build_model, train, trained_on
from .wording import clause

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
WEIGHTS, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
FILES = (CONFIG, METRICS, RESULT, WEIGHTS, CHECKPOINT)
NORM_TOLERANCE = 1e-2
"""How well the ℓ2 operator norms in a result are known: enough to see gains beside them; 'inspect' does better."""
GAINS_SAMPLE = 1000
"""How many training images the per-epoch maximum gains are taken over."""


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Somebody asked the program to stop, by Ctrl-C or another signal; the run is saved."""


@dataclass(frozen=True)
class Place:
    """Where a run, or a group of runs, reads, writes and computes: nothing that decides what comes out."""

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

    @property
    def results(self) -> Path:
        """The folder of the records, where there are many runs."""
        return self.records or self.folder / "results"

    @property
    def for_tuning(self) -> Place:
        """Beside runs whose scores are compared, a place for those that choose their numbers."""
        return replace(self, folder=self.folder / "tuning", has_test=False)

    def of(self, recipe: Recipe) -> Place:
        """The place of one of many runs here."""
        return replace(self, folder=self.folder / "runs" / f"{run_name(recipe)}-{key(recipe)}")


@dataclass(frozen=True)
class Watcher:
    """Whom to tell how a run goes."""

    started: Callable[[Training], None] = lambda training: None
    stepped: Callable[[Training], None] = lambda training: None
    epoch_done: Callable[[Metrics], None] = lambda metrics: None


@dataclass
class _Run:
    """A run that is under way."""

    place: Place
    dataset: Dataset
    training: Training
    watcher: Watcher
    history: list[Metrics]

    @property
    def folder(self) -> Path:
        return self.place.folder


@memory.in_words()
def perform(
    recipe: Recipe,
    place: Place,
    dataset: Dataset | None = None,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Result:
    """Trains to the end, from the checkpoint if the run is to be resumed, and returns the result that it writes."""
    folder = place.folder
    finished, saved = folder / RESULT, folder / CHECKPOINT
    if not resume and (finished.exists() or saved.exists()):
        raise RunError(f"{folder} holds a run already: go on with --resume, or choose another --out.")
    if finished.exists():
        checkpoint.expect_same_recipe(folder, read_config(folder), recipe)
    else:
        with stream_for(chosen_device(place.device)):
            run = _prepare(recipe, place, dataset, watcher or Watcher())
            with alone_in(folder, *FILES):
                _begin(run, resume)
                _fit(run)
                try:
                    _conclude(run)
                except KeyboardInterrupt:
                    raise Interrupted(str(folder)) from None
    with contextlib.suppress(OSError):  # it takes up room, and does no harm
        saved.unlink(missing_ok=True)
    return read_result(folder)


def _prepare(recipe: Recipe, place: Place, dataset: Dataset | None, watcher: Watcher) -> _Run:
    """Everything that can go wrong before anything is written."""
    if place.checkpoint_seconds is not None and not place.checkpoint_seconds >= 0:
        raise RunError(f"checkpoint-seconds must not be negative, but is {place.checkpoint_seconds}.")
    device = chosen_device(place.device)
    dataset = dataset or load_data(recipe, place.data)
    return _Run(place, dataset, Training(recipe, dataset, device), watcher, [])


def _begin(run: _Run, resume: bool) -> None:
    """Takes up the checkpoint, and writes before the first step, which shows at once whether the folder can be."""
    if resume and (run.folder / CHECKPOINT).exists():
        run.history = checkpoint.load(run.folder / CHECKPOINT, run.training)
    write_json(run.folder / CONFIG, to_json(run.training.recipe))
    write_text(run.folder / METRICS, "".join(codec.encode(line) + "\n" for line in run.history))
    run.watcher.started(run.training)


def _fit(run: _Run) -> None:
    """Trains the epochs that are left, and saves as often as asked for."""
    training, place = run.training, run.place
    before = sum(line["seconds"] for line in run.history)
    began = saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        training.expect_finite()  # the last good state is worth more than the first bad one
        with _telling_how_to_go_on():
            checkpoint.save(run.folder / CHECKPOINT, training, run.history)
        saved = time.monotonic()

    with signals.deferred() as interrupted:

        def after_step() -> None:
            run.watcher.stepped(training)
            due = place.checkpoint_seconds is not None and time.monotonic() - saved >= place.checkpoint_seconds
            if due or interrupted():
                save()
            if interrupted():
                raise Interrupted(str(run.folder))

        def after_epoch(epoch: Epoch) -> None:
            elapsed = before + time.monotonic() - began
            line = _metrics(run, epoch, elapsed - sum(line["seconds"] for line in run.history))
            run.history.append(line)
            with _telling_how_to_go_on():
                _append(run.folder / METRICS, line)
            due = place.checkpoint_seconds is None or epoch.number == training.recipe.epochs
            if due:
                save()
            run.watcher.epoch_done(line)
            if interrupted():
                if not due:
                    save()
                raise Interrupted(str(run.folder))

        try:
            for epoch in train(training, after_step, place.speed):
                after_epoch(epoch)
        except DivergedError as error:
            raise RunError(f"{clause(error)}; {_largest_gain(run)}; {_remedy(training)}.") from error


def _conclude(run: _Run) -> None:
    """Scores the trained model on whole splits, once, and writes what the run leaves behind."""
    training, model = run.training, run.training.model
    recipe = training.recipe
    parts = {"train": Split(training.images, training.labels)}
    if len(run.dataset.test):
        parts["test"] = run.dataset.test.to(training.device)
    quantiles = {part: gains(model, split, recipe.p).quantiles() for part, split in parts.items()}
    if recipe.train_on == "train":
        parts["validation"] = run.dataset.validation.to(training.device)
    scores = {part: evaluate(model, split) for part, split in parts.items()}
    result = {
        "key": key(recipe),
        "recipe": recipe.name,
        "regulariser": spelt(recipe.chosen),
        "gamma": recipe.gamma,
        "p": recipe.p,
        "seed": recipe.seed,
        "fold": recipe.fold,
        "epochs": recipe.epochs,
        **_scores("train", scores["train"]),
        **_scores("validation", scores.get("validation")),
        **_scores("test", scores.get("test")),
        "max_gain": {part: largest(rows) for part, rows in quantiles.items()},
        "gain_quantiles": quantiles,
        "operator_norms": operator_norms(model, to_float(training.images[:1]), tolerance=NORM_TOLERANCE).norms,
        "seconds": sum(line["seconds"] for line in run.history),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(training.device),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "maxgain": maxgain.__version__,
        "command": shlex.join(["maxgain", *sys.argv[1:]]),
        "note": run.dataset.note,
        "config": to_json(recipe),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_bytes(run.folder / WEIGHTS, safetensors.torch.save(tensors))
    write_json(run.folder / RESULT, result)


def _metrics(run: _Run, epoch: Epoch, seconds: float) -> Metrics:
    training = run.training
    held_out = None
    if training.recipe.train_on == "train":
        held_out = evaluate(training.model, run.dataset.validation.to(training.device))
    line = {
        "epoch": epoch.number,
        "learning_rate": epoch.learning_rate,
        **_scores("train", epoch.train),
        **_scores("validation", held_out),
        "max_gain": largest(_sample_gains(training).quantiles()),
        "seconds": seconds,
    }
    return cast("Metrics", codec.revived(codec.plain(line)))


def _sample_gains(training: Training) -> GainReport:
    sample = Split(training.images[:GAINS_SAMPLE], training.labels[:GAINS_SAMPLE])
    return gains(training.model, sample, training.recipe.p)


def _largest_gain(run: _Run) -> str:
    """Where to look: the layer of the largest gain when gains were last taken, or the first to have none any more."""
    if not run.history:
        lost = [name for name, count in _sample_gains(run.training).dropped.items() if count]
        return f"the gain of layer {lost[0]!r} is the first that is not finite" if lost else "all gains are finite"
    known = {name: gain for name, gain in run.history[-1]["max_gain"].items() if gain is not None}
    worst = max(known, key=lambda name: known[name])
    return f"after epoch {len(run.history)} the largest gain was {known[worst]:.3g}, in layer {worst!r}"


def _remedy(training: Training) -> str:
    """What to try after a run that diverged."""
    rate = training.recipe.learning_rate_at(training.epoch)
    bound = "maxgain in --regulariser" if training.recipe.gamma is None else "a tighter --gamma"
    return f"try a lower --learning-rate (it was {rate:g}) or {bound}"


# What was left behind


@dataclass(frozen=True)
class FinishedRun:
    """A run that was trained to the end, with its model and the data that it was trained and tested on."""

    recipe: Recipe
    model: torch.nn.Module
    parts: dict[str, Split]
    """'train' and 'test', where the model is."""

    @property
    def title(self) -> str:
        """What the run is called above a table or a figure."""
        return f"{self.recipe.name}, {self.recipe.regulariser}"


def open_run(place: Place) -> FinishedRun:
    """The finished run in a folder."""
    recipe, device = read_config(place.folder), chosen_device(place.device)
    dataset = load_data(recipe, place.data)
    model = load_model(place.folder, dataset, device)
    parts = {"train": trained_on(recipe, dataset), "test": dataset.test}
    return FinishedRun(recipe, model, {part: split.to(device) for part, split in parts.items()})


def load_data(recipe: Recipe, root: Path | None, load: Callable[..., Dataset] = datasets.load) -> Dataset:
    """The data set that a recipe asks for; `load` may know it already."""
    return load(recipe.dataset, root, recipe.fold, recipe.image_size, recipe.cross_validation)


def load_model(folder: Path, dataset: Dataset, device: torch.device) -> torch.nn.Module:
    """The trained model of a finished run."""
    model = build_model(read_config(folder), dataset, device)
    try:
        model.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        raise RunError(f"{folder} holds no readable {WEIGHTS}: is the run finished?") from error
    return model


def read_config(folder: Path) -> Recipe:
    """The recipe of a run's folder."""
    return from_json(_read_json(folder / CONFIG, folder))


def read_result(folder: Path) -> Result:
    """The result of a finished run."""
    result: Result = _read_json(folder / RESULT, folder)
    return result


def read_metrics(folder: Path) -> list[Metrics]:
    """A run's epochs so far; a last line that a killed process left incomplete is no epoch."""
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
        return [codec.decode(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} holds no readable {METRICS}: is it the folder of a run?") from error


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


def _read_json(path: Path, folder: Path) -> Any:
    try:
        return codec.decode(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{folder} has no {path.name}: it is not the folder of a finished run.") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def _scores(part: str, score: Score | None) -> dict[str, float | None]:
    loss, accuracy = (score.loss, score.accuracy) if score else (None, None)
    return {f"{part}_loss": loss, f"{part}_accuracy": accuracy}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _append(path: Path, line: Metrics) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(codec.encode(line) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error


@contextlib.contextmanager
def _telling_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise RunError(f"{clause(error)}; nothing saved before is lost: --resume goes on from there.") from error
