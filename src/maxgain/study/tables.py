"""Tables as data, shown on terminals of any width and in notebooks.

Nothing in a table is ever cut: where there is no room, whole columns are left out and named, a long name is broken
between its parts, and at last every row becomes a few lines. The numbers of a column have the same number of decimals.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table as Drawn
from rich.text import Text

Cell = str | float | None
"""Text is shown as it is, a number with the decimals of its column, and None as a dash."""

WIDTH_OF_A_FILE = 160
GAP = 2
NOTHING = "–"
PROSE = 20
"""How narrow a column of sentences may become."""


@dataclass(frozen=True)
class Column:
    """A column's heading, and what may happen to it on a narrow terminal."""

    title: str
    spare: int = 0
    """Columns of the highest number are left out first; those of 0 never are."""
    prose: bool = False
    """Sentences, which wrap at words."""
    digits: int = 4
    """Of the column's largest number; a number among them that is much smaller keeps two."""


@dataclass(frozen=True)
class Table:
    """A title, columns and rows; the first column holds the rows' names."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    bold: frozenset[int] = frozenset()
    """The rows to look at first."""

    def __str__(self) -> str:
        """For `print`: without colours, as wide as the terminal, or as it needs to be where there is none."""
        width = self.width_on(Console())
        console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, emoji=False)
        console.print(self.drawn(width))
        shown: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in shown.splitlines())

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{html.escape(column.title)}</th>" for column in self.columns)
        body = ""
        for number, row in enumerate(self.texts()):
            cell = "<td><b>{}</b></td>" if number in self.bold else "<td>{}</td>"
            body += f"<tr>{''.join(cell.format(html.escape(text)) for text in row)}</tr>"
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def texts(self) -> list[list[str]]:
        """What stands in the cells, row by row."""
        by_column = [
            uniform([row[place] for row in self.rows], column.digits) for place, column in enumerate(self.columns)
        ]
        return [list(row) for row in zip(*by_column, strict=True)]

    def without(self, place: int) -> Table:
        """The table less one of its columns."""
        rows = tuple(row[:place] + row[place + 1 :] for row in self.rows)
        return replace(self, columns=self.columns[:place] + self.columns[place + 1 :], rows=rows)

    def needs(self) -> int:
        """How many columns of a terminal it takes at least."""
        return sum(self._widths()) + GAP * (len(self.columns) - 1)

    def width_on(self, console: Console) -> int:
        """That of a terminal; a file or a pipe has none to fit the table into, so that nothing is left out there."""
        return console.width if console.is_terminal else max(WIDTH_OF_A_FILE, self.needs())

    def fitted(self, width: int) -> tuple[Table, list[str]]:
        """The table with as many columns as there is room for, and the titles of those left out."""
        shown = self
        while shown.needs() > width:
            spares = [column.spare for column in shown.columns]
            if not any(spares):
                break
            place = len(spares) - 1 - spares[::-1].index(max(spares))  # the last of the most easily spared
            shown = shown.without(place)
        return shown, [column.title for column in self.columns if column not in shown.columns]

    def drawn(self, width: int) -> Group:
        """For a rich console that is `width` wide."""
        shown, left_out = self.fitted(width)
        widths, texts = shown._widths(), shown.texts()
        room = width - shown.needs() + widths[0]
        if room < max((cell_len(part) for name, *_ in texts for part in _parts(name)), default=0):
            return self._as_lines()
        drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for place, column in enumerate(shown.columns):
            words = place == 0 or all(text[:1].isalpha() or text in ("", NOTHING) for text in _lines(texts, place))
            title = Text("\n".join(_packed(column.title.split(" "), widths[place], " ")))
            drawn.add_column(title, justify="left" if words else "right", no_wrap=not column.prose)
        for number, (name, *cells) in enumerate(texts):
            lines = "\n".join(_packed(_parts(name), room))
            drawn.add_row(lines, *cells, style="bold" if number in shown.bold else None)
        note = f"no room for: {', '.join(left_out)}; a wider terminal, a pipe or --json has them"
        below = [Text(note, style="dim")] if left_out else []
        return Group("", Text(shown.title, style="bold"), drawn, *below)

    def _as_lines(self) -> Group:
        """All of it on a terminal that is too narrow for columns."""
        lines = [Text(self.title, style="bold")]
        for name, *cells in self.texts():
            lines.append(Text(name))
            lines += [Text(f"  {column.title}: {cell}") for column, cell in zip(self.columns[1:], cells, strict=True)]
        return Group("", *lines)

    def _widths(self) -> list[int]:
        """How wide each column is at least: its longest word where it may wrap, its longest line where it may not."""
        texts = self.texts()
        return [
            max(map(cell_len, (*column.title.split(), *((" " * PROSE,) if column.prose else _lines(texts, place)))))
            for place, column in enumerate(self.columns)
        ]


def uniform(values: Sequence[Cell], digits: int = 4) -> list[str]:
    """Each value as text, all numbers with the same number of decimals, or all with an exponent."""
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    show = _format(numbers, digits)
    return [NOTHING if value is None else value if isinstance(value, str) else show(value) for value in values]


def _format(numbers: Sequence[float], digits: int) -> Callable[[float], str]:
    sizes = [abs(number) for number in numbers if number]
    if all(isinstance(number, int) for number in numbers) or not sizes:
        decimals, exponent = 0, False
    else:
        largest, smallest = math.floor(math.log10(max(sizes))), math.floor(math.log10(min(sizes)))
        decimals = max(0, digits - 1 - largest, 1 - smallest)
        exponent = decimals + max(largest, 0) > 8
        texts = [f"{number:.{decimals}f}" for number in numbers]
        while decimals and not exponent and all(text.endswith("0") for text in texts):
            decimals, texts = decimals - 1, [text[:-1] for text in texts]
    form = f".{digits - 1}e" if exponent else f".{decimals}f"

    def show(number: float) -> str:
        if math.isnan(number):
            return NOTHING
        return f"{'-' if number < 0 else ''}∞" if math.isinf(number) else format(number, form)

    return show


def _parts(name: str) -> list[str]:
    """Where a long name may be broken: after a dot, a plus, a blank ..."""
    return re.findall(r"[^.+/_ -]*[.+/_ -]|[^.+/_ -]+", name)


def _packed(parts: Sequence[str], width: int, between: str = "") -> list[str]:
    """The parts in as few lines as there can be; one that is wider than a line has a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1] + between + part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


def _lines(texts: Sequence[Sequence[str]], place: int) -> list[str]:
    return [line for row in texts for line in row[place].split("\n")]
