"""Calls that few models make, each of which was once wrong."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

from maxgain import MaxGain
from maxgain.errors import MeasurementWarning
from nets import training


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="aot_eager")


class ChangesItsInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu(x, inplace=True))


class KeepsALoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.loss = out.square().mean()
        return out


@pytest.mark.parametrize("kind", [ChangesItsInput, KeepsALoss])
def test_trying_a_forward_leaves_no_trace(kind: type[nn.Linear]) -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), kind(8, 8))
        if watched:
            MaxGain(model, math.inf)
        loss = model(torch.randn(4, 8)).sum()
        (loss + getattr(model[1], "loss", 0.0)).backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


class TakesTimeFirst(nn.Linear):
    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0


def test_a_first_argument_that_is_not_multiplied() -> None:
    layer = TakesTimeFirst(8, 8)
    _, optimizer = training(layer, 1e-3, lr=0.0)
    before = layer.weight.clone()
    layer(torch.rand(16, 1), torch.randn(16, 8)).sum().backward()
    with pytest.warns(MeasurementWarning, match="first argument"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("wrap", [lambda model: model, compiled], ids=["eager", "compiled"])
class TestEagerAndCompiled:
    @pytest.fixture(autouse=True)
    def _compile_anew(self, nothing_compiled: None) -> None:
        pass

    def test_an_empty_batch_has_no_gain(self, wrap: Callable[..., Callable[..., Tensor]]) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        constraint, optimizer = training(model, 1.0, lr=0.1)

        def chosen(x: Tensor) -> Tensor:
            return model[1](model[0](x)[x[:, 0] > 0])

        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        try:
            wrap(chosen)(-torch.ones(3, 8)).sum().backward()
        finally:
            torch._dynamo.config.capture_dynamic_output_shape_ops = False
        optimizer.step()
        assert constraint.gains["0"] > 0
        assert math.isnan(constraint.gains["1"])

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
    def test_nested_sequences(self, wrap: Callable[..., Callable[..., Tensor]], layout: Any, bias: bool) -> None:
        rows = [torch.randn(3, 8), torch.randn(5, 8)]
        layer = nn.Linear(8, 4, bias)
        constraint, optimizer = training(layer, math.inf, lr=0.0)
        call = wrap(layer) if layout == torch.jagged else layer  # torch compiles no nested tensors with strides
        call(torch.nested.nested_tensor(rows, layout=layout)).to_padded_tensor(0.0).sum().backward()
        optimizer.step()
        x = torch.cat(rows)
        expected = ((x @ layer.weight.T).norm(dim=1) / x.norm(dim=1)).max()
        assert constraint.gains[""] == pytest.approx(expected.item(), rel=1e-5)

    def test_a_call_with_the_parameters_of_another_model(self, wrap: Callable[..., Callable[..., Tensor]]) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        teacher = copy.deepcopy(model)
        for weight in teacher.parameters():
            weight.data.mul_(100)
        constraint, optimizer = training(model, 10.0, lr=0.0)
        x = torch.randn(8, 8)
        ask = wrap(lambda x: functional_call(model, dict(teacher.named_parameters()), (x,)))
        (model(x) - ask(x).detach()).square().mean().backward()
        optimizer.step()
        assert max(constraint.gains.values()) < 10


def test_every_weight_may_be_pruned_later_and_the_constraint_attached_again() -> None:
    model = nn.Linear(8, 4)
    constraint, optimizer = training(model, 1e-3, lr=0.1)
    prune.l1_unstructured(model, "weight", 0.5)
    for is_again in (False, True):
        model(torch.randn(8, 8)).sum().backward()
        with pytest.warns(MeasurementWarning, match=r"computed weight"):
            optimizer.step()
        if not is_again:
            constraint.detach()
            constraint.attach(optimizer)


def test_weights_that_are_made_of_other_tensors_have_gains_of_their_own() -> None:
    results = []
    for wrap in (lambda x: x, lambda x: TwoTensor(x, x.clone())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
        for layer in model:
            layer.weight = nn.Parameter(wrap(layer.weight.detach()))
        constraint, optimizer = training(model, 0.1, lr=0.0)
        model(wrap(torch.randn(8, 8))).sum().backward()
        optimizer.step()
        results.append(constraint.gains)
    assert results[1] == pytest.approx(results[0])


def test_an_optimizer_that_is_attached_in_mid_cycle_measures_in_its_first_step() -> None:
    model = nn.Linear(8, 4)
    constraint = MaxGain(model, 0.1, every=4)
    for _ in range(2):
        constraint.detach()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        constraint.attach(optimizer)
        model.weight.data.normal_()
        for step in range(2):
            model(torch.randn(8, 8)).sum().backward()
            optimizer.step()
            if step == 0:
                assert constraint.scales[""] < 1


def test_two_optimizers_that_are_attached_again_in_mid_cycle_measure_in_their_first_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = [torch.optim.SGD(layer.parameters(), 0.0) for layer in model]
    constraint = MaxGain(model, 0.1, every=2)
    for _ in range(2):
        for optimizer in optimizers:
            constraint.attach(optimizer)
        for layer in model:
            layer.weight.data.normal_()
        for optimizer in optimizers:
            model(torch.randn(8, 8)).sum().backward()
            optimizer.step()
            assert constraint.scales[str(optimizers.index(optimizer))] < 1
        optimizers[1].step()  # so that one of them is about to measure, and the other is not
        constraint.detach()


def test_detaching_forgets_what_was_measured() -> None:
    model = nn.Linear(8, 4)
    constraint, optimizer = training(model, 2.0, lr=0.0)
    good = copy.deepcopy(model.state_dict())
    model.weight.data.mul_(1000)
    model(torch.randn(8, 8))
    model.load_state_dict(good)
    constraint.detach()
    constraint.attach(optimizer)
    model(torch.randn(8, 8)).sum().backward()
    optimizer.step()
    assert constraint.scales[""] == 1


def test_a_scripted_part_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of scripting
        model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4))
    with pytest.warns(MeasurementWarning, match=r"'0\.weight'"):
        constraint = MaxGain(model, 1.0)
    assert list(constraint.gains) == ["1"]


def test_an_optimizer_that_updates_free_weights_is_not_the_one_to_attach() -> None:
    free, bounded = nn.Linear(4, 8), nn.Linear(8, 1)
    of_free, of_bounded = (torch.optim.SGD(one.parameters(), 0.01) for one in (free, bounded))
    MaxGain([free, bounded], {"0": math.inf, "1": 1.0}).attach(of_bounded)
    for turn in range(14):
        bounded(free(torch.randn(8, 4))).mean().backward()
        (of_free if turn % 6 else of_bounded).step()
