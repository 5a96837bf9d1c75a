"""Tables as plain text and as HTML, for those who print a report or look at one in a notebook."""

from collections.abc import Sequence
from html import escape

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
