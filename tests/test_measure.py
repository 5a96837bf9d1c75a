"""measure_gains: every instance's gain in every layer, of any model, which is afterwards as it was."""

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from maxgain import MaxGain, measure_gains
from maxgain.errors import MaxGainError, MeasurementWarning, PatternError, UnsupportedLayerError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)) for size in (7, 4)]


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_gains_and_quantiles_are_those_of_the_definition(batches: list[Tensor], p: float) -> None:
    model = net()
    report = measure_gains(model, batches, p=p)

    x = torch.cat(batches).double().numpy()
    weight, bias = (parameter.detach().double().numpy() for parameter in model[0].parameters())
    hidden = x @ weight.T + bias
    scale = 1 / np.sqrt(1 + model[1].eps)
    after = np.maximum(hidden * scale, 0)
    last = model[4].weight.detach().double().numpy()
    expected = {"0": (x, x @ weight.T), "1": (hidden, hidden * scale), "4": (after, after @ last.T)}
    for name, (before, z) in expected.items():
        gains = np.linalg.norm(z, p, axis=1) / np.linalg.norm(before, p, axis=1)
        np.testing.assert_allclose(report.gains[name], gains, rtol=1e-5)
        np.testing.assert_allclose(report.quantiles()[name], np.quantile(gains, [0, 0.25, 0.5, 0.75, 1]), rtol=1e-5)


def test_a_batch_is_a_tensor_a_tuple_or_keyword_inputs(batches: list[Tensor]) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, *, pixels: Tensor, scale: float = 1.0) -> Tensor:
            out: Tensor = self.net(scale * pixels)
            return out

    plain = measure_gains(net(), batches).quantiles()
    assert measure_gains(net(), [(batch, "label") for batch in batches]).quantiles() == plain
    named = measure_gains(Named(), [{"pixels": batch, "scale": 1.0} for batch in batches]).quantiles()
    assert list(named.values()) == list(plain.values())


def test_a_single_batch_is_not_taken_for_many(batches: list[Tensor]) -> None:
    for single in (batches[0], {"pixels": batches[0]}):
        with pytest.raises(MaxGainError, match="put a single one into a list"):
            measure_gains(net(), single)


def test_modes_hooks_and_measurements_are_afterwards_as_they_were(batches: list[Tensor]) -> None:
    model = net()
    model[1].eval()
    constraint = MaxGain(model)
    modes = [module.training for module in model.modules()]
    hooks = [list(module._forward_hooks) for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_gains(model, batches)
    assert [module.training for module in model.modules()] == modes
    assert [list(module._forward_hooks) for module in model.modules()] == hooks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(math.isnan(gain) for gain in constraint.gains.values()), "measuring is not training"

    def failing() -> object:
        yield batches[0]
        raise KeyError("no more")

    with pytest.raises(KeyError):
        measure_gains(model, failing())
    assert [module.training for module in model.modules()] == modes
    assert [list(module._forward_hooks) for module in model.modules()] == hooks


def test_it_shows_itself_as_table_figure_and_json(batches: list[Tensor], tmp_path: object) -> None:
    report = measure_gains(net(), batches)
    table = report.table()
    assert str(table) == str(report)  # for `print`, which knows nothing of rich
    assert (table.row_count, len(table.columns)) == (3, 7)
    figure = report.boxplot(bound={"0": 1.0, "1": 2.0, "4": 3.0})
    assert isinstance(figure, Figure)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1", "4"]
    text = report.to_json(tmp_path / "gains.json")
    assert json.loads((tmp_path / "gains.json").read_text()) == json.loads(text)
    layer = json.loads(text)["layers"]["4"]
    assert layer["instances"] == 11
    assert (layer["min"], layer["median"], layer["max"]) == tuple(report.quantiles()["4"][i] for i in (0, 2, 4))


def test_empty_batches_are_no_measurement(batches: list[Tensor]) -> None:
    with pytest.raises(MaxGainError, match="no gain was measured"):
        measure_gains(net(), [torch.empty(0, 6)])
    assert len(measure_gains(net(), [torch.empty(0, 6), *batches]).gains["0"]) == 11


def test_what_is_not_finite_is_counted_and_left_out(batches: list[Tensor]) -> None:
    batches[0][2, 1] = math.nan
    report = measure_gains(net(), batches)
    assert str(report).endswith("\nleft out, because their gain is not finite: 1 in 0, 1 in 1, 1 in 4.")
    assert report.dropped == {"0": 1, "1": 1, "4": 1}
    assert len(report.gains["0"]) == 10
    everything = json.loads(measure_gains(net(), [torch.full((2, 6), math.inf)]).to_json())
    assert everything["layers"]["0"]["max"] is None


def test_what_was_not_run_is_named_and_nothing_at_all_is_an_error(batches: list[Tensor]) -> None:
    model = net()
    model.add_module("unused", nn.Identity())
    model.unused.inner = nn.Linear(2, 2)
    with pytest.warns(MeasurementWarning, match=r"'unused\.inner'"):
        assert "unused.inner" not in measure_gains(model, batches).gains
    with pytest.raises(MaxGainError, match="there was no batch"):
        measure_gains(net(), [])


def test_a_parametrised_layer_can_be_measured_though_not_constrained(batches: list[Tensor]) -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)))
    assert len(measure_gains(model, batches).gains["0"]) == 11
    with pytest.raises(UnsupportedLayerError):
        MaxGain(model)


