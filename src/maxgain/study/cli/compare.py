"""maxgain compare: regularisers on the same folds or seeds, and whether what they differ by is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import tyro

from maxgain.errors import RecipeError

from ..compare import jobs as compare
from ..compare import records
from ..compare import tuning_rule as choice
from ..compare.jobs import Comparison, Job, Pairing
from ..compare.records import Record
from ..compare.statistics import Row, p_value, verdict
from ..compare.workers import process_count
from ..files import write_json
from ..locks import alone_in
from ..recipes import Recipe, recipe_named
from ..regularisers import numbers, parse, with_gamma
from ..runs import Place
from ..tables import Column, Table
from ..wording import counted
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain compare digits --regularisers none dropout maxgain --folds 10": "minutes on a CPU, nothing to download",
    "maxgain compare digits --regularisers none maxgain --folds 10 --tuned": "numbers chosen on each fold first",
    "maxgain compare cifar10 --regularisers none maxgain=2 --seeds 5 --data ~/data": "the same split, five seeds",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Train every regulariser on every fold or seed, and test the paired differences of their test accuracies.

    Runs are recorded as they end, so the same command goes on where it was stopped or killed, and trains nothing where
    all is recorded. A run that failed is tried again; it has no score, and its fold or seed is left out of the test.
    """

    refuses: ClassVar = ("regulariser",)

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    regularisers: tuple[str, ...] = ()
    """what to compare, as in the paper's rows: none dropout maxgain+batchnorm maxgain=1.5"""
    folds: int | None = None
    """compare on this many of the data set's disjoint folds; a data set with a single split is cut into as many for
    cross-validation, and its own test part left alone"""
    seeds: int | None = None
    """compare with this many seeds, from --seed on, on the same split: it says nothing about other data"""
    gamma: float | None = None
    """the bound of maxgain where its number is left out (default: 2)"""
    baseline: str | None = None
    """what the others are tested against (default: the first)"""
    tuned: bool = False
    """as the paper does on SINS-10: first choose the numbers that a regulariser leaves open on each fold's validation
    part, then train on training and validation part together"""
    grid: tuple[str, ...] = ()
    """with --tuned, the values to try, as NAME=START:STOP:STEP (default: four over the usual range of each number)"""
    jobs: int | None = None
    """runs at a time, each in a process with one thread, so that no result depends on it (default: one per core, or
    one on a GPU)"""
    out: Path | None = None
    """the comparison's folder (default: compare- and the recipe)"""
    data: DataFolder = None
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Trains what is missing, shows the table, and writes it into comparison.json in the comparison's folder."""
    _refuse_nonsense(options)
    options = _with_gamma(options)
    pairing = _pairing(options)
    processes = process_count(options.jobs, options.device)
    place = Place(options.out or Path(f"compare-{options.recipe.name}"), options.data, options.device)
    grids = [choice.Grid.parsed(text) for text in options.grid]
    choice.expect_used(grids, options.regularisers)
    jobs = compare.plan(options.recipe, options.regularisers, pairing)
    baseline = options.baseline or options.regularisers[0]
    with alone_in(place.folder):
        if options.tuned:
            tuning = compare.plan_tuning(jobs, grids)
            _perform("tuning", tuning, place.for_tuning, processes, screen)
            jobs = compare.tuned(jobs, tuning, records.read(place.for_tuning.results))
        _perform("comparing", jobs, place, processes, screen)
        shown = compare.comparison(jobs, records.read(place.results), baseline, pairing)
        content = _content(options, jobs, shown, baseline, pairing)
        write_json(place.folder / "comparison.json", content)
    _show(content, screen)
    page = typed("report", place.folder, "--out", place.folder / "report.html")
    steps = {page: "a page with curves, gains and every number"}
    screen.end([place.folder / "comparison.json", place.results / f"{options.recipe.name}.jsonl"], steps)
    return content


def _refuse_nonsense(options: Options) -> None:
    if not options.regularisers:
        raise RecipeError("'maxgain compare' needs --regularisers, such as: none dropout maxgain.")
    if options.baseline is not None and options.baseline not in options.regularisers:
        raise RecipeError(f"the baseline {options.baseline!r} is not one of {', '.join(options.regularisers)}.")
    if (options.folds is None) == (options.seeds is None):
        raise RecipeError("'maxgain compare' needs either --folds or --seeds, and how many.")
    if options.folds is not None and options.recipe.fold != recipe_named(options.recipe.name).fold:
        raise RecipeError("--folds goes through the folds from 0 on: leave out --fold.")
    if options.grid and not options.tuned:
        raise RecipeError("--grid says which values --tuned tries: it needs --tuned.")


def _with_gamma(options: Options) -> Options:
    """The options with --gamma in every regulariser that leaves it open."""
    regularisers = with_gamma(options.regularisers, options.gamma)
    named = dict(zip(options.regularisers, regularisers, strict=True))
    return replace(options, regularisers=regularisers, baseline=options.baseline and named[options.baseline])


def _pairing(options: Options) -> Pairing:
    if options.folds is not None:
        return compare.folds(options.recipe, options.folds)
    return compare.seeds(options.recipe, options.seeds or 0)


