"""The files in experiments/: one per table and figure, each opening with what it is about."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxgain.study.reproduce.experiments import EXPERIMENTS

FOLDER = Path(__file__).parents[3] / "experiments"
FILES = sorted(path for path in FOLDER.glob("*.py") if "maxgain reproduce" in path.read_text(encoding="utf-8"))


def opening(path):
    """What a file opens with, on one line."""
    return " ".join(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split())


def experiment_of(path):
    """The experiment that a file is about."""
    return EXPERIMENTS[re.search(r"Command: maxgain reproduce (\S+)", opening(path))[1]]


def test_every_table_and_figure_has_a_file():
    assert sorted(experiment_of(path).name for path in FILES) == sorted(EXPERIMENTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_opens_with_claim_command_numbers_hardware_and_duration(path):
    text, experiment = opening(path), experiment_of(path)
    for what in ("Claim: ", "Command: ", "The paper", "Runs: ", "Hardware: ", "Duration: "):
        assert what in text
    for row in experiment.published.keys() & set(experiment.rows):
        assert f"{row} {experiment.published[row]}" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_counts_its_runs_as_they_are(path):
    counts = [int(number) for number in re.findall(r"\d+", opening(path).partition("Runs: ")[2].partition(":")[0])]
    experiment = experiment_of(path)
    planned = [len(jobs) for jobs in (experiment.tuning(), experiment.final()) if jobs]
    assert counts[: len(planned)] == planned


def test_a_file_does_what_the_command_does(tmp_path):
    command = [sys.executable, str(FOLDER / "figure_3.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "svhn-maxgain=1.25-seed1000" in done.stdout
