"""The parts of the page as plain values for its template: what stands in which table, and which charts there are.

Nothing about a comparison is computed here: its numbers and its words are the comparison's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from maxgain.errors import MaxGainError

from ..comparing.comparison import Comparison, Contrast, Row
from ..comparing.sentences import in_words
from ..regularisers import REGULARISERS, parse
from ..schema import Metrics, Record, score
from ..tables import uniform
from ..wording import counted, listed
from . import drawing
from .tunings import Tuning

METRICS = {
    "train_loss": "training loss (nats)",
    "validation_loss": "validation loss (nats)",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
LAYERS = {"largest gain, training set": "train", "largest gain, test set": "test", "ℓ2 operator norm": None}
"""The panels of the chart of layers, and which part of the data a gain is of."""
SYMBOLS = {"gamma": "γ", "lambda": "λ"}
FAMILIAR = {"maxgain": "MaxGain", "batchnorm": "batch norm", "maxnorm": "max-norm"}
"""What regularisers are called in a headline, where that is not what they are called on the command line."""


# Comparisons


def comparison_section(name: str, comparison: Comparison, anchors: Mapping[str, str]) -> dict[str, Any]:
    """A comparison; `anchors` says where on the page each run is."""
    question, words = comparison.question, in_words(comparison)
    names = [row.name for row in comparison.rows]
    runs = {name: comparison.runs_of(name) for name in names}
    tests = [contrast.decided for contrast in comparison.contrasts]
    intervals = [test.simultaneous_interval for test in tests if test and test.simultaneous_interval]
    axis = drawing.forest_axis(intervals)
    cells = _cells(comparison, anchors)
    return {
        "name": name,
        "comparison": comparison,
        "words": words,
        "best": comparison.highest if len(comparison.comparable_means) > 1 else [],
        "rows": [{"row": row, **_numbers(comparison, row)} for row in comparison.rows],
        "contrasts": [
            {"contrast": contrast, "sentence": sentence, "forest": _forest(axis, contrast)}
            for contrast, sentence in zip(comparison.contrasts, words.contrasts, strict=True)
        ],
        "scale": drawing.scale(axis) if intervals else None,
        "zero": axis(0) if intervals else None,
        "scores": [(f"{question.over} {unit}", [row.get(unit) for row in cells]) for unit in question.units],
        "legend": list(enumerate(names)),
        "curves": _curves(list(runs.values()), names),
        "layers": _layers(runs),
        "settings": _settings(comparison.runs),
    }


def _forest(axis: drawing.Axis, contrast: Contrast) -> Markup | None:
    test = contrast.decided
    if test is None or test.simultaneous_interval is None:
        return None
    low, high = test.simultaneous_interval
    return drawing.interval(axis, low, test.mean, high)


def _cells(comparison: Comparison, anchors: Mapping[str, str]) -> list[dict[int, tuple[float, str | None]]]:
    """Each row's scores by fold or seed, with the run that a score links to, where one run alone made it."""
    question = comparison.question
    cells = []
    for row in comparison.rows:
        made_by: dict[int, list[str | None]] = {}
        for planned in question.rows[row.name]:
            made_by.setdefault(question.unit(planned), []).append(planned.key and anchors.get(planned.key))
        links = {unit: runs[0] if len(runs) == 1 else None for unit, runs in made_by.items()}
        cells.append({unit: (score, links[unit]) for unit, score in row.scores.items()})
    return cells


def _numbers(comparison: Comparison, row: Row) -> dict[str, str]:
    """A row's numbers, and where they come from."""
    question = comparison.question
    texts = dict.fromkeys(planned.regulariser for planned in question.rows[row.name] if planned.error is None)
    values: dict[str, list[float]] = {}
    for text in texts:
        for name, value in _parsed(text).items():
            if value is not None:
                values.setdefault(name, []).append(value)
    if not values:
        return {"numbers": "", "origin": ""}
    given, count = _parsed(row.name), question.tuning_runs.get(row.name)
    still_open = [name for name, value in given.items() if value is None and count is not None]
    chosen = question.chosen.get(row.name, still_open)  # a question of an earlier version does not say
    search = "chosen on the validation part" + ("" if count is None else f", {counted(count, 'run')}")
    by_origin: dict[str, list[str]] = {}
    for name in values:
        origin = search if name in chosen else "default" if given.get(name) is None else "as given"
        by_origin.setdefault(origin, []).append(symbol(name))
    origins = [f"{listed(names)} {origin}" for origin, names in by_origin.items()]
    if len(by_origin) == 1:
        origins = [*by_origin]
    return {
        "numbers": ", ".join(f"{symbol(name)} = {_range(numbers)}" for name, numbers in values.items()),
        "origin": "; ".join(origins) + ("" if search in by_origin else ", not tuned"),
    }


