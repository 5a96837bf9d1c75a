"""How many of a thing can ever be of use: counts are refused before anything is built that would never end."""

from maxgain.errors import RecipeError

MOST = {
    "--seeds": 1_000,
    "--folds": 1_000,
    "--trials": 10_000,
    "--budget": 10_000,
    "--jobs": 1_024,
    "--per-gpu": 64,
    "epochs": 1_000_000,
    "cross-validation": 1_000,
}
MOST_RUNS = 100_000
"""Of a comparison, or of a search."""
MOST_VALUES = 1_000
"""Of one grid."""


def expect_count(flag: str, count: int) -> None:
    """Refuse a count that is no count, or that could never be reached."""
    if count < 1:
        raise RecipeError(f"{flag} must be at least 1, not {count}.")
    if count > MOST[flag]:
        raise RecipeError(f"{flag} must be at most {MOST[flag]:,}, not {count}.")


def expect_runs(count: int) -> None:
    """Refuse more runs than could ever be made."""
    if count > MOST_RUNS:
        raise RecipeError(f"these are {count:,} runs, and {MOST_RUNS:,} are the most that one command makes.")
