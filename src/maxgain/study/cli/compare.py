"""maxgain compare: regularisers on the same folds or seeds, and whether what they differ by is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

import maxgain
from maxgain.errors import RecipeError, RunError

from ..comparing import jobs as work
from ..comparing import records, sentences, tuning_rule
from ..comparing.comparison import Comparison, compare
from ..comparing.engine import Engine, Here, Name, engine_for
from ..comparing.jobs import Job, Pairing
from ..comparing.question import FILE as ASKED
from ..comparing.question import Question, against, contrasts, remember
from ..comparing.records import Record
from ..comparing.shards import Shard
from ..comparing.shown import tables
from ..files import write_json
from ..limits import expect_count
from ..locks import alone_in
from ..recipes import Recipe, recipe_named
from ..regularisers import parse, settled, spelt, with_gamma
from ..runs import Place
from ..wording import counted
from .parts import end_of_part
from .patience import warn_of_many
from .terminal import Common, DataFolder, Screen, typed

COMPARISON = "comparison.json"
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
    decide_by: Literal["paired", "pooled"] = "paired"
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
    shard = Shard.parsed(options.shard or "")
    _refuse_nonsense(options)
    names = with_gamma(options.regularisers, options.gamma)
    _refuse_doubles(names, tuned=options.tuned)
    recipe = replace(options.recipe, train_on="train" if options.hold_out else "train+validation")
    grids = [tuning_rule.Grid.parsed(text) for text in options.grid]
    tuning_rule.refuse_unused(grids, names)
    # What is chosen together is trained together, so that no part needs to know another.
    chosen_on = (lambda job: (job.row, job.recipe.fold)) if options.tuned else (lambda job: job.recipe)
    jobs = shard.of(work.plan(recipe, names, _pairing(options, recipe)), chosen_on)
    place = Place(options.out or Path(f"compare-{recipe.name}-{shard.number}"), options.data, options.device)
    with _engine(options) as engine, alone_in(place.folder, COMPARISON, ASKED):
        jobs = work.identified(jobs, place)
        if options.tuned and jobs:
            tuning = work.plan_tuning(jobs, grids, options.budget or tuning_rule.BUDGET)
            tuning = work.identified(tuning, place.for_tuning)
            if tuning:
                _perform("tuning", tuning, place.for_tuning, engine, screen)
                jobs = work.tuned(jobs, tuning, records.read(place.for_tuning.results))
        if jobs:
            _perform(f"part {options.shard}", jobs, place, engine, screen)
        done = len(jobs) - len(work.missing(jobs, records.read(place.results)))
    return end_of_part(str(options.shard), place.folder, len(jobs), done, screen)


def conclude(comparison: Comparison, place: Place, screen: Screen) -> dict[str, Any]:
    """Show the comparison, and write it into comparison.json in its folder; refuse to end well if nothing succeeded."""
    content = sentences.to_json(comparison)
    write_json(place.folder / COMPARISON, {"maxgain": maxgain.__version__} | content)
    show(comparison, screen)
    if not comparison.runs:
        first = comparison.failures[0]
        raise RunError(f"no run succeeded, so there is nothing to compare; the first, of {first.row}: {first.error}")
    return content


def show_gaps(comparison: Comparison, screen: Screen) -> None:
    """Say last what is missing, where a reader cannot overlook it."""
    for gap in sentences.gaps(comparison):
        screen.show(gap)


def compared(options: Options, screen: Screen) -> tuple[Comparison, Place]:
    """The comparison that was asked for, after training what it needs; and where it is kept."""
    _refuse_nonsense(options)
    asked = _contrasts(options)
    names = with_gamma(options.regularisers, options.gamma)
    _refuse_doubles(names, tuned=options.tuned)
    named = dict(zip(options.regularisers, names, strict=True))
    recipe = replace(options.recipe, train_on="train" if options.hold_out else "train+validation")
    pairing = _pairing(options, recipe)
    place = Place(options.out or Path(f"compare-{recipe.name}"), options.data, options.device)
    grids = [tuning_rule.Grid.parsed(text) for text in options.grid]
    tuning_rule.refuse_unused(grids, names)
    jobs = work.plan(recipe, names, pairing)
    tuning = work.plan_tuning(jobs, grids, options.budget or tuning_rule.BUDGET) if options.tuned else []
    with _engine(options) as engine, alone_in(place.folder, COMPARISON, ASKED):
        jobs, tuning = work.identified(jobs, place), work.identified(tuning, place.for_tuning)
        validation_images = None
        if tuning:
            _perform("tuning", tuning, place.for_tuning, engine, screen)
            known = records.read(place.for_tuning.results)
            validation_images = next((run["validation_images"] for run in known.runs), None)
            jobs = work.tuned(jobs, tuning, known)
        question = Question(
            recipe=recipe.name,
            dataset=recipe.dataset,
            over=pairing.over,
            rows={name: tuple(job.planned for job in jobs if job.row == name) for name in names},
            contrasts=tuple((named[first], named[second]) for first, second in asked),
            train_on=recipe.train_on,
            cross_validation=pairing.cross_validation,
            decide_by=options.decide_by,
            rope=None if options.rope is None else options.rope / 100,
            tuning_runs=work.tuning_runs(tuning),
            validation_images=validation_images,
        )
        remember(place.folder, question)
        _perform("comparing", jobs, place, engine, screen)
        found = records.read(place.results)
        return compare(question, found, found.correct), place


def _refuse_nonsense(options: Options) -> None:
    if not options.regularisers:
        raise RecipeError("'maxgain compare' needs --regularisers, such as: none dropout maxgain.")
    if options.baseline is not None and options.baseline not in options.regularisers:
        raise RecipeError(f"the baseline {options.baseline!r} is not one of {', '.join(options.regularisers)}.")
    if options.baseline is not None and options.contrasts:
        raise RecipeError("--contrasts say what is tested against what: leave out --baseline.")
    if options.folds is None and options.seeds is None:
        raise RecipeError("'maxgain compare' needs --folds or --seeds, or both, and how many.")
    if options.folds is not None and options.recipe.fold != recipe_named(options.recipe.name).fold:
        raise RecipeError("--folds goes through the folds from 0 on: leave out --fold.")
    if options.rope is not None and not 0 < options.rope < 100:
        raise RecipeError(f"--rope must be a number of percentage points between 0 and 100, not {options.rope:g}.")
    _refuse_useless_tuning(options)


def _refuse_doubles(regularisers: Sequence[str], *, tuned: bool) -> None:
    """Refuse two names for the same runs; a number that is chosen by tuning is not the default."""
    spelling = {name: spelt(parse(name) if tuned else settled(name)) for name in regularisers}
    for place, name in enumerate(regularisers):
        if other := next((other for other in regularisers[:place] if spelling[other] == spelling[name]), None):
            raise RecipeError(f"{other} and {name} are the same regulariser: leave one of them out.")


def _refuse_useless_tuning(options: Options) -> None:
    for flag, given in (("--grid", options.grid), ("--budget", options.budget is not None)):
        if given and not options.tuned:
            raise RecipeError(f"{flag} says what --tuned tries: it needs --tuned.")
    if options.budget is not None and options.grid:
        raise RecipeError("a grid has as many runs as values: leave out --budget or --grid.")
    if options.budget is not None:
        expect_count("--budget", options.budget)


def _pairing(options: Options, recipe: Recipe) -> Pairing:
    if options.folds is None:
        return work.seeds(recipe, options.seeds or 0)
    return work.folds(recipe, options.folds, 1 if options.seeds is None else options.seeds)


def _engine(options: Options) -> AbstractContextManager[Engine]:
    return engine_for(options.engine, options.address, options.jobs, options.per_gpu, options.device)


def _contrasts(options: Options) -> tuple[tuple[str, str], ...]:
    if options.contrasts:
        return contrasts(options.contrasts, options.regularisers)
    return against(options.baseline or options.regularisers[0], options.regularisers)


def _perform(title: str, jobs: Sequence[Job], place: Place, engine: Engine, screen: Screen) -> None:
    known = records.read(place.results)
    for warning in known.warnings:
        screen.show(f"note: {warning}")
    missing = work.missing(jobs, known)
    recorded = len(jobs) - len(missing)
    screen.show(f"{title}: {counted(len(jobs), 'run')}, {recorded} of them recorded already → {place.folder}")
    if isinstance(engine, Here):
        warn_of_many(screen, jobs[0].recipe, len(missing), engine.at_once, place)
    with screen.progress() as progress:
        runs = progress.many(title, len(jobs), recorded)

        def on_start(job: Job) -> None:
            runs.began(_called(job), place.of(job.recipe, job.fingerprint).folder, job.recipe.epochs)

        def on_done(job: Job, record: Record) -> None:
            runs.ended(_called(job), failed=record["status"] == "failed")

        work.perform_all(missing, place, engine, on_done, on_start)


def _called(job: Job) -> str:
    """What people call a run that they see running."""
    recipe = job.recipe
    fold = "" if recipe.fold is None else f", fold {recipe.fold}"
    return f"{recipe.regulariser}{fold}, seed {recipe.seed}"


def show(comparison: Comparison, screen: Screen) -> None:
    """The comparison for people: rows, contrasts by both analyses, sentences, and each run without a score."""
    words = sentences.in_words(comparison)
    for table in tables(comparison):
        screen.show(table)
    screen.show(words.design)
    for contrast, sentence in zip(comparison.contrasts, words.contrasts, strict=True):
        screen.show(f"{contrast.first} against {contrast.second}: {sentence}")
    for sentence in (*words.sampling, *words.choices):
        screen.show(sentence)
    for failure in comparison.failures:
        place = f"seed {failure.run.seed}" if failure.run.fold is None else f"fold {failure.run.fold}"
        screen.show(f"no score: {failure.row}, {place}: {failure.error}")
    screen.show(words.outcome)
