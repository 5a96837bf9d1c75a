"""The method needs torch and numpy alone, and knows nothing of the study that is built on it."""

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
# fmt: off
OTHERS = {"matplotlib", "rich", "scipy", "tyro", "sklearn", "transformers", "accelerate", "lightning", "ray", "optuna",
          "PIL", "pooch"}
# fmt: on


def test_the_method_never_imports_the_study() -> None:
    for path in METHOD:
        assert not re.search(r"^\s*(from|import)\b.*\bstudy\b", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_every_public_name_is_there() -> None:
    assert all(getattr(maxgain, name) is not None for name in dir(maxgain))


def test_what_is_no_public_name_is_not_found() -> None:
    with pytest.raises(AttributeError, match="module 'maxgain' has no attribute 'maxgian'"):
        _ = maxgain.maxgian  # type: ignore[attr-defined]


SCRIPT = """
import sys
import maxgain
assert "torch" not in sys.modules, "the command line starts without it"
import torch
before = set(sys.modules)
from maxgain import MaxGain
model = torch.nn.Sequential(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
constraint = MaxGain(model, 0.5).attach(optimizer)
model(torch.randn(3, 4)).sum().backward()
optimizer.step()
print(*(set(sys.modules) - before))
"""


def test_a_script_imports_nothing_but_torch_and_numpy_and_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    new = {name.partition(".")[0] for name in done.stdout.split()}
    assert "maxgain" in new
    assert not new & OTHERS
    assert "maxgain.study" not in done.stdout.split()
    assert done.stderr == ""


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
