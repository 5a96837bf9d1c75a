"""One self-contained HTML page about everything below a folder: comparisons, searches and single runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from maxgain.errors import FileError

from .. import _files
from ..comparison import HEADS, Comparison, compare
from ..plan import FILE as PLAN
from ..plan import read_plan
from ..recipe import Recipe, fill, short_name
from ..result import CONFIG, RESULT, Result, load
from ..sentences import counted, listed, percent
from ..tuning import FILE as TUNING
from ..tuning import Choice, numbers_of
from . import figures

ORIGIN = ("maxgain", "commit", "torch", "device", "machine", "precision", "data_source", "command")
"""Fields of a result that say what it was made with."""

Drawn = tuple[str, Sequence[Figure | None]]
"""A caption, and the panels under it."""


@dataclass(frozen=True)
class Table:
    """Texts in columns; the first names the row."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A comparison, a search or runs, as the template shows it; what is empty is left out."""

    title: str
    place: str = ""
    """A comparison's folder below the page's."""
    notes: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Drawn] = ()
    method: str = ""
    details: Sequence[Table] = ()
    """Folded away, each under its caption."""


def build_page(folder: Path) -> str:
    """The page about a folder, or a .jsonl export, as HTML; the same files give the same page."""
    results = load(folder)
    if not results:
        raise FileError(f"there is no finished run in {folder}.")
    files = sorted(folder.rglob(RESULT)) or [folder] * len(results)
    sections = _sections(folder, list(zip(files, results, strict=True)))
    finished = sum(result.status == "ok" for result in results)
    days = sorted({result.finished[:10] for result in results if result.finished})
    facts = [
        counted(finished, "finished run"),
        f"{len(results) - finished} failed" if finished < len(results) else "",
        " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
        *sorted({f"maxgain {result.maxgain}" for result in results if result.maxgain}),
    ]
    is_answer = len(sections) == 1 or sum(bool(section.place) for section in sections) == 1
    title = sections[0].title if is_answer else f"Results in {folder.resolve().name}"
    html, style = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "svg": lambda figure, label: Markup(figures.svg(figure, label))}
    page = environment.from_string(html)
    return page.render(title=title, facts=filter(None, facts), sections=sections, style=Markup(style))


def _sections(folder: Path, found: Sequence[tuple[Path, Result]]) -> list[Section]:
    """Every comparison, then every search, then the runs that belong to neither."""
    sections: list[Section] = []
    compared, searched = set[str](), set[Path]()
    for home in sorted(file.parent for file in folder.rglob(PLAN)):
        comparison = compare(read_plan(home), [result for file, result in found if home in file.parents])
        compared |= {result.key for runs in (*comparison.results.values(), comparison.failed) for result in runs}
        sections.append(_comparison(comparison, home.relative_to(folder).as_posix()))
    for home in sorted(file.parent for file in folder.rglob(TUNING)):
        choice = _files.read_json(home / TUNING, Choice)
        tried = {file: result for file, result in found if home in file.parents and result.key in choice.runs}
        searched |= tried.keys()
        if tried:
            sections.append(_search(list(tried.values()), choice))
    # Of the rest, runs without a test score that differ in their numbers alone are a search.
    alike: dict[tuple[Recipe, bool], list[Result]] = {}
    for result in {result.key: result for file, result in found if file not in searched}.values():
        if result.key not in compared:
            names = "+".join(choice.row.name for choice in result.recipe.chosen)
            recipe = replace(result.recipe, regulariser=names, seed=0, fold=None if result.recipe.fold is None else 0)
            alike.setdefault((recipe, result.test_accuracy is None), []).append(result)
    searches = [runs for (_, untested), runs in alike.items() if untested and figures.varied(runs)]
    sections += map(_search, searches)
    if single := [run for runs in alike.values() if runs not in searches for run in runs]:
        sections.append(_runs(single))
    if waiting := sum(not (file.parent / RESULT).exists() for file in folder.rglob(CONFIG)):
        sections[-1] = replace(sections[-1], notes=[*sections[-1].notes, f"{counted(waiting, 'run')} not finished."])
    return sections


def _comparison(comparison: Comparison, place: str) -> Section:
    plan, labels = comparison.plan, comparison.labels
    # Gains are shown of the first pair that differs in maxgain, or else of the first pair, or of the only row.
    pairs = [(one.second, one.first) for one in comparison.contrasts]
    adds = [pair for pair in pairs if "maxgain" in pair[1] and "maxgain" not in pair[0]]
    gains = {row: [run for run in comparison.results[row] if run.gains] for row in [*adds, *pairs, plan.rows[:1]][0]}
    measured = {labels[row]: runs[0] for row, runs in gains.items() if runs}
    drawn = _figures(measured, {labels[row]: runs for row, runs in comparison.results.items() if runs})
    chosen = [
        (str(unit), *(" ".join(map("{:g}".format, row.get(unit, {}).values())) for row in plan.numbers.values()))
        for unit in (plan.units if plan.numbers else ())
    ]
    sampling = [
        (one.label, f"{100 * one.sampling_error:.2f}") for one in comparison.contrasts if one.sampling_error is not None
    ]
    return Section(
        title=comparison.title,
        place=place,
        notes=comparison.notes,
        table=Table(comparison.caption, HEADS, comparison.table()),
        figures=[("Differences", [figures.forest(comparison)]), *drawn],
        method=comparison.method,
        details=[
            Table(
                f"{comparison.score.capitalize()} accuracy by {plan.over}, %",
                (plan.over, *labels.values()),
                [(str(unit), *(percent(row.scores.get(unit)) for row in comparison.rows)) for unit in plan.units],
            ),
            Table("Chosen numbers", (plan.over, *plan.numbers), chosen),
            Table("Standard error from the sampling of test images alone", ("contrast", "points"), sampling),
            *_details([*(run for runs in comparison.results.values() for run in runs), *comparison.failed]),
        ],
    )


