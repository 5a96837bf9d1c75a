"""A run in a folder: config.json, metrics.jsonl, model.safetensors and result.json, and a checkpoint until it ends."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import maxgain
from maxgain import operator_norms
from maxgain.errors import RunError
from maxgain.measure import GainReport

from . import checkpoint
from .data import table as datasets
from .data.splits import Dataset, Split
from .evaluate import Score, evaluate, gains, largest, to_float
from .files import strict, sweep, write_bytes, write_json, write_text
from .locks import alone_in
from .recipes import Recipe, from_json, to_json
from .regularisers import numbers
from .train import DivergedError, Epoch, Training, train
from .wording import clause

CHECKPOINT = "checkpoint.safetensors"
NORM_TOLERANCE = 1e-2
"""How well the ℓ2 operator norms in a result are known: enough to see gains beside them; 'inspect' does better."""
GAINS_SAMPLE = 1000
"""How many training images the per-epoch maximum gains are taken over."""

Result = dict[str, Any]


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Ctrl-C was pressed; the run is saved."""


@dataclass(frozen=True)
class Watcher:
    """Whom to tell how a run goes."""

    started: Callable[[Training], None] = lambda training: None
    stepped: Callable[[Training], None] = lambda training: None
    epoch_done: Callable[[dict[str, Any]], None] = lambda metrics: None


@dataclass(frozen=True)
class Run:
    """Where a run reads, writes and computes: what is no part of its recipe."""

    out: Path
    data: Path | None = None
    device: str = "auto"
    resume: bool = False
    checkpoint_seconds: float | None = None
    """How often to save; None saves after every epoch."""
    watcher: Watcher = field(default_factory=Watcher)


def perform(recipe: Recipe, run: Run, dataset: Dataset | None = None) -> Result:
    """Trains to the end, from the checkpoint if the run is to be resumed, and returns the result that it writes."""
    finished, saved = run.out / "result.json", run.out / CHECKPOINT
    if not run.resume and (finished.exists() or saved.exists()):
        raise RunError(f"{run.out} holds a run already: go on with --resume, or choose another --out.")
    result = _read_finished(run.out, recipe) if finished.exists() else _carry_out(recipe, run, dataset)
    saved.unlink(missing_ok=True)
    return result


def _carry_out(recipe: Recipe, run: Run, dataset: Dataset | None) -> Result:
    if run.checkpoint_seconds is not None and not run.checkpoint_seconds >= 0:
        raise RunError(f"checkpoint-seconds must not be negative, but is {run.checkpoint_seconds}.")
    device = chosen_device(run.device)
    dataset = dataset or load_data(recipe, run.data)
    training = Training(recipe, dataset, device)
    with alone_in(run.out):
        return _trained(training, dataset, run)


def _trained(training: Training, dataset: Dataset, run: Run) -> Result:
    history: list[dict[str, Any]] = []
    if run.resume and (run.out / CHECKPOINT).exists():
        history = checkpoint.load(run.out / CHECKPOINT, training)
    # Written before the first step, so that a folder that cannot be written to is known of at once.
    sweep(run.out)
    write_json(run.out / "config.json", to_json(training.recipe))
    write_text(run.out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history))
    run.watcher.started(training)
    _train(training, dataset, run, history)
    try:
        return _conclude(training, dataset, run, history)
    except KeyboardInterrupt:
        raise Interrupted(str(run.out)) from None


def _train(training: Training, dataset: Dataset, run: Run, history: list[dict[str, Any]]) -> None:
    before = sum(line["seconds"] for line in history)
    began = saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        training.expect_finite()  # the last good state is worth more than the first bad one
        with _telling_how_to_go_on():
            checkpoint.save(run.out / CHECKPOINT, training, history)
        saved = time.monotonic()

    with _deferred_interrupt() as interrupted:

        def after_step() -> None:
            run.watcher.stepped(training)
            due = run.checkpoint_seconds is not None and time.monotonic() - saved >= run.checkpoint_seconds
            if due or interrupted():
                save()
            if interrupted():
                raise Interrupted(str(run.out))

        def after_epoch(epoch: Epoch) -> None:
            elapsed = before + time.monotonic() - began
            line = _metrics(training, dataset, epoch, elapsed - sum(line["seconds"] for line in history))
            history.append(line)
            with _telling_how_to_go_on():
                _append(run.out / "metrics.jsonl", line)
            due = run.checkpoint_seconds is None or epoch.number == training.recipe.epochs
            if due:
                save()
            run.watcher.epoch_done(line)
            if interrupted():
                if not due:
                    save()
                raise Interrupted(str(run.out))

        try:
            for epoch in train(training, after_step):
                after_epoch(epoch)
        except DivergedError as error:
            raise RunError(f"{clause(error)}; {_largest_gain(training, history)}; {_calmer(training)}.") from error