def _perform(title: str, jobs: Sequence[Job], place: Place, processes: int, screen: Screen) -> None:
    known = records.read(place.results)
    for warning in known.warnings:
        screen.show(f"note: {warning}")
    missing = compare.missing(jobs, known)
    known_already = len(jobs) - len(missing)
    screen.show(f"{title}: {counted(len(jobs), 'run')}, {known_already} of them recorded already → {place.folder}")
    with screen.progress() as progress:
        task = progress.add_task(title, total=len(jobs), completed=len(jobs) - len(missing), status="")

        def told(job: Job, record: Record) -> None:
            failed = " failed" if record["status"] == "failed" else ""
            progress.update(task, advance=1, status=f"{job.name}{failed}")

        compare.perform_all(missing, place, processes, told)


def _content(
    options: Options, jobs: Sequence[Job], shown: Comparison, baseline: str, pairing: Pairing
) -> dict[str, Any]:
    """The comparison for machines; the table for people shows nothing else."""
    return {
        "recipe": options.recipe.name,
        "baseline": baseline,
        "over": pairing.over,
        "asked": list(pairing.numbers),
        "compared": list(shown.pairs),
        "tuned": options.tuned,
        "test": shown.test,
        "rows": [_row(name, jobs, shown) for name in options.regularisers],
        "failures": [
            {"regulariser": job.regulariser, "fold": job.recipe.fold, "seed": job.recipe.seed, "error": error}
            for job, error in shown.failures
        ],
    }


def _row(regulariser: str, jobs: Sequence[Job], shown: Comparison) -> dict[str, Any]:
    row = shown.rows.get(regulariser)
    recipes = [job.recipe for job in jobs if job.regulariser == regulariser]
    content = {
        "regulariser": regulariser,
        "numbers": [dict(numbers(recipe.chosen)) for recipe in recipes],
        "runs": [job.key for job in jobs if job.regulariser == regulariser],
        "values": [job.tuned for job in jobs if job.regulariser == regulariser],
    }
    if row is None:
        failed = sum(job.regulariser == regulariser for job, _ in shown.failures) == len(content["runs"])
        why = "all of its runs failed" if failed else "there is nothing to pair it with"
        return content | {"verdict": f"not compared: {why}"}
    return content | _numbers(row) | {"verdict": verdict(row)}


def _numbers(row: Row) -> dict[str, Any]:
    tested = {} if row.test is None else asdict(row.test) | {"adjusted_p": row.adjusted_p}
    if tested:  # the summary's is of the mean accuracy
        tested["difference_standard_error"] = tested.pop("standard_error")
    return asdict(row.summary) | tested | {"significant": row.significant}


def _show(content: dict[str, Any], screen: Screen) -> None:
    over = content["over"]
    screen.show(
        Table(
            f"{content['recipe']}: test accuracy in %, over {counted(len(content['compared']), over)}",
            (
                Column("regulariser"),
                Column("mean ± s.e."),
                Column("difference"),
                Column("95 % interval", spare=1),
                Column("effect size", spare=2),
                Column("95 % interval", spare=3),
                Column("p (Holm)"),
            ),
            tuple((_label(row), *_cells(row)) for row in content["rows"]),
        )
    )
    screen.show(f"{content['test']}, each against {content['baseline']}" if content["test"] else "nothing was tested")
    for row in content["rows"]:
        screen.show(f"{row['regulariser']}: {row['verdict']}")
    if content["tuned"]:
        for row in content["rows"]:
            chosen = [", ".join(f"{name} {value:g}" for name, value in point.items()) for point in row["values"]]
            if any(chosen):
                screen.show(f"{row['regulariser']}, chosen by {over}: {'; '.join(chosen)}")
    for failure in content["failures"]:
        screen.show(f"no score: {failure['regulariser']}, {over} {failure[over]}: {failure['error']}")
    left_out = sorted(set(content["asked"]) - set(content["compared"]))
    if left_out:
        numbers = ", ".join(map(str, left_out))
        screen.show(f"left out of all numbers above, since a run has no score there: {over} {numbers}")


def _label(row: dict[str, Any]) -> str:
    """The regulariser with the numbers that it had by default, where they were the same in all runs."""
    if any(numbers != row["numbers"][0] for numbers in row["numbers"]):
        return str(row["regulariser"])
    given = parse(row["regulariser"])
    return "+".join(
        choice.row.name + (f"={row['numbers'][0][choice.row.name]:g}" if choice.row.name in row["numbers"][0] else "")
        for choice in given
    )


def _cells(row: dict[str, Any]) -> tuple[str | None, ...]:
    if "mean" not in row:
        return "failed", None, None, None, None, None
    error = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.2f}"
    mean = f"{100 * row['mean']:.2f}{error}"
    if "p_value" not in row:
        return mean, None, None, None, None, None
    low, high = row["interval"]
    small, large = map(float, row["effect_interval"])
    return (
        mean,
        f"{100 * row['mean_difference']:+.2f}",
        f"{100 * low:+.2f} to {100 * high:+.2f}",
        f"{float(row['effect_size']):+.2f}",
        f"{small:+.2f} to {large:+.2f}",
        p_value(row["adjusted_p"]),
    )
