"""A run in a folder: config, metrics, weights, predictions and result, and a checkpoint until it ends."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import cast

import safetensors.torch
import torch

import maxgain
from maxgain import operator_norms
from maxgain.errors import DataError, RunError
from maxgain.measure import GainReport

from . import checkpoint, files, memory, predictions, signals
from .capture import Speed, setting_up, stream_for
from .data import table as datasets
from .data.splits import Dataset, Split, cross_validated
from .evaluate import answers, evaluate, gains, largest
from .files import alone_in, write_bytes, write_json, write_text
from .ranks import ALONE, Ranks
from .recipes import Recipe, from_json, run_key, run_name, to_json
from .regularisers import spelt
from .run_files import (
    CHECKPOINT,
    CONFIG,
    FILES,
    METRICS,
    PREDICTIONS,
    RESULT,
    WEIGHTS,
    Begun,
    apart,
    data_of,
    expect_same_data,
    expect_same_recipe,
    read_begun,
    read_result,
)
from .schema import Metrics, Result
from .training import DivergedError, Epoch, Score, Training, to_float, train
from .wording import clause, counted

RUNS, TUNING = "runs", "tuning"
"""Where a folder has many runs, and those on which numbers are chosen."""
NORM_TOLERANCE = 1e-2
"""How well the ℓ2 operator norms in a result are known: enough to see gains beside them; 'inspect' does better."""
SHARE_OF_SAVING = 0.05
"""How much of the time checkpoints may take where nobody says how often to save."""
BRIEF = 0.25
"""Seconds; what takes no longer to save is saved after every epoch."""
GAINS_SAMPLE = 1000
"""How many training images the per-epoch maximum gains are taken over, but at most one of sixteen: to measure an image
takes a third of the time that training on it takes on a CPU, and twice that time on a GPU."""


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Somebody asked the program to stop, by Ctrl-C or another signal; the run is saved."""


@dataclass(frozen=True)
class Place:
    """Where a run, or a group of runs, reads, writes and computes."""

    folder: Path
    data: Path | None = None
    device: str = "auto"
    checkpoint_seconds: float | None = None
    """How often to save; None saves after every epoch, or after some where that would take too long."""
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
        return replace(self, folder=self.folder / TUNING, has_test=False)

    @property
    def chosen_device(self) -> torch.device:
        """The device itself."""
        return chosen_device(self.device)

    def of(self, recipe: Recipe, fingerprint: str) -> Place:
        """The place of one of many runs here: another recipe, or other data, has another one."""
        name = f"{run_name(recipe)}-{run_key(recipe, fingerprint)}"
        return replace(self, folder=self.folder / RUNS / name)

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
        raise DataError(f"{own.name} has no folds, so there is no fold {recipe.fold}.")
    return own