def _parsed(text: str) -> dict[str, float | None]:
    """The numbers that a regulariser's text gives; a record may name one that this version does not know."""
    try:
        return {choice.row.name: choice.value for choice in parse(text)}
    except MaxGainError:
        return {}


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def symbol(regulariser: str) -> str:
    """What a regulariser's number is called: γ for maxgain."""
    parameter = getattr(REGULARISERS.get(regulariser), "parameter", None) or regulariser
    return SYMBOLS.get(parameter, parameter)


# Runs


def run_section(name: str, run: Record) -> dict[str, Any]:
    """A run on its own."""
    parts = [part for part in ("train", "validation", "test") if score(run, f"{part}_accuracy") is not None]
    losses = uniform([score(run, f"{part}_loss") for part in parts])
    accuracies = [score(run, f"{part}_accuracy") for part in parts]
    gains = uniform([_peak(run, part) for part in parts])
    headline = f"{headline_name(run['config']['regulariser'])} on {run['config'].get('dataset', run['recipe'])}"
    if parts:
        last = "test" if "test" in parts else parts[-1]
        headline += f": {100 * (score(run, f'{last}_accuracy') or 0):.2f} % on the {last} set"
    sides, history = ["training set", "validation set"], run.get("history") or []
    return {
        "name": name,
        "run": run,
        "headline": headline,
        "scores": list(zip(parts, accuracies, losses, gains, strict=True)),
        "legend": list(enumerate(sides)),
        "curves": _drawn(
            {
                title: {
                    index: [_values(history, f"{part}_{what}")] for index, part in enumerate(("train", "validation"))
                }
                for title, what in (("loss (nats)", "loss"), ("accuracy", "accuracy"))
            },
            sides,
        ),
        "layers": _layers({"this run": [run]}),
        "settings": _settings([run]),
    }


def _peak(run: Record, part: str) -> float | None:
    known = [gain for gain in (run.get("max_gain") or {}).get(part, {}).values() if gain is not None]
    return max(known, default=None)


def headline_name(regulariser: str) -> str:
    """MaxGain (γ = 2) and batch norm, for maxgain=2+batchnorm."""
    values = _parsed(regulariser)
    if not values:
        return regulariser
    if list(values) == ["none"]:
        return "No regulariser"
    parts = [
        FAMILIAR.get(name, name) + ("" if value is None else f" ({symbol(name)} = {value:g})")
        for name, value in values.items()
    ]
    return listed(parts)


# Tuning


def tuning_section(tuning: Tuning) -> dict[str, Any]:
    """What a search tried, and what it chose."""
    names = list(tuning.curve[0]["values"]) if tuning.curve else []
    labels = {name: symbol(name) for name in names}
    done = [row for row in tuning.curve if row["status"] == "complete"]
    charts = [
        _trials(done, name, label, what, tuning)
        for name, label in labels.items()
        for what in ("accuracy", "loss")
        if done
    ]
    columns = [uniform([row["values"][name] for row in tuning.curve]) for name in names]
    scores = ("validation_accuracy", "validation_loss", "train_accuracy", "train_loss")
    for name in scores:
        scale = 100 if name.endswith("accuracy") else 1
        columns.append(uniform([None if row.get(name) is None else scale * row[name] for row in tuning.curve]))
    return {
        "title": tuning.title,
        "headline": tuning_headline(tuning, labels),
        "outcome": tuning.outcome,
        "caution": tuning.caution,
        "charts": charts,
        "legend": [(0, "training part"), (1, "validation part")],
        "labels": labels,
        "rows": [
            (texts, row["status"], row["values"] == tuning.chosen)
            for texts, row in zip(zip(*columns, strict=True), tuning.curve, strict=True)
        ],
    }


