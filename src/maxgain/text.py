"""Names and tables as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ITSELF = "(itself)"
"""What a model that is a single layer is called, whose dotted name is empty."""


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(repr(name or ITSELF) for name in names[:6]) or "none") + more


def by_reason(reasons: Mapping[str, str]) -> str:
    """Layers and why they are left out, grouped by reason."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{listed(some)} ({why})" for why, some in names.items())


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, caption: str = "") -> str:
    """Return lines of text: names to the left, numbers to the right, nothing cut."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        name, *numbers = row
        return "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip()

    lines = [title, "", line(columns), line(["-" * width for width in widths]), *map(line, rows)]
    return "\n".join([*lines, caption] if caption else lines)
