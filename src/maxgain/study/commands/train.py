"""maxgain train: one run of a recipe, in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.progress import Progress
from rich.table import Table

from maxgain.errors import MissingExtraError

from ..recipes import Recipe
from ..runs import Result, Run, Watcher, perform
from ..screen import Common, Screen
from ..train import Training


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Train a network by a recipe, and leave config, metrics, weights and result in a folder."""

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    data: Path | None = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    out: Path | None = None
    """the run's folder (default: runs/ and what identifies the run)"""
    resume: bool = False
    """go on from the folder's checkpoint, to the same bits as if nothing had happened"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""
    checkpoint_seconds: float | None = None
    """save this often, also within an epoch, instead of after every epoch"""
    tensorboard: bool = False
    """also write the metrics for TensorBoard, into the run's folder"""


def run(options: Options, screen: Screen) -> Result:
    """Trains, with a progress bar, and shows the scores."""
    recipe = options.recipe
    out = options.out or default_folder(recipe)
    screen.show(f"{recipe.name}: {recipe.network}, {recipe.regulariser}, {recipe.epochs} epochs → {out}")
    with screen.progress() as progress, _board(out, options.tensorboard) as board:
        watcher = progress_watcher(progress, recipe, board)
        result = perform(
            recipe, Run(out, options.data, options.device, options.resume, options.checkpoint_seconds, watcher)
        )
    if result["note"]:
        screen.show(f"note: {result['note']}")
    screen.show(scores_table(result))
    return result


def default_folder(recipe: Recipe) -> Path:
    """A folder whose name says which run it is."""
    fold = "" if recipe.fold is None else f"-fold{recipe.fold}"
    return Path("runs") / f"{recipe.name}-{recipe.regulariser}{fold}-seed{recipe.seed}"


def progress_watcher(progress: Progress, recipe: Recipe, board: Any = None) -> Watcher:
    """Moves a bar by steps, and tells of each finished epoch."""
    task = progress.add_task("training", total=None, status="")

    def started(training: Training) -> None:
        steps = training.steps_per_epoch
        done = training.epoch * steps + int(training.position) // training.batch_size
        progress.update(task, total=recipe.epochs * steps, completed=done)

    def epoch_done(line: dict[str, Any]) -> None:
        held_out = line["validation_accuracy"]
        parts = [
            f"epoch {line['epoch']}",
            f"loss {line['train_loss']:.4f}",
            f"accuracy {line['train_accuracy']:.1%}",
            *([] if held_out is None else [f"held out {held_out:.1%}"]),
            f"largest gain {max(line['max_gain'].values()):.3g}",
        ]
        progress.update(task, status=", ".join(parts))
        if board is not None:
            _write(board, line)

    return Watcher(started, lambda training: progress.advance(task), epoch_done)


def scores_table(result: Result) -> Table:
    """Loss and accuracy on each part of the data."""
    table = Table(title=f"{result['recipe']}, {result['regulariser']}, {result['seconds']:.0f} s on {result['device']}")
    for column in ("", "accuracy", "loss (nats)", "largest gain"):
        table.add_column(column, justify="right" if column else "left")
    for part in ("train", "validation", "test"):
        if result[f"{part}_loss"] is None:
            continue
        gains = result["max_gain"].get(part)
        table.add_row(
            part,
            f"{result[f'{part}_accuracy']:.2%}",
            f"{result[f'{part}_loss']:.4f}",
            f"{max(gains.values()):.3f}" if gains else "",
        )
    return table


@contextmanager
def _board(out: Path, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("--tensorboard needs TensorBoard: pip install 'maxgain[tensorboard]'.") from error
    with SummaryWriter(str(out / "tensorboard")) as writer:
        yield writer


def _write(board: Any, line: dict[str, Any]) -> None:
    for part in ("train", "validation"):
        for what in ("loss", "accuracy"):
            if line[f"{part}_{what}"] is not None:
                board.add_scalar(f"{what}/{part}", line[f"{part}_{what}"], line["epoch"])
    for layer, gain in line["max_gain"].items():
        board.add_scalar(f"max_gain/{layer}", gain, line["epoch"])
