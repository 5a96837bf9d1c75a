"""Choosing a regulariser's numbers on the validation part: gamma, a dropout rate, whatever its parts leave open.

The data set of a tuning run has no test part, so there is no test score that a choice could look at. A search is an
optuna study: of the points of a grid, or of points that TPE proposes, the hopeless of which are stopped early. What a
point comes to follows from the recipe alone, and a point is done once: a search that is killed goes on where it was,
the trials it left running being marked as failed and their points taken up again, from their checkpoints.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import optuna
from optuna.trial import FrozenTrial, TrialState

from maxgain.errors import FileError, MaxGainError, RecipeError, RegulariserError, RunError

from .. import reading
from ..data.splits import Dataset
from ..files import alone_in, locked, write_text
from ..lines import end_last_line
from ..recipes import Recipe, expect_count, run_key
from ..regularisers import filled
from ..run_files import CHECKPOINT, read_metrics
from ..runs import Place, Watcher
from ..schema import Count, Result, score
from ..wording import first_line
from .engine import Engine
from .shards import Shard
from .tuning_rule import Dimension, Grid, Point, Trial, dimensions, points, refuse_unused, rounded
from .workers import CHECKPOINT_SECONDS, data_for, fingerprints, tell_of_each

JOURNAL, SEARCHER, CURVE, TUNED = "journal.log", "searcher.txt", "curve.json", "tuned.json"
TRIALS = 30
"""How many points TPE proposes where nobody says how many."""
FILES = (JOURNAL, SEARCHER, CURVE, TUNED, "curve.png", "curve.svg")


@dataclass(frozen=True)
class Search:
    """What is looked for, where, and where the search is kept."""

    recipe: Recipe
    space: tuple[Dimension, ...]
    folder: Path
    trials: int | None = None
    """How many points TPE proposes; None for a grid."""
    data: Path | None = None
    device: str = "auto"
    storage: str | None = None
    """An optuna storage URL; None for a journal in the folder."""
    shard: Shard | None = None
    """Which part of a grid's points to try; None for all of them."""
    own: Dataset | None = field(default=None, repr=False, compare=False)
    """The data set itself, where it is none of the table's."""

    def __post_init__(self) -> None:
        if not self.space:
            raise RegulariserError(
                f"{self.recipe.regulariser!r} leaves no number open to choose: name one that does with --regulariser, "
                "such as maxgain."
            )
        if self.recipe.train_on != "train":
            raise RecipeError("tuning chooses on the validation part, which --train-on train+validation trains on.")
        if self.trials is not None:
            expect_count("--trials", self.trials)
        if self.shard is not None and self.trials is not None:
            raise RecipeError(
                "a proposal follows from what came of those before, so --shard cuts nothing but a --grid; --storage is "
                "for proposals on several machines."
            )
        if self.shard is not None and self.storage is not None:
            raise RecipeError("machines that share a --storage take its points in turn: leave out --shard.")

    @property
    def name(self) -> str:
        """The study's name, which another recipe, another kind of search or other data do not share."""
        kind = "grid" if self.trials is None else "tpe"
        tuned = "+".join(dimension.regulariser for dimension in self.space)
        (fingerprint,) = fingerprints([self.recipe], self.place)
        key = run_key(self.recipe, fingerprint)
        return f"{self.recipe.name}-{self.recipe.regulariser}-{kind}-{tuned}-{key}"

    @property
    def place(self) -> Place:
        """Where its runs are, none of which has a test part."""
        return Place(self.folder, self.data, self.device, CHECKPOINT_SECONDS, has_test=False, own=self.own)

    @property
    def grid(self) -> list[Point]:
        """The points of the grid, or of the part of it that is tried here."""
        whole = points(self.space)
        return whole if self.shard is None else self.shard.of(whole, str)

    @property
    def size(self) -> int:
        """How many points there will be."""
        return len(self.grid) if self.trials is None else self.trials

    def recipe_at(self, point: Point) -> Recipe:
        """What a trial of the point trains."""
        return replace(self.recipe, regulariser=filled(self.recipe.regulariser, point))


def search_space(regulariser: str, grid: Sequence[str], trials: int | None) -> tuple[tuple[Dimension, ...], int | None]:
    """What to look for, and how many points TPE proposes: None where texts of grids say what to try."""
    if grid and trials is not None:
        raise RecipeError("a grid has as many trials as values: leave out --trials or --grid.")
    grids = [Grid.parsed(text) for text in grid]
    refuse_unused(grids, [regulariser])
    return dimensions(regulariser, grids), None if grids else TRIALS if trials is None else trials


