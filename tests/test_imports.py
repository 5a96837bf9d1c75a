"""The method needs torch and numpy alone, and knows nothing of the study that is built on it."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import maxgain
from maxgain.errors import MissingExtraError

PACKAGE = Path(maxgain.__file__).parent
STUDY = {"study", "__main__.py"}  # the command line is the study's, also where `python -m maxgain` looks for it
METHOD = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in STUDY)
OTHERS = {
    "matplotlib",
    "rich",
    "scipy",
    "tyro",
    "sklearn",
    "transformers",
    "accelerate",
    "lightning",
    "ray",
    "optuna",
    "PIL",
    "pooch",
}


def imported(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it."""
    package = ["maxgain", *path.relative_to(PACKAGE).parent.parts]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", METHOD, ids=[str(path.relative_to(PACKAGE)) for path in METHOD])
def test_the_method_never_imports_the_study(path: Path) -> None:
    assert not {name for name in imported(path) if name.startswith("maxgain.study")}


def test_the_walk_over_imports_sees_relative_ones() -> None:
    assert "maxgain.functional" in imported(PACKAGE / "gain.py")
    assert "torch.nn" in imported(PACKAGE / "gain.py")


def test_every_public_name_is_there_and_torch_is_imported_with_the_first() -> None:
    """Type checkers read the names in one list, Python finds them by another."""
    content = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    told = set(re.findall(r"^    from .* as (\w+)$", content, re.MULTILINE))
    assert told == {*dir(maxgain)} - {"__version__"}
    assert all(getattr(maxgain, name) is not None for name in dir(maxgain))
    code = "import sys, maxgain; print('torch' in sys.modules); maxgain.MaxGain; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_what_is_no_public_name_is_not_found() -> None:
    with pytest.raises(AttributeError, match="module 'maxgain' has no attribute 'maxgian'"):
        _ = maxgain.maxgian  # type: ignore[attr-defined]


def test_the_method_imports_nothing_but_torch_and_numpy() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); from maxgain import MaxGain; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = {name.partition(".")[0] for name in done.stdout.split()}
    assert "maxgain" in new
    assert not new & OTHERS
    assert "maxgain.study" not in done.stdout.split()


@pytest.mark.parametrize(
    ("framework", "package"),
    [("lightning", "lightning"), ("transformers", "transformers"), ("transformers", "accelerate")],
)
def test_an_integration_without_its_framework_says_what_to_install(
    framework: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"maxgain.integrations.{framework}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'maxgain\[{framework}\]'\.$"):
        importlib.import_module(f"maxgain.integrations.{framework}")


def test_the_study_in_python_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(maxgain, "study", raising=False)
    for name in [name for name in sys.modules if name.startswith("maxgain.study")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(MissingExtraError, match=r"the study needs msgspec: pip install 'maxgain\[study\]'\.$"):
        from maxgain.study import compare  # noqa: F401


def test_python_m_maxgain_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "maxgain", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"maxgain {maxgain.__version__}\n"
