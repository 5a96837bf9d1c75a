"""What the documentation shows is run: the examples of docstrings, and the Python blocks of the README and docs/."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import maxgain
from maxgain.errors import MissingExtraError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MODULES = ["maxgain", *sorted(module.name for module in pkgutil.walk_packages(maxgain.__path__, "maxgain."))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path, monkeypatch):
    """Examples write files and seed generators; the next test must not notice."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_do_what_they_say(name):
    try:
        module = importlib.import_module(name)
    except (MissingExtraError, ModuleNotFoundError) as error:  # Triton comes with torch for GPUs only
        pytest.skip(str(error))
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_run_from_top_to_bottom(page):
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "every block should be found"
    namespace = {"__name__": page.stem}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)
