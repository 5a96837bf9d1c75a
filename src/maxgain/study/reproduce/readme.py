"""The passage of README.md that tells what came out: the same claims in short, and the picture.

It stands between two lines that only a README which wants it has. Whoever rebuilds the document rebuilds it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from maxgain.errors import FileError

from .. import reading
from ..files import write_text
from ..wording import listed
from .claims import SAME_GAINS, Claim, claims, mean, progress
from .state import State

BEGIN = "<!-- what came out: made by `maxgain reproduce` from the records, do not edit -->"
END = "<!-- end of what came out -->"
PICTURED = "cifar10"
"""The table whose picture is shown."""
_EXPECTED = "expected: "


def passage(states: Mapping[str, State], document: str, pictures: str) -> str:
    """What came out, for somebody who reads nothing else; `document` and `pictures` are where links lead."""
    found: dict[str, list[Claim]] = {name: [] for name in states}
    for claim in claims(states):
        found[claim.command.split()[-1]].append(claim)
    table = states[PICTURED]
    others = {name: state for name, state in states.items() if name != PICTURED}
    outcomes = [_outcome(state, found[name]) for name, state in others.items() if state.is_complete]
    if table.comparison:
        parts = [*_picture(table, pictures), _contrasts(found[PICTURED])]
        outcomes = [*_expectations(found[PICTURED]), *outcomes]
    else:
        parts = [_waiting(table)]
    parts += ["\n".join(f"- {outcome}." for outcome in outcomes)] if outcomes else []
    parts += _unfinished([state for state in others.values() if not state.is_complete])
    parts += [f"[{document}]({document}) has every number, row by row, with how to run it."]
    return "\n\n".join(parts)


def updated(text: str, content: str) -> str:
    """A README with this passage; as it was where it has no place for one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}" if begin and end else text


def update(path: Path, content: str) -> bool:
    """Bring the passage of the README at `path` up to date, if it has one, and say whether it changed."""
    try:
        text = reading.read_bytes(path).decode()
    except (FileError, UnicodeError):
        return False  # there is none that could have a passage
    new = updated(text, content)
    if new != text:
        write_text(path, new, replace=True)
    return new != text


def _waiting(table: State) -> str:
    done = progress(table)
    return f"The paper's first table, {table.experiment.title}, is being run again: {done}."


def _picture(table: State, pictures: str) -> Iterator[str]:
    assert table.comparison is not None
    rows = listed(f"{row.name} {mean(row)}" for row in table.comparison.rows)
    yield f"![Test accuracies in per cent, mean ± standard error (runs): {rows}.]({pictures}/{PICTURED}-rows.svg)"
    yield (
        f"*{table.experiment.title}: a dot per run, runs of a seed joined, and the paper's numbers, of one run each. "
        "The plan and its tests were [written down](experiments/PLAN.md) before there was any score.*"
    )


def _contrasts(found: list[Claim]) -> str:
    """The contrasts of the pictured table, in points of accuracy."""
    lines = ["| MaxGain + X against X, in points | the paper | ours (95 % together) | verdict |", "|---|---|---|---|"]
    for claim in found:
        if not claim.text.startswith(_EXPECTED):
            number, pair = claim.text.partition(": ")[0], claim.text.rpartition(": ")[-1]
            lines.append(f"| {number}: {pair} | {claim.paper} | {claim.ours} | {claim.verdict} |")
    return "\n".join(lines)


def _expectations(found: list[Claim]) -> Iterator[str]:
    """What the plan expected of the pictured table, and whether it came."""
    for claim in found:
        if claim.text.startswith(_EXPECTED):
            yield f"Expected: {claim.text.removeprefix(_EXPECTED)}. {_capital(claim.verdict)}: {claim.ours}"


def _outcome(state: State, found: list[Claim]) -> str:
    """What came out of another table or figure that is done, in a line."""
    if state.experiment.name == "gains":
        expected = (
            f"medians of gains within {100 * SAME_GAINS:g} % of the paper's Figures 1 and 2, averaged over layers"
        )
        told = _how_far_off if len({claim.verdict for claim in found}) == 1 else _which_are_how_far_off
        return f"Expected: {expected}. {_by_verdict(found, told)}"
    if state.experiment.name == "gamma-curve":
        return "; ".join(f"{claim.text}. {_capital(claim.verdict)}: {claim.ours}" for claim in found)
    return f"{_title(state)}. {_by_verdict(found, _differences)}"


def _by_verdict(found: list[Claim], told: Callable[[list[Claim]], str]) -> str:
    """Each verdict with what it is about."""
    verdicts = dict.fromkeys(claim.verdict for claim in found)
    groups = {verdict: [claim for claim in found if claim.verdict == verdict] for verdict in verdicts}
    return ". ".join(f"{_capital(verdict)}: {told(claims)}" for verdict, claims in groups.items())


def _capital(verdict: str) -> str:
    """A verdict in bold at the beginning of a sentence."""
    return f"{verdict[:2]}{verdict[2:3].upper()}{verdict[3:]}"


def _differences(found: list[Claim]) -> str:
    return listed(claim.text.rpartition(": ")[-1] + _beside_paper(claim) for claim in found)


def _beside_paper(claim: Claim) -> str:
    """Ours and the paper's number, as far as there are such."""
    numbers = [claim.brief] * bool(claim.brief) + [f"the paper: {claim.paper}"] * (claim.paper != "–")
    return f" ({'; '.join(numbers)})" if numbers else ""


def _how_far_off(found: list[Claim]) -> str:
    """How far medians of gains are from the paper's, from the nearest to the furthest."""
    off = sorted((claim.brief for claim in found if claim.brief), key=float)
    if not off:
        return "there are no gains to tell by"
    return f"they are {off[0]} % off" if off[0] == off[-1] else f"they are {off[0]} to {off[-1]} % off"


def _which_are_how_far_off(found: list[Claim]) -> str:
    figures = dict.fromkeys(claim.text.partition(":")[0] for claim in found)
    return f"{_how_far_off(found)} in {listed(figures)}"


def _unfinished(waiting: list[State]) -> Iterator[str]:
    for heading, obtainable in (("Still to be run", True), ("Not run, as the data could not be obtained", False)):
        names = [_so_far(state) for state in waiting if state.experiment.obtainable is obtainable]
        if names:
            yield f"{heading}: {'; '.join(names)}."


def _title(state: State) -> str:
    return state.experiment.title.partition(",")[0]


def _so_far(state: State) -> str:
    far = progress(state)
    return _title(state) + ("" if far == "not run" else f" ({far})")
