"""What a search came to: what was chosen, in which words, and every point as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from maxgain.errors import RunError

from .. import files
from ..files import write_json
from ..recipes import to_json
from ..tables import Column, Table
from .tune import CURVE, TUNED, Search
from .tuning_rule import RULE, Trial, best, worth


@dataclass(frozen=True)
class Tuned:
    """The numbers that were chosen for a regulariser, and what every point came to; `print` shows it as a table."""

    search: Search
    curve: list[Trial]
    chosen: Trial

    @property
    def regulariser(self) -> str:
        """The regulariser with the numbers that were chosen: what to train with."""
        return self.search.recipe_at(self.chosen["values"]).regulariser

    @property
    def values(self) -> dict[str, float]:
        """The numbers, by regulariser."""
        return dict(self.chosen["values"])

    @property
    def outcome(self) -> str:
        """What was chosen, by which rule, and how fine a choice it was."""
        return f"chosen: {self.regulariser} ({RULE}); {worth(self.chosen, self.curve)}"

    def __repr__(self) -> str:
        return f"<{self.regulariser}, chosen from {len(self.curve)}>"

    def __str__(self) -> str:
        return f"{table(self.search, self.curve)}\n\n{self.outcome}"

    def _repr_html_(self) -> str:
        return f"{table(self.search, self.curve)._repr_html_()}<p>{escape(self.outcome)}</p>"

    def to_json(self) -> dict[str, Any]:
        """What tuned.json holds."""
        counts = Counter(row["status"] for row in self.curve)
        scores = {name: value for name, value in self.chosen.items() if name.endswith(("_accuracy", "_loss"))}
        content = {
            "recipe": self.search.recipe.name,
            "asked": self.search.recipe.regulariser,
            "regulariser": self.regulariser,
            "values": self.values,
            **scores,
            "validation_images": self.chosen["validation_images"],
            "trials": {status: counts[status] for status in ("complete", "pruned", "failed")},
            "rule": RULE,
            "config": to_json(self.search.recipe_at(self.values)),
            "curve_sha256": files.checksum(self.curve),
        }
        return files.sealed(content)


def concluded(search: Search, curve: list[Trial]) -> Tuned:
    """Choose from the curve, and write curve.json and tuned.json into the search's folder."""
    chosen = best(curve)
    write_json(search.folder / CURVE, curve)
    if chosen is None:
        raise RunError(f"no trial came to an end, so nothing is chosen; {search.folder / CURVE} says why.")
    tuned = Tuned(search, curve, chosen)
    write_json(search.folder / TUNED, tuned.to_json())
    return tuned


def table(search: Search, curve: Sequence[Trial]) -> Table:
    """A row per point, the chosen one bold."""
    chosen = best(curve)
    return Table(
        f"{search.recipe.name}, {search.recipe.regulariser}: chosen on the validation part",
        (
            *(Column(f"{dimension.regulariser} {dimension.parameter}") for dimension in search.space),
            Column("validation accuracy"),
            Column("validation loss", spare=1),
            Column("train accuracy", spare=2),
            Column("train loss", spare=3),
            Column("", spare=0),
        ),
        tuple(
            (
                *row["values"].values(),
                _percent(row.get("validation_accuracy")),
                _nats(row.get("validation_loss")),
                _percent(row.get("train_accuracy")),
                _nats(row.get("train_loss")),
                "chosen" if row is chosen else "" if row["status"] == "complete" else row["status"],
            )
            for row in curve
        ),
        bold=frozenset(number for number, row in enumerate(curve) if row is chosen),
    )


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{fraction:.2%}"


def _nats(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f}"
