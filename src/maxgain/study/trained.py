"""What one run came to, as a table: what the terminal shows, and `print`, and notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .schema import Result, score
from .tables import Column, Table


def scores_table(result: Result) -> Table:
    """Loss and accuracy on each part of the data."""
    scores = {
        part: (score(result, f"{part}_accuracy"), score(result, f"{part}_loss"))
        for part in ("train", "validation", "test")
    }
    return Table(
        f"{result['recipe']}, {result['regulariser']}, {result['seconds']:.0f} s on {result['device']}",
        (Column("part"), Column("accuracy"), Column("loss (nats)"), Column("largest gain", spare=1)),
        tuple(
            (
                part,
                f"{accuracy:.2%}",
                f"{math.nan if loss is None else loss:.4f}",
                largest(result["max_gain"].get(part, {}), ".3f") or None,
            )
            for part, (accuracy, loss) in scores.items()
            if accuracy is not None
        ),
    )


def largest(gains: Mapping[str, float | None], form: str) -> str:
    """The largest gain of all layers, as text."""
    known = [gain for gain in gains.values() if gain is not None]
    return format(max(known), form) if known else ""
