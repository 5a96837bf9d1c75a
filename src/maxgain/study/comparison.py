"""From a plan and its results to rows, contrasts and verdicts: one pure function."""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxgain.errors import MissingExtraError

from . import _files, sentences, statistics
from .plan import Plan
from .recipe import Recipe, parse, short_name
from .result import Result, Score, correct_images, is_guess
from .sentences import counted, listed, p_equals, p_value, percent, points, reach
from .statistics import Difference, Scores, Verdict

WIDTH = 80
HEADS = ("row", "mean ± s.e.", "runs", "difference (95 % CI)", "p", "verdict")
FRAME = (
    "row", "mean", "standard_error", "runs", "failed", "baseline", "difference", "low", "high", "p", "verdict",
)  # fmt: skip
COMPARED: dict[Verdict, str] = {
    "established": "{} better than {}",
    "reversed": "{} worse than {}",
    "equivalent": "No difference that matters between {} and {}",
    "inconclusive": "Cannot tell {} from {}",
}
"""Some rows and their baseline in a title."""


@dataclass(frozen=True)
class Row:
    """A regulariser and its scores."""

    name: str
    label: str
    """The name with its numbers, where all runs have the same ones."""
    scores: dict[int, float]
    """Accuracy by fold or seed; several runs on one fold are averaged, and where one is missing the fold is."""
    mean: float | None
    standard_error: float | None
    planned: int
    done: int
    """Runs that have a score."""
    failed: int
    """Runs whose training failed."""
    missing: int
    """Runs that were not made, or that the machine stopped."""


