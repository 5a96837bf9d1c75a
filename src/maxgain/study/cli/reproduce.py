"""maxgain reproduce: the paper's experiments, run again on real data, as far as time allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from maxgain.errors import RecipeError

from ..compare import jobs as many
from ..compare import records
from ..compare.jobs import Job
from ..compare.records import Record
from ..limits import expect_count
from ..locks import alone_in
from ..reproduce.experiments import EXPERIMENTS
from ..reproduce.running import Budget, Stage, run_missing, stages
from ..runs import Place
from ..wording import counted, unknown
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain reproduce cifar10 --data ~/data --dry-run": "what would run, and nothing else",
    "maxgain reproduce cifar10 --data ~/data --per-gpu 4 --minutes 25": "as much as fits into 25 minutes",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Run what is missing of one of the paper's tables, by the plan in experiments/PLAN.md.

    First γ is chosen on validation parts, then the table's runs are trained. Every run is recorded as it ends, so the
    same command goes on where it was stopped, on this machine or on another that has the records.
    """

    name: Annotated[str, tyro.conf.Positional]
    """which table: cifar10, sins10, svhn or cifar100"""
    results: Path = Path("results")
    """the folder of the records"""
    work: Path = Path("runs/reproduce")
    """the folder of the runs themselves: checkpoints, weights"""
    per_gpu: int = 4
    """runs at a time on one GPU; on a CPU, processes at a time"""
    minutes: float | None = None
    """start no run that is not expected to end by then (default: run all)"""
    dry_run: bool = False
    """tell what would run, and run nothing"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Run the stages in their order, each as far as time allows."""
    if options.name not in EXPERIMENTS:
        raise RecipeError(unknown("experiment", options.name, EXPERIMENTS))
    expect_count("--per-gpu", options.per_gpu)
    if options.minutes is not None and not options.minutes > 0:
        raise RecipeError(f"--minutes must be positive, not {options.minutes:g}.")
    experiment = EXPERIMENTS[options.name]
    place = Place(options.work / options.name, options.data, options.device)
    budget = Budget(options.minutes)
    told = []
    screen.show(experiment.title)
    with alone_in(place.folder):
        for stage in stages(experiment, options.results, place):
            done = len(stage.jobs) - len(stage.missing)
            screen.show(f"{stage.name}: {counted(len(stage.jobs), 'run')}, {done} recorded → {stage.place.results}")
            if options.dry_run:
                for job in stage.missing:
                    screen.show(f"  {job.name}")
            else:
                _run(stage, budget, options.per_gpu, screen)
            left = many.missing(stage.jobs, records.read(stage.place.results))
            told.append({"stage": stage.name, "runs": len(stage.jobs), "missing": [job.name for job in left]})
            if left:
                break
    screen.end([options.results], {typed("reproduce", options.name): "goes on with what is missing"})
    return {"experiment": options.name, "stages": told}


def _run(stage: Stage, budget: Budget, at_once: int, screen: Screen) -> None:
    with screen.progress() as progress:
        task = progress.add_task(stage.name, total=len(stage.missing), status="")

        def on_done(job: Job, record: Record, seconds: float) -> None:
            failed = "" if record["status"] == "ok" else f": failed, {record['error']}"
            progress.update(task, advance=1, status=job.name)
            screen.show(f"  {job.name}, {seconds:.0f} s{failed}")

        run_missing(stage.missing, stage, budget, at_once, on_done)
