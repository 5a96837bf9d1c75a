"""One self-contained HTML page about everything below a folder: comparisons, searches and single runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from maxgain.errors import FileError

from .. import _files
from ..comparison import HEADS, Comparison, compare
from ..plan import FILE as PLAN
from ..plan import Plan, read_plan
from ..recipe import Recipe, short_name
from ..result import CONFIG, RESULT, Result, load
from ..sentences import counted, listed, percent
from ..tuning import FILE as TUNING
from ..tuning import Choice, numbers_of
from . import figures

PARTS = ("test", "validation", "train")
ORIGIN = ("maxgain", "commit", "torch", "device", "machine", "precision", "data_source", "command")
"""Fields of a result that say what it was made with."""

Drawn = tuple[str, Sequence[Figure | None]]
"""A caption, and the panels under it."""


@dataclass(frozen=True)
class Table:
    """Texts in columns; the first names the row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A comparison, a search or runs, as the template shows it; what is empty is left out."""

    title: str
    place: str = ""
    """A comparison's folder below the page's."""
    sentences: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Drawn] = ()
    notes: Sequence[str] = ()
    method: str = ""
    details: Sequence[Table] = ()
    """Folded away, each under its caption."""


def build_page(folder: Path) -> str:
    """The page about a folder, or a .jsonl export, as HTML; the same files give the same page."""
    every = load(folder)
    if not every:
        raise FileError(f"there is no finished run in {folder}.")
    sections = _sections(folder) if folder.is_dir() else _loose(every)
    finished = sum(result.status == "ok" for result in every)
    days = sorted({result.finished[:10] for result in every if result.finished})
    facts = [
        counted(finished, "finished run"),
        f"{len(every) - finished} failed" if finished < len(every) else "",
        " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
        *sorted({f"maxgain {result.maxgain}" for result in every if result.maxgain}),
    ]
    is_answer = len(sections) == 1 or sum(bool(section.place) for section in sections) == 1
    title = sections[0].title if is_answer else f"Results in {folder.resolve().name}"
    html, style = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "svg": lambda figure, label: Markup(figures.svg(figure, label))}
    page = environment.from_string(html)
    return page.render(title=title, facts=filter(None, facts), sections=sections, style=Markup(style))


def _sections(folder: Path) -> list[Section]:
    """Every comparison, then every search, then the runs that belong to neither."""
    found = {file: _files.read_json(file, Result) for file in sorted(folder.rglob(RESULT))}
    sections, compared, searched = [], set(), set()
    for home in sorted(file.parent for file in folder.rglob(PLAN)):
        results = [result for file, result in found.items() if home in file.parents]
        comparison = compare(read_plan(home), results)
        compared |= {result.key for runs in (*comparison.results.values(), comparison.failed) for result in runs}
        sections.append(_comparison(comparison, home.relative_to(folder).as_posix()))
    for home in sorted(file.parent for file in folder.rglob(TUNING)):
        choice = _files.read_json(home / TUNING, Choice)
        files = [file for file, result in found.items() if home in file.parents and result.key in choice.runs]
        searched |= {*files}
        sections.append(_search([found[file] for file in files], choice))
    rest = {result.key: result for file, result in found.items() if file not in searched}
    sections += _loose([result for key, result in rest.items() if key not in compared])
    if waiting := sum(not (file.parent / RESULT).exists() for file in folder.rglob(CONFIG)):
        sections[-1] = replace(sections[-1], notes=[*sections[-1].notes, f"{counted(waiting, 'run')} not finished."])
    return sections


def _loose(results: Sequence[Result]) -> list[Section]:
    """Searches, which are runs without a test score that differ in their numbers, and then single runs."""
    groups: dict[tuple[Recipe, bool], list[Result]] = {}
    for result in results:
        names = "+".join(choice.row.name for choice in result.recipe.chosen)
        fold = None if result.recipe.fold is None else 0
        alike = replace(result.recipe, regulariser=names, seed=0, fold=fold)
        groups.setdefault((alike, result.test_accuracy is None), []).append(result)
    searches = [runs for (_, untested), runs in groups.items() if untested and figures.varied(runs)]
    single = [run for runs in groups.values() if runs not in searches for run in runs]
    sections = [_search(runs) for runs in searches]
    if single:
        sections.append(_run(single[0]) if len(single) == 1 else _runs(single))
    return sections


# Comparisons


def _comparison(comparison: Comparison, place: str) -> Section:
    plan, labels = comparison.plan, comparison.labels
    results = [result for runs in comparison.results.values() for result in runs]
    shown = _before_and_after(comparison)
    scores = [(str(unit), *(percent(row.scores.get(unit)) for row in comparison.rows)) for unit in plan.units]
    return Section(
        title=comparison.title,
        place=place,
        sentences=[_gain_sentence(shown)],
        table=Table(HEADS, comparison.table(), comparison.caption),
        figures=[
            ("Differences", [figures.forest(comparison)]),
            *_figures(shown, {labels[row]: runs for row, runs in comparison.results.items() if runs}),
        ],
        notes=comparison.notes,
        method=comparison.method,
        details=[
            Table((plan.over, *labels.values()), scores, f"{comparison.score.capitalize()} accuracy by {plan.over}, %"),
            _chosen(plan),
            _sampling_errors(comparison),
            _settings(plan.recipe),
            _failures(comparison.failed),
            _origins(results),
        ],
    )


def _chosen(plan: Plan) -> Table:
    rows = []
    for unit in plan.units if plan.numbers else ():
        chosen = [by_unit.get(unit, {}).values() for by_unit in plan.numbers.values()]
        rows.append((str(unit), *(" ".join(f"{number:g}" for number in numbers) for numbers in chosen)))
    return Table((plan.over, *plan.numbers), rows, "Chosen numbers")


def _sampling_errors(comparison: Comparison) -> Table:
    known = [(one, one.sampling_error) for one in comparison.contrasts if one.sampling_error is not None]
    rows = [(f"{one.first} against {one.second}", f"{100 * error:.2f}") for one, error in known]
    return Table(("contrast", "points"), rows, "Standard error from the sampling of test images alone")


def _before_and_after(comparison: Comparison) -> dict[str, Result]:
    """One run of each row of the first contrast that adds maxgain, or of the first row, where gains were measured."""
    pairs = [(one.second, one.first) for one in comparison.contrasts]
    adds = [pair for pair in pairs if "maxgain" in pair[1] and "maxgain" not in pair[0]]
    rows = next(iter([*adds, *pairs]), comparison.plan.rows[:1])
    measured = {row: next((run for run in comparison.results[row] if run.gains), None) for row in rows}
    return {comparison.labels[row]: run for row, run in measured.items() if run is not None}


# Searches and runs


def _search(results: Sequence[Result], choice: Choice | None = None) -> Section:
    recipe, parts = results[0].recipe, figures.varied(results)

    def point_of(result: Result) -> tuple[float, ...]:
        return tuple(numbers_of(result.recipe, parts).values())

    finished = [result for result in results if result.status == "ok" and result.validation_accuracy is not None]
    scores: dict[tuple[float, ...], list[float]] = {}
    for result in finished:
        scores.setdefault(point_of(result), []).append(result.validation_accuracy or 0.0)
    title, chosen = f"Search on {recipe.name}: no run finished", None
    if scores:
        best = min(scores, key=lambda point: (-np.mean(scores[point]), point))
        chosen = {part.row.name: value for part, value in zip(parts, best, strict=True)}
        numbers, runs = ", ".join(f"{name}={value:g}" for name, value in chosen.items()), len(scores[best])
        mean = percent(float(np.mean(scores[best]))) + " %" + (f", the mean of {runs} runs" if runs > 1 else "")
        title = f"{numbers} has the best validation accuracy on {recipe.name}, {mean}"
    drawn = [figures.tuning_curves(finished, chosen)] if finished else []
    if choice and choice.by == "early" and (gamma := replace(recipe, regulariser=choice.regulariser).gamma):
        title = f"{choice.regulariser} is the early rule's choice on {recipe.name}"
        drawn.insert(0, figures.early_curve(results, gamma))
    heads = (*(part.row.name for part in parts), "validation, %", "validation loss", "train, %", "fold", "seed")
    rows = [
        (
            *(f"{value:g}" for value in point_of(result)),
            percent(result.validation_accuracy) if result.status == "ok" else "failed",
            "–" if result.validation_loss is None else f"{result.validation_loss:.4f}",
            percent(result.train_accuracy),
            "–" if result.recipe.fold is None else str(result.recipe.fold),
            str(result.recipe.seed),
        )
        for result in sorted(results, key=point_of)
    ]
    return Section(
        title=title,
        sentences=[
            f"Chosen: {choice.regulariser} ({choice.rule})." if choice else "",
            "Numbers are chosen on validation images; test images are not used.",
        ],
        figures=[("Scores by number", drawn)],
        details=[Table(heads, rows, counted(len(rows), "run")), _settings(recipe), _origins(results)],
    )


def _run(result: Result) -> Section:
    name = f"{result.recipe.name}, {short_name(result.recipe.regulariser)}"
    part = "validation" if result.test_accuracy is None else "test"
    score = percent(getattr(result, f"{part}_accuracy"))
    shown = {name: result} if result.gains else {}
    losses = [
        (part, percent(getattr(result, f"{part}_accuracy")), f"{loss:.4f}")
        for part in reversed(PARTS)
        if (loss := getattr(result, f"{part}_loss")) is not None
    ]
    return Section(
        title=f"{name}: {part} accuracy {score} %" if result.status == "ok" else f"{name}: failed",
        sentences=[result.error or _gain_sentence(shown)],
        table=Table(("part of the data", "accuracy, %", "log loss, nats"), losses),
        figures=_figures(shown, {name: [result]}),
        details=[_settings(result.recipe), _origins([result])],
    )


def _runs(results: Sequence[Result]) -> Section:
    heads = ("run", *(f"{part}, %" for part in PARTS))
    rows = [
        (result.recipe.title, *(percent(getattr(result, f"{part}_accuracy")) for part in PARTS))
        for result in results
        if result.status == "ok"
    ]
    failed = [result for result in results if result.status == "failed"]
    title = f"{counted(len(results), 'run')} outside any comparison"
    return Section(title=title, table=Table(heads, rows), details=[_failures(failed), _origins(results)])


# What all have


def _gain_sentence(results: Mapping[str, Result]) -> str:
    gains = [f"{figures.largest_gain(result):.2f} with {name}" for name, result in results.items()]
    return f"Largest gain of any layer: {listed(gains)}." if gains else ""


def _figures(measured: Mapping[str, Result], rows: Mapping[str, Sequence[Result]]) -> list[Drawn]:
    """The gains of some runs, all on one axis, and the learning curves of all rows."""
    top = max(map(figures.largest_gain, measured.values()), default=0.0)
    means = ", means over runs" if any(len(runs) > 1 for runs in rows.values()) else ""
    return [
        ("Gains of each layer", [figures.gain_boxes({name: run}, top) for name, run in measured.items()]),
        (f"Learning curves{means}", [figures.learning_curve(rows, metric) for metric in figures.METRICS]),
    ]


def _settings(recipe: Recipe) -> Table:
    content: dict[str, Any] = _files.to_builtins(recipe)
    hidden = ("regulariser", "fold", "seed")
    rows = [(name.replace("_", " "), str(value)) for name, value in content.items() if name not in hidden and value]
    return Table(("setting", "value"), rows, "Settings")


def _failures(results: Sequence[Result]) -> Table:
    rows = [(result.recipe.title, result.fault, result.error) for result in results]
    return Table(("run", "fault", "error"), rows, counted(len(rows), "failed run"))


def _origins(results: Sequence[Result]) -> Table:
    origins = Counter(
        "; ".join(f"{name.replace('_', ' ')}: {value}" for name in ORIGIN if (value := getattr(result, name)))
        for result in results
    )
    rows = [(str(count), origin) for origin, count in origins.items()]
    return Table(("runs", "made with"), rows, "How the runs were made")


def _breakable(text: str) -> Markup:
    """The text with a possible line break between joined regularisers."""
    return Markup("+<wbr>").join(re.split(r"(?<=\w)\+(?=[a-z])", text))
