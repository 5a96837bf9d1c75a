"""maxgain compare: regularisers on the same folds or seeds, and whether what they differ by is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tyro

from maxgain.errors import RunError

from ..comparing import asking, records, sentences
from ..comparing import jobs as work
from ..comparing.asking import COMPARISON, Asked
from ..comparing.comparison import Comparison
from ..comparing.engine import Engine, Here, Name, engine_for
from ..comparing.jobs import Job
from ..comparing.question import Analysis
from ..comparing.records import Record
from ..comparing.shards import Shard
from ..comparing.shown import tables
from ..files import alone_in
from ..recipes import Recipe
from ..runs import Place
from ..wording import counted
from .parts import end_of_part
from .patience import warn_of_many
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain compare digits --regularisers none dropout maxgain --folds 10": "minutes on a CPU, nothing to download",
    "maxgain compare digits --regularisers none maxgain --folds 10 --tuned": "numbers chosen on each fold first",
    "maxgain compare digits --regularisers none maxgain dropout maxgain+dropout --folds 10 --contrasts matched": (
        "what MaxGain adds to each"
    ),
    "maxgain compare cifar10 --regularisers none maxgain=2 --seeds 5 --data ~/data": "the same split, five seeds",
    "maxgain compare cifar10 --regularisers none maxgain=2 --seeds 5 --engine ray --address auto --per-gpu 4": (
        "on the Ray cluster that this machine belongs to, four runs per GPU"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Train every regulariser on every fold or seed, and test the paired differences of their test accuracies.

    Runs are recorded as they end, so the same command goes on where it was stopped or killed, and trains nothing where
    all is recorded. A run that failed is tried again; if it fails again, it is counted and named, and no verdict is
    given that counting it as guessing would change.
    """

    refuses: ClassVar = ("regulariser", "train_on")

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    regularisers: tuple[str, ...] = ()
    """what to compare, as in the paper's rows: none dropout maxgain+batchnorm maxgain=1.5"""
    folds: int | None = None
    """compare on this many of the data set's disjoint folds, each with a seed of its own; a data set with a single
    split is cut into as many for cross-validation, and its own test part left alone"""
    seeds: int | None = None
    """compare with this many seeds, from --seed on, on the same split, which says nothing about other data; with
    --folds, train with this many seeds on every fold and average their scores before folds are paired"""
    gamma: float | None = None
    """the bound of maxgain where its number is left out (default: 2)"""
    baseline: str | None = None
    """what all others are tested against (default: the first)"""
    contrasts: tuple[str, ...] = ()
    """test these pairs instead, the first of each expected to be the better one: maxgain+dropout:dropout; 'matched'
    stands for every X and maxgain+X"""
    rope: float | None = None
    """a difference below this many percentage points does not matter in practice: lets 'equivalent' be told from
    'inconclusive'"""
    decide_by: Analysis = "paired"
    """which of the two analyses verdicts follow: a paired test per contrast, or accuracy ~ row + fold (or seed) with an
    error pooled over all rows, which sees smaller differences if all rows spread alike"""
    tuned: bool = False
    """first choose the numbers that a regulariser leaves open, on each fold's validation part"""
    budget: int | None = None
    """with --tuned, how many runs to choose a row's numbers with, the same for every row (default: 9)"""
    grid: tuple[str, ...] = ()
    """with --tuned, the values to try instead, as NAME=START:STOP:STEP"""
    hold_out: bool = False
    """train on the training part alone; without this, runs that are compared train on the validation part too, as the
    paper's do"""
    jobs: int | None = None
    """runs at a time, each in a process with one thread, so that no result depends on it (default: one per core, or
    one on a GPU)"""
    per_gpu: int | None = None
    """on a GPU, runs at a time, side by side from one process; no result depends on it (default: 1)"""
    engine: Name = "local"
    """where to train: in processes here, or on the nodes of a Ray cluster, with a part of a GPU each"""
    address: str | None = None
    """with --engine ray, the cluster, as HOST:PORT or auto (default: $RAY_ADDRESS, or one that is started here)"""
    shard: str | None = None
    """train the part NUMBER/COUNT of the runs alone, such as 0/4, for a machine of its own; 'maxgain merge' brings the
    parts together"""
    out: Path | None = None
    """the comparison's folder (default: compare- and the recipe)"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""

    @property
    def asked(self) -> Asked:
        """What is to be compared, whoever asks."""
        return Asked(**{field.name: getattr(self, field.name) for field in fields(Asked)})


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Train what is missing, show the comparison, and say how to make a page of it."""
    if options.shard is not None:
        return _part(options, screen)
    comparison, place = compared(options, screen)
    content = conclude(comparison, place, screen)
    page = typed("report", place.folder, "--out", place.folder / "report.html")
    steps = {page: "a page with curves, gains and every number"}
    screen.end([place.folder / COMPARISON, place.results / f"{options.recipe.name}.jsonl"], steps)
    show_gaps(comparison, screen)
    return content


