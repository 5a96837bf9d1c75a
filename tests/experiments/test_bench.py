"""The bench times a step with and without, and keeps what it found."""

import json

import pytest
import torch
from benchmarks import bench
from benchmarks.bench import ON_CPU, ON_GPU, Settings, gpt, main, make_step, measure

TINY = {"tiny GPT": gpt(1, 16, 11, 2, 4)}
CPU = torch.device("cpu")


def test_every_variant_has_a_row_beside_the_step_without():
    rows = list(measure(TINY, Settings(CPU, turns=3, steps=1)))
    assert [row.variant for row in rows] == ["without", *bench.VARIANTS, *bench.REPARAMETRISED]
    assert rows[0].ratio == 1
    assert all(0 < row.lowest <= row.ratio <= row.highest for row in rows)


def test_what_was_timed_is_written_with_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ON_CPU", TINY)
    main(["--device", "cpu", "--turns", "1", "--variants", "MaxGain", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [row["variant"] for row in record["rows"]] == ["without", "MaxGain"]
    assert record["torch"] == torch.__version__
    assert (tmp_path / "bench.svg").stat().st_size
    assert "tiny GPT" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--networks", "ResNet"], ["--modes", "captured", "--device", "cpu"]])
def test_what_cannot_be_timed_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err


def step_of(variant):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256, bias=False))
    model[1].weight.data *= 10
    make_step(bench.Network(lambda: model, ON_CPU["GPT, 4 layers"].batch), variant, "eager", CPU)
    return model[1].weight.detach()


def test_a_naive_hook_bounds_what_maxgain_bounds():
    torch.testing.assert_close(step_of("naive hook"), step_of("MaxGain"), rtol=1e-4, atol=1e-6)


def test_every_network_of_the_gpu_can_be_named():
    assert {"ResNet-50", "ConvNeXt-T", "ViT-B", "Swin-T", "GPT-2, 124M"} <= set(ON_GPU)
