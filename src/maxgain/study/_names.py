"""Tables of named things that answer an unknown name with the nearest one."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from maxgain.errors import MaxGainError

Thing = TypeVar("Thing")


class Table(dict[str, Thing]):
    """Things by name; a name that is missing raises `error` for `field`."""

    def __init__(self, field: str, error: type[MaxGainError], things: Mapping[str, Thing]) -> None:
        super().__init__(things)
        self.field, self.error = field, error

    def __missing__(self, name: str) -> Thing:
        raise self.error(unknown(self.field, name, self), field=self.field)


def unknown(kind: str, name: object, known: Iterable[object]) -> str:
    """The sentence for a name that does not exist."""
    names = [str(one) for one in known]
    near = get_close_matches(str(name).lower(), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}."
    return f"there is no {kind} {name!r}: {hint}"
