"""measure_gains: every instance's gain in every layer, of any model, which is afterwards as it was."""

import copy
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from explicit import same_bits
from maxgain import MaxGain, measure_gains, register_layer
from maxgain.errors import MaxGainError, MeasurementWarning, NothingToConstrainError, PatternError
from nets import compiling
from odd_layers import Routed, Router, Scaled, Squared


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)) for size in (7, 4)]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
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


class Named(nn.Sequential):
    def forward(self, *, pixels: Tensor, scale: float = 1.0) -> Any:
        return super().forward(scale * pixels)


def test_a_batch_is_a_tensor_a_tuple_or_keyword_inputs(batches: list[Tensor]) -> None:
    plain = measure_gains(net(), batches).quantiles()
    assert measure_gains(net(), [(batch, "label") for batch in batches]).quantiles() == plain
    named = measure_gains(Named(*net()), [{"pixels": batch, "scale": 1.0} for batch in batches]).quantiles()
    assert named == plain


def test_the_model_and_its_constraint_are_afterwards_as_they_were(batches: list[Tensor]) -> None:
    model = net()
    model[1].eval()
    constraint = MaxGain(model)

    def state() -> Any:
        modules = list(model.modules())
        return [[module.training for module in modules], [list(module._forward_hooks) for module in modules]]

    def failing() -> Any:
        yield batches[0]
        raise KeyError("no more")

    before, tensors = state(), copy.deepcopy(model.state_dict())
    measure_gains(model, batches)
    with pytest.raises(KeyError):
        measure_gains(model, failing())
    assert state() == before
    assert same_bits(model.state_dict(), tensors)
    assert all(math.isnan(gain) for gain in constraint.gains.values()), "measuring is not training"


def test_a_report_is_a_table_and_a_figure(batches: list[Tensor]) -> None:
    report = measure_gains(nn.Sequential(*net(), nn.Sequential(nn.Linear(3, 2))), batches)
    lines = [line.split() for line in str(report).splitlines()]
    for name, row in report.quantiles().items():
        assert [name, "11", *(f"{value:.4g}" for value in row)] in lines
    assert "(itself)" in str(measure_gains(nn.Linear(6, 2), batches))
    figure = report.boxplot(bound={"0": 1.0, "1": 2.0, "4": 3.0, "5.0": 4.0})
    assert isinstance(figure, Figure)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1", "4", "5.0"]
    assert report.boxplot(figure.axes[0], bound=2.0) is figure


def test_promise_07_what_is_not_finite_is_counted_and_left_out(batches: list[Tensor]) -> None:
    batches[0][2, 1] = math.nan
    report = measure_gains(net(), batches)
    assert report.dropped == {"0": 1, "1": 1, "4": 1}
    assert len(report.gains["0"]) == 10
    assert "1 in 4" in str(report)
    nothing = measure_gains(net(), [torch.full((2, 6), math.inf)])
    assert all(math.isnan(value) for value in nothing.quantiles()["0"])


def test_promise_10_what_was_not_measured_is_named(batches: list[Tensor]) -> None:
    model = net()
    model.register_module("odd", nn.Identity())
    model.odd.unused, model.odd.attention = nn.Linear(2, 2), nn.MultiheadAttention(4, 2)  # type: ignore[union-attr]
    with pytest.warns(MeasurementWarning, match=r"'odd\.unused'"):
        report = measure_gains(model, batches)
    assert list(report.gains) == ["0", "1", "4"]
    assert "odd.attention" in report.skipped
    assert "odd.attention" in str(report)
    for none in ([], [torch.empty(0, 6)]):
        with pytest.raises(MaxGainError, match="no gain was measured"):
            measure_gains(net(), none)


def test_promise_11_a_forward_of_ones_own_is_tried(batches: list[Tensor]) -> None:
    model = nn.Sequential(Squared(6, 6), Scaled(6, 4, bias=False))
    report = measure_gains(model, batches)
    assert list(report.gains) == ["1"]
    assert "halving" in report.skipped["0"]
    x = torch.cat([model[0](batch) for batch in batches])
    torch.testing.assert_close(torch.tensor(report.gains["1"]), (model[1](x).norm(dim=1) / x.norm(dim=1)).detach())


