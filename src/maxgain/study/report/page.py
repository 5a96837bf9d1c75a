"""The page to look at: what the records show, as one HTML file that opens offline, on a phone, and in print.

Everything on it comes from the records, and the same records give the same page.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from maxgain.errors import RecordError, RunError

from ..compare import records
from ..compare.comparison import Comparison, Contrast
from ..compare.question import Question
from ..compare.records import Record, Records
from ..compare.sentences import in_words, p_value
from ..files import marked, write_text
from ..regularisers import REGULARISERS
from . import figures, svg, tunings
from .comparisons import comparisons, questions_in
from .tunings import Tuning

METRICS = {
    "train_loss": "training loss (nats)",
    "validation_loss": "validation loss (nats)",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
PARTS = ("train", "test")
MINUS = "−"


def write(folder: Path, out: Path, baseline: str | None = None) -> Records:
    """Write the page about a folder of results, and return the records it was made of.

    It shows the comparisons that `maxgain compare` was asked for; with a baseline, each with that baseline instead.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder: name one that 'maxgain compare' or 'maxgain tune' has made.")
    found = records.read(folder / "results" if (folder / "results").is_dir() else folder)
    asked, problems = questions_in(folder)
    found = replace(found, warnings=(*found.warnings, *problems))
    made = tunings.read(folder, found)
    if not (found.runs or found.failed or made):
        raise RecordError(f"{folder} has no records of runs: 'maxgain compare' leaves some there.")
    if out.is_file() and not marked(out, ".html"):
        raise RunError(f"cannot write {out}: it exists and is no page of maxgain's; choose another --out.")
    write_text(out, build_page(found, made, baseline, asked))
    return found


