"""maxgain train: one run of a recipe, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.progress import Progress

from maxgain.errors import MissingExtraError, RunError

from ..capture import Speed
from ..cost import LONG, SLOW, STEP_OVERHEAD
from ..ranks import HERE
from ..recipes import Recipe, run_name
from ..regularisers import spelt, with_gamma
from ..run_files import CONFIG, FILES, RESULT, read_begun
from ..runs import Place, Watcher, perform
from ..schema import Metrics, Result, score
from ..trained import largest, scores_table
from ..training import Training
from .patience import warn_of_one
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain train digits --regulariser maxgain --gamma 2": "about a minute on a CPU, and nothing to download",
    "maxgain train cifar10 --regulariser maxgain=2+batchnorm --data ~/data": "a row of the paper; minutes on an H200",
    "maxgain train --resume runs/cifar10-maxgain=2+batchnorm-seed0": "go on with it after it was stopped",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Train a network by a recipe, and leave config, metrics, weights and result in a folder.

    'torchrun --nproc-per-node N -m maxgain train ...' trains the same network on N ranks, each with its share of every
    batch.
    """

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    gamma: float | None = None
    """the bound of maxgain where its number is left out (default: 2)"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    out: Path | None = None
    """the run's folder (default: runs/RECIPE-REGULARISER-seedSEED)"""
    resume: bool = False
    """go on with the run in the folder, to the same bits as if nothing had happened; 'maxgain train --resume FOLDER' is
    enough, as the folder knows the options"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""
    checkpoint_seconds: float | None = None
    """save this often, within an epoch too (default: after every epoch; a large network, which takes longer to save,
    after some of them)"""
    graph: bool = True
    """on a GPU, capture the whole step once and replay it; without it one can look inside a step"""
    compile: bool = True
    """on a GPU, compile the network if the run is long enough to earn it"""
    tensorboard: bool = False
    """also write the metrics for TensorBoard, into the run's folder"""


def run(options: Options, screen: Screen) -> Result:
    """Trains, with a progress bar, and shows the scores."""
    recipe = options.recipe
    if options.gamma is not None:
        (regulariser,) = with_gamma([recipe.regulariser], options.gamma)
        recipe = replace(recipe, regulariser=regulariser)
    out = options.out or Path("runs") / run_name(recipe)
    epochs = f"{recipe.epochs:,} epoch{'' if recipe.epochs == 1 else 's'}"
    screen.show(f"{recipe.name}: {recipe.network}, {spelt(recipe.chosen)}, {epochs} → {out}")
    if options.resume and (out / RESULT).exists():
        screen.show("the run is finished already: nothing is left to train")
    with ExitStack() as stack:
        progress = stack.enter_context(screen.progress())
        watcher = progress_watcher(progress, recipe, partial(_tell_beforehand, options, screen))
        if options.tensorboard:
            watcher = together(watcher, stack.enter_context(_board(out)))
        speed = Speed(options.graph, options.compile)
        place = Place(out, options.data, options.device, options.checkpoint_seconds, speed)
        resume = options.resume or HERE.is_restarted
        result = perform(recipe, place, resume=resume, watcher=watcher, ranks=HERE)
    if result["note"]:
        screen.show(f"note: {result['note']}")
    screen.show(scores_table(result))
    names = [name for name in FILES if (out / name).exists()]
    screen.end(
        [out / name for name in names],
        {
            typed("gains", out): "each layer's gains, drawn",
            typed("inspect", out): "gains beside operator norms",
            typed("report", out, "--out", out / "report.html"): "a page of the run",
        },
    )
    return result


def begun(words: Sequence[str]) -> tuple[Recipe | None, list[str]]:
    """The recipe of the run that is to be resumed, if it was begun, and the words that are left to be read.

    ``--resume FOLDER`` is short for ``--resume --out FOLDER``. A recipe that is named must be the folder's.
    """
    words = list(words)
    after = words.index("--resume") + 1
    if after < len(words) and not words[after].startswith("-"):
        if any(word.partition("=")[0] == "--out" for word in words):
            raise RunError(f"'--resume {words[after]}' says which folder to go on in: leave out --out.")
        words.insert(after, "--out")
    if "--out" not in words[:-1]:
        return None, words
    folder = Path(words[words.index("--out") + 1])
    named = not words[0].startswith("-")
    if not (folder / CONFIG).exists():
        if named:
            return None, words
        raise RunError(f"{folder} holds no run to go on with: it has no {CONFIG}.")
    recipe = read_begun(folder).recipe
    if named and words[0] != recipe.name:
        raise RunError(f"{folder} holds a run of the recipe {recipe.name!r}, and not of {words[0]!r}.")
    return recipe, words[1:] if named else words