def test_a_computed_weight_can_be_measured_though_not_bounded(batches: list[Tensor]) -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)))
    assert len(measure_gains(model, batches).gains["0"]) == 11
    with pytest.raises(NothingToConstrainError):
        MaxGain(model)


def test_blocks_of_a_fused_layer_are_measured_separately(batches: list[Tensor]) -> None:
    fused = nn.Linear(6, 8)
    halves = [nn.Linear(6, 4, bias=False) for _ in range(2)]
    for half, rows in zip(halves, fused.weight.detach().chunk(2), strict=True):
        half.weight.data.copy_(rows)
    report = measure_gains(nn.Sequential(fused), batches, parts={"0": ("q", "k")})
    assert list(report.gains) == ["0[q]", "0[k]"]
    for found, half in zip(report.gains.values(), halves, strict=True):
        torch.testing.assert_close(found, measure_gains(half, batches).gains[""])


def test_promise_03_tokens_are_instances_unless_samples_are_asked_for() -> None:
    model, tokens = nn.Linear(3, 2), torch.randn(4, 5, 3)
    assert len(measure_gains(model, [tokens]).gains[""]) == 20
    assert len(measure_gains(model, [tokens], instance="sample").gains[""]) == 4


def test_promise_10_a_layer_whose_call_cannot_be_measured_is_named(batches: list[Tensor]) -> None:
    model = nn.Sequential(Routed(6, 6), nn.Linear(6, 2))
    assert "not one tensor" in measure_gains(model, batches).skipped["0.0"]
    register_layer(Router, 1, lambda layer, x, output: (x, output[2]))
    report = measure_gains(model, batches)
    assert list(report.gains) == ["1"]
    assert "cannot be measured" in report.skipped["0.0"]


class TestCompiled:
    pytestmark = compiling

    def test_promise_12_a_compiled_model_is_measured_as_a_plain_one(self, batches: list[Tensor]) -> None:
        model = net().eval()
        plain = measure_gains(model, batches).quantiles()
        whole, part = torch.compile(model, backend="eager"), copy.deepcopy(model)
        part[0].compile(backend="eager")
        for one in (whole, part):
            with torch.no_grad():  # as it will be measured: without hooks, this code would run again
                for batch in batches:
                    one(batch)
            assert measure_gains(one, batches).quantiles() == plain  # type: ignore[arg-type]

    def test_threads_that_measure_at_once_leave_the_compiler_on(self) -> None:
        compiled: list[Any] = []
        entered, ended = threading.Event(), threading.Event()

        def first() -> Iterator[Tensor]:
            yield torch.ones(2, 4)
            entered.wait(0.3)  # in vain, where the second waits for the first

        def second() -> Iterator[Tensor]:
            entered.set()
            ended.wait(10)
            yield torch.ones(2, 4)

        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(graph)
            return graph

        torch.compile(nn.Linear(4, 2), backend="eager")(torch.ones(2, 4))  # what has compiled nothing has no stance
        with ThreadPoolExecutor() as pool:
            one = pool.submit(measure_gains, nn.Linear(4, 2), first())
            time.sleep(0.05)
            pool.submit(measure_gains, nn.Linear(4, 2), second())
            one.result()
            ended.set()
        torch.compile(nn.Linear(4, 2), backend=backend)(torch.ones(2, 4))
        assert compiled


def test_what_makes_no_sense_is_refused(batches: list[Tensor]) -> None:
    for single in (torch.zeros(2, 6), {"pixels": torch.zeros(2, 6)}, "text", 5):
        with pytest.raises(MaxGainError, match="batches must be several"):
            measure_gains(net(), single)  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="matches no layer"):
        measure_gains(net(), batches, include="nothing")
    with pytest.raises(MaxGainError, match="instance must be"):
        measure_gains(net(), batches, instance="row")  # type: ignore[arg-type]