def chosen_device(name: str) -> torch.device:
    """'auto' is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.suppress(RuntimeError, AssertionError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            torch.empty(0, device=device)
            return device
    there = "'cpu', 'cuda' or 'auto'" if torch.cuda.is_available() else "'cpu' or 'auto', as torch finds no GPU"
    raise RunError(f"there is no device {name!r} to train on here: use {there}.")


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
    folder: Path
    history: list[Metrics]

    @cached_property
    def held_out(self) -> Split | None:
        """What every epoch is scored on, beside the model."""
        is_held_out = self.training.recipe.train_on == "train"
        return self.dataset.validation.to(self.training.device) if is_held_out else None


def perform(
    recipe: Recipe,
    place: Place,
    dataset: Dataset | None = None,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    ranks: Ranks = ALONE,
) -> Result:
    """Trains to the end, from the checkpoint if the run is to be resumed, and returns the result that it writes.

    Of several ranks the first does all this, and the others train their shares beside it.
    """
    try:
        if ranks.count > 1:
            return _perform_as_one_of(ranks, recipe, place, dataset, resume, watcher or Watcher())
        task = _look(recipe, place, dataset, resume)
        if not task.is_finished:
            device = chosen_device(task.place.device)
            with stream_for(device) if device.type == "cuda" else contextlib.nullcontext():
                _lead(_prepare(task, dataset, device, watcher or Watcher()), resume)
        return _ended(place.folder)
    except (MemoryError, RuntimeError) as error:
        raise memory.explained(error) from error


def _perform_as_one_of(
    ranks: Ranks, recipe: Recipe, place: Place, dataset: Dataset | None, resume: bool, watcher: Watcher
) -> Result:
    with ranks.joined(lambda: chosen_device(place.device)):
        task = ranks.first_says(lambda: _look(recipe, place, dataset, resume))
        if not task.is_finished:
            device = ranks.own(chosen_device(task.place.device))
            with stream_for(device):
                run = ranks.ready(lambda: _prepare(task, dataset, device, watcher, ranks))
                ranks.expect_same("data", run.training.fingerprint)
                _lead(run, resume) if ranks.is_first else _follow(run)
        return ranks.first_says(lambda: _ended(place.folder))


@dataclass(frozen=True)
class _Task:
    """What there is to do: as it was asked for, or as a folder says that is taken up."""

    recipe: Recipe
    place: Place
    is_finished: bool
    begun: Begun | None = None
    """What the folder says, if the run was begun before."""


def _look(recipe: Recipe, place: Place, dataset: Dataset | None, resume: bool) -> _Task:
    """What the folder says about the run; refused if it computes something else, or is on other data."""
    folder = place.folder
    is_finished = (folder / RESULT).exists()
    if not resume and (is_finished or (folder / CHECKPOINT).exists()):
        raise RunError(f"{folder} holds a run already: go on with --resume, or choose another --out.")
    if not resume or not (folder / CONFIG).exists():
        return _Task(recipe, place, is_finished)
    begun = read_begun(folder)
    expect_same_recipe(folder, begun.recipe, recipe)
    if is_finished:
        expect_same_recipe(folder / RESULT, from_json(read_result(folder)["config"]), begun.recipe)
    if dataset is not None:
        expect_same_data(folder, begun.fingerprint, dataset.fingerprint)
    elif is_finished and place.data is not None:
        data_of(begun, place)
    return _Task(begun.recipe, begun.resumed(place), is_finished, begun)


def _lead(run: _Run, resume: bool) -> None:
    """What the first rank does, which is mostly the only one."""
    training, data = run.training, datasets.data_root(run.place.data).absolute()
    with alone_in(run.folder, *FILES):
        if resume and (run.folder / CHECKPOINT).exists():
            run.history = checkpoint.load(run.folder / CHECKPOINT, training)
        if training.ranks.count > 1:
            training.ranks.share_state(training)
        # Before the first step, which shows at once whether the folder can be written in.
        about = {"fingerprint": training.fingerprint, "data": str(data), "device": training.device.type}
        write_json(run.folder / CONFIG, files.sealed(to_json(training.recipe) | about))
        write_text(run.folder / METRICS, "".join(files.encode(line) + "\n" for line in run.history))
        run.watcher.started(training)
        _fit(run)
        try:
            _conclude(run)
        except KeyboardInterrupt:
            raise Interrupted(str(run.folder)) from None


def _follow(run: _Run) -> None:
    """What the other ranks do: train beside the first one until it ends, which is also how they hear of signals."""
    run.training.ranks.share_state(run.training)
    with signals.deferred():
        for _ in train(run.training, speed=run.place.speed):
            pass


def _ended(folder: Path) -> Result:
    with contextlib.suppress(OSError):  # it takes up room, and does no harm
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return read_result(folder)


def _prepare(
    task: _Task, dataset: Dataset | None, device: torch.device, watcher: Watcher, ranks: Ranks = ALONE
) -> _Run:
    """Everything that can go wrong before anything is written."""
    place = task.place
    if place.checkpoint_seconds is not None and not place.checkpoint_seconds >= 0:
        raise RunError(f"checkpoint-seconds must not be negative, but is {place.checkpoint_seconds}.")
    if dataset is None:  # the data of a run that was begun are those that it began with
        dataset = place.load_data(task.recipe) if task.begun is None else data_of(task.begun, place)
    training = Training(task.recipe, dataset, device, ranks)
    return _Run(place, dataset, training, watcher, place.folder, [])


def _fit(run: _Run) -> None:
    """Trains the epochs that are left, and saves as often as asked for."""
    training, place = run.training, run.place
    before = sum(line["seconds"] for line in run.history)
    began = saved = time.monotonic()
    took = 0.0

    def save() -> None:
        nonlocal saved, took
        started = time.monotonic()
        training.expect_finite()  # the last good state is worth more than the first bad one
        with _telling_how_to_go_on():
            checkpoint.save(run.folder / CHECKPOINT, training, run.history)
        saved = time.monotonic()
        took = saved - started

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
            is_affordable = took < BRIEF or time.monotonic() - saved > took / SHARE_OF_SAVING
            due = (place.checkpoint_seconds is None and is_affordable) or epoch.number == training.recipe.epochs
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
            raise DivergedError(f"{clause(error)}; {_largest_gain(run)}; {_remedy(training)}.") from error


def _conclude(run: _Run) -> None:
    """Scores the trained model on whole splits, once, and writes what the run leaves behind."""
    training, model = run.training, run.training.model
    recipe = training.recipe
    parts = {"train": Split(training.images, training.labels)}
    if len(run.dataset.test):
        parts["test"] = run.dataset.test.to(training.device)
    quantiles = {part: gains(model, split, recipe.p).quantiles() for part, split in parts.items()}
    if run.held_out is not None:
        parts["validation"] = run.held_out
    said = {part: answers(model, split) for part, split in parts.items()}
    scores = {part: answer.score for part, answer in said.items()}
    kept = said["test"].predictions if "test" in said else None
    weights = safetensors.torch.save(apart(model.state_dict()))
    with setting_up:  # nothing can be compiled meanwhile
        norms = operator_norms(model, to_float(training.images[:1]), tolerance=NORM_TOLERANCE).norms
    result = {
        "key": run_key(recipe, training.fingerprint),
        "fingerprint": training.fingerprint,
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
        "operator_norms": norms,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "metrics_sha256": files.checksum(run.history),
        "predictions_sha256": kept and kept.sha256,
        "seconds": sum(line["seconds"] for line in run.history),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(training.device),
        "machine": _machine(training.ranks),
        "torch": torch.__version__,
        "maxgain": maxgain.__version__,
        "command": shlex.join(["maxgain", *sys.argv[1:]]),
        "note": run.dataset.note,
        "config": to_json(recipe),
    }
    if kept is not None:
        predictions.write(run.folder / PREDICTIONS, kept)
    write_bytes(run.folder / WEIGHTS, weights)
    write_json(run.folder / RESULT, files.sealed(result))


def _metrics(run: _Run, epoch: Epoch, seconds: float) -> Metrics:
    training = run.training
    line = {
        "epoch": epoch.number,
        "learning_rate": epoch.learning_rate,
        **_scores("train", epoch.train),
        **_scores("validation", None if run.held_out is None else evaluate(training.model, run.held_out)),
        "max_gain": largest(_sample_gains(training).quantiles()),
        "seconds": seconds,
    }
    return cast("Metrics", files.revived(files.plain(line)))


def _sample_gains(training: Training) -> GainReport:
    count = min(GAINS_SAMPLE, -(-len(training.labels) // 16))
    sample = Split(training.images[:count], training.labels[:count])
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


def _scores(part: str, score: Score | None) -> dict[str, float | None]:
    loss, accuracy = (score.loss, score.accuracy) if score else (None, None)
    return {f"{part}_loss": loss, f"{part}_accuracy": accuracy}


def _machine(ranks: Ranks) -> str:
    beside = f", {ranks.count} ranks" if ranks.count > 1 else ""
    return f"{platform.system()} {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}{beside}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _append(path: Path, line: Metrics) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(files.encode(line) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error


@contextlib.contextmanager
def _telling_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise RunError(f"{clause(error)}; nothing saved before is lost: --resume goes on from there.") from error