def together(*watchers: Watcher) -> Watcher:
    """One watcher that tells all of these."""

    def teller(moment: str) -> Callable[[Any], None]:
        def tell(what: Any) -> None:
            for watcher in watchers:
                getattr(watcher, moment)(what)

        return tell

    return Watcher(*(teller(moment.name) for moment in fields(Watcher)))


def progress_watcher(
    progress: Progress, recipe: Recipe, beforehand: Callable[[Training], None] = lambda training: None
) -> Watcher:
    """Moves a bar by epochs and parts of them, and tells what the last epoch came to."""
    task = progress.add_task("epoch", total=recipe.epochs, status="")
    done = 0

    def started(training: Training) -> None:
        nonlocal done
        beforehand(training)
        done = training.epoch * training.steps_per_epoch + int(training.position) // training.batch_size
        progress.update(task, completed=done / training.steps_per_epoch)

    def stepped(training: Training) -> None:
        nonlocal done
        done += 1
        progress.update(task, completed=done / training.steps_per_epoch)
        if training.epoch == 0 and training.device.type == "cpu":  # where reading a tensor makes nobody wait
            loss, accuracy = training.loss.item() / done, training.hits.item() / (done * training.batch_size)
            progress.update(task, status=f"so far loss {loss:.3f}, train {accuracy:.1%}")

    def epoch_done(line: Metrics) -> None:
        held_out = line["validation_accuracy"]
        parts = [
            f"loss {line['train_loss']:.3f}",
            f"train {line['train_accuracy']:.1%}",
            *([] if held_out is None else [f"held out {held_out:.1%}"]),
            f"gain {largest(line['max_gain'], '.4g')}",
        ]
        progress.update(task, status=", ".join(parts))

    return Watcher(started, stepped, epoch_done)


def _tell_beforehand(options: Options, screen: Screen, training: Training) -> None:
    """Where a resumed run goes on, and whether a CPU will take hours."""
    recipe = training.recipe
    if options.resume and (training.epoch or int(training.position)):
        screen.show(f"going on after {training.epoch} of {recipe.epochs} epochs")
    elif options.resume:
        screen.show("there is no checkpoint yet: starting from the beginning")
    # A weight is used once per pixel at most. What even a slow processor has done soon need not be estimated.
    weights, pixels = sum(map(torch.numel, training.model.parameters())), training.images[0].numel()
    steps = (recipe.epochs - training.epoch) * training.steps_per_epoch
    at_most = steps * (6 * weights * pixels * training.batch_size / SLOW + STEP_OVERHEAD)
    if training.device.type == "cpu" and at_most > LONG / 2:
        warn_of_one(screen, training)


@contextmanager
def _board(out: Path) -> Iterator[Watcher]:
    """Writes for TensorBoard, from when the run starts and not before: the folder may turn out to hold another run."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("--tensorboard needs TensorBoard: pip install 'maxgain[tensorboard]'.") from error
    with ExitStack() as stack:
        writers: list[Any] = []

        def started(training: Training) -> None:
            # What a killed run wrote after its last checkpoint is written once more.
            writer = SummaryWriter(str(out / "tensorboard"), purge_step=training.epoch + 1)
            writers.append(stack.enter_context(writer))

        def epoch_done(line: Metrics) -> None:
            for name, value in _scalars(line):
                writers[0].add_scalar(name, value, line["epoch"])

        yield Watcher(started=started, epoch_done=epoch_done)


def _scalars(line: Metrics) -> Iterator[tuple[str, float]]:
    for part in ("train", "validation"):
        for what in ("loss", "accuracy"):
            if (value := score(line, f"{part}_{what}")) is not None:
                yield f"{what}/{part}", value
    for layer, gain in line["max_gain"].items():
        if gain is not None:
            yield f"max_gain/{layer}", gain