def _trials(done: Sequence[Mapping[str, Any]], name: str, label: str, what: str, tuning: Tuning) -> Markup:
    title = what if what == "accuracy" else f"{what} (nats)"
    about = f"Dots: {title} on the training and the validation part against {label}, {counted(len(done), 'point')}."
    return drawing.trials(
        {part: [(row["values"][name], row[f"{part}_{what}"]) for row in done] for part in ("train", "validation")},
        label,
        title,
        f"{about} {tuning.outcome} The numbers are in the table below.",
        share=what == "accuracy",
        joined=len(done[0]["values"]) == 1,
        chosen=None if tuning.chosen is None else tuning.chosen[name],
    )


def tuning_headline(tuning: Tuning, labels: Mapping[str, str]) -> str:
    """γ for MaxGain on digits: 2.75."""
    if tuning.chosen is None:
        return tuning.title
    where, _, asked = tuning.title.partition(", ")
    values = listed(f"{value:g}" for value in tuning.chosen.values())
    return f"{listed(labels.values())} for {headline_name(asked)} on {where}: {values}"


# Charts and settings of both


def _curves(runs: Sequence[Sequence[Record]], names: Sequence[str]) -> list[Markup]:
    """A chart per metric, of every row whose runs all have it."""
    histories = [[run["history"] for run in of_row if run.get("history")] for of_row in runs]
    return _drawn(
        {
            title: {index: [_values(run, metric) for run in of_row] for index, of_row in enumerate(histories)}
            for metric, title in METRICS.items()
        },
        names,
    )


def _drawn(charts: Mapping[str, Mapping[int, Sequence[list[float]]]], names: Sequence[str]) -> list[Markup]:
    """The charts that have a line; a run without values takes its row's line away."""
    drawings = []
    for title, lines in charts.items():
        share = title.endswith("accuracy")
        known = {index: runs for index, runs in lines.items() if runs and all(runs)}
        if known:
            drawings.append(drawing.curves(known, title, _ends(known, names, title, share), share=share))
    return drawings


def _values(history: Sequence[Metrics], metric: str) -> list[float]:
    """A metric over the epochs; nothing where an epoch has none."""
    values: list[Any] = [line.get(metric) for line in history]
    return values if _all_finite(values) else []


def _ends(series: Mapping[int, Sequence[Sequence[float]]], names: Sequence[str], title: str, share: bool) -> str:
    show: Callable[[Sequence[float]], list[str]] = drawing.percent if share else uniform
    means = show([math.fsum(run[-1] for run in runs) / len(runs) for runs in series.values()])
    ends = ", ".join(f"{names[index]} {mean}" for index, mean in zip(series, means, strict=True))
    return f"Lines: {title} by epoch, mean over runs. After the last epoch: {ends}."


def _layers(runs: Mapping[str, Sequence[Record]]) -> dict[str, Any] | None:
    """Each row's gains and operator norms by layer, as means over its runs, drawn and as numbers.

    Norms are ℓ2 operator norms, which gains in another norm must not be set beside.
    """
    panels: dict[str, dict[int, dict[str, float]]] = {title: {} for title in LAYERS}
    for index, of_row in enumerate(runs.values()):
        known = [run for run in of_row if run.get("operator_norms") and run["config"].get("p", 2) == 2]
        for title, part in LAYERS.items():
            rows = [((run.get("max_gain") or {}).get(part, {}) if part else run["operator_norms"]) for run in known]
            if rows and (means := _layer_means(rows)):
                panels[title][index] = means
    panels = {title: entries for title, entries in panels.items() if entries}
    if not panels:
        return None
    tables = [(title, *_numbers_by_layer(entries, list(runs))) for title, entries in panels.items()]
    return {"drawings": drawing.layers(panels), "tables": tables}


def _numbers_by_layer(
    entries: Mapping[int, Mapping[str, float]], names: Sequence[str]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """The names of the columns, and a row of text per layer."""
    layers = list(dict.fromkeys(layer for means in entries.values() for layer in means))
    columns = [uniform([means.get(layer) for layer in layers]) for means in entries.values()]
    return [names[index] for index in entries], list(zip(layers, *columns, strict=True))


def _layer_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every layer that has a number in all rows."""
    values: dict[str, list[Any]] = {layer: [row.get(layer) for row in rows] for layer in rows[0]}
    return {layer: math.fsum(row) / len(row) for layer, row in values.items() if _all_finite(row)}


def _all_finite(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _settings(runs: Sequence[Record]) -> dict[str, str]:
    """What the configurations of all runs agree on."""
    if not runs:
        return {}
    common = dict(runs[0]["config"])
    for run in runs:
        common = {name: value for name, value in common.items() if run["config"].get(name) == value}
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