def _search(results: Sequence[Result], choice: Choice | None = None) -> Section:
    """A search; one without a record of its choice takes the best mean over folds or seeds."""
    recipe, parts = results[0].recipe, figures.varied(results)
    results = sorted(results, key=lambda result: list(numbers_of(result.recipe, parts).values()))
    finished = [result for result in results if result.status == "ok" and result.validation_accuracy is not None]
    scores: dict[str, list[float]] = {}
    for result in finished:
        scores.setdefault(fill(result.recipe.regulariser), []).append(result.validation_accuracy or 0.0)
    best = max(scores, key=lambda name: float(np.mean(scores[name])), default=recipe.regulariser)
    chosen = replace(recipe, regulariser=choice.regulariser if choice else best)
    name, title = fill(chosen.regulariser), f"Search on {recipe.name}: no run finished"
    drawn = [figures.tuning_curves(finished, numbers_of(chosen, parts))] if finished else []
    if choice and choice.by == "early" and chosen.gamma:
        title = f"{name} is the early rule's choice on {recipe.name}"
        drawn.insert(0, figures.early_curve(results, chosen.gamma))
    elif runs := scores.get(name):
        title = f"{name} has the best validation accuracy on {recipe.name}, {percent(float(np.mean(runs)))} %"
        title += f", the mean of {len(runs)} runs" if len(runs) > 1 else ""
    return Section(
        title=title,
        figures=[("Scores by number", drawn)],
        method=(f"Chosen: {name} ({choice.rule}). " if choice else "") + "No test image was used.",
        details=[_scores(results), *_details(results)],
    )


def _runs(results: Sequence[Result]) -> Section:
    """Runs outside any comparison; a single one with its figures."""
    title, notes, drawn = f"{counted(len(results), 'run')} outside any comparison", [], []
    if len(results) == 1:
        (run,) = results
        name = f"{run.recipe.name}, {short_name(fill(run.recipe.regulariser))}"
        part = "validation" if run.test_accuracy is None else "test"
        score = f"{part} accuracy {percent(getattr(run, f'{part}_accuracy'))} %"
        title, notes = f"{name}: {score if run.status == 'ok' else 'failed'}", [run.error] if run.error else []
        drawn = _figures({name: run} if run.gains else {}, {name: [run]})
    return Section(title=title, notes=notes, table=_scores(results), figures=drawn, details=_details(results))


# What all have


def _figures(measured: Mapping[str, Result], rows: Mapping[str, Sequence[Result]]) -> list[Drawn]:
    """The gains of some runs, all on one axis, and the learning curves of all rows."""
    largest = {name: figures.largest_gain(run) for name, run in measured.items()}
    means = ", means over runs" if any(len(runs) > 1 for runs in rows.values()) else ""
    drawn: list[Drawn] = [
        (f"Learning curves{means}", [figures.learning_curve(rows, metric) for metric in figures.METRICS])
    ]
    if largest:
        top, said = max(largest.values()), listed([f"{gain:.2f} with {name}" for name, gain in largest.items()])
        boxes = [figures.gain_boxes({name: run}, top) for name, run in measured.items()]
        drawn.insert(0, (f"Gains of each layer; the largest is {said}", boxes))
    return drawn


def _scores(results: Sequence[Result]) -> Table:
    """The finished runs' scores on the parts of the data that any was scored on."""
    finished, columns = [result for result in results if result.status == "ok"], {}
    for part in ("test", "validation", "train"):
        losses = [getattr(result, f"{part}_loss") for result in finished]
        columns[f"{part} accuracy, %"] = [percent(getattr(result, f"{part}_accuracy")) for result in finished]
        columns[f"{part} loss, nats"] = ["–" if loss is None else f"{loss:.4f}" for loss in losses]
    known = {head: texts for head, texts in columns.items() if {*texts} - {"–"}}
    rows = list(zip((result.recipe.title for result in finished), *known.values(), strict=True))
    return Table("Scores", ("run", *known), rows)


def _details(results: Sequence[Result]) -> list[Table]:
    """What the runs have in common, which failed, and what they were made with."""
    settings = []
    for name in sorted(Recipe.__dataclass_fields__.keys() - {"regulariser", "fold", "seed"}):
        values = dict.fromkeys(str(value) for result in results if (value := getattr(result.recipe, name)))
        settings += [(name.replace("_", " "), ", ".join(values))] if values else []
    failed = [(one.recipe.title, one.fault, one.error) for one in results if one.status == "failed"]
    origins = Counter(
        "; ".join(f"{name.replace('_', ' ')}: {value}" for name in ORIGIN if (value := getattr(result, name)))
        for result in results
    )
    return [
        Table("Settings", ("setting", "value"), settings),
        Table(counted(len(failed), "failed run"), ("run", "fault", "error"), failed),
        Table("How the runs were made", ("runs", "made with"), [(str(count), text) for text, count in origins.items()]),
    ]


def _breakable(text: str) -> Markup:
    """The text with a possible line break between joined regularisers."""
    return Markup("+<wbr>").join(re.split(r"(?<=\w)\+(?=[a-z])", text))
