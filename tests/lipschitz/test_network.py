"""The bound on a whole network: the constants of its parts, and where none is claimed."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from maxgain import MaxGain, operator_norms, register_layer
from maxgain.lipschitz.network import PARTS, part_constant

PS = [1, 2, math.inf]
ACTIVATIONS = [
    *(nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.LeakyReLU(-3.0), nn.ELU(2.0), nn.CELU(0.5), nn.SELU(), nn.GELU()),
    *(nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardtanh(-2, 1), nn.Hardswish(), nn.Softplus(3), nn.Softsign()),
    *(nn.Tanh(), nn.Sigmoid(), nn.LogSigmoid()),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_an_activation_has_the_constant_of_its_steepest_slope(activation):
    x = torch.linspace(-8, 8, 400001, dtype=torch.float64)
    y = activation(x)
    steepest = ((y[1:] - y[:-1]) / (x[1:] - x[:-1])).abs().max().item()
    for p in PS:
        assert steepest - 1e-9 <= part_constant(activation, p) <= steepest * 1.001


def test_an_activation_that_grows_without_bound_or_jumps_has_no_constant():
    assert part_constant(nn.CELU(-1.0), 2) is None
    assert part_constant(nn.Softplus(threshold=1.0), 2) is None, "it jumps there"


def test_every_elementwise_part_is_in_the_test_above():
    untested = {kind for kind in PARTS if "Pool" not in kind.__name__} - set(map(type, ACTIVATIONS))
    assert untested == {nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}


@pytest.mark.parametrize(
    "pool",
    [
        *(nn.AvgPool1d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d((2, 3), 1), nn.AvgPool2d(3, 2, ceil_mode=True)),
        *(nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1))),
    ],
    ids=repr,
)
def test_an_average_pool_has_a_constant_no_smaller_than_its_matrix_has(pool):
    shape = (1, 6) if isinstance(pool, nn.AvgPool1d) else (1, 6, 6)
    columns = pool(torch.eye(math.prod(shape)).view(-1, *shape)).flatten(1)
    for p in PS:
        assert np.linalg.norm(columns.T.numpy(), p) <= part_constant(pool, p) + 1e-6


def test_a_plain_average_pool_has_the_constant_of_its_matrix():
    assert part_constant(nn.AvgPool2d(2), 2) == pytest.approx(0.5)
    assert part_constant(nn.AvgPool2d(2), 1) == pytest.approx(0.25)
    assert part_constant(nn.AvgPool2d(2, divisor_override=1), 2) is None
    assert part_constant(nn.AdaptiveAvgPool2d(2), 2) is None


def test_a_max_pool_is_steeper_where_its_windows_overlap():
    for p in PS:
        assert part_constant(nn.MaxPool2d(2), p) == 1
    assert part_constant(nn.MaxPool2d(3, 1), 2) == 3
    assert part_constant(nn.MaxPool2d(3, 2), 1) == 4
    assert part_constant(nn.MaxPool2d(3, 1), math.inf) == 1
    assert part_constant(nn.MaxPool1d(2, 2, dilation=2), 1) == 2
    peak = torch.zeros(1, 1, 5, 5)
    peak[0, 0, 2, 2] = 1
    assert torch.linalg.vector_norm(nn.MaxPool2d(3, 1)(peak)) == 3  # so that no smaller constant would do


class Written(nn.Module):
    """A network whose forward is code, as most are."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout(F.leaky_relu(x, 0.1), training=self.training)
        return torch.sigmoid(self.fc(x.view(x.size(0), -1)))


def test_a_chain_is_bounded_by_the_product_of_its_parts():
    model, x = Written(), torch.zeros(1, 1, 4, 4)
    for p in PS:
        report = operator_norms(model, x, p=p)
        assert report.bound == pytest.approx(report.product / 4, rel=1e-4)
        assert report.bound >= report.product / 4
        assert "whole network" in report.covers


def test_batch_norm_and_registered_types_are_links_and_a_layer_counts_as_often_as_it_runs():
    dense = nn.Linear(4, 4)
    model = nn.Sequential(Conv1D(4, 3), dense, nn.Tanh(), nn.Sequential(dense, nn.BatchNorm1d(4), nn.Flatten()))
    report = operator_norms(model, torch.zeros(1, 3))
    assert report.bound == pytest.approx(report.product * report.norms["1"], rel=1e-4)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.fc(x)


