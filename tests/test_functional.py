"""Gain and projection against their definitions, in decimal arithmetic that neither over- nor underflows."""

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxgain.functional import gain, project_, without_bias

INF, NAN = math.inf, math.nan
NORMS = [1.0, 1.5, 2.0, 3.0, 17.0, INF]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
quick = settings(max_examples=60, deadline=None, derandomize=True)
norms = st.sampled_from(NORMS) | st.floats(1, 50)
each_p = pytest.mark.parametrize("p", NORMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def norm(v: np.ndarray, p: float) -> Decimal:
    """``‖v‖_p`` as it is defined."""
    entries = [abs(Decimal(float(entry))) for entry in np.ravel(v)]
    return max(entries) if p == INF else sum(entry ** Decimal(p) for entry in entries) ** (1 / Decimal(p))  # type: ignore[return-value]


def definition(z: np.ndarray, x: np.ndarray, p: float) -> list[float]:
    """``‖z‖_p / ‖x‖_p`` of every row, 0 where x is 0."""
    with localcontext(prec=40, Emin=-(10**6), Emax=10**6):
        return [float(norm(a, p) / norm(b, p)) if np.any(b) else 0.0 for a, b in zip(z, x, strict=True)]


def rows(dtype: Any, low: float, high: float) -> st.SearchStrategy[Any]:
    """Two arrays of as many rows, whose entries are 0 or of any magnitude from low to high."""
    positive = st.floats(low, high, width=np.dtype(dtype).itemsize * 8)  # type: ignore[arg-type]
    entries = st.just(0.0) | positive | positive.map(lambda value: -value)
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
    return sizes.flatmap(
        lambda size: st.tuples(
            hnp.arrays(dtype, size[:2], elements=entries), hnp.arrays(dtype, (size[0], size[2]), elements=entries)
        )
    )


@quick
@given(rows(np.float64, 2.0**-40, 2.0**40) | rows(np.float32, 2.0**-30, 2.0**30), norms)
def test_gain_is_its_definition(arrays: Any, p: float) -> None:
    z, x = arrays
    measured = gain(torch.from_numpy(z), torch.from_numpy(x), p).numpy()
    assert measured.dtype == x.dtype
    np.testing.assert_allclose(measured, definition(z, x, p), rtol=1e-12 if x.dtype == np.float64 else 1e-5)


@each_p
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_promise_04_half_precision_is_accumulated_in_float32(dtype: torch.dtype, p: float) -> None:
    for size in (6e4, 6e-5) if dtype == torch.float16 else (1e15, 1e-15):
        x = torch.full((2, 8), size, dtype=dtype)
        assert gain(x[:, :2], x, p).tolist() == pytest.approx([4 ** (-1 / p)] * 2, rel=1e-4)


@each_p
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_promise_07_what_is_not_finite_shows_in_its_own_instance_alone(bad: float, p: float) -> None:
    spoilt = torch.ones(3, 4)
    spoilt[1, 2] = bad
    measured = gain(spoilt, spoilt, p)
    assert measured[[0, 2]].tolist() == pytest.approx([1.0, 1.0])
    assert not measured[1].isfinite()


def test_promise_02_a_bias_is_taken_off_as_it_was_added() -> None:
    x, bias = torch.randn(2, 3, 4, 4), torch.randn(3)
    torch.testing.assert_close(without_bias(x + bias.view(3, 1, 1), bias, 3), x)
    half = (torch.zeros(2, 3) + bias.bfloat16()).bfloat16()
    assert not without_bias(half, bias, 1).any()
    assert without_bias(x, None, 3) is x


layers_and_inputs = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda size: st.tuples(
        hnp.arrays(np.float64, size[:2], elements=st.floats(-8, 8)),
        hnp.arrays(np.float64, (size[2], size[1]), elements=st.floats(-8, 8).map(lambda entry: round(entry, 6))),
    )
)


@quick
@given(layers_and_inputs, norms, st.floats(0.01, 100))
def test_the_projection_is_the_largest_multiple_within_the_bound(arrays: Any, p: float, gamma: float) -> None:
    W, X = arrays
    largest = max(definition(X @ W.T, X, p))
    weight = torch.tensor(W)
    (scale,) = project_([weight], gain(torch.from_numpy(X @ W.T), torch.from_numpy(X), p).amax(0, keepdim=True), gamma)
    np.testing.assert_allclose(weight, W if largest <= gamma else W * (gamma / largest), rtol=1e-11)
    assert scale.item() == pytest.approx(min(1.0, gamma / largest) if largest else 1.0)


@each_dtype
def test_promise_04_low_precision_weights_are_divided_in_full_precision_and_rounded_once(dtype: torch.dtype) -> None:
    W = (1 + torch.rand(1000)).to(dtype)
    exact = W.double() / (3.0 / 1.7)
    wide = torch.promote_types(dtype, torch.float32)
    project_([W], torch.tensor([3.0], dtype=wide), 1.7)
    error = (W.double() / exact - 1).abs().max()
    assert error <= torch.finfo(dtype).eps / 2 + 2 * torch.finfo(wide).eps


@each_dtype
@pytest.mark.parametrize("size", [0.0, 1.0, 2.0, -1.0, INF, -INF, NAN])
def test_promise_01_a_weight_within_its_bound_or_of_no_known_gain_keeps_its_bits(
    dtype: torch.dtype, size: float
) -> None:
    bits = torch.cat([torch.randn(50), torch.tensor([0.0, -0.0, 1e-45, 3e38, INF, NAN])]).to(dtype)
    for gamma in (2.0, INF):
        W = bits.clone()
        version = W._version
        assert project_([W], torch.tensor([size]), gamma).tolist() == [1.0]
        assert torch.equal(W.view(torch.uint8), bits.view(torch.uint8))
        assert W._version == version, "autograd refuses weights that were written to since their forward"


def test_each_weight_has_its_own_gain_and_bound() -> None:
    weights = [torch.nn.Parameter(torch.tensor([6.0])), torch.ones(2, dtype=torch.bfloat16), torch.ones(1)]
    scales = project_(weights, torch.tensor([3.0, 8.0, NAN]), torch.tensor([2.0, 4.0, 1.0]))
    assert [weight.tolist() for weight in weights] == [[4.0], [0.5, 0.5], [1.0]]
    assert scales.tolist() == pytest.approx([2 / 3, 0.5, 1.0])
    assert weights[0].is_leaf