@dataclass(frozen=True)
class Contrast:
    """Two rows, and whether the first is better."""

    first: str
    second: str
    label: str
    """Both rows with their numbers."""
    difference: Difference | None
    """By the analysis that decides; None where no runs connect the rows."""
    check: Difference | None
    """By the other analysis."""
    with_failures: Difference | None
    """By the analysis that decides, failed runs counted as guesses; None where neither row has any."""
    verdict: Verdict
    """Inconclusive, unless it holds with failed runs counted as guesses."""
    sampling_error: float | None
    """Standard error from the sampling of test images alone; None over folds, whose spread contains it."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """What the results of a plan show."""

    plan: Plan
    score: Score
    """Part of the data that accuracies are of."""
    rows: tuple[Row, ...]
    contrasts: tuple[Contrast, ...]
    chance: float
    """Accuracy of guessing."""
    results: dict[str, tuple[Result, ...]]
    """Finished runs by row."""
    failed: tuple[Result, ...]
    left_out: int
    """Number of results of other data."""

    def __repr__(self) -> str:
        return f"<Comparison: {self.title}>"

    @property
    def labels(self) -> dict[str, str]:
        """What each row is called on the page."""
        return {row.name: row.label for row in self.rows}

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def baseline(self) -> str | None:
        """The row that all others are compared with; None where contrasts have several."""
        firsts, seconds = {one.first for one in self.contrasts}, {one.second for one in self.contrasts}
        return seconds.pop() if len(seconds) == 1 and len(firsts) == len(self.contrasts) else None

    @property
    def title(self) -> str:
        """What came out, in a line."""
        results = [result for runs in self.results.values() for result in runs]
        if not results:
            return f"No result: none of the {counted(sum(row.planned for row in self.rows), 'run')} has finished"
        if all(is_guess(result, self.score) for result in results):
            scores = f"0 of {counted(len(results), 'score')} clearly above chance ({100 * self.chance:.3g} %)"
            rate = self.plan.recipe.learning_rate / 10
            other = "more epochs" if self.plan.recipe.optimiser == "adam" else "the optimizer adam"
            return f"No run learned anything: {scores}. Try {other}, or a learning rate of {rate:g}"
        if not self.contrasts:
            best = max(self.rows, key=lambda row: row.mean or 0.0)
            return f"{best.label} has {self.score} accuracy {percent(best.mean, best.standard_error)} %"
        return _headline(self.contrasts, self.labels, self.plan.rope)

    @property
    def notes(self) -> list[str]:
        """What is missing or could not be tested, and what a contrast's check and failed runs change."""
        plan, notes = self.plan, []
        for row in self.rows:
            if untuned := len(plan.units) - len(plan.numbers.get(row.name, plan.units)):
                notes.append(f"{row.name}: default numbers on {counted(untuned, plan.over)}, where tuning chose none.")
            for count, what in ((row.failed, "failed to train"), (row.missing, "are missing")):
                if count:
                    notes.append(f"{row.name}: {count} of {row.planned} runs {what}.")
        notes += [
            f"{one.label}: {remarks}."
            for one in self.contrasts
            if (remarks := "; ".join(_remarks(one, plan, self.chance)))
        ]
        notes += dict.fromkeys(f"{run.note}." for runs in self.results.values() for run in runs if run.note)
        return notes + [f"{counted(self.left_out, 'result')} of other data left out."] * bool(self.left_out)

    @property
    def method(self) -> str:
        """How the rows were trained and scored, and the contrasts tested."""
        return sentences.method(self.plan, self.score)

    @property
    def caption(self) -> str:
        """What the table is of."""
        against = f"; difference against {self.baseline} in points" if self.baseline else ""
        units = counted(len(self.plan.units), self.plan.over)
        return f"{self.plan.recipe.name}, {units}: {self.score} accuracy in %{against}"

    def table(self) -> list[tuple[str, ...]]:
        """Texts by `HEADS`: a line per row with its contrast, or where baselines differ a line per contrast below."""
        lines: list[tuple[str, ...]] = []
        baseline = self.baseline
        for row in self.rows:
            runs = str(row.done) if row.done == row.planned else f"{row.done} of {row.planned}"
            start, tests = (row.label, percent(row.mean, row.standard_error), runs), []
            for one in self.contrasts:
                if one.first == row.name:
                    test = one.difference
                    text = points(test.mean) if test else "–"
                    text += f" ({reach(test.interval)})" if test and test.interval else ""
                    tests.append((f"  against {one.second}", text, p_value(test.p_holm if test else None), one.verdict))
            if baseline and tests:
                lines.append((*start, *tests[0][1:]))
            else:
                lines += [(*start, "", "", ""), *((name, "", "", *texts) for name, *texts in tests)]
        return lines

    def __str__(self) -> str:
        """The table, the title and what is missing; at most 80 columns."""
        table = [(name, mean, *rest) for name, mean, _, *rest in (HEADS, *self.table())]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
        lines = textwrap.wrap(self.caption, WIDTH)
        for name, *cells in table:
            if len(name) > widths[0]:
                lines.append(name)
                name = ""
            lines.append("  ".join(map(str.ljust, (name, *cells), widths)).rstrip())
        for sentence in ("", f"{self.title}.", *self.notes):
            lines += textwrap.wrap(sentence, WIDTH) or [""]
        return "\n".join(lines)

    def to_frame(self) -> Any:
        """A pandas.DataFrame with a line per contrast, and per row that has none; accuracies as fractions."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise MissingExtraError("to_frame() needs pandas: pip install pandas") from error
        lines = []
        for row in self.rows:
            contrasts = [one for one in self.contrasts if one.first == row.name]
            for contrast in contrasts or (None,):
                test: Any = contrast and contrast.difference
                low, high = (test and test.interval) or (None, None)
                about = (row.label, row.mean, row.standard_error, row.done, row.failed, contrast and contrast.second)
                numbers = (test and test.mean, low, high, test and test.p_holm)
                lines.append((*about, *numbers, contrast and contrast.verdict))
        return pandas.DataFrame(lines, columns=FRAME)

    def to_json(self) -> dict[str, Any]:
        """Everything but the results, in the types of JSON."""
        names = ("plan", "score", "rows", "contrasts", "chance", "title", "notes", "method")
        return {name: _files.to_builtins(getattr(self, name)) for name in names}


def compare(plan: Plan, results: Sequence[Result]) -> Comparison:
    """What the results show of the plan. Results of other recipes are ignored; of other data, left out and counted."""
    recipes = {row: plan.recipes(row) for row in plan.rows}
    keys = {recipe.key for runs in recipes.values() for recipe in runs}
    own = [result for result in results if result.recipe.key in keys]
    # A finished run replaces a failed one of the same recipe, a failed training one that the machine stopped.
    own.sort(key=lambda result: (result.status == "ok", result.fault == "training", result.finished))
    data = {result.recipe.fold: result.fingerprint for result in own}
    used = [result for result in own if result.fingerprint in ("", data[result.recipe.fold])]
    found = {result.recipe.key: result for result in used}
    finished = {
        row: tuple(found[run.key] for run in runs if run.key in found and found[run.key].status == "ok")
        for row, runs in recipes.items()
    }
    every = [result for runs in finished.values() for result in runs]
    score: Score = "validation" if any(result.test_accuracy is None for result in every) else "test"
    chance = max((result.chance for result in found.values()), default=0.0)
    accuracies = {result.recipe.key: getattr(result, f"{score}_accuracy") for result in every}
    guesses = {key: chance for key, result in found.items() if result.fault == "training"}
    rows = {row: _row(plan, row, recipes[row], accuracies, guesses) for row in plan.rows}
    guessed = {row: _by_unit(plan, recipes[row], guesses | accuracies) for row in plan.rows}
    contrasts = _contrasts(plan, rows, guessed, finished if score == "test" and plan.over == "seed" else {})
    return Comparison(
        plan=plan,
        score=score,
        rows=tuple(rows.values()),
        contrasts=contrasts,
        chance=chance,
        results=finished,
        failed=tuple(result for result in found.values() if result.status == "failed"),
        left_out=len(own) - len(used),
    )


# Rows


def _by_unit(plan: Plan, recipes: Sequence[Recipe], accuracies: Mapping[str, float]) -> dict[int, float]:
    """The mean accuracy per fold or seed, where all its runs have one."""
    keys = [recipe.key for recipe in recipes]
    groups = [keys[start : start + plan.repeats] for start in range(0, len(keys), plan.repeats)]
    return {
        unit: float(np.mean([accuracies[key] for key in group]))
        for unit, group in zip(plan.units, groups, strict=True)
        if accuracies.keys() >= {*group}
    }


def _row(
    plan: Plan, name: str, recipes: Sequence[Recipe], accuracies: Mapping[str, float], guesses: Mapping[str, float]
) -> Row:
    scores = _by_unit(plan, recipes, accuracies)
    values = list(scores.values())
    done, failed = (sum(recipe.key in known for recipe in recipes) for known in (accuracies, guesses))
    given = {choice.row.name for choice in parse(name) if not choice.is_open}
    given |= {regulariser for numbers in plan.numbers.get(name, {}).values() for regulariser in numbers}
    labels = {short_name(recipe.regulariser, given) for recipe in recipes}
    return Row(
        name=name,
        label=labels.pop() if len(labels) == 1 else name,
        scores=scores,
        mean=float(np.mean(values)) if values else None,
        standard_error=float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None,
        planned=len(recipes),
        done=done,
        failed=failed,
        missing=len(recipes) - done - failed,
    )


# Contrasts


def _contrasts(
    plan: Plan, rows: Mapping[str, Row], guessed: Scores, results: Mapping[str, Sequence[Result]]
) -> tuple[Contrast, ...]:
    """Every contrast by both analyses, each corrected as a family of its own; `results` share their test images."""

    def tests(analysis: Callable[..., list[Difference | None]], scores: Scores) -> list[Difference | None]:
        return statistics.as_family(analysis(scores, plan.contrasts, plan.overlap), plan.rope and plan.rope / 100)

    analyses = [statistics.paired, statistics.pooled]
    decides, checks = analyses if plan.decide_by == "paired" else reversed(analyses)
    scores = {name: row.scores for name, row in rows.items()}
    correct = {row: [correct_images(result) for result in runs if result.correct] for row, runs in results.items()}
    contrasts = []
    for pair, difference, check, guess in zip(
        plan.contrasts, tests(decides, scores), tests(checks, scores), tests(decides, guessed), strict=True
    ):
        failed = any(rows[row].failed for row in pair)
        verdict = statistics.verdict(difference)
        first, second = (correct.get(row, []) for row in pair)
        on_same_images = first and second and len({len(images) for images in (*first, *second)}) == 1
        contrasts.append(
            Contrast(
                *pair,
                label=" against ".join(rows[row].label for row in pair),
                difference=difference,
                check=check,
                with_failures=guess if failed else None,
                verdict="inconclusive" if failed and statistics.verdict(guess) != verdict else verdict,
                sampling_error=statistics.sampling_error(np.array(first), np.array(second)) if on_same_images else None,
            )
        )
    return tuple(contrasts)


# Words


def _headline(contrasts: Sequence[Contrast], labels: Mapping[str, str], rope: float | None) -> str:
    """The contrasts as one title, a sentence per verdict."""
    baselines = {labels[one.second] for one in contrasts}
    baseline = baselines.pop() if len(baselines) == 1 else "their baselines"
    said = []
    for verdict, compared in COMPARED.items():
        group = [one for one in contrasts if one.verdict == verdict]
        if not group:
            continue
        names = list(dict.fromkeys(labels[one.first] for one in group))
        sentence = compared.format(listed(names) if len(names) < 5 else counted(len(names), "row"), baseline)
        sentence += f" (±{rope:g} points)" if verdict == "equivalent" else ""
        if means := [one.difference.mean for one in group if one.difference]:
            sentence += f": {' to '.join(map(points, sorted({min(means), max(means)})))} points of accuracy"
        said.append(sentence)
    if len(contrasts) == 1 and (test := contrasts[0].difference) and test.interval:
        said[0] += f" (95 % CI {reach(test.interval)})"
    return ". ".join(said)


def _remarks(contrast: Contrast, plan: Plan, chance: float) -> Iterator[str]:
    """What a contrast's line in the table does not say."""
    test, check, guess = contrast.difference, contrast.check, contrast.with_failures
    verdict, checked = statistics.verdict(test), statistics.verdict(check)
    if test is None:
        yield f"no {plan.over} has a score of both"
    elif test.p_holm is None:
        yield f"too few {plan.over}s to test" if test.n < 2 else "no spread, so no test"
    elif verdict != "equivalent" and statistics.is_equivalent(test):
        yield f"within ±{plan.rope:g} points"
    if check and check.p_holm is not None and checked != verdict:
        other = "pooled" if plan.decide_by == "paired" else "paired"
        yield f"the check, the {other} analysis, is {checked} ({p_equals(check.p_holm)})"
    if guess and guess.p_holm is not None:
        size = f"{points(guess.mean)} points ({p_equals(guess.p_holm)})"
        yield f"counting failed runs as guesses ({100 * chance:.3g} %) makes it {size}"
        if verdict != "inconclusive":
            yield f"the verdict {'stands' if contrast.verdict == verdict else 'is withdrawn'}"
