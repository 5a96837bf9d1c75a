"""Files that configure other programs (workflows, templates, hooks, packaging) are checked by those who know them."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "dependabot": [GITHUB / "dependabot.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def complaints(tool: str, *arguments: str | Path) -> str:
    """What a linter says about files; empty if it is content. Skips where the linter is not installed."""
    found = shutil.which(tool, path=Path(sys.executable).parent) or shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_workflows_pass_actionlint() -> None:
    assert not complaints("actionlint", *WORKFLOWS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_the_forge_follow_their_schemas(schema: str) -> None:
    assert SCHEMAS[schema]
    assert not complaints("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema])


def test_pyproject_is_valid() -> None:
    assert not complaints("validate-pyproject", "pyproject.toml")


def test_hooks_before_a_commit_are_valid_and_use_the_projects_own_ruff() -> None:
    assert not complaints("pre-commit", "validate-config", ".pre-commit-config.yaml")
    hooked = re.search(r"ruff-pre-commit\n\s+rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    pinned = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert hooked is not None
    assert pinned is not None
    assert hooked[1] == pinned[1]


def test_the_workflows_test_every_python_that_the_package_names() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [c.rpartition(" ")[2] for c in package["classifiers"] if re.search(r":: 3\.\d+$", c)]
    matrix = re.search(r"python: \[(.*)\]", (GITHUB / "workflows" / "test.yml").read_text(encoding="utf-8"))
    assert matrix is not None
    assert re.findall(r"[\d.]+", matrix[1]) == named


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_whatever_is_automated_calls_targets_that_the_makefile_has(path: Path) -> None:
    """``make help`` names every target, and nothing calls one that is not there."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    described = re.findall(r"^(\w+):.*## ", makefile, re.MULTILINE)
    assert sorted(described) == sorted(phony[1].split())
    called = re.findall(r"\bmake (\w+)", path.read_text(encoding="utf-8"))
    assert set(called) <= set(described)