def build_page(
    found: Records, made: Sequence[Tuning] = (), baseline: str | None = None, asked: Sequence[Question] = ()
) -> str:
    """The page about these records, the tuning behind them and the comparisons that were asked for."""
    compared = comparisons(found, asked, baseline)
    draw = _Drawer()
    script = _resource("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {show.__name__: show for show in (percent, signed, number, p_value, breakable)}
    return environment.from_string(_resource("report.html")).render(
        style=Markup(_resource("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=_title(list(compared.values())),
        found=found,
        sections=[_section(name, comparison, draw) for name, comparison in compared.items()],
        gains=_gain_data(compared),
        searches=[_tuning(tuning, draw) for tuning in made],
        origins=_origins(found),
    )


class _Drawer:
    """Turns figures into elements of the page, each with ids of its own."""

    def __init__(self) -> None:
        self._numbers = count()

    def __call__(self, figure: Figure, description: str) -> Markup:
        return svg.inline(figure, description, f"figure{next(self._numbers)}")


# The sections of the page


def _title(compared: Sequence[Comparison]) -> str:
    names = dict.fromkeys(comparison.question.dataset for comparison in compared)
    return f"Regularisers compared on {', '.join(names)}" if compared else "A search for good numbers"


@dataclass(frozen=True)
class Line:
    """A contrast in its table."""

    contrast: Contrast
    sentence: str
    interval: tuple[float, float, float] | None
    """Where the difference and its interval's ends lie in the column's drawing, from 0 to 100; zero is at 50."""


def _section(name: str, comparison: Comparison, draw: _Drawer) -> dict[str, Any]:
    question = comparison.question
    names = [row.name for row in comparison.rows]
    words = in_words(comparison)
    means = [row.summary.mean for row in comparison.rows if row.summary]
    return {
        "name": name,
        "comparison": comparison,
        "words": words,
        "best": max(means) if len(means) > 1 else None,
        "lines": _lines(comparison, words.contrasts),
        "numbers": [
            (f"{question.over} {unit}", [row.scores.get(unit) for row in comparison.rows]) for unit in question.units
        ],
        "names": names,
        "legend": [(name, _swatch(index)) for index, name in enumerate(names)],
        "curves": _curves(comparison, draw),
        "norms": _norms(comparison, draw),
        "settings": _settings(comparison.runs) if comparison.runs else {},
    }


def _lines(comparison: Comparison, sentences: Sequence[str]) -> list[Line]:
    tests = [contrast.analyses.paired for contrast in comparison.contrasts]
    ends = [abs(end) for test in tests if test and test.simultaneous_interval for end in test.simultaneous_interval]
    largest = max(ends, default=0) or 1

    def places(contrast: Contrast) -> tuple[float, float, float] | None:
        test = contrast.analyses.paired
        if test is None or test.simultaneous_interval is None:
            return None
        low, high = test.simultaneous_interval
        low, mean, high = (round(50 + 48 * value / largest, 1) for value in (low, test.mean, high))
        return low, mean, high

    return [
        Line(contrast, sentence, places(contrast))
        for contrast, sentence in zip(comparison.contrasts, sentences, strict=True)
    ]


def _curves(comparison: Comparison, draw: _Drawer) -> list[tuple[str, Markup]]:
    histories = {
        row.name: [run["history"] for run in comparison.runs_of(row.name) if run.get("history")]
        for row in comparison.rows
    }
    if not any(histories.values()):
        return []
    return [
        (title, draw(figures.learning_curve(histories, metric), _last_values(histories, metric, title)))
        for metric, title in METRICS.items()
        if any(line.get(metric) is not None for runs in histories.values() for run in runs for line in run)
    ]


def _last_values(histories: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], metric: str, title: str) -> str:
    show = percent if metric.endswith("accuracy") else number
    means = []
    for name, runs in histories.items():
        last = [run[-1][metric] for run in runs if run[-1].get(metric) is not None]
        if last:
            means.append(f"{name} {show(math.fsum(last) / len(last))}")
    return f"Lines: {title} by epoch, mean over runs. After the last epoch: {', '.join(means)}."


def _norms(comparison: Comparison, draw: _Drawer) -> list[dict[str, Any]]:
    """Each regulariser's operator norms beside its largest gains, both as means over its runs.

    Norms are ℓ2 operator norms, which gains in another norm must not be set beside.
    """
    tables = {}
    for name in (row.name for row in comparison.rows):
        runs = [run for run in comparison.runs_of(name) if run.get("operator_norms") and run["config"].get("p", 2) == 2]
        if runs:
            gains = {part: _layer_means([run["max_gain"].get(part, {}) for run in runs]) for part in PARTS}
            tables[name] = (_layer_means([run["operator_norms"] for run in runs]), gains, len(runs))
    largest = max((norm for norms, _, _ in tables.values() for norm in norms.values()), default=None)
    return [
        {
            "name": name,
            "runs": runs,
            "drawing": draw(
                figures.gains_beside_norms(norms, gains, largest),
                f"Bars and dots: operator norms and largest gains of {name}, layer by layer; "
                "the numbers are in the table below.",
            ),
            "layers": [(layer, norm, *(gains[part].get(layer) for part in PARTS)) for layer, norm in norms.items()],
        }
        for name, (norms, gains, runs) in tables.items()
    ]


def _tuning(tuning: Tuning, draw: _Drawer) -> dict[str, Any]:
    names = list(tuning.curve[0]["values"]) if tuning.curve else []
    labels = {name: getattr(REGULARISERS.get(name), "parameter", None) or name for name in names}
    tried = sum(row["status"] == "complete" for row in tuning.curve)
    description = (
        f"Lines: accuracy and loss on the training and the validation part against {', '.join(labels.values())}, "
        f"{tried} points. {tuning.outcome} The numbers are in the table below."
    )
    return {
        "title": tuning.title,
        "outcome": tuning.outcome,
        "drawing": draw(figures.tuning_curve(tuning.curve, labels, tuning.chosen), description) if tried else None,
        "labels": labels,
        "rows": [(row, row["values"] == tuning.chosen) for row in tuning.curve],
    }


def _layer_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every layer that has a number in all rows."""
    values: dict[str, list[Any]] = {layer: [row.get(layer) for row in rows] for layer in rows[0]}
    return {layer: math.fsum(row) / len(row) for layer, row in values.items() if _all_finite(row)}


def _gain_data(compared: Mapping[str, Comparison]) -> dict[str, Any]:
    """What the box plots are drawn from, and which two runs are shown first: if it can be, one of them is bounded."""
    runs = {
        run["key"]: {
            "group": f"{name}: {row.name}" if len(compared) > 1 else row.name,
            "name": f"{run['config']['regulariser']}, {_place(run['config'])}",
            "bound": None if run.get("gamma") in (None, math.inf) else run["gamma"],
            "gains": {
                part: [
                    [layer, *(float(f"{value:.4g}") for value in values)]
                    for layer, values in run["gain_quantiles"].get(part, {}).items()
                    if _all_finite(values)
                ]
                for part in PARTS
            },
        }
        for name, comparison in compared.items()
        for row in comparison.rows
        for run in comparison.runs_of(row.name)
        if run.get("gain_quantiles", {}).get("train")
    }
    bounded = (index for index, run in enumerate(runs.values()) if run["bound"])
    return {"runs": list(runs.values()), "chosen": [0, next(bounded, len(runs) - 1)]}


def _place(config: Mapping[str, Any]) -> str:
    fold = config.get("fold")
    return f"seed {config.get('seed', 0)}" if fold is None else f"fold {fold}"


def _all_finite(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _origins(found: Records) -> list[dict[str, Any]]:
    """The runs by what made them: command, versions, machine."""
    keys = ("command", "maxgain", "torch", "device", "machine")
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for run in found.runs:
        groups.setdefault(tuple(run.get(key) for key in keys), []).append(run)
    return [{**dict(zip(keys, made_by, strict=True)), "runs": runs} for made_by, runs in groups.items()]


def _settings(runs: Sequence[Record]) -> dict[str, str]:
    """What the configurations of all runs agree on."""
    first = runs[0]["config"]
    common = {name: value for name, value in first.items() if all(run["config"].get(name) == value for run in runs)}
    return {name.replace("_", " "): _plain(value) for name, value in common.items() if value not in (None, [])}


def _plain(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list():
            return ", ".join(map(_plain, value))
        case _:
            return str(value)


def _swatch(index: int) -> dict[str, Any]:
    dashes = {"-": "", "--": "6 3", ":": "1.5 2.5", "-.": "7 3 1.5 3"}
    return {"series": index % len(figures.COLOURS), "dashes": dashes[figures.series_style(index)["linestyle"]]}


# Numbers and names for people


def percent(fraction: float | None) -> str:
    """0.9075 as 90.75, or a dash for nothing."""
    return "–" if fraction is None else f"{100 * fraction:.2f}"


def signed(value: float, scale: float = 100, decimals: int = 2) -> str:
    """A difference with its sign, a real minus if need be."""
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    return f"{scale * value:+.{decimals}f}".replace("-", MINUS)


def number(value: float | None) -> str:
    """Four digits, or a dash for nothing."""
    return "–" if value is None else f"{value:.4g}".replace("-", MINUS)


def breakable(name: str) -> Markup:
    """A regulariser that a narrow column breaks between its parts."""
    return Markup("+<wbr>").join(name.split("+"))


def _resource(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")
