"""What sentences to people have in common, whatever they are about."""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Thing = TypeVar("Thing")


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence to somebody who named a thing that does not exist: the nearest spelling, or all names there are."""
    known = list(known)
    near = nearest(name, known)
    if any("," in one for one in known):
        known = [repr(one) for one in known]  # else nobody could tell where one ends
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}."
    return f"there is no {kind} {name!r}: {hint}"


class Named(dict[str, Thing]):
    """Things by their names; one that is not there is answered in a sentence."""

    def __init__(self, kind: str, error: type[Exception], things: Mapping[str, Thing]) -> None:
        super().__init__(things)
        self.kind = kind
        self.error = error

    def __missing__(self, name: str) -> Thing:
        raise self.error(unknown(self.kind, name, self))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that is spelt most like this one, if any is spelt much like it."""
    return next(iter(get_close_matches(name.lower(), list(known), n=1)), None)


def clause(sentence: object) -> str:
    """A sentence, mostly an error's, without its full stop: for a longer one that it becomes a part of."""
    return str(sentence).removesuffix(".")


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, in one line; its kind, where it says nothing or little."""
    said = clause(next(iter(str(error).splitlines()), ""))
    return said if " " in said else f"{type(error).__name__} {said}".strip()


def counted(count: int, thing: str, ending: str = "s") -> str:
    """1 run, 2 runs, 1,797 images; of searches the ending is es."""
    return f"{count:,} {thing}{'' if count == 1 else ending}"


def signed(value: float) -> str:
    """+1.25 or -1.25; what rounds to nothing has no sign."""
    if math.isinf(value):
        return "+∞" if value > 0 else "-∞"
    text = f"{value:+.2f}"
    return text if float(text) else text[1:]


def percent(fraction: float | None) -> str:
    """0.9075 as 90.75, or a dash for nothing."""
    return "–" if fraction is None else f"{100 * fraction:.2f}"


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def told_apart(value: float, limit: float, texts: Iterable[str]) -> str:
    """The first of the texts of a number, each more exact than the one before, that is on its side of the limit."""
    *most, last = texts
    sides = ((text, float(text)) for text in most)
    return next((text for text, near in sides if (near < limit, near > limit) == (value < limit, value > limit)), last)


def duration(seconds: float) -> str:
    """About how long, in the unit that a person would choose."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length or (seconds >= length and unit == "minute"):
            return f"about {counted(round(seconds / length), unit)}"
    return f"about {counted(max(1, round(seconds)), 'second')}"
