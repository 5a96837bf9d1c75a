"""One self-contained HTML page about everything below a folder: comparisons, searches and single runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
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
from ..recipe import Recipe, to_json
from ..regularisers import short_name, spell
from ..result import RESULT, Result, load
from ..run import CONFIG
from ..sentences import counted, listed, p_value, percent
from ..tuning import FILE as TUNING
from ..tuning import Choice, numbers_of
from . import figures

Cells = Sequence[str]


@dataclass(frozen=True)
class Table:
    """Texts in columns; the first names the row."""

    heads: Cells
    rows: Sequence[Cells]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A comparison, a search or runs, as the template shows it."""

    title: str
    place: str
    """A comparison's folder below the page's."""
    sentences: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[tuple[str, Sequence[Markup]]] = ()
    """Captions, and the panels under each."""
    notes: Sequence[str] = ()
    method: str = ""
    details: Sequence[Table] = field(default_factory=list)
    """Folded away, each under its caption."""


def build_page(folder: Path) -> str:
    """The page about a folder, or a .jsonl export, as HTML; the same files give the same page."""
    sections, every = _sections(folder)
    if not sections:
        raise FileError(f"there is no finished run in {folder}.")
    finished = [result for result in every if result.status == "ok"]
    days = sorted({result.finished[:10] for result in every if result.finished})
    facts = [counted(len(finished), "finished run")]
    if len(every) > len(finished):
        facts.append(f"{len(every) - len(finished)} failed")
    if days:
        facts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    facts += sorted({f"maxgain {result.maxgain}" for result in every if result.maxgain})
    comparisons = [section for section in sections if section.place]
    is_answer = len(sections) == 1 or len(comparisons) == 1
    title = sections[0].title if is_answer else f"Results in {folder.resolve().name}"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    template = environment.from_string(_resource("page.html"))
    return template.render(title=title, facts=facts, sections=sections, style=Markup(_resource("page.css")))


def _sections(folder: Path) -> tuple[list[Section], list[Result]]:
    """Every comparison, then every search, then the runs that belong to neither; and all results."""
    every = load(folder)
    if folder.is_file():
        return _rest(every), every
    sections, used = [], set()
    for file in sorted(folder.rglob(PLAN)):
        begun = any(file.parent.rglob(RESULT))
        comparison = compare(read_plan(file.parent), load(file.parent) if begun else [])
        used |= {result.key for runs in comparison.results.values() for result in runs}
        used |= {result.key for result in comparison.failed}
        sections.append(_comparison(comparison, file.parent.relative_to(folder).as_posix()))
    loose, searches = [], sorted(file.parent for file in folder.rglob(TUNING))
    for search in searches:
        choice, found = _files.read_json(search / TUNING, Choice), load(search)
        sections.append(_search([result for result in found if result.key in choice.runs], choice))
        loose += [result for result in found if result.key not in choice.runs]
    runs = sorted(file.parent for file in folder.rglob(RESULT) if not any(one in file.parents for one in searches))
    loose += [result for run in runs for result in load(run)]
    rest = {result.key: result for result in loose if result.key not in used}
    sections += _rest(list(rest.values()))
    if waiting := sum(not (file.parent / RESULT).exists() for file in folder.rglob(CONFIG)):
        sections[-1] = replace(sections[-1], notes=[*sections[-1].notes, f"{counted(waiting, 'run')} not finished."])
    return sections, every


def _rest(results: Sequence[Result]) -> list[Section]:
    """Searches, which are runs without a test score that differ in their numbers, and then single runs."""
    groups: dict[tuple[Recipe, bool], list[Result]] = {}
    for result in results:
        group = _without_numbers(result.recipe), result.test_accuracy is None
        groups.setdefault(group, []).append(result)
    searches = [runs for (_, untested), runs in groups.items() if untested and figures.varied(runs)]
    single = [run for runs in groups.values() if runs not in searches for run in runs]
    sections = [_search(runs) for runs in searches]
    if single:
        sections.append(_run(single[0]) if len(single) == 1 else _runs(single))
    return sections


def _without_numbers(recipe: Recipe) -> Recipe:
    names = "+".join(choice.row.name for choice in recipe.chosen)
    return replace(recipe, regulariser=names, seed=0, fold=None if recipe.fold is None else 0)


# Comparisons


