"""A page made of records whose every text was written by an enemy: text stays text."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from maxgain.errors import MaxGainError
from maxgain.study.report import page
from synthetic_records import failed_run, synthetic_run
from torture.hostile_names import HOSTILE
from torture.size import LARGE

CHOSEN = HOSTILE if LARGE else HOSTILE[::6]
IDENTITY = ("recipe", "status", "key")  # what decides where a record belongs, and is checked when it is read


class Skeleton(HTMLParser):
    """What a page is made of, apart from text."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[tuple[str, ...]] = Counter()
        self.elements: Counter[str] = Counter()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.kinds.update((tag, name) for name, _ in attributes)
        self.links += [value or "" for name, value in attributes if name in ("href", "src", "action")]


def skeleton(content: str) -> Skeleton:
    parser = Skeleton()
    parser.feed(content)
    return parser


def spoilt(value: Any, hostile: str, *, keys: bool = True) -> Any:
    """The value with every text in it, and the names of layers, replaced."""
    if isinstance(value, dict):
        return {
            (hostile + name if keys and name.startswith(("features", "classifier")) else name): spoilt(item, hostile)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [spoilt(item, hostile) for item in value]
    return hostile + value if isinstance(value, str) and value not in ("inf", "-inf") else value


def write(folder: Path, runs: list[dict[str, Any]]) -> None:
    """As an enemy would: past everything that checks what is written."""
    (folder / "results").mkdir(parents=True)
    text = "".join(json.dumps(run) + "\n" for run in runs)
    (folder / "results" / "digits.jsonl").write_text(text, encoding="utf-8", errors="surrogatepass")


def runs() -> list[dict[str, Any]]:
    made = [synthetic_run(name, fold=fold, epochs=2, layers=2) for name in ("none", "maxgain") for fold in range(3)]
    return [*copy.deepcopy(made), failed_run("dropout")]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    folder = tmp_path_factory.mktemp("clean") / "comparison"
    write(folder, runs())
    page.write(folder, folder / "report.html")
    return skeleton((folder / "report.html").read_text(encoding="utf-8"))


FIELDS = ("note", "machine", "command", "device", "torch", "maxgain", "error")


@pytest.mark.parametrize("hostile", CHOSEN, ids=lambda text: ascii(text)[:25])
@pytest.mark.parametrize("everywhere", [False, True], ids=["free texts and layers", "every text"])
def test_hostile_texts_stay_texts(
    hostile: str, everywhere: bool, clean: Skeleton, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    records = []
    for run in runs():
        changed = {
            name: spoilt(value, hostile)
            if name not in IDENTITY and (everywhere or not isinstance(value, str) or name in FIELDS)
            else value
            for name, value in run.items()
        }
        records.append(changed if everywhere else changed | {"config": run["config"]})
    write(tmp_path / "comparison", records)
    tried("hostile pages", 1)
    try:
        page.write(tmp_path / "comparison", tmp_path / "report.html")
    except MaxGainError:
        if not everywhere:  # where even names are hostile, every record may be refused, but then in words
            raise
        return
    made = skeleton((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert set(made.kinds) <= set(clean.kinds)
    assert set(made.elements) <= set(clean.elements)
    for element in ("script", "style", "img", "iframe", "body", "title", "base", "meta", "form"):
        assert made.elements[element] == clean.elements[element]
    assert not [link for link in made.links if link.lower().startswith("javascript")]
