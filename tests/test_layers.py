"""Every layer row against an explicit matrix.

W is built column by column, by pushing basis vectors through the layer, or written down where a layer is diagonal. The
gain is then computed from W as it is defined, in float64, and must be what was measured without any W.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from maxgain import MaxGain, measure_gains, operator_norms
from maxgain.layers import KINDS

NORMS = [1.0, 1.5, 2.0, 3.0, math.inf]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


@dataclass
class Explicit:
    """What a layer's linear part is: W, the instances X that it acts on (one per row), and the bias b."""

    W: np.ndarray
    X: np.ndarray
    b: np.ndarray | float = 0.0

    def gains(self, p):
        """``‖Wx‖_p / ‖x‖_p`` by definition."""
        return ratios(np.linalg.norm(self.X @ self.W.T, p, axis=1), np.linalg.norm(self.X, p, axis=1))

    def rounding(self, p, dtype):
        """How far rounding may take a measured gain from the true one.

        Products are summed in float32 at least, and inputs and outputs are rounded to the layer's type, so an entry
        of Wx is off by at most (terms · eps of the sum + 3 eps of the type) · (|W||x| + |b|).
        """
        eps, wide = (torch.finfo(d).eps for d in (dtype, torch.promote_types(dtype, torch.float32)))
        entries = np.abs(self.X) @ np.abs(self.W).T + np.abs(self.b)
        bound = ((sum(self.W.shape) + 16) * wide + 3 * eps) * np.linalg.norm(entries, p, axis=1)
        return ratios(bound, np.linalg.norm(self.X, p, axis=1))


def ratios(above, below):
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def rows(tensor, size):
    return tensor.detach().double().reshape(-1, size).numpy()


def pushed(layer, x, instance_dims):
    """Of a layer that computes Wx + b: column i is what comes of the i-th basis vector, without what comes of 0."""
    shape = x.shape[x.dim() - instance_dims :]
    size = math.prod(shape)
    with torch.no_grad():
        b = layer(torch.zeros(1, *shape, dtype=torch.float64)).reshape(1, -1)
        columns = layer(torch.eye(size, dtype=torch.float64).view(size, *shape)).reshape(size, -1) - b
    return Explicit(columns.numpy().T, rows(x, size), b.numpy())


def batch_norm(layer, x, instance_dims):
    """α / sqrt(running_var + ε), the same at every place of a channel, on the raw activations."""
    scale = layer.weight.detach().numpy() / np.sqrt(layer.running_var.numpy() + layer.eps)
    places = x[0, 0].numel()
    return Explicit(np.diag(np.repeat(scale, places)), rows(x, len(scale) * places))


def layer_norm(layer, x, instance_dims):
    weight = layer.weight.detach().numpy().ravel()
    return Explicit(np.diag(weight), standardised(rows(x, weight.size), layer.eps))


def rms_norm(layer, x, instance_dims):
    weight = layer.weight.detach().numpy().ravel()
    X = rows(x, weight.size)
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    return Explicit(np.diag(weight), X / np.sqrt((X**2).mean(axis=-1, keepdims=True) + eps))


def group_norm(layer, x, instance_dims):
    weight = np.repeat(layer.weight.detach().numpy(), x[0, 0].numel())
    groups = rows(x, x[0].numel()).reshape(len(x), layer.num_groups, -1)
    return Explicit(np.diag(weight), standardised(groups, layer.eps).reshape(len(x), -1))


def standardised(X, eps):
    return (X - X.mean(axis=-1, keepdims=True)) / np.sqrt(X.var(axis=-1, keepdims=True) + eps)


# What Hypothesis draws: a layer, the shape of a batch, and how many of its last dimensions make up one instance.

ints = st.integers
batches = st.lists(ints(1, 3), max_size=1)  # torch takes instances without a batch dimension too


