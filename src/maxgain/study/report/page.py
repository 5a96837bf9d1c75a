"""The page to look at: what the records show, as one HTML file that opens offline, on a phone, and in print.

Everything on it comes from the records, and the same records give the same page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from maxgain.errors import RecordError

from ..compare import records, statistics
from ..compare.records import Record, Records
from ..compare.statistics import Row, p_value
from ..files import write_text
from ..regularisers import REGULARISERS
from . import figures, svg
from . import tunings as searches
from .comparisons import Comparison, comparisons, in_words
from .tunings import Search

METRICS = {
    "train_loss": "training loss (nats)",
    "validation_loss": "validation loss (nats)",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
COLUMNS = (
    ("Regulariser", "text"),
    ("Accuracy, %", "number"),
    ("Difference", "number"),
    ("p", "number"),
    ("Holm p", "number"),
    ("Effect size", "number"),
    ("Verdict", "text"),
)
"""Of the comparison table; where nothing was tested, there are the first two."""
PARTS = ("train", "test")
MINUS = "−"


def write(folder: Path, out: Path, baseline: str | None = None) -> Records:
    """Writes the page about a folder of results, and returns the records it was made of.

    Compared is with the baseline, or with that of the folder's last `maxgain compare`.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder: name one that 'maxgain compare' or 'maxgain tune' has made.")
    found = records.read(folder / "results" if (folder / "results").is_dir() else folder)
    made = searches.read(folder, found)
    if not (found.runs or found.failed or made):
        raise RecordError(f"{folder} has no records of runs: 'maxgain compare' leaves some there.")
    write_text(out, build_page(found, made, baseline or _last_baseline(folder, found)))
    return found


def build_page(found: Records, made: Sequence[Search] = (), baseline: str | None = None) -> str:
    """The page about these records and searches, everything compared with the baseline (see `comparisons`)."""
    compared = comparisons(found, baseline)
    draw = _Drawer()
    script = _resource("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {show.__name__: show for show in (percent, signed, number, p_value, breakable)}
    return environment.from_string(_resource("report.html")).render(
        style=Markup(_resource("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=_title(compared),
        columns=COLUMNS,
        found=found,
        sections=[_section(comparison, draw) for comparison in compared],
        gains=_gain_data(compared),
        searches=[_search(search, draw) for search in made],
        origins=_origins(found),
    )


def _last_baseline(folder: Path, found: Records) -> str | None:
    try:
        baseline = json.loads((folder / "comparison.json").read_bytes())["baseline"]
    except (OSError, ValueError, LookupError, TypeError):  # the page needs the records alone
        return None
    return baseline if baseline in {run["regulariser"] for run in found.runs} else None


class _Drawer:
    """Turns figures into elements of the page, each with ids of its own."""

    def __init__(self) -> None:
        self._numbers = count()

    def __call__(self, figure: Figure, description: str) -> Markup:
        return svg.inline(figure, description, f"figure{next(self._numbers)}")


# The sections of the page


def _title(compared: Sequence[Comparison]) -> str:
    names = dict.fromkeys(comparison.dataset for comparison in compared)
    return f"Regularisers compared on {', '.join(names)}" if compared else "A search for good numbers"


@dataclass(frozen=True)
class Line:
    """A row of the comparison table."""

    row: Row
    verdict: str
    status: str
    """The verdict in two words."""
    best: bool
    interval: tuple[float, float, float] | None
    """Where the difference and its interval's ends lie in the column's drawing, from 0 to 100; zero is at 50."""


def _section(comparison: Comparison, draw: _Drawer) -> dict[str, Any]:
    names = list(comparison.scores)
    return {
        "comparison": comparison,
        "words": in_words(comparison),
        "lines": _lines(comparison.rows),
        "numbers": [
            (f"{comparison.over} {number}", [comparison.scores[name].get(number) for name in names])
            for number in comparison.numbers
        ],
        "names": names,
        "legend": [(name, _swatch(index)) for index, name in enumerate(names)],
        "curves": _curves(comparison, draw),
        "norms": _norms(comparison, draw),
        "settings": _settings(comparison.runs),
    }


def _lines(rows: Sequence[Row]) -> list[Line]:
    ends = [abs(end) for row in rows if row.test for end in row.test.interval]
    largest = max(ends, default=0) or 1

    def place(value: float) -> float:
        return round(50 + 48 * value / largest, 1)

    best = max((row.summary.mean for row in rows), default=0)
    return [
        Line(
            row=row,
            verdict=statistics.verdict(row),
            status=_status(row),
            best=len(rows) > 1 and row.summary.mean == best,
            interval=(place(row.test.interval[0]), place(row.test.mean_difference), place(row.test.interval[1]))
            if row.test
            else None,
        )
        for row in rows
    ]


def _status(row: Row) -> str:
    if row.regulariser == row.baseline:
        return "baseline"
    if row.test is None:
        return "not tested"
    if not row.significant:
        return "not significant"
    if row.test.standard_error == 0:
        return "only formally significant"
    return "significantly better" if row.test.mean_difference > 0 else "significantly worse"


def _curves(comparison: Comparison, draw: _Drawer) -> list[tuple[str, Markup]]:
    histories = {
        name: [run["history"] for run in comparison.of(name) if run.get("history")] for name in comparison.scores
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
    for name in comparison.scores:
        runs = [run for run in comparison.of(name) if run.get("operator_norms") and run["config"].get("p", 2) == 2]
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


def _search(search: Search, draw: _Drawer) -> dict[str, Any]:
    names = list(search.curve[0]["values"]) if search.curve else []
    labels = {name: getattr(REGULARISERS.get(name), "parameter", None) or name for name in names}
    tried = sum(row["status"] == "complete" for row in search.curve)
    description = (
        f"Lines: accuracy and loss on the training and the validation part against {', '.join(labels.values())}, "
        f"{tried} points. {search.outcome} The numbers are in the table below."
    )
    return {
        "title": search.title,
        "outcome": search.outcome,
        "drawing": draw(figures.tuning_curve(search.curve, labels, search.chosen), description) if tried else None,
        "labels": labels,
        "rows": [(row, row["values"] == search.chosen) for row in search.curve],
    }


def _layer_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every layer that has a number in all rows."""
    values: dict[str, list[Any]] = {layer: [row.get(layer) for row in rows] for layer in rows[0]}
    return {layer: math.fsum(row) / len(row) for layer, row in values.items() if _all_finite(row)}


def _gain_data(compared: Sequence[Comparison]) -> dict[str, Any]:
    """What the box plots are drawn from, and which two runs are shown first: if it can be, one of them is bounded."""
    runs = {
        run["key"]: {
            "group": f"{comparison.name}: {run['regulariser']}" if len(compared) > 1 else run["regulariser"],
            "name": f"{run['config']['regulariser']}, {comparison.over} {run['config'][comparison.over]}",
            "bound": None if run.get("gamma") in (None, math.inf) else run["gamma"],
            "gains": {
                part: [
                    [layer, *(float(f"{value:.4g}") for value in row)]
                    for layer, row in run["gain_quantiles"].get(part, {}).items()
                    if _all_finite(row)
                ]
                for part in PARTS
            },
        }
        for comparison in compared
        for run in comparison.runs
        if run.get("gain_quantiles", {}).get("train")
    }
    bounded = (index for index, run in enumerate(runs.values()) if run["bound"])
    return {"runs": list(runs.values()), "chosen": [0, next(bounded, len(runs) - 1)]}


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
