"""The bench times a step with and without, and keeps what it found."""

import json
import threading

import pytest
import torch
from benchmarks import timing
from benchmarks.bench import main
from benchmarks.networks import ON_CPU, ON_GPU, Network, gpt
from benchmarks.timing import RIVALS, SETTINGS, Bench

CPU = torch.device("cpu")
NAME = "GPT-2, 124M"


def test_every_variant_has_a_row_beside_the_step_without(monkeypatch):
    monkeypatch.setattr(timing, "STEPS", dict.fromkeys(timing.MODES, 1))
    timed = Bench(gpt(1, 16, 11, 2, 4), CPU, ["eager"], [*SETTINGS, *RIVALS])
    rows = timed.rows("eager", 0)
    assert [row["variant"] for row in rows] == ["without", *SETTINGS, *RIVALS]
    assert rows[0]["ratio"] == 1
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows)
    assert timed.about() == {"layers": 5, "fallbacks": {}, "fused": False}


def test_what_was_timed_is_written_with_figures(tmp_path, capfd):
    options = "--device cpu --tiny --seconds 0 --modes eager --profile"
    main([*options.split(), NAME, "--networks", NAME, "--out", str(tmp_path)])
    record = json.loads((tmp_path / "bench.json").read_text())
    assert not record["errors"]
    assert [(row["mode"], row["variant"]) for row in record["rows"]] == [
        ("eager", variant) for variant in ("without", "MaxGain", "watching", "every=8")
    ]
    assert record["torch"] == torch.__version__
    assert json.loads((tmp_path / "profile.json").read_text())[NAME]["MaxGain"]["kernels"]
    assert {"bench.svg", "bench-every-8.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "ms" in capfd.readouterr().out


def test_networks_that_are_prepared_at_once_are_timed_when_the_file_is_there(tmp_path):
    names, quiet = [NAME, "VGG-19"], tmp_path / "quiet"
    threading.Timer(5, quiet.touch).start()
    options = ["--device", "cpu", "--tiny", "--seconds", "0", "--after", str(quiet), "--variants", *SETTINGS]
    main([*options, "--networks", *names, "--out", str(tmp_path)])
    record = json.loads((tmp_path / "bench.json").read_text())
    assert not record["errors"]
    assert sorted({row["network"] for row in record["rows"]}) == names
    assert len(record["rows"]) == 2 * (1 + len(SETTINGS))
    assert not [path for path in tmp_path.iterdir() if path.stat().st_mtime < quiet.stat().st_mtime]


@pytest.mark.parametrize("arguments", [["--networks", "ResNet"], ["--modes", "captured", "--device", "cpu"]])
def test_what_cannot_be_timed_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err


def test_a_naive_hook_bounds_what_maxgain_bounds(monkeypatch):
    def model():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256, bias=False))
        model[1].weight.data *= 10
        models.append(model)
        return model

    models = []
    Bench(Network(model, ON_CPU["GPT, 4 layers"].batch), CPU, ["eager"], ["naive hook"])
    _, ours, naive = (model[1].weight.detach() for model in models)
    torch.testing.assert_close(naive, ours, rtol=1e-4, atol=1e-6)


def test_every_network_of_the_gpu_can_be_named():
    assert {"ResNet-50", "ConvNeXt-T", "ViT-B", "Swin-T", "GPT-2, 124M"} <= set(ON_GPU)
