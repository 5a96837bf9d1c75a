"""The page to look at: what a folder of results shows, as one HTML file that opens offline, on a phone, and in print.

Everything on it comes from the records, and the same records give the same page.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from maxgain.errors import RecordError, RunError

from ..comparing.comparison import Comparison
from ..comparing.question import Question
from ..comparing.records import Record, Records, finished
from ..comparing.sentences import p_value
from ..files import marked, write_text
from ..schema import score
from ..tables import uniform
from ..wording import clause, counted, listed, percent, signed
from . import drawing, sources
from .comparisons import comparisons
from .gain_data import gain_data
from .sections import comparison_section, run_section, tuning_section
from .tunings import Tuning

LONGEST_HEADLINE = 150
"""Letters; a longer outcome stands under the headline."""


def write(folder: Path, out: Path, baseline: str | None = None) -> Records:
    """Write the page about a folder of results, and return the records it was made of.

    It shows the comparisons that `maxgain compare` was asked for; with a baseline, each with that baseline instead.
    """
    found = sources.read(folder)
    if not found:
        warnings = found.records.warnings
        why = clause(warnings[0]) if warnings else "maxgain train, tune and compare leave some there"
        raise RecordError(f"{folder} has no records of runs: {why}.")
    if out.is_file() and not marked(out, ".html"):
        raise RunError(f"cannot write {out}: it exists and is no page of maxgain's; choose another --out.")
    write_text(out, build_page(found.records, found.tunings, baseline, found.asked, found.alone), replace=True)
    return found.records


def build_page(
    found: Records,
    made: Sequence[Tuning] = (),
    baseline: str | None = None,
    asked: Sequence[Question] = (),
    alone: Collection[str] = (),
) -> str:
    """The page about these records, the tuning behind them and the comparisons that were asked for.

    `alone` are the keys of runs that belong to no comparison; they are compared among themselves where they can be.
    """
    compared = _compared(found, asked, baseline, alone)
    anchors = {run["key"]: f"r{number}" for number, run in enumerate(found.runs)}
    several = {name: comparison for name, comparison in compared.items() if not _single(comparison)}
    sections = [comparison_section(name, comparison, anchors) for name, comparison in several.items()]
    single = [run_section(name, comparison.runs[0]) for name, comparison in compared.items() if _single(comparison)]
    tunings = [tuning_section(tuning) for tuning in made]
    results = [*found.runs, *(result for tuning in made for result in tuning.made)]
    gains = gain_data(_by_row(compared))
    script = _resource("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {show.__name__: show for show in (percent, points, number, p_value, breakable, counted)}
    return environment.from_string(_resource("report.html")).render(
        style=Markup(_resource("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **_headline(several, sections, single, tunings),
        dates=_dates(results),
        versions=listed(dict.fromkeys(f"maxgain {run['maxgain']}" for run in results if run.get("maxgain")) or [""]),
        look=drawing.look,
        found=found,
        sections=sections,
        single=single,
        gains=gains,
        tunings=tunings,
        runs=_runs_table(found.runs),
        origins=_origins(results),
    )


def _compared(
    found: Records, asked: Sequence[Question], baseline: str | None, alone: Collection[str]
) -> dict[str, Comparison]:
    """The comparisons of a folder, and then those that its single runs make possible."""
    together = replace(found, runs=tuple(run for run in found.runs if run["key"] not in alone), warnings=())
    apart = replace(found, runs=tuple(run for run in found.runs if run["key"] in alone), failed=(), warnings=())
    answers = {}
    if together.runs or together.failed:
        answers = comparisons(together, asked, baseline)
    if apart.runs:
        alone_answers = comparisons(apart, (), None if answers else baseline)
        answers |= {f"{name}, single runs" if name in answers else name: one for name, one in alone_answers.items()}
    return answers


def _single(comparison: Comparison) -> bool:
    return len(comparison.rows) == 1 and len(comparison.runs) == 1 and not comparison.failures


def _by_row(compared: Mapping[str, Comparison]) -> Iterator[tuple[str, Record]]:
    for name, comparison in compared.items():
        for row in comparison.rows:
            for run in comparison.runs_of(row.name):
                yield (f"{name}: {row.name}" if len(compared) > 1 else row.name), run


# What the page is about


def _headline(
    several: Mapping[str, Comparison],
    sections: Sequence[Mapping[str, Any]],
    single: Sequence[Mapping[str, Any]],
    tunings: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The page's title, the sentence that it begins with, and what stands above and below that."""
    if len(sections) == 1:
        title = f"Regularisers compared on {next(iter(several.values())).question.dataset}"
        outcome = sections[0]["words"].outcome
        short = len(outcome) <= LONGEST_HEADLINE
        return {"title": title, "headline": outcome if short else title, "lead": "" if short else outcome}
    if sections:
        data = dict.fromkeys(comparison.question.dataset for comparison in several.values())
        title = f"{counted(len(sections), 'comparison')} of regularisers on {listed(data)}"
        return {"title": title, "headline": title, "lead": ""}
    alone = [*single, *tunings]
    if len(alone) == 1:
        return {"title": alone[0]["headline"], "headline": alone[0]["headline"], "lead": ""}
    kinds = [counted(len(single), "run")] * bool(single) + [counted(len(tunings), "search", "es")] * bool(tunings)
    title = listed(kinds).capitalize() if kinds else "Runs that failed"
    return {"title": title, "headline": title, "lead": ""}


