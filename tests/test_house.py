"""The house is as its papers say: every promise is kept by a test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PROMISES = ROOT / "docs" / "promises.md"
NOT_KEPT_YET: set[int] = {16, 17, 19, 20}
"""Promises that no test keeps yet. A number leaves this set with its first test, and none may come in."""


def promised() -> list[int]:
    """The numbers of the page."""
    return [int(number) for number in re.findall(r"^(\d+)\. \*\*", PROMISES.read_text(encoding="utf-8"), re.MULTILINE)]


def kept() -> set[int]:
    """The numbers that tests name."""
    named = re.compile(r"^ *(?:async )?def test_promise_(\d\d)_", re.MULTILINE)
    return {int(n) for path in TESTS.rglob("test_*.py") for n in named.findall(path.read_text(encoding="utf-8"))}


def test_promises_are_numbered_without_a_gap() -> None:
    assert promised() == list(range(1, len(promised()) + 1))


@pytest.mark.parametrize("number", promised())
def test_every_promise_is_kept_by_a_test_that_names_it(number: int) -> None:
    assert number in kept() | NOT_KEPT_YET, f"write a test_promise_{number:02d}_..."


def test_no_test_keeps_what_was_never_promised() -> None:
    assert kept() <= set(promised())
