"""The gains of runs, small enough to be all on one page, which draws the box plots of those that are asked for.

Layers' names are written once per network. A gain is the logarithm to base 2 in steps of 1/2048, in two bytes: right
to 0.02 %, from 1/65,536 to 65,536. A box plot shows less.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..schema import Record

PARTS = ("train", "test")
MOST_RUNS = 1000
"""Of a page: of more, each row's first ones are there, as many of each."""
STEPS = 2048
ONE = 32768
"""How a gain of one is written."""


def packed(gains: Sequence[float]) -> str:
    """The gains as text; zero stays zero, and what does not fit is the nearest that does."""
    values = np.asarray(gains, dtype=np.float64)
    with np.errstate(divide="ignore"):
        steps = np.where(values > 0, np.clip(np.rint(STEPS * np.log2(values)) + ONE, 1, 65535), 0)
    return base64.b64encode(steps.astype("<u2").tobytes()).decode()


def gain_data(runs: Iterable[tuple[str, Record]]) -> dict[str, Any]:
    """What the page's script draws from: each run's row, regulariser, fold, seed, bound, network, and gains by part.

    Words that many runs share are written once. `chosen` are the two runs that are shown first: if it can be, one of
    them is bounded. `of_each` is how many runs of each row are there, where those are not all.
    """
    runs = list(runs)
    counts = Counter(row for row, _ in runs)
    of_each = MOST_RUNS // len(counts) if len(runs) > MOST_RUNS else None
    taken: Counter[str] = Counter()
    words: dict[str, int] = {}
    networks: dict[tuple[str, ...], int] = {}
    rows: dict[str, list[Any]] = {}
    for row, run in runs:
        quantiles = run.get("gain_quantiles") or {}
        layers = tuple(layer for layer, five in quantiles.get("train", {}).items() if _drawable(five))
        if layers and run["key"] not in rows and taken[row] != of_each:
            taken[row] += 1
            gains = [_flat(quantiles.get(part, {}), layers) for part in PARTS]
            gamma = run.get("gamma")
            bound = gamma if gamma is not None and math.isfinite(gamma) else None
            shared = [words.setdefault(word, len(words)) for word in (row, run["config"]["regulariser"])]
            place = [run["config"].get("fold"), run["config"].get("seed", 0)]
            network = networks.setdefault(layers, len(networks))
            rows[run["key"]] = [*shared, *place, bound, network, *map(packed, gains)]
    listed = list(rows.values())
    bounded = next((number for number, row in enumerate(listed) if row[4] is not None), len(listed) - 1)
    return {
        "words": list(words),
        "networks": list(map(list, networks)),
        "runs": listed,
        "chosen": [0, bounded],
        "of_each": of_each,
    }


def _flat(quantiles: Mapping[str, Sequence[Any]], layers: Sequence[str]) -> list[float]:
    """All layers' quantiles one after the other; none where a layer has none."""
    rows = [quantiles.get(layer, ()) for layer in layers]
    return [value for row in rows for value in row] if all(map(_drawable, rows)) else []


def _drawable(row: Sequence[Any]) -> bool:
    return len(row) == 5 and all(isinstance(value, int | float) and math.isfinite(value) for value in row)
