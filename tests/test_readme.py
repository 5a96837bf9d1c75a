"""The README's commands work as printed, in order, in a fresh folder; what its snippet prints is what it says."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from maxgain.study.cli.app import main
from one_process import in_this_process

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ["--epochs", "1", "--network", "mlp"]
ADDED = {
    "train": SMALL,
    "gains": [],
    "inspect": [],
    "tune": [*SMALL, "--jobs", "1", "--grid", "gamma=1:2:1"],
    "compare": [*SMALL, "--jobs", "1", "--folds", "2"],
    "report": [],
    "list": [],
    "data": [],
    "reproduce": [],
}
"""What a test adds to each command, so that it takes seconds; of an option that is there twice the last one counts."""


def plain(text: str) -> list[str]:
    """The fenced blocks that have no language."""
    return [block for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if not language]


def blocks(heading: str) -> list[list[list[str]]]:
    """The commands of each block in a section that has no language, as words."""
    section = re.split(r"^## ", README.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [[shlex.split(line, comments=True) for line in block.splitlines()] for block in plain(section)]
    return [[words for words in block if words] for block in lines]


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A folder with nothing in it, and no data anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXGAIN_DATA", str(tmp_path / "data"))
    return tmp_path


def test_the_studys_commands_work_as_printed_and_in_order(fresh, capsys, monkeypatch) -> None:
    in_this_process(monkeypatch)
    first, _ = blocks("The study")
    commands = [words for words in first if words[0] == "maxgain"]
    assert {words[1] for words in commands} == {"list", "train", "gains", "inspect", "tune", "compare", "report"}
    for _, name, *rest in commands:
        added = [] if "--resume" in rest else ADDED[name]  # a run goes on with the options of its folder
        assert main([name, *rest, *added]) == 0, f"maxgain {name}: {capsys.readouterr().err}"
    assert (fresh / "report.html").read_text(encoding="utf-8").count("<svg") > 0


def test_what_comes_before_them_makes_the_environment_that_they_need() -> None:
    first, _ = blocks("The study")
    shell = [words for words in first if words[0] != "maxgain"]
    assert shell == [["make", "demo"], ["source", ".venv/bin/activate"]]
    plan = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv/bin/maxgain demo" in plan


def test_commands_for_fetched_data_are_understood_and_ask_for_the_data(fresh, capsys) -> None:
    _, second = blocks("The study")
    for _, name, *rest in second:
        if rest[0] == "fetch":
            with pytest.raises(SystemExit, match="0"):  # the network is not for tests
                main([name, *rest, "--help"])
            continue
        code = main([name, *rest, *ADDED[name]])
        said = capsys.readouterr().err
        assert code == 0 or "cifar10" in said, said
        assert code == 0 or "see 'maxgain" not in said, said


def test_no_command_of_the_readme_is_left_out_of_these_tests() -> None:
    printed = [line for block in plain(README) for line in block.splitlines() if line.startswith("maxgain ")]
    assert [shlex.split(line, comments=True) for line in printed] == [
        words for block in blocks("The study") for words in block if words[0] == "maxgain"
    ]


def test_every_target_of_make_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake (\w+)", "\n".join(plain(README))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_snippet_prints_what_it_says_and_the_constraint_bites(capsys) -> None:
    block = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert block is not None
    said = re.findall(r"print\(.*\)  # ([\d.]*) ?(\{.*?\})", block[1])
    exec(compile(block[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    numbers = re.compile(r"\d+\.\d+")
    assert len(printed) == len(said) == 3
    for line, expected in zip(printed, said, strict=True):
        claimed = [float(number) for number in numbers.findall(" ".join(expected))]
        assert [float(number) for number in numbers.findall(line)] == pytest.approx(claimed, rel=0.15, abs=0.005)
    free, held = (max(map(float, numbers.findall(line.partition("{")[2]))) for line in printed[:2])
    assert free > 3 * held
