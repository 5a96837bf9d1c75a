"""Promises 2 to 5: of which instances a gain is, in which norm, and when it is taken; what it is: ../test_layers.py."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explicit import largest_gain, norm
from maxgain import MaxGain
from nets import rows

each_p = pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])


@pytest.mark.parametrize("norm_type", [nn.LayerNorm, nn.RMSNorm, lambda n: nn.GroupNorm(2, n)])
def test_promise_02_other_norms_are_taken_where_include_names_them(norm_type: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), norm_type(4)).double(), torch.randn(8, 4, dtype=torch.float64)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, -3.0, 0.5, 2.0]))
    before = model[1].weight.detach().clone()
    assert list(MaxGain(model, math.inf).gains) == ["0"]
    constraint = MaxGain(model, 0.5, include=["1"])
    normalised = (model(x) - model[1].bias if getattr(model[1], "bias", None) is not None else model(x)) / before
    constraint.step()
    expected = largest_gain(normalised * before, normalised)
    assert constraint.gains == {"1": pytest.approx(expected, rel=1e-6)}
    torch.testing.assert_close(model[1].weight, before * 0.5 / expected)


@pytest.mark.parametrize("instance", ["auto", "sample"])
def test_promise_03_a_token_is_an_instance_and_an_argument_makes_it_a_sample(instance: Any) -> None:
    layer, x = nn.Linear(6, 4).double(), torch.randn(3, 5, 7, 6, dtype=torch.float64)
    constraint = MaxGain(layer, math.inf, instance=instance)
    z = layer(x) - layer.bias
    constraint.step()
    expected = largest_gain(z.flatten(0, 2), x.flatten(0, 2)) if instance == "auto" else largest_gain(z, x)
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-9)


def test_promise_03_a_convolution_without_a_batch_dimension_is_one_sample() -> None:
    layer, x = nn.Conv2d(2, 3, 3).double(), torch.randn(2, 5, 5, dtype=torch.float64)
    constraint = MaxGain(layer, math.inf)
    z = layer(x) - layer.bias.view(-1, 1, 1)
    constraint.step()
    assert constraint.gains[""] == pytest.approx(norm(z, 2) / norm(x, 2), rel=1e-9)


@each_p
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 6e3), (torch.bfloat16, 1e15), (torch.float16, 1e-4)])
def test_promise_04_squares_of_half_precision_do_not_overflow(dtype: torch.dtype, size: float, p: float) -> None:
    layer, x = nn.Linear(64, 8, bias=False, dtype=dtype), (size * torch.randn(4, 64)).to(dtype)
    constraint = MaxGain(layer, math.inf, p=p)
    z = layer(x)
    constraint.step()
    assert constraint.gains[""] == pytest.approx(largest_gain(z.float(), x.float(), p), rel=1e-4)
    assert constraint.dropped == {"": 0}


def test_promise_05_no_activation_is_kept_alive() -> None:
    layer = nn.Linear(6, 4)
    constraint = MaxGain(layer, math.inf)
    x = rows()
    z = layer(x)
    kept = weakref.ref(x), weakref.ref(z)
    del x, z
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    constraint.step()
    assert constraint.gains[""] > 0


@pytest.mark.parametrize("spoil", [torch.Tensor.zero_, torch.relu_, lambda z: z.mul_(100)])
def test_promise_05_what_happens_to_an_output_in_place_does_not_matter(spoil: Any) -> None:
    layer, x = nn.Linear(6, 4), rows()
    expected = largest_gain(F.linear(x, layer.weight), x)
    constraint = MaxGain(layer, math.inf)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        spoil(layer(x))
    x.zero_()
    constraint.step()
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("is_older", [True, False])
def test_promise_05_another_hook_that_replaces_the_output_is_not_measured(is_older: bool) -> None:
    layer, x = nn.Linear(6, 4), rows()
    expected = largest_gain(F.linear(x, layer.weight), x)

    def triple(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 3 * output

    if is_older:
        layer.register_forward_hook(triple)
    constraint = MaxGain(layer, math.inf)
    if not is_older:
        layer.register_forward_hook(triple)
    layer(x)
    constraint.step()
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)
