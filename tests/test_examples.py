"""Every example runs, small, and does what it says."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    return runpy.run_path(str(EXAMPLES / name))


def test_own_images_are_compared(tmp_path, capsys):
    pytest.importorskip("tyro")
    script = example("own_images.py")
    script["write_digits"](tmp_path / "photos", 120)
    words = f"{tmp_path / 'photos'} --epochs 1 --seeds 2 --size 8 --jobs 1 --out {tmp_path / 'out'}"
    script["main"](words.split())
    assert "maxgain" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists()


@pytest.fixture
def _timm(monkeypatch):
    """Timm, whether or not torchvision has a build for this torch."""
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    networks = pytest.importorskip("benchmarks.networks")
    try:
        networks.import_timm()
    except ModuleNotFoundError:
        pytest.skip("timm is not installed: pip install --no-deps timm")


@pytest.mark.usefixtures("_timm")
def test_no_layer_of_a_fine_tuned_model_grows():
    growth = example("finetune_timm.py")["main"](["--network", "resnet10t", "--images", "64", "--epochs", "1"])
    assert max(growth.values()) < 1.5


@pytest.mark.parametrize("remedy", ["none", "cap", "qk-norm"])
def test_a_small_gpt_is_watched_and_helped(tmp_path, capsys, remedy):
    words = f"--rate 0.01 --remedy {remedy} --steps 12 --to {tmp_path / 'gains.jsonl'}"
    example("watch_gpt.py")["main"](words.split())
    first, last = capsys.readouterr().out.splitlines()
    assert "does not spike" in first
    assert last.strip() == "0 alarms"
    logged = [json.loads(line) for line in (tmp_path / "gains.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [0, 8]
    assert "gain/blocks.3.qkv[k]" in logged[0]


def test_the_norm_of_a_convolution_is_that_of_its_matrix():
    by_svd, ours, theirs = example("conv_norm.py")["compare"](size=8)
    assert ours == pytest.approx(by_svd, rel=1e-4)
    assert abs(theirs / by_svd - 1) > 0.05


def test_the_notebook_runs(monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "story.ipynb").read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert len(notebook["cells"]) == 10
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    plt.switch_backend("agg")
    namespace = {"__name__": "story"}
    try:
        for number, text in enumerate(code, start=1):
            quick = text.replace("range(40)", "range(1)").replace("set_num_threads(1)", "get_num_threads()")
            exec(compile(quick, f"story.ipynb, code cell {number}", "exec"), namespace)
        assert plt.get_fignums()
    finally:
        plt.close("all")


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
