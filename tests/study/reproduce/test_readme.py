"""README's passage: what the records say, and no score before all runs are done."""

import re
from pathlib import Path

from maxgain.study.reproduce.document import build
from maxgain.study.reproduce.experiments import EXPERIMENTS
from maxgain.study.reproduce.readme import BEGIN, END, passage, updated
from maxgain.study.reproduce.running import Recorded
from maxgain.study.reproduce.state import look
from reproduce_records import finish, tune

ROOT = Path(__file__).parents[3]
CIFAR10 = EXPERIMENTS["cifar10"]


def said(results):
    """The passage that the records in a folder make."""
    recorded = Recorded.read(results)
    states = {name: look(experiment, recorded) for name, experiment in EXPERIMENTS.items()}
    return passage(states, "REPRODUCTION.md", "results/figures")


def test_the_readme_in_the_tree_says_what_the_records_in_it_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert BEGIN in text
    assert updated(text, said(ROOT / "results")) == text, "run 'maxgain reproduce' in the root"


def test_before_all_runs_are_done_it_counts_them_and_shows_no_score(tmp_path):
    tune(CIFAR10, tmp_path)
    finish(CIFAR10, tmp_path, lambda row: 0.87654, but={("none", 4)})
    text = said(tmp_path)
    assert "39 of 40 runs done" in text
    assert "87.6" not in text
    assert ".svg" not in text


def test_when_all_are_done_it_shows_the_picture_the_contrasts_and_what_was_expected(tmp_path):
    tune(CIFAR10, tmp_path)
    finish(CIFAR10, tmp_path, lambda row: 0.93 if "maxgain" in row else 0.9)
    text = said(tmp_path)
    assert "](results/figures/cifar10-rows.svg)" in text
    contrast = look(CIFAR10, Recorded.read(tmp_path)).comparison.contrasts[0]
    assert f"| H1: maxgain against none | +2.46 | {100 * contrast.decided.mean:+.2f} (" in text
    assert text.count("| **established**, p < 0.001 |") == 4
    assert text.count("- Expected: ") == 4
    assert re.search(r"averaged over layers\. \*\*Does not hold\*\*: they are [\d.]+ to [\d.]+ % off\.", text)
    assert "Not run, as the data could not be obtained: CIFAR-100." in text


def test_other_tables_have_the_papers_differences_beside_ours(tmp_path):
    tune(EXPERIMENTS["sins10"], tmp_path)
    finish(EXPERIMENTS["sins10"], tmp_path, lambda row: 0.7)
    text = said(tmp_path)
    assert "maxgain+batchnorm against batchnorm (" in text
    assert "; the paper: +0.52, p = 0.332)" in text


def test_a_readme_beside_the_document_is_kept_up_to_date_between_its_two_lines_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"mine\r\n\n{BEGIN}\nold\n{END}\n\nmine too\n", newline="")
    assert readme in build(tmp_path / "results", tmp_path / "REPRODUCTION.md")
    text = readme.read_bytes().decode()
    assert text.startswith(f"mine\r\n\n{BEGIN}\n\nThe paper's first table")
    assert text.endswith(f"\n\n{END}\n\nmine too\n")
    assert "old" not in text
    assert readme not in build(tmp_path / "results", tmp_path / "REPRODUCTION.md"), "it says so already"


def test_a_readme_without_those_lines_is_left_alone(tmp_path):
    for content in (b"mine", f"{BEGIN} and no end".encode(), b"\xff\xfe"):
        (tmp_path / "README.md").write_bytes(content)
        build(tmp_path / "results", tmp_path / "REPRODUCTION.md")
        assert (tmp_path / "README.md").read_bytes() == content
