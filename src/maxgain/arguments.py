"""What arguments must be like, and the sentences for those that are not; for p and bounds see functional.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from .errors import MaxGainError, PatternError

MOST = 10**9
"""No count that could ever be reached is larger."""


def check_count(what: str, value: Any, least: int = 1) -> int:
    """Return the value if it is a whole number that can be counted to."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise MaxGainError(f"{what} must be a whole number from {least} to {MOST:,}, not {value!r:.40}.")
    return value


def as_float(value: Any) -> float:
    """The real number that the value is, and nan if it is none, or one that no float can hold."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan


def check_number(what: str, value: Any) -> float:
    """Return the value as a float if it is a real number; whether it is finite is not asked."""
    if not isinstance(value, Real) or (math.isnan(as_float(value)) and not isinstance(value, float)):
        raise MaxGainError(f"{what} must be a real number, not {value!r:.40}.")
    return as_float(value)


def check_positive(what: str, value: Any, above: float = 0) -> float:
    """Return the value as a float if it is a number above `above`."""
    if not as_float(value) > above:
        raise MaxGainError(f"{what} must be a number greater than {above:g}, not {value!r:.40}.")
    return float(value)


def check_choice(what: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Return the value if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise MaxGainError(f"{what} must be {' or '.join(map(repr, choices))}, not {value!r:.60}.")
    return value


def check_is(what: str, value: Any, kind: type | tuple[type, ...], described: str) -> Any:
    """Return the value if it is of that kind."""
    if not isinstance(value, kind):
        raise MaxGainError(f"{what} must be {described}, not {value!r:.60}.")
    return value


def check_callable(what: str, value: Any) -> Callable[..., Any]:
    """Return the value if it can be called."""
    if not callable(value):
        raise MaxGainError(f"{what} must be a function, not {value!r:.60}.")
    return value  # type: ignore[no-any-return]


def check_globs(patterns: Any) -> tuple[str, ...]:
    """The globs that a text, or several, are; none, if that is what was given."""
    if patterns is None or isinstance(patterns, str):
        return () if patterns is None else (patterns,)
    # An array has ideas of its own about what is equal and what can be iterated over.
    several = tuple(patterns) if isinstance(patterns, Iterable) and not hasattr(patterns, "shape") else (None,)
    if not all(isinstance(glob, str) for glob in several):
        raise PatternError(f"include and exclude take a glob over dotted layer names or several, not {patterns!r:.60}.")
    return several
