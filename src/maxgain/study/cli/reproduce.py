"""maxgain reproduce: the paper's experiments, run again on real data, as far as time allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from maxgain.errors import RecipeError, RunError

from ..comparing import records
from ..comparing.jobs import Job
from ..comparing.records import Record
from ..comparing.shards import Shard
from ..files import alone_in, make_folder
from ..recipes import expect_count
from ..reproduce import estimate
from ..reproduce.claims import progress
from ..reproduce.document import build, expect_own
from ..reproduce.experiments import EXPERIMENTS, Experiment
from ..reproduce.running import Budget, Recorded, Stage, part_of, run_missing, stages
from ..reproduce.state import State, look
from ..runs import Place
from ..tables import Column, Table
from ..wording import counted, unknown
from .parts import end_of_part
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain reproduce": "how far every table and figure is; REPRODUCTION.md is made again from the records",
    "maxgain reproduce cifar10 --data ~/data --dry-run": "what would run and how long it would take",
    "maxgain reproduce cifar10 --data ~/data --per-gpu 4 --minutes 25": "as much as fits into 25 minutes",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Run what is missing of one of the paper's tables and figures, by the plan in experiments/PLAN.md.

    First numbers are chosen on validation parts, then the table's runs are trained. Every run is recorded as it ends,
    so the same command goes on where it was stopped, on this machine or on another that has the records. At the end
    REPRODUCTION.md and its figures are made again from all records; without a name that is all that is done.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """which table or figure: cifar10, gains, sins10, svhn, gamma-curve, lipschitz or cifar100"""
    results: Path = Path("results")
    """the folder of the records"""
    document: Path = Path("REPRODUCTION.md")
    """the page that is made of the records"""
    work: Path = Path("runs/reproduce")
    """the folder of the runs themselves: checkpoints, weights"""
    per_gpu: int = 4
    """runs at a time on one GPU; on a CPU, processes at a time"""
    minutes: float | None = None
    """start no run that is not expected to end by then, by the longest so far; the first ones always start (default:
    run all)"""
    dry_run: bool = False
    """tell what would run and how long it would take, and run and write nothing"""
    shard: str | None = None
    """run the part NUMBER/COUNT of an experiment alone, such as 0/4, for a machine of its own; parts may write to the
    same --results, and 'maxgain merge' brings those together that are apart"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


