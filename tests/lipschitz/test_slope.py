"""sampled_slope, against maps whose slopes are known."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain, operator_norms, sampled_slope
from maxgain.errors import MaxGainError, NormError
from maxgain.lipschitz.slope import unit_vector_along

PS = [1, 1.5, 2, 4, math.inf]
each_p = pytest.mark.parametrize("p", PS)


def linear(matrix: Tensor) -> nn.Linear:
    layer = nn.Linear(*matrix.shape[::-1])
    layer.weight.data = matrix
    return layer


@each_p
def test_a_diagonal_map_is_as_steep_as_its_largest_entry(p):
    layer = linear(torch.diag(torch.tensor([1.0, -5.0, 2.0])))
    slope = sampled_slope(layer, [torch.randn(100, 3)], p)
    assert slope.p == p
    assert slope.local == pytest.approx(5, rel=1e-3)
    assert 1 <= slope.random_pairs <= 5.001
    assert 1 <= slope.neighbours <= 5.001
    assert slope.value == max(slope.random_pairs, slope.neighbours, slope.local)


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_a_dense_map_is_as_steep_as_its_operator_norm(p):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    matrix = (model[1].weight @ model[0].weight).detach().numpy()
    slope = sampled_slope(model, [torch.randn(50, 6)], p, iterations=100)
    assert slope.local == pytest.approx(np.linalg.norm(matrix, p), rel=1e-4)
    assert slope.value <= np.linalg.norm(matrix, p) * (1 + 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_of_half_precision_has_slopes_too(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    slope = sampled_slope(model, [torch.randn(50, 6).to(dtype)])
    exact = sampled_slope(copy.deepcopy(model).double(), [torch.randn(50, 6).double()])
    assert 0 < slope.neighbours <= exact.value * 1.1
    assert slope.value == pytest.approx(exact.value, rel=0.3)


def test_for_positive_matrices_the_power_method_finds_the_norm_for_any_p():
    matrix = torch.rand(4, 5)
    slope = sampled_slope(linear(matrix), [torch.randn(20, 5)], p=3, iterations=100)
    tried = torch.rand(200_000, 5)
    tried[100_000:] = tried[100_000:] ** 0.2
    largest = (torch.linalg.vector_norm(tried @ matrix.T, 3, dim=1) / torch.linalg.vector_norm(tried, 3, dim=1)).max()
    assert slope.local >= largest * (1 - 1e-6)
    assert slope.local == pytest.approx(largest.item(), rel=2e-3)


class Folded(nn.Module):
    """|3x|: as steep as 3 everywhere, but flat between x and -x."""

    def forward(self, x: Tensor) -> Tensor:
        return (3 * x).abs()


@each_p
def test_a_folded_map_is_steep_within_a_fold_and_flat_across_it(p):
    ends = torch.tensor([[1.0], [-1.0]])
    across = sampled_slope(Folded(), [ends], p)
    assert across.random_pairs == 0
    assert across.neighbours == 0
    assert across.local == pytest.approx(3)
    assert sampled_slope(Folded(), [ends, ends + 0.1], p).neighbours == pytest.approx(3, rel=1e-3)


class Step(nn.Module):
    """Slope 0 but for a steep ramp between 0 and 0.1."""

    def forward(self, x: Tensor) -> Tensor:
        return (10 * x).clamp(0, 1)


def test_neighbours_find_what_neither_random_pairs_nor_derivatives_at_the_data_do():
    far = torch.linspace(1, 100, 400)[:, None]
    x = torch.cat([-far, far, torch.tensor([[-0.01], [0.11]])])
    slope = sampled_slope(Step(), [x], pairs=50)
    assert slope.local == 0
    assert slope.neighbours == pytest.approx(1 / 0.12, rel=1e-3)
    assert slope.random_pairs < 1
    assert slope.value == slope.neighbours


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_it_never_exceeds_the_product_bound(p):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(16, 3),
    )
    model[1].running_var.fill_(0.2)
    x = torch.randn(60, 2, 8, 8)
    bound = operator_norms(model, x, p=p).bound
    slope = sampled_slope(model, [x[:30], (x[30:], torch.zeros(30))], p)
    assert bound is not None
    assert 0 < slope.random_pairs <= slope.value
    assert slope.value <= bound * (1 + 1e-4)
    assert slope.local > 0


def test_it_is_the_same_each_time_and_differs_by_seed():
    model, x = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)), torch.randn(300, 4)
    first = sampled_slope(model, [x], pairs=50, neighbours=20, points=5, iterations=2)
    assert first == sampled_slope(model, [x], pairs=50, neighbours=20, points=5, iterations=2)
    assert first != sampled_slope(model, [x], pairs=50, neighbours=20, points=5, iterations=2, seed=1)


def test_inputs_that_are_all_but_the_same_do_not_pass_off_rounding_as_slope():
    layer = linear(torch.eye(2))
    layer.bias.data = torch.tensor([1e4, 1e4])  # so that differences of outputs are rounded coarsely
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-6], [3.0, 5.0]])
    assert sampled_slope(layer, [x]).value == pytest.approx(1, rel=1e-2)
    assert sampled_slope(layer, [x.repeat(3, 1)]).value == pytest.approx(1, rel=1e-2)
    layer.weight.data *= 1e-7
    assert sampled_slope(layer, [x]).value == pytest.approx(1e-7, rel=1e-2)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    constraint = MaxGain(model)
    model[1].eval()
    model[0].weight.grad = torch.ones(3, 3)
    before, hooks = copy.deepcopy(model.state_dict()), [len(module._forward_hooks) for module in model.modules()]
    sampled_slope(model, [torch.randn(9, 3)])
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.grad is None for parameter in model.parameters()] == [False] + [True] * 5
    assert torch.equal(model[0].weight.grad, torch.ones(3, 3))
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(math.isnan(value) for value in constraint.gains.values())


@each_p
def test_the_unit_vector_that_sees_most_of_another(p):
    torch.manual_seed(0)
    y = torch.randn(3, 4, 2)
    v = unit_vector_along(y, p)
    assert torch.linalg.vector_norm(v.flatten(1), p, dim=1).tolist() == pytest.approx([1.0] * 3, rel=1e-5)
    dual = math.inf if p == 1 else 1 if math.isinf(p) else p / (p - 1)
    seen = (v * y).flatten(1).sum(1)  # Hölder's inequality with equality
    torch.testing.assert_close(seen, torch.linalg.vector_norm(y.flatten(1), dual, dim=1))
    assert not unit_vector_along(torch.zeros(2, 3), p).any()


class Pair(nn.Linear):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(input), input


def test_what_has_no_slope_is_refused():
    layer = nn.Linear(2, 2)
    with pytest.raises(NormError):
        sampled_slope(layer, [torch.randn(3, 2)], p=0.5)
    with pytest.raises(MaxGainError, match="needs batches of tensors of real numbers"):
        sampled_slope(layer, [torch.ones(3, 2, dtype=torch.int64)])
    with pytest.raises(MaxGainError, match="needs batches"):
        sampled_slope(layer, [])
    with pytest.raises(MaxGainError, match="two inputs at least, not 1"):
        sampled_slope(layer, [torch.randn(1, 2)])
    with pytest.raises(MaxGainError, match="returns a tensor, not tuple"):
        sampled_slope(Pair(2, 2), [torch.randn(3, 2)])
    with pytest.raises(MaxGainError, match="not finite"):
        sampled_slope(layer, [torch.full((3, 2), math.inf)])
    with pytest.raises(MaxGainError, match="must be a whole number from 1 to"):
        sampled_slope(layer, [torch.randn(3, 2)], points=0)
