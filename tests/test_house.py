"""The house is as its papers say: every promise has a test, every file is on the map, every walk leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PROMISES = ROOT / "docs" / "promises.md"
NOT_KEPT_YET: set[int] = set()
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


# The map of the house and the walks through it, in CONTRIBUTING.md.

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "maxgain"
PLACES = sorted(set(re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", CONTRIBUTING)))
"""Every `file.py` `name` of the text."""


def mapped() -> list[str]:
    """The files of the map, as paths below src/maxgain; a folder's name ends in a slash and its files are indented."""
    block = CONTRIBUTING.partition("```\nsrc/maxgain/\n")[2].partition("```")[0]
    files, folders = [], []
    for line in block.splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders = [*folders[: depth - 1], name]
        if not name.endswith("/"):
            files.append("".join(folders))
            assert len(line.split()) > 1, f"{name} has no remark"
    return files


def test_the_map_shows_every_file_and_nothing_else() -> None:
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.is_file()}
    there = {path for path in files if "__pycache__" not in path}
    shown = mapped()
    assert len(shown) == len(set(shown))
    assert (there - set(shown), set(shown) - there) == (set(), set())


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[f"{file}:{name}" for file, name in PLACES])
def test_the_walks_and_the_recipes_name_what_exists(file: str, name: str) -> None:
    path = ROOT / file if file.startswith("tests/") else PACKAGE / file
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^ *(?:(?:async )?def|class) {name}\b|^ *{name}\b *[:=]", text, re.MULTILINE), f"{file}: {name}"


def test_the_rooms_of_the_readme_are_folders() -> None:
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## The rooms\n\n```\n")[2].partition("```")[0]
    rooms = [line.split()[0].rstrip("/") for line in block.splitlines() if line.startswith("  ")]
    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir() and not path.name.startswith("_")}
    assert set(rooms) == folders - {"templates"}


LONGEST_WALKS = {"whole walk": (126, 21, 72), "the step": (41, 9, 28)}
"""Functions, files and changes of file of the first version: a batch must stay easier to follow than it was then."""


def test_the_walk_of_one_batch_stays_shorter_than_that_of_the_first_release() -> None:
    found = subprocess.run([sys.executable, str(TESTS / "walk.py")], capture_output=True, text=True, check=True).stdout
    for name, longest in LONGEST_WALKS.items():
        line = found.partition(f"{name}:")[2].partition("\n")[0]
        counts = tuple(map(int, re.findall(r"\d+", line)))
        assert len(counts) == len(longest), found
        assert all(count < most for count, most in zip(counts, longest, strict=True)), f"{name}: {counts}\n{found}"
