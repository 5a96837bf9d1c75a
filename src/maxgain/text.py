"""Tables as plain text, as HTML and for the terminal: a report printed, in a notebook, on the command line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

from .errors import MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table

Row = Sequence[str]


def text_table(columns: Row, rows: Sequence[Row], *, title: str, caption: str = "") -> str:
    """Lines of text: names to the left, numbers to the right, nothing cut."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(row: Row) -> str:
        name, *numbers = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([name, *numbers]).rstrip()

    return "\n".join(
        [
            title,
            "",
            line(columns),
            line(["-" * width for width in widths]),
            *map(line, rows),
            *([caption] * bool(caption)),
        ]
    )


def html_table(columns: Row, rows: Sequence[Row], *, title: str, caption: str = "") -> str:
    """A plain HTML table, for the style of whatever page it is shown on."""

    def line(row: Row, tag: str) -> str:
        cells = (
            f'<{tag} style="text-align: {"right" if i else "left"}">{escape(cell)}</{tag}>'
            for i, cell in enumerate(row)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    foot = f"<p>{escape(caption)}</p>" if caption else ""
    return f"<p>{escape(title)}</p><table><thead>{line(columns, 'th')}</thead><tbody>{body}</tbody></table>{foot}"


def rich_table(columns: Row, rows: Sequence[Row], *, title: str, caption: str | None = None) -> Table:
    """A table for rich, which folds long names and never cuts them; Python's own ``print`` shows it as plain text."""
    with extra("rich"):
        from rich.table import Table

    class Printed(Table):
        def __str__(self) -> str:
            return text_table(columns, rows, title=title, caption=caption or "")

    table = Printed(title=title, caption=caption)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold", no_wrap=bool(i))
    for row in rows:
        table.add_row(*row)
    return table


class Tabular(ABC):
    """A report that `print`, notebooks and the terminal show as one table."""

    def __str__(self) -> str:
        return text_table(*self._cells(), title=self._title, caption=self._caption)

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), title=self._title, caption=self._caption)

    def table(self, title: str | None = None) -> Table:
        """The same as a table of rich, for the terminal.

        Args:
            title: what stands above it; without one, what the report is about.
        """
        return rich_table(*self._cells(), title=title or self._title, caption=self._caption or None)

    @property
    @abstractmethod
    def _title(self) -> str: ...

    @property
    @abstractmethod
    def _caption(self) -> str: ...

    @abstractmethod
    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """The table's head, and its rows."""


@contextmanager
def extra(package: str) -> Iterator[None]:
    """Says what to install where an optional package is missing."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"this needs {package}: pip install 'maxgain[study]'.") from error
