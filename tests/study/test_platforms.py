"""What Linux, macOS and Windows have in common is enough."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import maxgain

ROOT = Path(__file__).parents[2]

DEMO = """
import os, sys
sys.modules["fcntl"] = None
for name in ("sched_getaffinity", "setpgid"):
    if hasattr(os, name):
        delattr(os, name)
import maxgain.study.cli.app as app
if __name__ == "__main__":
    sys.exit(app.main(["demo", "--folds", "3", "--epochs", "1", "--budget", "1", "--jobs", "2", "--out", sys.argv[1]]))
"""


def test_demo_without_fcntl_and_sched_getaffinity(tmp_path) -> None:
    (tmp_path / "demo.py").write_text(DEMO)
    command = [sys.executable, "demo.py", "out"]
    environment = {"PYTHONPATH": str(Path(maxgain.__file__).parents[1]), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "against none: " in done.stdout
    assert "next: maxgain report out" in done.stdout
    assert (tmp_path / "out" / "gains.png").exists()


def test_workflows_name_three_systems() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert [system for system in ("ubuntu", "macos", "windows") if f"{system}-latest" not in text] == []


def test_source_distribution_is_small(tmp_path) -> None:
    pytest.importorskip("hatchling")
    build = "import hatchling.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    archive = tmp_path / done.stdout.split()[-1]
    with tarfile.open(archive) as files:
        tops = {Path(name).parts[1] for name in files.getnames()}
    assert tops == {"src", "tests", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert archive.stat().st_size < 1_000_000