def run(
    search: Search,
    engine: Engine,
    on_change: Callable[[list[Trial]], None] = lambda curve: None,
    on_start: Callable[[Recipe], None] = lambda recipe: None,
    on_done: Callable[[Recipe], None] = lambda recipe: None,
) -> list[Trial]:
    """Search to the end, from wherever the search stands, and return its curve, which `on_change` sees grow."""
    with alone_in(search.folder, *FILES):
        study, searcher = _study(search), _searcher(search.folder)
        _recover(study, search, searcher)
        on_change(curve(study))
        trials = tell_of_each(_proposals(study, search, searcher), lambda trial: on_start(_recipe(trial, search)))
        work = partial(_perform, search=search, perform=engine.perform)
        with closing(engine.each(work, trials, search.size)) as outcomes:
            for trial, outcome in outcomes:
                _tell(study, trial, outcome)
                on_done(_recipe(trial, search))
                on_change(curve(study))
        return curve(study)


def curve(study: optuna.Study) -> list[Trial]:
    """What every point came to, in the order of their values; a point that was tried again counts once."""
    ended = {TrialState.FAIL: "failed", TrialState.PRUNED: "pruned", TrialState.COMPLETE: "complete"}
    trials = study.get_trials(deepcopy=False, states=tuple(ended))
    rows: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: list(ended).index(trial.state)):
        if "point" in trial.user_attrs:
            row = {"values": trial.user_attrs["point"], "status": ended[trial.state]}
            rows[str(row["values"])] = row | trial.user_attrs.get("outcome", {"error": "it was stopped"})
    return sorted(rows.values(), key=lambda row: list(row["values"].values()))


class _JournalLock:
    """Keeps two processes from writing to a journal at once; a killed one keeps nobody out and spoils no line."""

    beginning = '{"op_code":'  # of the lines that optuna writes

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: ExitStack | None = None

    def __getstate__(self) -> dict[str, object]:
        """For a worker, which has a study of its own: a lock that is held here, perhaps this moment, is not its."""
        return {"path": self.path, "held": None}

    def acquire(self) -> bool:
        self.held = ExitStack()
        lock = locked(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX)
        end_last_line(self.held.enter_context(lock), self.beginning)
        return True

    def release(self) -> None:
        if self.held is not None:
            self.held.close()
            self.held = None


def _study(search: Search) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if search.trials is None:
        pruner = optuna.pruners.NopPruner()  # a grid is there for its whole curve
    else:  # no trial is judged by its first epochs, nor before there are others to compare it with
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=search.recipe.epochs // 4)
    name = search.name  # for which the data must be there
    try:
        if search.storage is None and (search.folder / JOURNAL).exists():
            reading.expect_regular(search.folder / JOURNAL, reading.LARGEST_RECORDS)
        study = optuna.create_study(
            storage=search.storage or _journal(search.folder / JOURNAL),
            study_name=name,
            direction="maximize",
            pruner=pruner,
            load_if_exists=True,
        )
        _expect_sense(study)
        return study
    except Exception as error:  # whatever a database driver, or the lack of one, has to say
        raise RunError(f"cannot keep the search in {search.storage or search.folder}: {first_line(error)}.") from error


class _Outcome(TypedDict, total=False):
    """What is kept of a trial that came to its end."""

    epochs: int
    error: str
    train_accuracy: float
    train_loss: float
    validation_accuracy: float
    validation_loss: float
    validation_images: Count


def _expect_sense(study: optuna.Study) -> None:
    """`ValueError` where a trial holds what no search of ours has written, as after a flipped bit in the journal."""
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        reading.converted(attributes.get("point", {}), dict[str, float])
        outcome = reading.converted(attributes.get("outcome", {}), _Outcome)
        lacking = [name for name in _Outcome.__annotations__ if name != "error" and name not in outcome]
        if trial.state is TrialState.COMPLETE and ("point" not in attributes or lacking):
            raise ValueError(f"its trial {trial.number} has no {(lacking or ['point'])[0]}")


class _JournalFile(optuna.storages.journal.JournalFileBackend):  # type: ignore[misc]
    """Optuna's journal, which says of which file a full disk cut a line short; the next writer removes the piece."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:
            why = error.strerror or error
            raise FileError(
                f"cannot write {self._file_path}: {why}; the same command goes on with the search."
            ) from error


def _journal(path: Path) -> optuna.storages.BaseStorage:
    return optuna.storages.JournalStorage(_JournalFile(str(path), lock_obj=_JournalLock(path)))


def _searcher(folder: Path) -> str:
    """Who searches here. Several may share a storage, each from its own folder; none takes another's trial for dead."""
    path = folder / SEARCHER
    if not path.exists():
        write_text(path, secrets.token_hex(8))
    return reading.read_bytes(path, limit=1024).decode(errors="replace")


