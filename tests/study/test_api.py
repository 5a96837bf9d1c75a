"""The study in Python: one's own tensors and network, with the same records, tests and page as the command line's."""

import pytest
import torch
from torch import nn

from maxgain.errors import DataError, RecipeError
from maxgain.study import api
from maxgain.study.comparing import records
from maxgain.study.models import NETWORKS

QUICK = {"epochs": 2, "batch_size": 8, "device": "cpu"}


def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % 2
    images = (
        torch.randint(0, 100, (count, 1, 4, 4), dtype=torch.uint8) + (100 * labels).to(torch.uint8)[:, None, None, None]
    )
    return images, labels


def my_network(shape, classes):
    channels, height, width = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 8), nn.ReLU(), nn.Linear(8, classes))


@pytest.fixture
def data():
    return api.dataset("mine", part(32), part(8), part(16), classes=["dark", "light"])


def test_a_network_of_ones_own_is_trained_and_goes_on(data, tmp_path) -> None:
    result = api.train(data, "maxgain=1.5", network=my_network, out=tmp_path / "run", **QUICK)
    assert (result["recipe"], result["gamma"]) == ("mine", 1.5)
    assert result["config"]["network"] == "my_network"
    assert api.train(data, "maxgain=1.5", network=my_network, out=tmp_path / "run", **QUICK) == result
    assert "my_network" not in NETWORKS
    assert "MaxGain (γ = 1.5) on mine" in api.page(tmp_path / "run", tmp_path / "run.html").read_text()


def test_a_comparison_is_recorded_printed_and_made_a_page_of(data, tmp_path, monkeypatch) -> None:
    rows = ["none", "maxgain=1"]
    comparison = api.compare(data, rows, network=my_network, out=tmp_path, seeds=2, **QUICK)
    assert [row.done for row in comparison.rows] == [2, 2]
    assert len(records.read(tmp_path / "results").runs) == 4
    shown = str(comparison)
    assert "maxgain=1 : none" in shown
    assert "mine: test accuracy in %, over 2 seeds" in shown
    assert comparison._repr_html_().startswith("<table><caption>mine: test accuracy")
    monkeypatch.setattr(api.work, "run_recorded", None)  # nothing is trained twice
    again = api.compare(data, rows, network=my_network, out=tmp_path, seeds=2, **QUICK)
    assert again.contrasts == comparison.contrasts
    assert "Regularisers compared on mine" in api.page(tmp_path, tmp_path / "report.html").read_text()


def test_a_number_is_chosen_without_a_look_at_the_test_part(data, tmp_path) -> None:
    tuned = api.tune(data, "maxgain", grid=["gamma=1:2:1"], network=my_network, out=tmp_path, **QUICK)
    assert tuned["regulariser"] in ("maxgain=1", "maxgain=2")
    assert "test_accuracy" not in tuned
    assert "γ for MaxGain on mine" in api.page(tmp_path, tmp_path / "tune.html").read_text()


def test_what_makes_no_sense_is_said(data, tmp_path) -> None:
    with pytest.raises(DataError, match=r"bytes \(torch.uint8\)"):
        api.dataset("mine", (torch.zeros(2, 1, 4, 4), torch.zeros(2)), part(2), part(2))
    with pytest.raises(DataError, match="2 images and 3 labels"):
        api.dataset("mine", (part(2)[0], torch.zeros(3)), part(2), part(2))
    with pytest.raises(RecipeError, match="has the batch norm and the dropout that it has"):
        api.train(data, "dropout", network=my_network, out=tmp_path, **QUICK)
    with pytest.raises(RecipeError, match="a recipe cannot be made of these settings"):
        api.train(data, out=tmp_path, rate=3)
    with pytest.raises(RecipeError, match="leaves no number open"):
        api.tune(data, "none", out=tmp_path)