def _metrics(training: Training, dataset: Dataset, epoch: Epoch, seconds: float) -> dict[str, Any]:
    """What is kept of an epoch; the gains are those of the first training images, in evaluation mode."""
    held_out = None
    if training.recipe.train_on == "train":
        held_out = evaluate(training.model, dataset.validation.to(training.device))
    line = {
        "epoch": epoch.number,
        "learning_rate": epoch.learning_rate,
        "train_loss": epoch.train.loss,
        "train_accuracy": epoch.train.accuracy,
        **_scores("validation", held_out),
        "max_gain": largest(_sample_gains(training).quantiles()),
        "seconds": seconds,
    }
    kept: dict[str, Any] = strict(line)
    return kept


def _sample_gains(training: Training) -> GainReport:
    sample = Split(training.images[:GAINS_SAMPLE], training.labels[:GAINS_SAMPLE])
    return gains(training.model, sample, training.recipe.p)


def _largest_gain(training: Training, history: list[dict[str, Any]]) -> str:
    """Where to look: the layer of the largest gain when gains were last taken, or the first to have none any more."""
    if not history:
        lost = [name for name, count in _sample_gains(training).dropped.items() if count]
        return f"the gain of layer {lost[0]!r} is the first that is not finite" if lost else "all gains are finite"
    known = {name: gain for name, gain in history[-1]["max_gain"].items() if gain is not None}
    worst = max(known, key=lambda name: known[name])
    return f"after epoch {len(history)} the largest gain was {known[worst]:.3g}, in layer {worst!r}"


def _calmer(training: Training) -> str:
    """What to try after a run that diverged."""
    rate = training.recipe.learning_rate_at(training.epoch)
    bound = "a tighter --gamma" if "maxgain" in numbers(training.chosen) else "maxgain in --regulariser"
    return f"try a lower --learning-rate (it was {rate:g}) or {bound}"


def _conclude(training: Training, dataset: Dataset, run: Run, history: list[dict[str, Any]]) -> Result:
    """Scores the trained model on whole splits, once, and writes what the run leaves behind."""
    recipe, model = training.recipe, training.model
    parts = {"train": Split(training.images, training.labels)}
    if len(dataset.test):  # whoever tunes has none
        parts["test"] = dataset.test.to(training.device)
    quantiles = {part: gains(model, split, recipe.p).quantiles() for part, split in parts.items()}
    if recipe.train_on == "train":
        parts["validation"] = dataset.validation.to(training.device)
    scores = {part: evaluate(model, split) for part, split in parts.items()}
    values = numbers(training.chosen)
    result: Result = strict(
        {
            "recipe": recipe.name,
            "regulariser": recipe.regulariser,
            "gamma": values.get("maxgain"),
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
            "seconds": sum(line["seconds"] for line in history),
            "device": _device_name(training.device),
            "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "maxgain": maxgain.__version__,
            "command": shlex.join(["maxgain", *sys.argv[1:]]),
            "note": dataset.note,
            "config": to_json(recipe),
        }
    )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_bytes(run.out / "model.safetensors", safetensors.torch.save(tensors))
    write_json(run.out / "result.json", result)
    return result


def load_data(recipe: Recipe, root: Path | None, load: Callable[..., Dataset] = datasets.load) -> Dataset:
    """The data set that a recipe asks for; `load` may know it already."""
    return load(recipe.dataset, root, recipe.fold, recipe.image_size, recipe.cross_validation)


def read_config(folder: Path) -> Recipe:
    """The recipe of a run's folder."""
    return from_json(_read_json(folder / "config.json", folder))


def read_result(folder: Path) -> Result:
    """The result of a finished run."""
    result: Result = _read_json(folder / "result.json", folder)
    return result


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """A run's epochs so far; a last line that a killed process left incomplete is no epoch."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} holds no readable metrics.jsonl: is it the folder of a run?") from error


def load_model(folder: Path, dataset: Dataset, device: torch.device) -> torch.nn.Module:
    """The trained model of a finished run."""
    training = Training(read_config(folder), dataset, device)
    try:
        training.model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        raise RunError(f"{folder} holds no readable model.safetensors: is the run finished?") from error
    for constraint in training.constraints:
        constraint.detach()
    return training.model


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


def _read_finished(folder: Path, recipe: Recipe) -> Result:
    checkpoint.expect_same_recipe(folder, _read_json(folder / "config.json", folder), to_json(recipe))
    return read_result(folder)


def _read_json(path: Path, folder: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{folder} has no {path.name}: it is not the folder of a finished run.") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def _scores(part: str, score: Score | None) -> dict[str, float | None]:
    loss, accuracy = (score.loss, score.accuracy) if score else (None, None)
    return {f"{part}_loss": loss, f"{part}_accuracy": accuracy}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}.") from error


@contextlib.contextmanager
def _telling_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise RunError(f"{clause(error)}; nothing saved before is lost: --resume goes on from there.") from error


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C into a question that can be asked between two steps; a second Ctrl-C stops at once."""
    pressed = False

    def handler(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread, where no signal arrives
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