def _recover(study: optuna.Study, search: Search, searcher: str) -> None:
    """Gives up what a killed process of this folder left running, and puts in line every point without a trial."""
    # One that was killed before it had signed its trial can only have been here, unless the storage is shared.
    ours = {searcher, None} if search.storage is None else {searcher}
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("searcher") in ours:
            study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    wanted = search.grid if search.trials is None else _points(trials, failed=True)
    standing = _points(trials, failed=False)
    for point in wanted:
        if point not in standing:
            standing.append(point)
            study.enqueue_trial(point, user_attrs={"point": point, "searcher": searcher})


def _points(trials: Iterable[FrozenTrial], *, failed: bool) -> list[Point]:
    chosen = (trial for trial in trials if (trial.state is TrialState.FAIL) == failed)
    return [trial.user_attrs["point"] for trial in chosen if "point" in trial.user_attrs]


def _proposals(study: optuna.Study, search: Search, searcher: str) -> Iterator[optuna.Trial]:
    """One trial after another: first the points that stand in line, then what TPE makes of the trials so far."""
    while True:
        trials = study.get_trials(deepcopy=False)
        standing, failed = _points(trials, failed=False), _points(trials, failed=True)
        known = len(standing) + sum(point not in standing for point in failed)
        if not any(trial.state is TrialState.WAITING for trial in trials) and known >= search.size:
            return
        # The seed follows from how many points there are, so that a search that was killed proposes what it would have.
        study.sampler = optuna.samplers.TPESampler(seed=(search.recipe.seed + known) % 2**32)
        trial = study.ask()
        trial.set_user_attr("searcher", searcher)
        if search.trials is None and "point" not in trial.user_attrs:
            study.tell(trial, state=TrialState.FAIL)  # somebody else was faster in taking the grid's last point
            continue
        point = {
            dimension.regulariser: rounded(
                trial.suggest_float(dimension.regulariser, dimension.low, dimension.high, log=not dimension.values)
            )
            for dimension in search.space
        }
        trial.set_user_attr("point", point)
        yield trial


def _recipe(trial: optuna.Trial, search: Search) -> Recipe:
    return search.recipe_at(trial.user_attrs["point"])


def _perform(trial: optuna.Trial, search: Search, perform: Callable[..., Result]) -> Trial:
    """What a trial comes to. Its folder belongs to its point, so a trial that takes up a point goes on with its run."""
    recipe = _recipe(trial, search)
    dataset = data_for(recipe, search.place)
    place = search.place.of(recipe, dataset.fingerprint)
    reported = set()

    def report(_: object = None) -> None:
        """Tells optuna of the epochs that it has not heard of, those before a checkpoint too."""
        for line in read_metrics(place.folder):
            if line["epoch"] not in reported:
                trial.report(line["validation_accuracy"], line["epoch"])
                reported.add(line["epoch"])
        if len(reported) < recipe.epochs and trial.should_prune():
            raise optuna.TrialPruned

    watcher = Watcher(started=report, epoch_done=report)
    try:
        result = perform(recipe, place, dataset, resume=True, watcher=watcher)
        report()  # if it was finished already, nobody has been told
    except optuna.TrialPruned:
        (place.folder / CHECKPOINT).unlink(missing_ok=True)
        return {"status": "pruned", "epochs": len(reported)}
    except MaxGainError as error:
        return {"status": "failed", "error": str(error)}
    names = (f"{part}_{what}" for part in ("train", "validation") for what in ("accuracy", "loss"))
    scores = {name: score(result, name) for name in names}
    if endless := [name for name, score in scores.items() if score is None or math.isinf(score)]:
        return {"status": "failed", "error": f"its {endless[0].replace('_', ' ')} is not a finite number"}
    return {"status": "complete", "epochs": recipe.epochs, "validation_images": len(dataset.validation)} | scores


def _tell(study: optuna.Study, trial: optuna.Trial, outcome: Trial) -> None:
    status = outcome.pop("status")
    trial.set_user_attr("outcome", outcome)
    if status == "complete":
        study.tell(trial, outcome["validation_accuracy"])
    else:
        study.tell(trial, state=TrialState.PRUNED if status == "pruned" else TrialState.FAIL)