@st.composite
def dense(draw, make):
    inputs = draw(ints(1, 6))
    batch = draw(st.lists(ints(1, 3), max_size=3))
    return make(inputs, draw(ints(1, 6)), draw(st.booleans())), (*batch, inputs), 1


@st.composite
def convolutions(draw, n, is_transposed=False):
    groups, bias = draw(ints(1, 3)), draw(st.booleans())
    channels = groups * draw(ints(1, 2)), groups * draw(ints(1, 2))
    kernel, dilation, stride = (draw(st.tuples(*[ints(1, 3)] * n)) for _ in range(3))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if is_transposed:
        # The most padding that leaves an output, and the most output padding that torch takes.
        padding = tuple(draw(ints(0, side // 2)) for side in reach)
        more = {"output_padding": tuple(draw(ints(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))}
        least, make = [1] * n, getattr(nn, f"ConvTranspose{n}d")
    else:
        padding = draw(st.tuples(*[ints(0, 2)] * n) | st.sampled_from(["same", "valid"]))
        both_sides = [0] * n if padding == "valid" else reach if padding == "same" else [2 * side for side in padding]
        stride = (1,) * n if padding == "same" else stride
        # Large enough for one output, and for what reflecting and wrapping around can take from the other side.
        least = [max(r + 1 - q, (q + 1) // 2 + 1) for r, q in zip(reach, both_sides, strict=True)]
        more = {"padding_mode": draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))}
        make = getattr(nn, f"Conv{n}d")
    layer = make(*channels, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias, **more)
    return layer, (*draw(batches), layer.in_channels, *[draw(ints(low, low + 2)) for low in least]), 1 + n


@st.composite
def batch_norms(draw):
    make, places = draw(
        st.sampled_from([(nn.BatchNorm1d, 0), (nn.BatchNorm1d, 1), (nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)])
        | st.tuples(st.just(nn.SyncBatchNorm), ints(0, 3))
    )
    channels = draw(ints(1, 4))
    momentum = draw(st.sampled_from([0.1, 0.9, None]))
    layer = make(channels, eps=draw(st.sampled_from([1e-5, 0.1])), momentum=momentum)
    return layer, (draw(ints(2, 4)), channels, *[draw(ints(1, 4)) for _ in range(places)]), 1 + places


@st.composite
def normalisations(draw, make):
    shape = draw(st.lists(ints(2, 4), min_size=1, max_size=2))
    batch = draw(st.lists(ints(1, 3), max_size=2))
    return make(shape, eps=draw(st.sampled_from([1e-5, 0.1]))), (*batch, *shape), len(shape)


@st.composite
def group_normalisations(draw):
    groups = draw(ints(1, 3))
    layer = nn.GroupNorm(groups, groups * draw(ints(2, 3)), eps=draw(st.sampled_from([1e-5, 0.1])))
    size = draw(st.lists(ints(1, 4), max_size=3))
    return layer, (draw(ints(1, 3)), layer.num_channels, *size), 1 + len(size)


def rms_norm_of(shape, eps):
    return nn.RMSNorm(shape, eps=None if eps < 0.1 else eps)


class PyGLinear(nn.Module):
    """As torch_geometric's dense layer, which is not derived from torch's."""

    def __init__(self, inputs, outputs, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


PyGLinear.__module__, PyGLinear.__qualname__ = "torch_geometric.nn.dense.linear", "Linear"


ORACLES = {
    nn.Linear: (dense(nn.Linear), pushed),
    nn.Conv1d: (convolutions(1), pushed),
    nn.Conv2d: (convolutions(2), pushed),
    nn.Conv3d: (convolutions(3), pushed),
    nn.ConvTranspose1d: (convolutions(1, True), pushed),
    nn.ConvTranspose2d: (convolutions(2, True), pushed),
    nn.ConvTranspose3d: (convolutions(3, True), pushed),
    nn.modules.batchnorm._BatchNorm: (batch_norms(), batch_norm),
    nn.LayerNorm: (normalisations(nn.LayerNorm), layer_norm),
    nn.RMSNorm: (normalisations(rms_norm_of), rms_norm),
    nn.GroupNorm: (group_normalisations(), group_norm),
    "transformers.pytorch_utils.Conv1D": (dense(lambda inputs, outputs, bias: Conv1D(outputs, inputs)), pushed),
    "torch_geometric.nn.dense.linear.Linear": (dense(PyGLinear), pushed),
}
every_row = pytest.mark.parametrize("key", ORACLES, ids=lambda key: str(key).strip("'<>").rpartition(".")[2])


def filled(layer, shape, seed, dtype):
    """Random parameters into the layer and a random batch for it, rounded to the type before any oracle sees them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    return nn.Sequential(layer.to(dtype)).train(), torch.randn(shape, generator=generator).to(dtype)


def exactly(layer):
    """The layer in float64, with the very weights that it has."""
    return copy.deepcopy(layer).double()


def test_every_row_has_an_oracle():
    assert set(ORACLES) == set(KINDS)


@every_row
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), seed=ints(0, 2**32), dtype=st.sampled_from(DTYPES))
def test_promise_02_gains_are_those_of_the_explicit_matrix(key, data, seed, dtype):
    cases, matrix = ORACLES[key]
    layer, shape, instance_dims = data.draw(cases)
    model, x = filled(layer, shape, seed, dtype)
    constraints = {p: MaxGain(model, math.inf, p=p, include="0") for p in NORMS}
    model(x)
    linear = matrix(exactly(layer), x, instance_dims)
    for p, constraint in constraints.items():
        constraint.step()
        constraint.detach()
        by_instance = measure_gains(model, [x], p, include="0").gains["0"]
        expected, tolerance = linear.gains(p), linear.rounding(p, dtype)
        assert by_instance.shape == expected.shape
        assert (np.abs(by_instance - expected) <= tolerance).all()
        assert abs(constraint.gains["0"] - expected.max()) <= tolerance.max()


@every_row
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), seed=ints(0, 2**32), p=st.sampled_from(NORMS))
def test_the_projection_divides_the_explicit_matrix(key, data, seed, p):
    cases, matrix = ORACLES[key]
    layer, shape, instance_dims = data.draw(cases)
    model, x = filled(layer, shape, seed, torch.float64)
    constraint = MaxGain(model, gamma=0.5, p=p, include="0")
    model(x)
    before = matrix(exactly(layer), x, instance_dims)
    constraint.step()
    after = matrix(exactly(layer), x, instance_dims)
    largest = before.gains(p).max()
    np.testing.assert_allclose(after.W, before.W / max(1.0, largest / 0.5), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(after.b, before.b)
    assert after.gains(p).max() == pytest.approx(min(largest, 0.5))


@every_row
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), seed=ints(0, 2**32))
def test_the_operator_norms_are_those_of_the_explicit_matrix(key, data, seed):
    cases, matrix = ORACLES[key]
    layer, shape, instance_dims = data.draw(cases)
    model, x = filled(layer, shape, seed, torch.float32)
    linear = matrix(exactly(layer), x, instance_dims)
    for p in (1, 2, math.inf):
        norms = operator_norms(model, x, p=p, include="0").norms
        assert norms["0"] == pytest.approx(np.linalg.norm(linear.W, p), rel=1e-4, abs=1e-6), p


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_promise_04_a_batch_norm_of_half_precision_is_measured_where_its_products_would_overflow(dtype):
    layer = nn.BatchNorm1d(2, momentum=0.0).to(dtype)
    layer.running_var.fill_(1e-4)
    constraint = MaxGain(nn.Sequential(layer), math.inf)
    layer(torch.tensor([[6e4, 5e4], [4e4, 3e4]], dtype=dtype))
    constraint.step()
    assert constraint.gains["0"] == pytest.approx((float(layer.running_var[0]) + 1e-5) ** -0.5, rel=1e-5)
    assert constraint.dropped == {"0": 0}