def _comparison(comparison: Comparison, place: str) -> Section:
    plan, results = comparison.plan, [result for runs in comparison.results.values() for result in runs]
    labels = comparison.labels
    shown = _before_and_after(comparison)
    rows = {labels[row]: runs for row, runs in comparison.results.items() if runs}
    scores = Table(
        (plan.over, *labels.values()),
        [(str(unit), *(percent(row.scores.get(unit)) for row in comparison.rows)) for unit in plan.units],
        f"{comparison.score.capitalize()} accuracy by {plan.over}, %",
    )
    return Section(
        title=comparison.title,
        place=place,
        sentences=[*(f"{_capital(contrast.sentence)}." for contrast in comparison.contrasts), *_gain_sentence(shown)],
        table=Table(HEADS, comparison.table(), comparison.caption),
        figures=[
            *_drawn("Differences", [figures.forest(comparison)]),
            *_gain_figures(shown),
            *_curves("Learning curves, means over runs", rows),
        ],
        notes=comparison.notes,
        method=" ".join([comparison.method, *_checks(comparison)]),
        details=[scores, *_chosen(plan), _settings(plan.recipe), *_failures(comparison.failed), *_origins(results)],
    )


def _chosen(plan: Plan) -> Iterator[Table]:
    if plan.numbers:
        rows = [
            (
                str(unit),
                *(" ".join(f"{number:g}" for number in by.get(unit, {}).values()) for by in plan.numbers.values()),
            )
            for unit in plan.units
        ]
        yield Table((plan.over, *plan.numbers), rows, "Chosen numbers")


def _checks(comparison: Comparison) -> Iterator[str]:
    """What the other analysis and the test set's own sampling say about each contrast."""
    checks = [f"{one.first}: p = {p_value(one.check.p_holm)}" for one in comparison.contrasts if one.check]
    if checks:
        yield f"Check: {'; '.join(checks)}."
    errors = [
        f"{one.first} ± {100 * one.sampling_error:.2f}"
        for one in comparison.contrasts
        if one.sampling_error is not None
    ]
    if errors:
        yield f"Standard error from the sampling of test images alone, in points: {'; '.join(errors)}."


def _before_and_after(comparison: Comparison) -> dict[str, Result]:
    """One run of each row of the first contrast that adds maxgain, or of the first row, where gains were measured."""
    pairs = [(one.second, one.first) for one in comparison.contrasts]
    adds = [pair for pair in pairs if "maxgain" in pair[1] and "maxgain" not in pair[0]]
    rows = next(iter([*adds, *pairs]), comparison.plan.rows[:1])
    measured = {row: next((run for run in comparison.results[row] if run.gains), None) for row in rows}
    return {comparison.labels[row]: run for row, run in measured.items() if run is not None}


def _gain_sentence(results: Mapping[str, Result]) -> Iterator[str]:
    if results:
        gains = [f"{figures.largest_gain(result):.2f} with {name}" for name, result in results.items()]
        yield f"Largest gain of any layer: {listed(gains)}."


# Searches and runs


def _search(results: Sequence[Result], choice: Choice | None = None) -> Section:
    recipe, parts = results[0].recipe, figures.varied(results)
    finished = [result for result in results if result.status == "ok" and result.validation_accuracy is not None]
    by_point: dict[tuple[float, ...], list[Result]] = {}
    for result in finished:
        by_point.setdefault(tuple(numbers_of(result.recipe, parts).values()), []).append(result)
    title, chosen = f"Search on {recipe.name}: no run finished", None
    if by_point:
        means = {point: np.mean([run.validation_accuracy or 0 for run in runs]) for point, runs in by_point.items()}
        best = min(means, key=lambda point: (-means[point], point))
        chosen = {part.row.name: value for part, value in zip(parts, best, strict=True)}
        runs = len(by_point[best])
        title = (
            f"{', '.join(f'{name}={value:g}' for name, value in chosen.items())} has the best validation accuracy on "
            f"{recipe.name}, {percent(float(means[best]))} %{f', the mean of {runs} runs' if runs > 1 else ''}"
        )
    drawn = [figures.tuning_curves(finished, chosen)] if finished else []
    if choice and choice.by == "early" and (gamma := replace(recipe, regulariser=choice.regulariser).gamma):
        title = f"{choice.regulariser} is the early rule's choice on {recipe.name}"
        drawn.insert(0, figures.early_curve(results, gamma))
    heads = (*(part.row.name for part in parts), "validation, %", "validation loss", "train, %", "fold", "seed")
    rows = [
        (
            *(f"{value:g}" for value in numbers_of(result.recipe, parts).values()),
            percent(result.validation_accuracy) if result.status == "ok" else "failed",
            "–" if result.validation_loss is None else f"{result.validation_loss:.4f}",
            percent(result.train_accuracy),
            "–" if result.recipe.fold is None else str(result.recipe.fold),
            str(result.recipe.seed),
        )
        for result in sorted(results, key=lambda result: [*numbers_of(result.recipe, parts).values()])
    ]
    return Section(
        title=title,
        place="",
        sentences=[
            *([f"Chosen: {choice.regulariser} ({choice.rule})."] if choice else []),
            "Numbers are chosen on validation images; test images are not used.",
        ],
        figures=list(_drawn("Scores by number", drawn)),
        details=[Table(heads, rows, counted(len(rows), "run")), _settings(recipe), *_origins(results)],
    )


