"""What to say to somebody who named a thing that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence with the nearest spelling, or with all names there are."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
    return f"there is no {kind} {name!r}: {hint}"