class Softened(Skip):
    def forward(self, x):
        return self.fc(x).softmax(-1)


class Twofold(Skip):
    def forward(self, x):
        y = self.fc(x)
        return y, y


class Decided(Skip):
    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class StillDropping(Skip):
    def forward(self, x):
        return F.dropout(self.fc(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Skip(), "branches or joins at 'add'"),
        (Softened(), "no Lipschitz constant is known for the operation 'softmax'"),
        (Twofold(), "something other than one tensor"),
        (Decided(), "the forward of Decided cannot be traced"),
        (StillDropping(), "no Lipschitz constant is known for the operation 'dropout'"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), r"'1' \(LayerNorm\) divides by the size of its input"),
        (nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), r"no Lipschitz constant is known for '1' \(Softmax\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_nothing_is_claimed_of_what_is_not_a_chain_of_known_parts(model, reason):
    report = operator_norms(model, torch.ones(1, 3))
    assert report.bound is None
    assert report.product > 0
    assert re.search(reason, report.covers)


def test_nothing_is_claimed_where_a_layer_was_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    report = operator_norms(model, torch.ones(1, 3), exclude="1")
    assert report.bound is None
    assert "'1' (Linear)" in report.covers


def tenfold(module, args, output):
    return 10 * output


def tenfold_input(module, args):
    return (10 * args[0],)


def steeper_forward(module):
    module.forward = lambda x: 10 * x


@pytest.mark.parametrize("which", [0, 1, 2, None], ids=["first", "ReLU", "last", "whole"])
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(tenfold),
        lambda module: module.register_forward_pre_hook(tenfold_input),
        steeper_forward,
    ],
    ids=["hook", "pre-hook", "forward"],
)
def test_nothing_is_claimed_where_a_hook_may_change_what_passes(which, change):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    assert operator_norms(model, torch.ones(1, 3)).bound is not None
    change(model if which is None else model[which])
    report = operator_norms(model, torch.ones(1, 3))
    assert report.bound is None
    where = "the Sequential itself" if which is None else f"'{which}'"
    assert where in report.covers
    assert "has a forward hook" in report.covers or "was replaced" in report.covers


class SteepNorm(nn.BatchNorm1d):
    def forward(self, input):
        return F.leaky_relu(super().forward(input), 10.0)


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return 10 * torch.relu(x @ self.weight)


def test_nothing_is_claimed_where_a_layer_changes_its_own_linear_part():
    register_layer(Activated, 1, lambda layer, x, output: (x, x @ layer.weight))
    for layer in (SteepNorm(3), Activated()):
        for model in (layer, nn.Sequential(nn.Flatten(), layer)):
            report = operator_norms(model, torch.ones(1, 3))
            assert report.product == pytest.approx(1, rel=1e-4)  # of Wx, and not of the tenfold that is returned
            assert report.bound is None


def test_nothing_is_claimed_while_a_hook_for_all_modules_is_registered():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 2 * output)
    try:
        assert "hook for all modules" in operator_norms(nn.Linear(3, 3), torch.ones(1, 3)).covers
    finally:
        handle.remove()


def test_a_bound_is_given_under_our_own_hooks_and_those_that_compute_a_weight():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    MaxGain(model)
    prune.l1_unstructured(model[0], "weight", amount=2)
    report = operator_norms(model, torch.ones(1, 3))
    assert report.bound == pytest.approx(report.product, rel=1e-4)


def test_a_copy_of_a_watched_model_has_the_bound_of_a_plain_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    MaxGain(model)
    report = operator_norms(copy.deepcopy(model), torch.ones(1, 3))
    assert report.bound == pytest.approx(report.product, rel=1e-4)


def test_other_threads_may_run_their_models_while_a_bound_is_found():
    other, x, outcomes = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4), []

    class Model(nn.Sequential):
        def forward(self, input):
            with ThreadPoolExecutor() as pool:
                outcomes.append(pool.submit(other, x).exception())
            return super().forward(input)

    report = operator_norms(Model(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), x, p=1)
    assert len(outcomes) > 1, "traced too"
    assert set(outcomes) == {None}
    assert report.bound == pytest.approx(report.product)
