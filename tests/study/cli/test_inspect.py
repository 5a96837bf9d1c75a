"""maxgain inspect: gains beside operator norms, for a run and for somebody's own model."""

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

from maxgain.study.cli.app import main


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = "train digits --network mlp --epochs 2 --fold 0 --regulariser maxgain --gamma 1.5 --json --out"
    assert main([*words.split(), str(folder)]) == 0
    return folder


def test_a_run_shows_gains_norms_ratio_bound_and_the_whole_network(finished, capsys):
    capsys.readouterr()
    assert main(["inspect", str(finished)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("layer", "median", "‖W‖∞", "bound", "a measured gain is a lower bound"):
        assert words.lower() in shown.lower()
    content = json.loads((finished / "inspect.json").read_text())
    assert set(content["bounds"].values()) == {1.5}
    for name, norm in content["norms"]["2"].items():
        assert content["gains"]["train"][name][-1] <= norm * (1 + 1e-5)
        assert content["gains"]["test"][name][-1] <= norm * (1 + 1e-5)
    slope, network = content["slope"]["value"], content["network"]["2"]
    assert 0 < slope <= network["bound"] * (1 + 1e-5)
    assert {path.name for path in finished.glob("inspect.*")} == {"inspect.json", "inspect.png", "inspect.svg"}


def test_the_gains_of_a_final_run_are_those_of_all_that_it_was_trained_on(tmp_path, capsys):
    words = "train digits --network mlp --epochs 1 --fold 0 --train-on train+validation --json --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    for name, largest in trained["max_gain"]["train"].items():
        assert seen["gains"]["train"][name][-1] == pytest.approx(largest, rel=1e-6)


def test_a_model_of_ones_own_needs_no_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "their_model.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)

    assert main(["inspect", "--model", "their_model:make", "--input", "3x2x2", "--json"]) == 0

    content = json.loads(capsys.readouterr().out)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    for name in ("1", "3"):
        weight = model[int(name)].weight.detach().numpy()
        for p, order in (("1", 1), ("2", 2), ("inf", np.inf)):
            assert content["norms"][p][name] == pytest.approx(np.linalg.norm(weight, order), rel=1e-4)
    assert content["gains"] == {}

    assert main(["inspect", "--model", "their_model:make", "--input", "3x4x4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("maxgain: their_model:make takes no input of the shape 3x4x4: mat1 and mat2")
    assert error.count("\n") == 1


def test_layers_that_cannot_be_measured_can_be_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "attentive.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["inspect", "--model", "attentive:make", "--input", "5x8", "--json"]
    assert main(command) == 2
    assert "Leave them out with --exclude layers.0.self_attn layers.1.self_attn." in capsys.readouterr().err
    assert main([*command, "--exclude", "*.self_attn"]) == 0
    norms = json.loads(capsys.readouterr().out)["norms"]["2"]
    assert list(norms) == [f"layers.{i}.linear{j}" for i in range(2) for j in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs a run's folder, or --model"),
        (["nowhere"], "there is no folder nowhere"),
        (["--model", "nowhere:make", "--input", "3x2x2"], "No module named 'nowhere'"),
        (["--model", "json:make", "--input", "3x2x2"], "has no attribute 'make'"),
        (["--model", "json:dumps", "--input", "3x2x2"], "cannot be made"),
        (["--model", "platform:machine", "--input", "3x2x2"], "gives a str"),
        (["--model", "os:abort", "--input", "3x2x2"], "is a function of Python's own, which makes no model"),
        (["--model", ":make", "--input", "3x2x2"], "':make' cannot be made"),
        (["--model", "json:dumps", "--input", "large"], "is not a shape like 3x32x32"),
        (["--model", "json:dumps", "--input", "3x-2x2"], "is not a shape like 3x32x32"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence, capsys):
    assert main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("model", ["torture.models:raises", "torture.models:exits", "torture.models:greedy", "torch:"])
def test_a_model_that_cannot_be_made_is_one_sentence(model, capsys) -> None:
    assert main(["inspect", "--model", model, "--input", "3x4x4"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"maxgain: --model {model!r} cannot be made: ") or "not enough memory" in told
    assert told.count("\n") == 1


def test_a_module_that_cannot_be_imported_is_one_sentence(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"broken": "def f(:", "raising": "raise OSError('no')", "leaving": "raise SystemExit(3)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        assert main(["inspect", "--model", f"{name}:f", "--input", "3x4x4"]) == 2
        assert capsys.readouterr().err.startswith(f"maxgain: --model '{name}:f' cannot be made: ")


def test_a_forward_pass_that_raises_anything_is_one_sentence(capsys) -> None:
    assert main(["inspect", "--model", "torture.models:odd", "--input", "3x4x4"]) == 2
    said = capsys.readouterr().err
    assert said == "maxgain: torture.models:odd takes no input of the shape 3x4x4: forward of the user's own fails.\n"


def test_weights_that_are_no_numbers_are_named(capsys) -> None:
    assert main(["inspect", "--model", "torture.models:not_a_number", "--input", "3x4x4"]) == 2
    assert "has weights that are not finite numbers, in '1.weight'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "said"),
    [("0x8x8", "is not a shape"), ("-3x8x8", "is not a shape"), ("", "inspect needs"), ("99999x99999", "are the most")],
)
def test_a_shape_that_is_none_or_beyond_all_is_one_sentence(shape, said, capsys) -> None:
    assert main(["inspect", "--model", "torture.models:small", "--input", shape]) == 2
    assert said in capsys.readouterr().err


NOISY = """
import torch
from torch import nn
print("imported")

class Loud(nn.Linear):
    def forward(self, x):
        print("run")
        return super().forward(x)

def make(): return Loud(4, 3)
def double(): return nn.Sequential(nn.Linear(4, 3)).double()
def half(): return nn.Sequential(nn.Linear(4, 3)).half()
def meta(): return nn.Linear(4, 3, device="meta")
"""


@pytest.fixture
def noisy(tmp_path, monkeypatch):
    (tmp_path / "noisy_model.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("noisy_model", None)


def test_machines_get_json_alone_whatever_a_model_prints(noisy, capsys) -> None:
    assert main(["inspect", "--model", "noisy_model:make", "--input", "4", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["norms"]["2"]
    assert "imported" in shown.err
    assert main(["inspect", "--model", "noisy_model:nothing", "--input", "4", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.mark.parametrize("precision", ["double", "half"])
def test_a_model_gets_inputs_of_its_own_precision(precision, noisy, capsys) -> None:
    assert main(f"inspect --model noisy_model:{precision} --input 4".split()) == 0


def test_a_model_without_numbers_is_one_sentence(noisy, capsys) -> None:
    assert main(["inspect", "--model", "noisy_model:meta", "--input", "4"]) == 2
    assert "noisy_model:meta has weights on the device meta" in capsys.readouterr().err