def _part(options: Options, screen: Screen) -> dict[str, Any]:
    """Train one part of the runs; what they show can be said when all parts are together."""
    shard, asked = Shard.parsed(options.shard or ""), options.asked
    # What is chosen together is trained together, so that no part needs to know another.
    jobs = shard.of(asked.jobs(), work.tuned_together if options.tuned else lambda job: job.recipe)
    place = Place(options.out or Path(f"compare-{options.recipe.name}-{shard.number}"), options.data, options.device)
    with _engine(options) as engine, alone_in(place.folder, *asking.FILES):
        perform = partial(_perform, engine=engine, screen=screen)
        jobs = work.identified(jobs, place)
        if tuning := work.identified(asked.tuning(jobs), place.for_tuning):
            perform("tuning", tuning, place.for_tuning)
            jobs = work.tuned(jobs, tuning, records.read(place.for_tuning.results))
        if jobs:
            perform(f"part {options.shard}", jobs, place)
        done = work.recorded(jobs, records.read(place.results))
    return end_of_part(str(options.shard), place.folder, len(jobs), done, screen)


def conclude(comparison: Comparison, place: Place, screen: Screen) -> dict[str, Any]:
    """Show the comparison, and write it into comparison.json in its folder; refuse to end well if nothing succeeded."""
    asking.write(comparison, place)
    show(comparison, screen)
    if not comparison.runs:
        first = comparison.failures[0]
        raise RunError(f"no run succeeded, so there is nothing to compare; the first, of {first.row}: {first.error}")
    return sentences.to_json(comparison)


def show_gaps(comparison: Comparison, screen: Screen) -> None:
    """Say last what is missing, where a reader cannot overlook it."""
    for gap in sentences.gaps(comparison):
        screen.show(gap)


def compared(options: Options, screen: Screen) -> tuple[Comparison, Place]:
    """The comparison that was asked for, after training what it needs; and where it is kept."""
    asked = options.asked
    place = Place(options.out or Path(f"compare-{options.recipe.name}"), options.data, options.device)
    with _engine(options) as engine:
        return asking.answered(asked, place, partial(_perform, engine=engine, screen=screen)), place


def _engine(options: Options) -> AbstractContextManager[Engine]:
    return engine_for(options.engine, options.address, options.jobs, options.per_gpu, options.device)


def _perform(title: str, jobs: Sequence[Job], place: Place, engine: Engine, screen: Screen) -> None:
    known = records.read(place.results)
    for warning in known.warnings:
        screen.show(f"note: {warning}")
    missing = work.missing(jobs, known)
    recorded = work.recorded(jobs, known)
    screen.show(f"{title}: {counted(len(jobs), 'run')}, {recorded} of them recorded already → {place.folder}")
    if isinstance(engine, Here):
        warn_of_many(screen, jobs[0].recipe, len(missing), engine.at_once, place)
    with screen.progress() as progress:
        runs = progress.many(title, recorded + len(missing), recorded)

        def on_start(job: Job) -> None:
            runs.began(job.called, place.of(job.recipe, job.fingerprint).folder, job.recipe.epochs)

        def on_done(job: Job, record: Record) -> None:
            runs.ended(job.called, failed=record["status"] == "failed")

        work.perform_all(missing, place, engine, on_done, on_start)


def show(comparison: Comparison, screen: Screen) -> None:
    """The comparison for people: rows, contrasts by both analyses, sentences, and each run without a score."""
    words = sentences.in_words(comparison)
    for table in tables(comparison):
        screen.show(table)
    screen.show(f"\n{words.design}\n")
    for contrast, sentence in zip(comparison.contrasts, words.contrasts, strict=True):
        screen.show(f"{contrast.first} against {contrast.second}: {sentence}")
    for sentence in (*words.sampling, *words.choices):
        screen.show(sentence)
    for failure in comparison.failures:
        place = f"seed {failure.run.seed}" if failure.run.fold is None else f"fold {failure.run.fold}"
        screen.show(f"no score: {failure.row}, {place}: {failure.error}")
    screen.show(f"\n{words.outcome}\n", strong=True)
