"""A comparison as tables: what the terminal shows, and `print`, and notebooks."""

from __future__ import annotations

from html import escape

from ..tables import Column, Table
from ..wording import counted, signed
from .comparison import Comparison
from .sentences import gaps, outcome, p_value
from .statistics import Difference, Summary


def tables(comparison: Comparison) -> list[Table]:
    """The rows with their scores, and the contrasts where there are any."""
    return [_rows(comparison), *([_contrast_table(comparison)] if comparison.contrasts else [])]


def text(comparison: Comparison) -> str:
    """The tables, what is missing and the outcome, for `print`."""
    return "\n".join([*map(str, tables(comparison)), "", *gaps(comparison), outcome(comparison)])


def html(comparison: Comparison) -> str:
    """The same for notebooks."""
    said = (f"<p>{escape(sentence)}</p>" for sentence in (*gaps(comparison), outcome(comparison)))
    return "".join([*(table._repr_html_() for table in tables(comparison)), *said])


def _rows(comparison: Comparison) -> Table:
    question = comparison.question
    return Table(
        f"{question.recipe}: test accuracy in %, over {counted(len(question.units), question.over)}",
        (Column("regulariser"), Column("mean ± s.e."), Column("runs")),
        tuple(
            (
                row.label,
                _mean(row.summary),
                str(row.done) if row.done == row.planned else f"{row.done} of {row.planned}",
            )
            for row in comparison.rows
        ),
    )


def _contrast_table(comparison: Comparison) -> Table:
    analyses = ("paired", "pooled")
    return Table(
        "contrasts, in percentage points",
        (
            Column("contrast"),
            *(
                Column(f"{way} {what}", spare=spare)
                for way, rank in zip(analyses, (0, 2), strict=True)
                for what, spare in (("difference", rank), (_interval(comparison, way), rank + 1), ("p (Holm)", rank))
            ),
            Column("effect size", spare=4),
            Column("effect 95 % interval", spare=5),
            Column("verdict"),
        ),
        tuple(
            (
                f"{contrast.first} : {contrast.second}",
                *(cell for way in analyses for cell in _difference(getattr(contrast.analyses, way))),
                *_effect(contrast.analyses.paired),
                contrast.verdict,
            )
            for contrast in comparison.contrasts
        ),
    )


def _interval(comparison: Comparison, way: str) -> str:
    """What an analysis's intervals are called, which hold together where it tests several contrasts."""
    tests: list[Difference | None] = [getattr(contrast.analyses, way) for contrast in comparison.contrasts]
    several = sum(test is not None and test.p_value is not None for test in tests) > 1
    return "95 % together" if several else "95 % interval"


def _mean(summary: Summary | None) -> str | None:
    if summary is None:
        return None
    error = "" if summary.standard_error is None else f" ± {100 * summary.standard_error:.2f}"
    return f"{100 * summary.mean:.2f}{error}"


def _difference(difference: Difference | None) -> tuple[str | None, str | None, str | None]:
    if difference is None:
        return None, None, None
    interval = difference.simultaneous_interval
    return (
        signed(100 * difference.mean),
        None if interval is None else f"{signed(100 * interval[0])} to {signed(100 * interval[1])}",
        p_value(difference.adjusted_p),
    )


def _effect(difference: Difference | None) -> tuple[str | None, str | None]:
    if difference is None or difference.effect_size is None or difference.effect_interval is None:
        return None, None
    low, high = difference.effect_interval
    return signed(difference.effect_size), f"{signed(low)} to {signed(high)}"
