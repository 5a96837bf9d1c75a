"""Benchmarks: what is timed is what it says, and the table is made of medians of ratios. No test looks at a clock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from maxgain import MaxGain
from maxgain.study.bench import running, variants
from maxgain.study.bench.networks import ON_CPU, ON_GPU, SWEEPS, gpt, images, vit
from maxgain.study.cli.app import main

SMALL = {"images": images("mlp", 4, 8, batchnorm=False), "gpt": gpt(1, 16, 2, 8), "vit": vit(1, 16, 2, 32)}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("variant", [variants.WITHOUT, *variants.VARIANTS, *variants.REPARAMETRISED])
def test_every_variant_trains_every_kind_of_network(name: str, variant: str) -> None:
    step = running.make_step(SMALL[name], variant, "eager", torch.device("cpu"))
    step()


def test_the_naive_version_bounds_the_gains_that_ours_bounds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight *= 6
    twin = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    twin.load_state_dict(model.state_dict())
    for one, put in ((model, variants.NaiveMaxGain), (twin, lambda m, o: MaxGain(m, 2.0).attach(o))):
        optimiser = torch.optim.SGD(one.parameters(), lr=0.01)
        put(one, optimiser)
        for step in range(3):
            one(torch.randn(16, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_ratios_are_taken_turn_by_turn_and_the_median_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 100.0, 150.0, 10.0, 12.0])  # a machine that is slow for one turn
    monkeypatch.setattr(running, "_milliseconds", lambda *_: next(times))
    settings = running.Settings(torch.device("cpu"), turns=3)
    without, ours = running.compared("small", SMALL["gpt"], "eager", settings, ("MaxGain",))
    assert (without.ratio, ours.ratio, ours.lowest, ours.highest) == pytest.approx((1.0, 1.2, 1.1, 1.5))


def test_the_command_writes_numbers_with_machine_and_date_and_a_figure(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(running, "ON_CPU", {"small": SMALL["gpt"]})
    monkeypatch.setattr(running, "SWEEPS", {"depth": {1: SMALL["gpt"]}})
    assert main(["bench", "--device", "cpu", "--turns", "1", "--sweeps", "--json", "--out", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "bench.json").read_text())
    assert {"machine", "torch", "maxgain", "date", "rows"} <= shown.keys()
    assert {row["variant"] for row in shown["rows"]} >= {"without", "MaxGain", "naive hook", "torch spectral_norm"}
    assert any(row.get("sweep") == "depth" for row in shown["rows"])
    assert (tmp_path / "bench.svg").exists()


def test_a_part_can_be_timed_alone_and_is_compared_with_the_step_without(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(running, "ON_CPU", {"small": SMALL["gpt"], "other": SMALL["images"]})
    flags = ["--turns", "1", "--networks", "other", "--variants", "MaxGain", "--modes", "eager"]
    assert main(["bench", "--device", "cpu", *flags, "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["network"], row["variant"]) for row in rows] == [("other", "without"), ("other", "MaxGain")]


@pytest.mark.parametrize("name", ["bench.json", "bench.svg"])
def test_what_stands_in_the_way_is_found_before_anything_is_timed(name, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(running, "_milliseconds", None)
    (tmp_path / name).write_text("mine")
    assert main(["bench", "--device", "cpu", "--turns", "1", "--out", str(tmp_path)]) == 2
    assert f"has a {name} that maxgain did not write" in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--turns", "1", "--out", str(tmp_path / name)]) == 2
    assert "cannot write in" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--turns", "0"], "--turns must be at least 1"),
        (["--turns", "9" * 30], "--turns must be at most 10,000"),
        (["--variants", "none"], "there are 'MaxGain', 'MaxGain, every=4',"),
        (["--modes", "egaer"], "did you mean 'eager'"),
        (["--device", "cpu", "--networks", "GPT, 4 layer"], "did you mean 'GPT, 4 layers'"),
        (["--variants", "maxgain"], "did you mean 'MaxGain'"),
        (["--device", "cpu", "--modes", "whole-step graph"], "needs a GPU"),
    ],
)
def test_bad_options_are_answered_in_a_sentence(flags, said, capsys) -> None:
    assert main(["bench", *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_networks_of_both_machines_can_be_made_without_running_them() -> None:
    with torch.device("meta"):
        for network in (*ON_CPU.values(), *ON_GPU.values(), *(n for sweep in SWEEPS.values() for n in sweep.values())):
            assert sum(parameter.numel() for parameter in network.model().parameters()) > 0


def test_everything_is_timed_on_the_gpu_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def rows(settings: running.Settings) -> Iterator[tuple[dict[str, Any], running.Row]]:
        yield {"seen": list(current)}, running.Row("net", "eager", "MaxGain", 1.0, 1.0, 1.0, 1.0, None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(running, "_machine", str)
    monkeypatch.setattr(running, "_rows", rows)
    second = torch.device("cuda", 1)
    assert [content["rows"][-1]["seen"] for content in running.measure(running.Settings(second))] == [[second]]