def _run(result: Result) -> Section:
    name = f"{result.recipe.name}, {short_name(spell(result.recipe.chosen))}"
    part = "validation" if result.test_accuracy is None else "test"
    score = result.validation_accuracy if result.test_accuracy is None else result.test_accuracy
    shown = {name: result} if result.gains else {}
    losses = [
        (part, percent(getattr(result, f"{part}_accuracy")), f"{loss:.4f}")
        for part in ("train", "validation", "test")
        if (loss := getattr(result, f"{part}_loss")) is not None
    ]
    return Section(
        title=f"{name}: {part} accuracy {percent(score)} %" if result.status == "ok" else f"{name}: failed",
        place="",
        sentences=[result.error] if result.error else list(_gain_sentence(shown)),
        table=Table(("part of the data", "accuracy, %", "log loss, nats"), losses) if losses else None,
        figures=[*_gain_figures(shown), *_curves("Learning curves", {name: [result]})],
        details=[_settings(result.recipe), *_origins([result])],
    )


def _runs(results: Sequence[Result]) -> Section:
    rows = [
        (
            result.recipe.title,
            *(percent(getattr(result, f"{part}_accuracy")) for part in ("test", "validation", "train")),
        )
        for result in results
        if result.status == "ok"
    ]
    return Section(
        title=f"{counted(len(results), 'run')} outside any comparison",
        place="",
        table=Table(("run", "test, %", "validation, %", "train, %"), rows),
        details=[*_failures([result for result in results if result.status == "failed"]), *_origins(results)],
    )


# What all have


def _gain_figures(results: Mapping[str, Result]) -> Iterator[tuple[str, list[Markup]]]:
    top = max([figures.largest_gain(result) for result in results.values()], default=0.0)
    return _drawn("Gains of each layer", [figures.gain_boxes({name: run}, top) for name, run in results.items()])


def _curves(caption: str, rows: Mapping[str, Sequence[Result]]) -> Iterator[tuple[str, list[Markup]]]:
    return _drawn(caption, [figures.learning_curve(rows, metric) for metric in figures.METRICS])


def _drawn(caption: str, drawings: Sequence[Figure | None]) -> Iterator[tuple[str, list[Markup]]]:
    if known := [Markup(figures.svg(figure, caption)) for figure in drawings if figure is not None]:
        yield caption, known


def _settings(recipe: Recipe) -> Table:
    content: dict[str, Any] = to_json(recipe)
    hidden = ("regulariser", "fold", "seed")
    rows = [(name.replace("_", " "), str(value)) for name, value in content.items() if name not in hidden and value]
    return Table(("setting", "value"), rows, "Settings")


def _failures(results: Sequence[Result]) -> Iterator[Table]:
    rows = [(result.recipe.title, result.fault, result.error) for result in results]
    if rows:
        yield Table(("run", "fault", "error"), rows, counted(len(rows), "failed run"))


def _origins(results: Sequence[Result]) -> Iterator[Table]:
    names = ("maxgain", "commit", "torch", "device", "machine", "precision", "data_source", "command")
    counts: dict[tuple[str, ...], int] = {}
    for result in results:
        origin = tuple(str(getattr(result, name)) for name in names)
        counts[origin] = counts.get(origin, 0) + 1
    rows = [
        (
            str(count),
            "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in zip(names, origin, strict=True) if value),
        )
        for origin, count in counts.items()
    ]
    if rows:
        yield Table(("runs", "made with"), rows, "How the runs were made")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:] if sentence.startswith(("on ", "no ")) else sentence


def _breakable(text: str) -> Markup:
    """The text with a possible line break between joined regularisers."""
    return Markup("+<wbr>").join(re.split(r"(?<=\w)\+(?=[a-z])", text))


def _resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
