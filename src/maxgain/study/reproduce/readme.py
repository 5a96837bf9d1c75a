"""The passage of README.md that tells what came out: the same claims in short, and the picture.

It stands between two lines that only a README which wants it has. Whoever rebuilds the document rebuilds it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from maxgain.errors import FileError

from .. import reading
from ..files import write_text
from ..wording import listed
from .claims import Claim, claims, mean, progress
from .state import State

BEGIN = "<!-- what came out: made by `maxgain reproduce` from the records, do not edit -->"
END = "<!-- end of what came out -->"
PICTURED = "cifar10"
"""The table whose picture is shown."""


def passage(states: Mapping[str, State], document: str, pictures: str) -> str:
    """What came out, for somebody who reads nothing else; `document` and `pictures` are where links lead."""
    found: dict[str, list[Claim]] = {name: [] for name in states}
    for claim in claims(states):
        found[claim.command.split()[-1]].append(claim)
    table = states[PICTURED]
    parts = [*_picture(table, pictures), *_table(found[PICTURED])] if table.comparison else [_waiting(table)]
    parts += _others({name: state for name, state in states.items() if name != PICTURED}, found)
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


def _table(found: list[Claim]) -> Iterator[str]:
    """The contrasts of the pictured table in points of accuracy, and what was expected of it beforehand."""
    expected = [claim for claim in found if claim.text.startswith("expected: ")]
    lines = ["| MaxGain + X against X, in points | the paper | ours (95 % together) | verdict |", "|---|---|---|---|"]
    for claim in found:
        if claim not in expected:
            number, pair = claim.text.partition(": ")[0], claim.text.rpartition(": ")[-1]
            lines.append(f"| {number}: {pair} | {claim.paper} | {claim.ours} | {claim.verdict} |")
    yield "\n".join(lines)
    yield "\n".join(f"- E{claim.text[1:]}: {claim.verdict}; {claim.ours}." for claim in expected)


def _others(states: Mapping[str, State], found: Mapping[str, list[Claim]]) -> Iterator[str]:
    """The other tables and figures: their verdicts where they are done, how far they are where they are not."""
    done = [name for name, state in states.items() if state.is_complete]
    if done:
        yield "\n".join(f"- {_title(states[name])}: {_by_verdict(found[name], _title(states[name]))}." for name in done)
    waiting = [state for name, state in states.items() if name not in done]
    for heading, obtainable in (("Still to be run", True), ("Not run, as the data could not be obtained", False)):
        names = [_so_far(state) for state in waiting if state.experiment.obtainable is obtainable]
        if names:
            yield f"{heading}: {'; '.join(names)}."


def _by_verdict(found: list[Claim], title: str) -> str:
    """Each verdict with what it is about."""
    groups: dict[str, list[str]] = {}
    for claim in found:
        groups.setdefault(claim.verdict, []).append(claim.text.removeprefix(f"{title}: "))
    return "; ".join(f"{verdict}: {', '.join(texts)}" for verdict, texts in groups.items())


def _title(state: State) -> str:
    return state.experiment.title.partition(",")[0]


def _so_far(state: State) -> str:
    far = progress(state)
    return _title(state) + ("" if far == "not run" else f" ({far})")
