"""How much the torture tests try: a little with every run of the suite, and very much with `make torture`."""

import os

LARGE = bool(os.environ.get("MAXGAIN_TORTURE"))


def many(small: int, large: int) -> int:
    """The number for this run."""
    return large if LARGE else small
