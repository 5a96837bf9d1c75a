"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, caption: str = "") -> str:
    """Return lines of text: names to the left, numbers to the right, nothing cut."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        name, *numbers = row
        return "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip()

    lines = [title, "", line(columns), line(["-" * width for width in widths]), *map(line, rows)]
    return "\n".join([*lines, caption] if caption else lines)
