"""Tables as plain text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Row = Sequence[str]


def text_table(columns: Row, rows: Sequence[Row], *, title: str, caption: str = "") -> str:
    """Return lines of text: names to the left, numbers to the right, nothing cut."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(row: Row) -> str:
        name, *numbers = row
        return "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip()

    lines = [title, "", line(columns), line(["-" * width for width in widths]), *map(line, rows)]
    return "\n".join([*lines, caption] if caption else lines)


class Tabular:
    """A report that ``print`` and notebooks show as a table."""

    def _table(self) -> tuple[str, Row, Sequence[Row], str]:
        """Return the title, the columns' names, the rows, and what is said below."""
        raise NotImplementedError

    def __str__(self) -> str:
        title, columns, rows, caption = self._table()
        return text_table(columns, rows, title=title, caption=caption)

    def _repr_html_(self) -> str:
        title, columns, rows, caption = self._table()
        lines = ["".join(f'<td style="text-align: {"right" if i else "left"}">{escape(cell)}</td>'
                         for i, cell in enumerate(row)) for row in rows]  # fmt: skip
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<p>{escape(title)}</p><table><tr>{head}</tr>{body}</table><p>{escape(caption)}</p>"