def test_tokens_are_instances_unless_samples_are_asked_for() -> None:
    model, tokens = nn.Linear(3, 2), torch.randn(4, 5, 3)
    assert len(measure_gains(model, [tokens]).gains[""]) == 20
    assert len(measure_gains(model, [tokens], instance="sample").gains[""]) == 4


def test_printed_it_is_a_table_in_which_no_name_is_cut(batches: list[Tensor]) -> None:
    name = "a_rather_long_name_for_a_block" * 4
    model = nn.Sequential(OrderedDict([(name, nn.Linear(6, 4)), ("<last>", nn.Linear(4, 2))]))
    report = measure_gains(model, batches)
    lines = str(report).splitlines()
    assert lines[0] == "gain by layer, p = 2"
    assert any(line.split()[:2] == [name, "11"] for line in lines)
    assert len({len(line) for line in lines[2:]}) == 1, "the numbers are lined up"
    assert "&lt;last&gt;" in report._repr_html_()
    assert repr(report) == "<GainReport of 2 layers, p = 2>"
    assert "(itself)" in str(measure_gains(nn.Linear(6, 2), batches))


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (
            [torch.zeros(2, 6), torch.zeros(2, 5)],
            r"cannot be run on batch 1 \(float32 of shape \(2, 5\)\): RuntimeError: ",
        ),
        (
            [{"pixels": torch.zeros(2, 6)}],
            r"cannot be run on batch 0 \(pixels: float32 of shape \(2, 6\)\): TypeError: ",
        ),
        ([()], "batch 0 is empty"),
        (["text"], r"cannot be run on batch 0 \(str\)"),
        (5, "batches must be an iterable of batches, such as a list or a DataLoader, not 5"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(batches: Any, said: str) -> None:
    with pytest.raises(MaxGainError, match=said):
        measure_gains(net(), batches)


def test_what_is_no_model_and_no_pattern_is_refused(batches: list[Tensor]) -> None:
    with pytest.raises(UnsupportedLayerError, match=r"^the model must be a torch\.nn\.Module, not list\.$"):
        measure_gains([net()], batches)  # type: ignore[arg-type]
    for options in ({"include": 5}, {"exclude": 5}, {"include": [5]}):
        with pytest.raises(PatternError, match="glob"):
            measure_gains(net(), batches, **options)  # type: ignore[arg-type]
