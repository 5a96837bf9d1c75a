"""Every kind of file that is read, damaged in every way: named in a sentence or harmless, never a traceback."""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxgain.study.cli import app
from maxgain.study.data import checksums
from torture import damage
from torture.harness import Failures, answer, in_a_hurry
from torture.size import many

EACH = many(6, 150)
RECIPE = ["digits", "--network", "mlp", "--fold", "0", "--epochs", "2"]
TUNE = ["tune", *RECIPE, "--regulariser", "maxgain", "--grid", "gamma=1:2:1", "--jobs", "1"]
COMPARE = ["compare", *RECIPE[:3], "--epochs", "1", "--regularisers", "none", "maxgain", "--folds", "2", "--jobs", "1"]

JSON = (damage.of_json, damage.of_bytes, damage.of_text)
LINES = (damage.of_json_lines, damage.of_bytes, damage.of_text)
BYTES = (damage.of_bytes,)

# The file, in how many ways it is damaged, and the command that reads it, in the folder that holds the damaged copy.
ROWS: tuple[tuple[str, tuple[Callable[..., Iterable[damage.Damage]], ...], list[str]], ...] = (
    ("run/config.json", JSON, ["gains", "run"]),
    ("run/result.json", JSON, ["train", *RECIPE, "--out", "run", "--resume"]),
    ("run/metrics.jsonl", LINES, ["report", "run"]),
    ("run/model.safetensors", BYTES, ["gains", "run"]),
    ("stopped/config.json", JSON, ["train", "--resume", "stopped"]),
    ("stopped/checkpoint.safetensors", BYTES, ["train", *RECIPE, "--out", "stopped", "--resume"]),
    ("comparison/results/digits.jsonl", LINES, ["report", "comparison"]),
    ("comparison/results/digits.jsonl", LINES, ["merge", "merged", "comparison/results"]),
    ("comparison/results/predictions/*.npz", BYTES, ["merge", "merged", "comparison/results"]),
    ("comparison/results/predictions/*.npz", BYTES, [*COMPARE, "--out", "comparison"]),
    ("comparison/asked.json", JSON, ["report", "comparison"]),
    ("comparison/comparison.json", JSON, [*COMPARE, "--out", "comparison"]),
    ("search/curve.json", JSON, ["report", "search"]),
    ("search/tuned.json", JSON, ["report", "search"]),
    ("search/journal.log", LINES, [*TUNE, "--out", "search"]),
    ("search/searcher.txt", BYTES, [*TUNE, "--out", "search"]),
    ("sins10/X.bin", BYTES, ["data", "check", "sins10", "--data", "."]),
    ("sins10/y.bin", BYTES, ["data", "check", "sins10", "--data", "."]),
    ("sins10/classes.txt", BYTES, ["data", "check", "sins10", "--data", "."]),
    ("sins10/SHA256SUMS", (damage.of_bytes, damage.of_text), ["data", "check", "sins10", "--data", "."]),
    ("images/a/0.png", BYTES, ["data", "check", "folder", "--data", "images"]),
    ("mapping.json", JSON, ["data", "build-sins10", "images", "mapping.json", "--data", "built"]),
)
SEALED = (
    *("run/model.safetensors", "stopped/checkpoint.safetensors", "sins10/X.bin", "sins10/y.bin"),
    *("run/metrics.jsonl", "search/curve.json"),
)
"""Files of which no change may go unseen, but of how a JSON file is laid out."""

each_row = pytest.mark.parametrize(("pattern", "kinds", "words"), ROWS, ids=[f"{row[0]} {row[2][0]}" for row in ROWS])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of every file."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with in_a_hurry(most=10**9):
            assert app.main(["train", *RECIPE, "--out", "run"]) == 0
            assert app.main([*COMPARE, "--out", "comparison"]) == 0
            assert app.main([*TUNE, "--out", "search"]) == 0
        patch.setattr("maxgain.study.runs.signals.deferred", stopping_at_once)
        assert app.main(["train", *RECIPE, "--out", "stopped"]) == 130
    rng = np.random.default_rng(0)
    (place / "sins10").mkdir()
    rng.integers(0, 256, 100 * 3 * 96 * 96, np.uint8).tofile(place / "sins10/X.bin")
    rng.integers(0, 10, 100, np.uint8).tofile(place / "sins10/y.bin")
    (place / "sins10/classes.txt").write_text("".join(f"class {number}\n" for number in range(10)))
    checksums.record(place / "sins10", ["X.bin", "y.bin", "classes.txt"])
    for name in ("a", "b"):
        (place / "images" / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 256, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(place / "images" / name / f"{number}.png")
    (place / "mapping.json").write_text(json.dumps({f"class {number}": [f"n{number}"] for number in range(10)}))
    return place


def stopping_at_once() -> object:
    """As if somebody asked for it before the first step was done."""
    return nullcontext(lambda: True)


def named(pattern: str, whole: Path) -> str:
    """The first file that a pattern fits."""
    return str(min(whole.glob(pattern)).relative_to(whole))


def prepared(whole: Path, file: str, tmp_path: Path, number: int) -> Path:
    """A copy of what the file lies in, to be damaged."""
    place = tmp_path / str(number)
    top = file.split("/")[0]
    place.mkdir()
    for name in {top, "images"} if top == "mapping.json" else {top}:
        source = whole / name
        shutil.copytree(source, place / name) if source.is_dir() else shutil.copy(source, place / name)
    return place


def same(damaged: bytes, content: bytes) -> bool:
    """Whether both say the same, in JSON, in lines of JSON or otherwise."""
    for read in (json.loads, json_lines):
        with suppress(ValueError, RecursionError):
            return bool(read(damaged) == read(content))
    return damaged == content


def json_lines(content: bytes) -> list[object]:
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


@each_row
def test_a_damaged_file_is_answered_in_words(
    pattern: str,
    kinds: tuple[Callable[..., Iterable[damage.Damage]], ...],
    words: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    file = named(pattern, whole)
    content = (whole / file).read_bytes()
    share = -(-EACH // len(kinds))
    changes = [change for kind in kinds for change in kind(content, len(pattern), share)]
    failures = Failures()
    with in_a_hurry():
        for number, (what, damaged) in enumerate(changes):
            place = prepared(whole, file, tmp_path, number)
            (place / file).write_bytes(damaged)
            monkeypatch.chdir(place)
            with failures.collected(f"{file}, {what}"):
                code, told = answer(words, capsys)
                assert code == 2 or file not in SEALED or same(damaged, content), f"it was used, and said {told!r}"
            monkeypatch.chdir(tmp_path)
            shutil.rmtree(place)
    tried("damaged files", len(changes))
    failures.tell()


@each_row
def test_what_is_no_file_is_answered_in_words(
    pattern: str,
    kinds: object,
    words: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    chosen = damage.SPECIAL if len(damage.SPECIAL) < EACH else {"a pipe": damage.SPECIAL["a pipe"]}
    file, failures = named(pattern, whole), Failures()
    with in_a_hurry():
        for number, (kind, make) in enumerate(chosen.items()):
            place = prepared(whole, file, tmp_path, number)
            (place / file).unlink()
            make(place / file)
            monkeypatch.chdir(place)
            with failures.collected(f"{file}, {kind}"):
                assert answer(words, capsys)[0] in (0, 2)
            monkeypatch.chdir(tmp_path)
            shutil.rmtree(place)
    tried("damaged files", len(chosen))
    failures.tell()
