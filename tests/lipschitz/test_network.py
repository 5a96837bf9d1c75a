"""The bound on a whole network: the constants of its parts, and where none is claimed."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from maxgain import MaxGain, operator_norms, register_layer
from maxgain.lipschitz.network import FUNCTIONS, PARTS, part_constant

PS = [1, 2, math.inf]
ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.LeakyReLU(-3.0), nn.ELU(2.0), nn.SELU(), nn.GELU(), nn.GELU("tanh"),
    nn.SiLU(), nn.Mish(), nn.Hardtanh(-2, 1), nn.Hardswish(), nn.Softplus(3), nn.Softsign(), nn.Tanh(), nn.Sigmoid(),
    nn.LogSigmoid(),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_an_activation_has_the_constant_of_its_steepest_slope(activation: nn.Module) -> None:
    x = torch.linspace(-8, 8, 400001, dtype=torch.float64)
    y = activation(x)
    steepest = ((y[1:] - y[:-1]) / (x[1:] - x[:-1])).abs().max().item()
    for p in PS:
        constant = part_constant(activation, p)
        assert constant is not None
        assert steepest - 1e-9 <= constant <= steepest * 1.001


def test_every_elementwise_part_is_tried_above() -> None:
    untried = {kind for kind in PARTS if "Pool" not in kind.__name__} - set(map(type, ACTIVATIONS))
    assert untried == {nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}
    assert part_constant(nn.Softplus(threshold=1.0), 2) is None, "it jumps there"


def test_a_function_does_what_the_module_of_its_name_does() -> None:
    x, tried = torch.linspace(-9, 9, 101), set[str]()
    for function, kind in FUNCTIONS.items():
        if any(kind is type(activation) for activation in ACTIVATIONS):
            called = getattr(torch.Tensor, function) if isinstance(function, str) else function
            assert torch.equal(called(x.clone()), kind()(x)), function
            tried.add(kind.__name__)
    assert tried == {type(activation).__name__ for activation in ACTIVATIONS}


@pytest.mark.parametrize(
    "pool",
    [
        *(nn.AvgPool1d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d((2, 3), 1), nn.AvgPool2d(3, 2, ceil_mode=True)),
        *(nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1))),
    ],
    ids=repr,
)
def test_an_average_pool_has_a_constant_no_smaller_than_its_matrix_has(pool: nn.Module) -> None:
    shape = (1, 6) if isinstance(pool, nn.AvgPool1d) else (1, 6, 6)
    columns = pool(torch.eye(math.prod(shape)).view(-1, *shape)).flatten(1)
    for p in PS:
        constant = part_constant(pool, p)
        assert constant is not None
        assert np.linalg.norm(columns.T.numpy(), p) <= constant + 1e-6


@pytest.mark.parametrize(
    ("pool", "p", "constant"),
    [
        (nn.AvgPool2d(2), 2, 0.5),
        (nn.AvgPool2d(2), 1, 0.25),
        (nn.AvgPool2d(2, divisor_override=1), 2, None),
        (nn.AdaptiveAvgPool2d(2), 2, None),
        (nn.MaxPool2d(2), 2, 1),
        (nn.MaxPool2d(3, 1), 2, 3),  # a single peak lies in nine windows
        (nn.MaxPool2d(3, 2), 1, 4),
        (nn.MaxPool2d(3, 1), math.inf, 1),
        (nn.MaxPool1d(2, 2, dilation=2), 1, 2),
    ],
    ids=repr,
)
def test_a_pool_is_steeper_where_its_windows_overlap(pool: nn.Module, p: float, constant: float | None) -> None:
    assert part_constant(pool, p) == (None if constant is None else pytest.approx(constant))


class Written(nn.Module):
    """A network whose forward is code, as most are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout(F.leaky_relu(x, 0.1), training=self.training)
        return torch.sigmoid(self.fc(x.view(x.size(0), -1)))


def test_a_chain_is_bounded_by_the_product_of_its_parts_each_as_often_as_it_runs() -> None:
    dense = nn.Linear(4, 4)
    twice = nn.Sequential(nn.Linear(3, 4), dense, nn.Tanh(), nn.Sequential(dense, nn.BatchNorm1d(4), nn.Flatten()))
    for p in PS:
        report = operator_norms(Written(), torch.zeros(1, 1, 4, 4), p=p)
        assert report.product / 4 <= report.bound == pytest.approx(report.product / 4, rel=1e-4)
        assert f"bound {report.bound:.6g}: the whole network" in str(report)
        report = operator_norms(twice, torch.zeros(1, 3), p=p)
        assert report.bound == pytest.approx(report.product * report.norms["1"], rel=1e-4)


class Around(nn.Module):
    """What a function makes of a dense layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fc, x)


class SteepNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(super().forward(input), 10.0)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return 10 * torch.relu(x @ self.weight)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Around(lambda fc, x: x + fc(x)), "branches or joins at 'add'"),
        (Around(lambda fc, x: fc(x).softmax(-1)), "'softmax'"),
        (Around(lambda fc, x: (y := fc(x), y)), "other than one tensor"),
        (Around(lambda fc, x: fc(x) if x.sum() > 0 else fc(-x)), "cannot be traced"),
        (Around(lambda fc, x: F.dropout(fc(x))), "'dropout'"),
        (Around(lambda fc, x: F.dropout1d(fc(x), 0.1, True)), "'dropout1d'"),
        (Around(lambda fc, x: F.avg_pool1d(fc(x), x.shape[-1])), "'avg_pool1d'"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "'1' (LayerNorm)"),
        (nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), "'1' (Softmax)"),
        (nn.Sequential(nn.Flatten(), SteepNorm(3)), ""),
        (Activated(), ""),
    ],
)
def test_nothing_is_claimed_of_what_is_not_a_chain_of_known_parts(model: nn.Module, reason: str) -> None:
    register_layer(Activated, 1, lambda layer, x, output: (x, x @ layer.weight))
    report = operator_norms(model, torch.ones(1, 3), include="*")
    assert report.product > 0
    assert report.bound is None
    assert reason in report.covers


def test_nothing_is_claimed_where_a_layer_was_left_out() -> None:
    report = operator_norms(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(1, 3), exclude="1")
    assert report.bound is None
    assert "'1' (Linear)" in report.covers


def replaced(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: 10 * forward(x)  # type: ignore[method-assign]


@pytest.mark.parametrize("which", [0, 1, None])
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(lambda module, args, output: 10 * output),
        lambda module: module.register_forward_pre_hook(lambda module, args: (10 * args[0],)),
        replaced,
    ],
    ids=["hook", "pre-hook", "forward"],
)
def test_nothing_is_claimed_where_something_may_change_what_passes(which: int | None, change: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3))
    change(model if which is None else model[which])
    assert operator_norms(model, torch.ones(1, 3)).bound is None


def test_a_bound_is_given_under_our_own_hooks_their_copies_and_those_that_compute_a_weight() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    MaxGain(model)
    copied = copy.deepcopy(model)
    prune.l1_unstructured(model[0], "weight", amount=2)
    for one in (model, copied):
        report = operator_norms(one, torch.ones(1, 3))
        assert report.bound == pytest.approx(report.product, rel=1e-4)
