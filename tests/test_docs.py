"""What the documentation shows runs: Python blocks, docstring examples, the README's commands. Links lead somewhere."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import maxgain
from maxgain.errors import MissingExtraError

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "examples" / "README.md"]
MODULES = ["maxgain", *sorted(module.name for module in pkgutil.walk_packages(maxgain.__path__, "maxgain."))]
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
QUICK = {
    "train": ["--epochs", "1"],
    "tune": ["--epochs", "1", "--jobs", "1", "--budget", "2"],
    "compare": ["--epochs", "1", "--jobs", "1", "--folds", "3"],
}
"""What is added to the README's commands; of a flag that is there twice the last one counts."""


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    """The fenced blocks of a language, each with the number of lines before it."""
    text = page.read_text(encoding="utf-8")
    fenced = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(2)), block[2]) for block in fenced if block[1] == language]


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder, and the random numbers as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield tmp_path


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run_from_top_to_bottom(page):
    namespace = {"__name__": page.stem}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_do_what_they_say(module):
    try:
        imported = importlib.import_module(module)
    except (MissingExtraError, ModuleNotFoundError) as error:  # Triton comes with torch for GPUs only
        pytest.skip(str(error))
    assert doctest.testmod(imported).failed == 0


def test_the_readmes_commands_run_in_order(elsewhere):
    pytest.importorskip("tyro")
    from maxgain.study.cli.app import main

    lines = [line for _, code in blocks(README, "") for line in code.splitlines() if line.startswith("maxgain ")]
    assert len(lines) == 5
    for line in lines:
        _, command, *words = shlex.split(line, comments=True)
        assert main([command, *words, *QUICK.get(command, [])]) == 0, line
    assert "<svg" in (elsewhere / "report.html").read_text(encoding="utf-8")


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "".join(code for page in PAGES for _, code in blocks(page, ""))
    named = set(re.findall(r"^make (\w+)", text, re.MULTILINE))
    assert named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_table_of_models_is_that_of_its_record(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    make = runpy.run_path(str(ROOT / "docs" / "make_models.py"))
    record = json.loads((ROOT / "docs" / "figures" / "models.json").read_text(encoding="utf-8"))["models"]
    assert make["table"](record) in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [family.name for family in make["FAMILIES"]] == [one["model"] for one in record]
    found, recorded = make["tried"](make["FAMILIES"][0]), record[0]
    assert found["layers"] == recorded["layers"]
    assert found["gain over bound"] == pytest.approx(recorded["gain over bound"], abs=1e-3)


def test_every_page_is_in_the_index_and_in_the_navigation():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [page for page in pages if f"({page})" not in index or f" {page}\n" not in navigation] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "excluded from the built site" not in done.stderr, "a link to what is not there"
    reference = (tmp_path / "site" / "api" / "method" / "index.html").read_text(encoding="utf-8")
    assert [name for name in maxgain._HOMES if f'id="maxgain.{name}"' not in reference] == []