PLACES = ("results", "document", "work", "data")
"""The options that the command which goes on needs too."""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Run the stages of an experiment in their order, each as far as time allows, and make the document again."""
    _refuse_nonsense(options)
    if options.name is not None and not options.dry_run:
        make_folder(options.results)  # what cannot be written is not found out after hours of training
        expect_own(options.document)
    if options.shard is not None and options.name is not None:
        return _run_part(EXPERIMENTS[options.name], Shard.parsed(options.shard), options, screen)
    wanted = EXPERIMENTS if options.name is None else {options.name: EXPERIMENTS[options.name]}
    recorded, ended = Recorded.read(options.results), list[Record]()
    if options.name is not None and not (options.dry_run or look(wanted[options.name], recorded).is_complete):
        _, ended = _run_stages(wanted[options.name], options, screen)
        recorded = Recorded.read(options.results)
    for warning in (*recorded.tuning.warnings, *recorded.final.warnings):
        screen.show(f"note: {warning}")
    states = {name: look(experiment, recorded) for name, experiment in wanted.items()}
    if options.dry_run:
        for state in states.values():
            _tell(state, options.per_gpu, screen)
    elif options.name is None:
        screen.show(_overview(states))
    files = [] if options.dry_run else build(options.results, options.document)
    possible = {name for name, state in states.items() if state.experiment.obtainable or name == options.name}
    left = [name for name, state in states.items() if name in possible and not state.is_complete]
    moved = [name for name in PLACES if getattr(options, name) != getattr(Options, name)]
    same = [word for name in moved for word in (f"--{name}", getattr(options, name))]
    steps = {typed("reproduce", name, *same): "goes on with what is missing" for name in left[:1]}
    screen.end(files[:1], steps)
    _tell_of_failures(ended, screen)
    return {"experiments": [_content(state) for state in states.values()], "written": [str(file) for file in files]}


def _refuse_nonsense(options: Options) -> None:
    if options.name is not None and options.name not in EXPERIMENTS:
        raise RecipeError(unknown("experiment", options.name, EXPERIMENTS))
    expect_count("--per-gpu", options.per_gpu)
    if options.minutes is not None and not options.minutes > 0:
        raise RecipeError(f"--minutes must be positive, not {options.minutes:g}.")
    if options.shard is not None and (options.name is None or options.dry_run):
        raise RecipeError("--shard is for running a part of one experiment: name it, and leave out --dry-run.")


def _tell_of_failures(ended: Sequence[Record], screen: Screen) -> None:
    """Say last how many runs failed just now; refuse to end well if all did."""
    failed = [record for record in ended if record["status"] == "failed"]
    if failed and len(failed) == len(ended):
        raise RunError(f"no run succeeded; the last one, of {failed[-1]['regulariser']}: {failed[-1]['error']}")
    if failed:
        screen.show(f"{len(failed)} of {counted(len(ended), 'run')} failed, those that were tried twice counted twice")


def _run_stages(
    experiment: Experiment, options: Options, screen: Screen, shard: Shard | None = None
) -> tuple[int, list[Record]]:
    """Run what there is time for; return how many runs have a record of a success, and the records of those run now."""
    part = "" if shard is None else f"-{shard.number}"
    place = Place(options.work / f"{experiment.name}{part}", options.data, options.device)
    budget = Budget(options.minutes)
    succeeded, ended = 0, list[Record]()
    screen.show(experiment.title)
    with alone_in(place.folder):
        for stage, where in stages(experiment, options.results, place, shard):
            done = len(stage.jobs) - len(stage.missing)
            screen.show(f"{stage.name}: {counted(len(stage.jobs), 'run')}, {done} recorded → {where.results}")
            _run(stage, where, budget, options.per_gpu, screen, ended)
            succeeded += len(replace(stage, known=records.read(where.results)).recorded)
    return succeeded, ended


def _run_part(experiment: Experiment, shard: Shard, options: Options, screen: Screen) -> dict[str, Any]:
    """Run a part; the document is made when all are together."""
    done, _ = _run_stages(experiment, options, screen, shard)
    planned = len(part_of(experiment, [*experiment.tuning(), *experiment.final()], shard))
    return end_of_part(f"{shard.number}/{shard.count}", options.results, planned, done, screen)


def _run(stage: Stage, place: Place, budget: Budget, at_once: int, screen: Screen, ended: list[Record]) -> None:
    with screen.progress() as progress:
        task = progress.add_task(stage.name, total=len(stage.missing), status="")

        def on_done(job: Job, record: Record, seconds: float) -> None:
            ended.append(record)
            failed = "" if record["status"] == "ok" else f": failed, {record['error']}"
            progress.update(task, advance=1, status=job.name)
            screen.show(f"  {job.name}, {seconds:.0f} s{failed}")

        run_missing(stage, place, budget, at_once, on_done)


# Telling


def _tell(state: State, at_once: int, screen: Screen) -> None:
    """What would run, in its order, and how long that would take."""
    screen.show(f"{state.experiment.name}: {state.experiment.title}")
    runs = (*state.tuning.known.runs, *state.certain.known.runs)
    if state.is_complete:
        screen.show(f"  {estimate.in_words((), runs, at_once)}")
    for title, jobs in (("tuning", state.tuning.missing), ("final", state.left)):
        if jobs:
            screen.show(f"  {title}: {estimate.in_words(jobs, runs, at_once)}")
        for job in jobs:
            is_open = title == "final" and job.row in state.searching
            fold = "" if job.recipe.fold is None else f"fold {job.recipe.fold}, "
            named = f"{job.row}, {fold}seed {job.recipe.seed}, its numbers still to be chosen" if is_open else job.name
            screen.show(f"    {named}")


def _overview(states: dict[str, State]) -> Table:
    rows = tuple((name, state.experiment.title, progress(state)) for name, state in states.items())
    return Table(
        "the paper's tables and figures", (Column("name"), Column("what it is"), Column("how far it is")), rows
    )


def _content(state: State) -> dict[str, Any]:
    return {
        "experiment": state.experiment.name,
        "state": progress(state),
        "stages": [
            {"stage": name, "runs": runs, "missing": [job.name for job in missing]}
            for name, runs, missing in (
                ("tuning", len(state.tuning.jobs), state.tuning.missing),
                ("final", state.planned, state.left),
            )
        ],
    }
