"""Promises 2 to 4: gain is of the linear part, instance by instance, for any p and any magnitude."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from explicit import largest_gain
from maxgain import MaxGain

# 2. Gain is of the linear part.


def test_promise_02_bias_is_no_part_of_the_gain_and_is_not_rescaled() -> None:
    layer = nn.Linear(6, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.fill_(100.0)
    x = torch.randn(9, 6, dtype=torch.float64)
    expected = largest_gain(x @ layer.weight.T, x)
    constraint = MaxGain(layer, gamma=0.1)
    layer(x)
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-9)
    weight = layer.weight.clone()
    constraint.step()
    torch.testing.assert_close(layer.weight, weight * (0.1 / expected), rtol=1e-9, atol=0)
    assert (layer.bias == 100.0).all()


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect"])
def test_promise_02_a_convolution_is_measured_as_it_is_applied(padding_mode: str) -> None:
    options: dict[str, Any] = {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "padding_mode": padding_mode}
    layer = nn.Conv2d(4, 6, 3, **options, dtype=torch.float64)
    x = torch.randn(5, 4, 9, 7, dtype=torch.float64)
    without_bias = nn.Conv2d(4, 6, 3, **options, bias=False, dtype=torch.float64)
    without_bias.weight = layer.weight
    constraint = MaxGain(layer)
    layer(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(without_bias(x), x), rel=1e-9)


def test_promise_02_batch_norm_is_its_scale_over_the_running_deviation() -> None:
    layer = nn.BatchNorm2d(3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -3.0, 0.5]))
        layer.bias.fill_(7.0)
        layer.running_mean.fill_(-5.0)  # type: ignore[union-attr]
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64) + 2
    constraint = MaxGain(layer, gamma=0.7)
    layer(x)
    assert layer.running_var is not None
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    expected = largest_gain(x * scale.view(3, 1, 1), x)
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-9)
    constraint.step()
    torch.testing.assert_close(layer.weight, torch.tensor([1.0, -3.0, 0.5]).double() * (0.7 / expected))
    assert (layer.bias == 7.0).all()


# 3. What an instance is.


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
def test_promise_03_tokens_are_instances_of_a_dense_layer_unless_samples_are_asked_for(p: float) -> None:
    layer = nn.Linear(4, 6, dtype=torch.float64)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    by_token, by_sample = MaxGain(layer, p=p), MaxGain(layer, p=p, instance="sample")
    layer(x)
    z = x @ layer.weight.T
    assert by_token.gains[""] == pytest.approx(largest_gain(z.flatten(0, 1), x.flatten(0, 1), p), rel=1e-9)
    assert by_sample.gains[""] == pytest.approx(largest_gain(z, x, p), rel=1e-9)


def test_promise_03_samples_are_instances_of_a_convolution() -> None:
    layer = nn.Conv1d(2, 3, 3, bias=False, dtype=torch.float64)
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    constraint = MaxGain(layer)
    z = layer(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(z, x), rel=1e-12)


def test_promise_03_an_input_without_a_batch_is_one_instance() -> None:
    model = nn.ModuleList([nn.Linear(4, 2, bias=False).double(), nn.Conv2d(1, 2, 3, bias=False).double()])
    inputs = [torch.randn(4).double(), torch.randn(1, 5, 5).double()]
    for instance in ("auto", "sample"):
        constraint = MaxGain(model, instance=instance)  # type: ignore[arg-type]
        for name, layer, x in zip(("0", "1"), model, inputs, strict=True):
            assert largest_gain(layer(x)[None], x[None]) == pytest.approx(constraint.gains[name], rel=1e-12)
        constraint.detach()


# 4. Any p, any magnitude.

MAGNITUDES = {  # what squares or fourth powers would spoil in the dtype itself, or even in float32
    torch.float16: [300.0, 1e-6],
    torch.bfloat16: [1.0, 1e-25, 1e10, 1e30],
    torch.float32: [1.0, 1e-25, 1e10, 1e30],
    torch.float64: [1.0, 1e-25, 1e10, 1e-200, 1e150],
}


@pytest.mark.parametrize(
    ("dtype", "magnitude"), [(dtype, magnitude) for dtype, row in MAGNITUDES.items() for magnitude in row]
)
@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 4, math.inf])
def test_promise_04_a_gain_is_right_for_any_p_and_any_magnitude(dtype: torch.dtype, magnitude: float, p: float) -> None:
    layer = nn.Linear(40, 30, bias=False, dtype=dtype)
    x = (torch.randn(5, 40, dtype=torch.float64) * magnitude).to(dtype)
    constraint = MaxGain(layer, p=p)
    z = layer(x)
    assert z.isfinite().all(), "the layer itself must not overflow for this to test anything"
    accuracy = 1e-12 if dtype == torch.float64 else 2e-6
    assert constraint.gains[""] == pytest.approx(largest_gain(z, x, p), rel=accuracy)


def test_promise_04_a_zero_input_has_no_gain() -> None:
    layer = nn.Linear(3, 3)
    constraint = MaxGain(layer)
    layer(torch.zeros(2, 3))
    assert constraint.gains == {"": 0.0}
    assert constraint.dropped == {"": 0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_promise_04_a_half_precision_weight_is_divided_in_single_precision(dtype: torch.dtype) -> None:
    layer = nn.Linear(40, 30, bias=False, dtype=dtype)
    before = layer.weight.detach().double()
    constraint = MaxGain(layer, gamma=0.1)
    layer(torch.randn(5, 40, dtype=dtype))
    gain = constraint.gains[""]
    constraint.step()
    assert torch.equal(layer.weight, (before / (gain / 0.1)).to(dtype))
