"""What sentences to people have in common, whatever they are about."""

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence to somebody who named a thing that does not exist: the nearest spelling, or all names there are."""
    known = list(known)
    near = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
    return f"there is no {kind} {name!r}: {hint}"


def clause(sentence: object) -> str:
    """A sentence, mostly an error's, without its full stop: for a longer one that it becomes a part of."""
    return str(sentence).removesuffix(".")


def is_text(name: str) -> bool:
    """Whether a name, of a file for example, is text that can be shown and kept: no stray bytes, no control codes."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in name)
