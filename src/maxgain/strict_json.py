"""JSON that any reader accepts, which knows no infinity: it is the text 'inf' or '-inf', and NaN is null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def number(value: float) -> float | str | None:
    """The number as strict JSON can hold it."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(float(value))


def report(content: dict[str, Any], path: str | Path | None) -> str:
    """A report as indented text, which is also written to ``path`` if one is given."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text
