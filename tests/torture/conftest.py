"""Counts of what was tried, told at the end."""

from collections import Counter
from collections.abc import Callable

import pytest


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Call with what was tried and how often; the sums are told when all tests are done."""

    def count(what: str, number: int) -> None:
        record_property(f"tried: {what}", number)

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sums: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        sums.update({name: value for name, value in report.user_properties if str(name).startswith("tried: ")})
    for name, total in sorted(sums.items()):
        terminalreporter.write_line(f"{name}: {total:,}")
