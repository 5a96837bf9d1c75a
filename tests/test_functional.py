"""Gain and projection against their definitions, in decimal arithmetic that neither over- nor underflows."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxgain.errors import BoundError, MaxGainError, NormError
from maxgain.functional import channelwise_gains, check_bound, check_p, gain, project_, record

INF = float("inf")
NAN = float("nan")
NORMS = [1.0, 1.5, 2.0, 3.0, 4.0, 17.0, INF]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
quick = settings(max_examples=60, deadline=None, derandomize=True)
norms = st.sampled_from(NORMS) | st.floats(1, 50)


def norm(v, p):
    """``‖v‖_p`` as it is defined."""
    entries = [abs(Decimal(float(entry))) for entry in np.ravel(v)]
    if p == INF:
        return max(entries)
    return sum(entry ** Decimal(p) for entry in entries) ** (1 / Decimal(p))


def definition(z, x, p):
    """``‖z‖_p / ‖x‖_p`` of every row, 0 where x is 0."""
    with localcontext(prec=40, Emin=-(10**6), Emax=10**6):
        return [float(norm(a, p) / norm(b, p)) if np.any(b) else 0.0 for a, b in zip(z, x, strict=True)]


def rows(dtype, low, high):
    """Two arrays of as many rows, whose entries are 0 or of any magnitude from low to high."""
    positive = st.floats(low, high, width=np.dtype(dtype).itemsize * 8)
    entries = st.just(0.0) | positive | positive.map(lambda value: -value)
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
    return sizes.flatmap(
        lambda size: st.tuples(
            hnp.arrays(dtype, size[:2], elements=entries), hnp.arrays(dtype, (size[0], size[2]), elements=entries)
        )
    )


layers_and_inputs = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda size: st.tuples(
        hnp.arrays(np.float64, size[:2], elements=st.floats(-8, 8)),
        hnp.arrays(np.float64, (size[2], size[1]), elements=st.floats(-8, 8).map(lambda entry: round(entry, 6))),
    )
)


@quick
@given(rows(np.float64, 2.0**-40, 2.0**40), norms)
def test_gain_is_its_definition(arrays, p):
    z, x = arrays
    measured = gain(torch.from_numpy(z), torch.from_numpy(x), p)
    np.testing.assert_allclose(measured, definition(z, x, p), rtol=1e-13)


@quick
@given(rows(np.float32, 2.0**-60, 2.0**60), norms)
def test_gain_is_its_definition_in_float32_at_magnitudes_whose_powers_leave_float32(arrays, p):
    z, x = arrays
    measured = gain(torch.from_numpy(z), torch.from_numpy(x), p)
    assert measured.dtype == torch.float32
    np.testing.assert_allclose(measured, definition(z, x, p), rtol=1e-5)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_numbers_of_a_type_can_be_measured(dtype, p):
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for size in (largest, smallest, largest**0.5, smallest**0.5):
        x = torch.full((2, 8), size, dtype=dtype)
        assert gain(x, x, p).tolist() == pytest.approx([1.0, 1.0])
        assert gain(x[:, :2], x, p).tolist() == pytest.approx([4 ** (-1 / p)] * 2, rel=1e-5)


@quick
@given(rows(np.float64, 2.0**-20, 2.0**20), norms, st.floats(-1e6, 1e6).filter(lambda c: abs(c) > 1e-6 or c == 0))
def test_scaling_the_output_scales_the_gain_and_scaling_both_does_not(arrays, p, factor):
    z, x = map(torch.from_numpy, arrays)
    once = gain(z, x, p)
    torch.testing.assert_close(gain(factor * z, x, p), abs(factor) * once, rtol=1e-13, atol=0)
    if factor:
        torch.testing.assert_close(gain(factor * z, factor * x, p), once, rtol=1e-13, atol=0)


@pytest.mark.parametrize("p", NORMS)
def test_a_layer_that_is_given_nothing_has_no_gain(p):
    nothing = torch.zeros(2, 3)
    assert gain(nothing, nothing, p).tolist() == [0.0, 0.0]
    assert gain(torch.ones(2, 3), nothing, p).tolist() == [0.0, 0.0]
    assert gain(nothing, torch.ones(2, 3), p).tolist() == [0.0, 0.0]
    assert gain(torch.ones(2, 0), torch.ones(2, 3), p).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_shows_in_its_own_instance_alone(bad, p):
    spoilt = torch.ones(3, 4)
    spoilt[1, 2] = bad
    for measured in (gain(spoilt, torch.ones(3, 4), p), gain(torch.ones(3, 4), spoilt, p)):
        assert measured[[0, 2]].tolist() == pytest.approx([1.0, 1.0])
        assert not measured[1].isfinite()


@pytest.mark.parametrize("instance_dims", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("p", NORMS)
def test_the_last_dimensions_are_the_instance(instance_dims, p):
    z, x = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    counted = x.shape[: x.dim() - instance_dims]
    per_row = gain(z.reshape(counted.numel(), -1), x.reshape(counted.numel(), -1), p)
    measured = gain(z, x, p, instance_dims=instance_dims)
    assert measured.shape == counted
    torch.testing.assert_close(measured.flatten(), per_row)


def test_gain_leaves_no_trace_in_the_graph_and_is_wide_enough():
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    measured = gain(2 * x, x)
    assert not measured.requires_grad
    assert measured.dtype == torch.float32


@quick
@given(layers_and_inputs, norms, st.floats(0.01, 100))
def test_the_projection_is_the_largest_multiple_within_the_bound(arrays, p, gamma):
    W, X = arrays
    largest = max(definition(X @ W.T, X, p))
    measured = gain(torch.from_numpy(X @ W.T), torch.from_numpy(X), p).amax()
    projected = project_(torch.tensor(W), measured, gamma)
    np.testing.assert_allclose(projected, W if largest <= gamma else W * (gamma / largest), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", NORMS)
def test_after_the_projection_the_bound_holds_and_projecting_again_changes_nothing_but_rounding(dtype, p):
    torch.manual_seed(0)
    W, x = torch.randn(7, 5).to(dtype), torch.randn(20, 5).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    gamma, rounding = 0.4, 4 * torch.finfo(dtype).eps

    def largest():
        return gain(x.to(wide) @ W.to(wide).T, x, p).amax()

    assert largest() > gamma
    project_(W, largest(), gamma)
    assert largest() == pytest.approx(gamma, rel=rounding)
    once = W.clone()
    torch.testing.assert_close(project_(W, largest(), gamma), once, rtol=rounding, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_weights_are_divided_in_full_precision_and_rounded_once(dtype):
    torch.manual_seed(0)
    W = (1 + torch.rand(1000)).to(dtype)
    exact = W.double() / (3.0 / 1.7)
    error = (project_(W, gain=3.0, gamma=1.7).double() / exact - 1).abs().max()
    wide = torch.promote_types(dtype, torch.float32)
    assert error <= torch.finfo(dtype).eps / 2 + 2 * torch.finfo(wide).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 2.0, -1.0, INF, -INF, NAN])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_within_its_bound_or_of_no_known_gain_keeps_its_bits(dtype, size, as_tensor):
    bits = torch.cat([torch.randn(50), torch.tensor([0.0, -0.0, 1e-45, 3e38, INF, NAN])]).to(dtype)
    W = bits.clone()
    assert project_(W, torch.tensor(size) if as_tensor else size, gamma=2.0) is W
    assert torch.equal(W.view(torch.uint8), bits.view(torch.uint8))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, INF, NAN])
def test_an_infinite_bound_keeps_every_bit(size):
    bits = torch.randn(50)
    assert torch.equal(project_(bits.clone(), size, gamma=INF), bits)


def test_a_parameter_is_projected_in_place_and_outside_of_the_graph():
    W = torch.nn.Parameter(torch.tensor([6.0]))
    assert project_(W, gain=3.0, gamma=2.0) is W
    assert W.item() == 4.0
    assert W.is_leaf
    assert W.grad_fn is None


def test_every_row_may_have_a_gain_of_its_own():
    W = project_(torch.ones(3, 2), torch.tensor([[1.0], [4.0], [NAN]]), gamma=2.0)
    assert W.tolist() == [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0]]


@pytest.mark.parametrize("p", [0.5, 0, -1, -INF, NAN, "2", None])
def test_what_is_not_a_norm_is_refused(p):
    with pytest.raises(NormError) as error:
        gain(torch.ones(1, 1), torch.ones(1, 1), p)
    assert str(error.value) == f"p must be a number from 1 to inf, not {p!r}: below 1 it does not define a norm."
    assert isinstance(error.value, MaxGainError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("gamma", [0, 0.0, -1, -INF, NAN, "2", None])
def test_what_is_not_a_bound_is_refused(gamma):
    W = torch.ones(1)
    with pytest.raises(BoundError) as error:
        project_(W, 3.0, gamma)
    said = f"gamma must be a positive number (inf measures without constraining), not {gamma!r}."
    assert str(error.value) == said
    assert W.item() == 1.0


def test_a_bound_that_is_zero_in_float32_is_refused():
    with pytest.raises(BoundError, match=r"^gamma must be a positive number of at least 1\.2e-38 .* not 1e-50\.$"):
        check_bound(1e-50)


def test_a_bound_is_refused_by_the_name_that_the_user_knows():
    with pytest.raises(BoundError, match=r"^lambda\['\*'\] must be a positive number"):
        check_bound(0, "lambda['*']")


@pytest.mark.parametrize("number", [1, 2.5, INF, np.float32(3)])
def test_numbers_of_any_kind_name_norms_and_bounds(number):
    assert check_p(number) == check_bound(number) == float(number)
    assert type(check_p(number)) is type(check_bound(number)) is float


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gains_from_the_norms_of_channels_are_the_gains(p: float, magnitude: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (magnitude * torch.randn(4, 3, 5, 2, generator=generator)).to(dtype)
    x[0, 1] *= 1e-9
    x[1] = 0
    for scales in (torch.tensor([2.0, -0.3, 1e-20]), torch.tensor([1e-12, 1e12, 0.0]), torch.zeros(3)):
        explicit = gain(x.double() * scales.double()[:, None, None], x.double(), p)
        found = channelwise_gains(x, scales, p)
        if found is not None:
            torch.testing.assert_close(found.double(), explicit, rtol=1e-6, atol=0)
    assert channelwise_gains(x[2:], torch.tensor([2.0, -0.3, 0.5]), p) is not None or magnitude != 1.0


def test_gains_from_the_norms_of_channels_are_not_given_where_they_would_be_wrong() -> None:
    x = torch.ones(2, 2, 3, 3)
    x[:, 1] = 1e-21  # whose square is nothing in float32, and whose scale is all that counts
    assert channelwise_gains(x, torch.tensor([0.0, 1.0]), 2.0) is None
    assert channelwise_gains(torch.full((1, 2, 3, 3), 3e38), torch.ones(2), 2.0) is None
    assert channelwise_gains(torch.full((1, 2, 3, 3), math.nan), torch.ones(2), 2.0) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_is_no_less_exact_a_gain_of_a_half_precision_weight_than_a_tensor(dtype: torch.dtype) -> None:
    for size in (2.005, 3.3, 70000.0):
        weight = torch.linspace(-3, 3, 50).to(dtype)
        expected = project_(weight.clone(), torch.tensor(size), 2.0)
        assert torch.equal(project_(weight.clone(), size, 2.0), expected)
        assert (size > 1000) == bool(expected.abs().max() < 0.01)


def test_a_gain_that_is_not_finite_in_the_type_of_the_maxima_is_dropped() -> None:
    maxima, dropped = torch.full((2,), -1.0), torch.zeros(2, dtype=torch.int64)
    record(maxima, dropped, 1, torch.tensor([3.0, 1e60], dtype=torch.float64))
    assert (maxima.tolist(), dropped.tolist()) == ([-1.0, 3.0], [0, 1])
