"""Every example runs, small, and does what it says. (conv_norm.py is tested with the operator norms.)"""

import json
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str):
    return runpy.run_path(str(EXAMPLES / name))["main"]


def rows(table: str) -> dict[str, list[float]]:
    """The numbers of each line that begins with a name."""
    return {line.split()[0]: [float(n) for n in re.findall(r"\d+\.\d+", line)] for line in table.splitlines() if line}


def test_ones_own_images_are_read_measured_and_bounded(tmp_path, capsys) -> None:
    script = runpy.run_path(str(EXAMPLES / "own_images.py"))
    script["write_digits"](tmp_path / "photos", images=200)
    script["main"]([str(tmp_path / "photos"), "--epochs", "2"])
    printed = capsys.readouterr().out
    assert printed.startswith("160 images of 10 classes\n")
    free, held = rows(printed)["0"]
    assert free > held
    assert held < 1.1 * float(re.search(r"γ = ([\d.]+)", printed)[1])


def test_a_small_gpt_is_watched_layer_by_layer(capsys) -> None:
    example("gpt.py")(["--steps", "11"])
    watched = rows(capsys.readouterr().out)
    assert len(watched["head"]) == 2  # the first and the last gain
    assert {"blocks.0.qkv", "blocks.0.out", "blocks.1.up", "blocks.1.down"} <= watched.keys()


def test_a_small_gpt_can_be_held_to_a_bound_and_drawn_by_tensorboard(tmp_path, capsys) -> None:
    pytest.importorskip("tensorboard")
    example("gpt.py")(["--steps", "3", "--gamma", "0.5", "--tensorboard", str(tmp_path / "board")])
    gains = rows(capsys.readouterr().out)
    assert gains["blocks.0.up"][-1] < 0.75
    assert list((tmp_path / "board").iterdir())


@pytest.fixture
def _timm(monkeypatch) -> None:
    """Timm, with stand-ins for what it imports of torchvision where that has no build for this torch."""
    try:
        import timm  # noqa: F401
    except Exception:  # torchvision fails in many ways
        parts = ("", ".ops", ".ops.misc", ".datasets", ".transforms", ".transforms.functional")
        for name in (f"torchvision{part}" for part in parts):
            monkeypatch.setitem(sys.modules, name, MagicMock(name=name))
        frozen = type("FrozenBatchNorm2d", (nn.Module,), {})  # its class is asked for; no network here has one
        monkeypatch.setattr(sys.modules["torchvision.ops.misc"], "FrozenBatchNorm2d", frozen)
        pytest.importorskip("timm", reason="timm is not installed: pip install --no-deps timm")


@pytest.mark.usefixtures("_timm")
def test_a_fine_tuned_resnet_grows_in_no_layer() -> None:
    growth = example("resnet.py")(["--network", "resnet10t", "--images", "64", "--epochs", "1"])
    assert max(growth.values()) < 1.5


def test_the_notebook_tells_the_story_in_ten_cells(monkeypatch, tmp_path) -> None:
    nbformat = pytest.importorskip("nbformat")
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "story.ipynb").read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(notebook["cells"]) == 10
    assert all(cell["outputs"] for cell in code), "a reader sees results without running it"
    plt.switch_backend("agg")
    namespace: dict[str, object] = {"__name__": "story"}
    try:
        for number, cell in enumerate(code, start=1):
            exec(compile("".join(cell["source"]), f"story.ipynb, code cell {number}", "exec"), namespace)
        assert plt.get_fignums()
    finally:
        plt.close("all")


def test_the_list_of_examples_is_complete() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
