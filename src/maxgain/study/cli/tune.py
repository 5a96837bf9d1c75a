"""maxgain tune: choose a regulariser's numbers on the validation part, and draw what they do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import tyro

from ..comparing import tune
from ..comparing.engine import Engine, Here, Name, engine_for
from ..comparing.shards import Shard
from ..comparing.tuned import concluded, table
from ..comparing.tuning_rule import Point, Trial, best
from ..comparing.workers import data_for
from ..files import write_json
from ..recipes import RECIPES, Recipe
from ..regularisers import with_gamma
from ..report import figures
from ..report.sections import symbol
from ..wording import counted
from .flags import typed_out
from .parts import end_of_part
from .patience import warn_of_many
from .terminal import Bars, Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain tune digits --regulariser maxgain --grid gamma=1.25:3:0.25": "a few minutes on a CPU",
    "maxgain tune digits --regulariser maxgain+dropout --trials 20": "two numbers at once, proposed by optuna",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Choose the numbers that --regulariser leaves open (gamma, dropout's factor) on the validation part, not on test.

    A grid tries all its values; without one, optuna's TPE proposes --trials of them, by what came of those before, and
    hopeless ones are stopped early. Chosen is the best validation accuracy, among equals the lowest validation loss.
    The same command goes on with a search that was stopped or killed: no trial is lost or done twice.
    """

    refuses: ClassVar = ("train_on",)

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    gamma: float | None = None
    """the bound of maxgain where its number is left out (default: 2)"""
    grid: tuple[str, ...] = ()
    """values to try, as NAME=START:STOP:STEP, NAME being a regulariser or its parameter: gamma=1.25:3:0.25
    dropout=0.4:1.6:0.4; several grids are multiplied, and what no grid names stays what it is"""
    trials: int | None = None
    """how many points are proposed where there is no grid (default: 30)"""
    storage: str | None = None
    """an optuna storage URL, for searches from several machines, each with an --out of its own (default: a file in the
    folder); it becomes part of the command that results keep, so leave passwords to the database's own files"""
    jobs: int | None = None
    """trials at a time, each in a process with one thread; with a grid no result depends on it (default: one per
    core, or one on a GPU)"""
    per_gpu: int | None = None
    """on a GPU, runs at a time, side by side from one process; no result depends on it (default: 1)"""
    engine: Name = "local"
    """where to train: in processes here, or on the nodes of a Ray cluster, with a part of a GPU each"""
    address: str | None = None
    """with --engine ray, the cluster, as HOST:PORT or auto (default: $RAY_ADDRESS, or one that is started here)"""
    shard: str | None = None
    """try the part NUMBER/COUNT of a grid's points alone, such as 0/4, for a machine of its own; 'maxgain merge' brings
    the parts together"""
    out: Path | None = None
    """the search's folder (default: tune- and the recipe and regulariser)"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Writes tuned.json, curve.json and the figure into the search's folder, and shows them."""
    search = _search(options)
    with engine_for(options.engine, options.address, options.jobs, options.per_gpu, options.device) as engine:
        curve = _searched(search, engine, screen)
    if options.shard is not None:
        write_json(search.folder / tune.CURVE, curve)
        done = sum(row["status"] == "complete" for row in curve)
        return end_of_part(options.shard, search.folder, search.size, done, screen)
    screen.show(table(search, curve))
    tuned = concluded(search, curve)
    labels = {dimension.regulariser: symbol(dimension.regulariser) for dimension in search.space}
    title = f"{search.recipe.name}, {search.recipe.regulariser}"
    paths = figures.save(figures.tuning_curve(curve, labels, tuned.chosen["values"], title), search.folder, "curve")
    screen.show(tuned.outcome)
    files = [search.folder / tune.TUNED, search.folder / tune.CURVE, *paths]
    page = search.folder / "report.html"
    chosen = replace(search.recipe, regulariser=tuned.regulariser)
    data = () if options.data is None else ("--data", options.data)
    screen.end(
        files,
        {
            typed("train", chosen.name, *typed_out(chosen, RECIPES[chosen.name]), *data): "train with what was chosen",
            typed("report", search.folder, "--out", page): "a page of what was tried",
        },
    )
    return tuned.to_json()


def _search(options: Options) -> tune.Search:
    (regulariser,) = with_gamma([options.recipe.regulariser], options.gamma)
    recipe = replace(options.recipe, regulariser=regulariser)
    space, trials = tune.search_space(recipe.regulariser, options.grid, options.trials)
    shard = None if options.shard is None else Shard.parsed(options.shard)
    part = "" if shard is None else f"-{shard.number}"
    return tune.Search(
        recipe=recipe,
        space=space,
        folder=options.out or Path(f"tune-{recipe.name}-{recipe.regulariser}{part}"),
        trials=trials,
        data=options.data,
        device=options.device,
        storage=options.storage,
        shard=shard,
    )


def _searched(search: tune.Search, engine: Engine, screen: Screen) -> list[Trial]:
    screen.show(f"{search.recipe.name}, {search.recipe.regulariser}: {counted(search.size, 'point')} → {search.folder}")
    if isinstance(engine, Here):
        warn_of_many(screen, search.recipe, search.size, engine.at_once, search.place)
    with screen.progress() as progress:
        return _watched(search, engine, progress)


def _watched(search: tune.Search, engine: Engine, progress: Bars) -> list[Trial]:
    """The curve of the search; what is best so far stands beside its bar."""
    runs, place = progress.many("tuning", search.size, 0), search.place

    def on_change(curve: list[Trial]) -> None:
        leader = best(curve)
        status = f"best so far {_spelt(leader['values'])}: {leader['validation_accuracy']:.2%}" if leader else ""
        runs.stands_at(len(curve), status)

    def on_start(recipe: Recipe) -> None:
        runs.began(recipe.regulariser, place.of(recipe, data_for(recipe, place).fingerprint).folder, recipe.epochs)

    return tune.run(search, engine, on_change, on_start, lambda recipe: runs.ended(recipe.regulariser))


def _spelt(values: Point) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