def _dates(runs: Sequence[Mapping[str, Any]]) -> str:
    """When the runs were finished, to the day."""
    days = sorted(time.date() for run in runs if (time := finished(run)) is not None)
    if not days:
        return ""
    first, last = (f"{day.day} {day:%B %Y}" for day in (days[0], days[-1]))
    return first if first == last else f"{first} to {last}"


# How runs were made

ORIGIN = ("command", "maxgain", "torch", "device", "machine")


def _origins(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What made the runs, each way once: command, versions, machine."""
    return [dict(zip(ORIGIN, origin, strict=True)) for origin in dict.fromkeys(map(_origin, runs))]


def _runs_table(runs: Sequence[Record]) -> dict[str, Any]:
    """Every run in a row of text, and which of the origins made it; columns that would say one thing are left out."""
    numbers = {origin: number for number, origin in enumerate(dict.fromkeys(map(_origin, runs)))}

    def percents(part: str) -> list[str]:
        return [percent(score(run, f"{part}_accuracy")) for run in runs]

    columns = {
        "Recipe": [run["recipe"] for run in runs],
        "Regulariser": [run["config"]["regulariser"] for run in runs],
        "Fold": uniform([run["config"].get("fold") for run in runs]),
        "Seed": uniform([run["config"].get("seed") for run in runs]),
        "Test, %": percents("test"),
        "Validation, %": percents("validation"),
        "Train, %": percents("train"),
        "Test loss": uniform([score(run, "test_loss") for run in runs]),
        "Seconds": uniform([run.get("seconds") for run in runs], 3),
    }
    kept = {title: texts for title, texts in columns.items() if title == "Regulariser" or len(set(texts)) > 1}
    rows = zip(*kept.values(), strict=True)
    return {
        "titles": list(kept),
        "rows": [(cells, numbers[_origin(run)], run["key"]) for cells, run in zip(rows, runs, strict=True)],
    }


def _origin(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(run.get(key) for key in ORIGIN)


# Numbers and names for people


def points(fraction: float) -> str:
    """A difference of accuracies in percentage points, with its sign and a real minus."""
    return number(100 * fraction)


def number(value: float) -> str:
    """A number with its sign and a real minus."""
    return signed(value).replace("-", "−")


def breakable(name: str) -> Markup:
    """A regulariser that a narrow column breaks between its parts."""
    return Markup("+<wbr>").join(name.split("+"))


def _resource(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")
