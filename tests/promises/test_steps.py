"""Promises 8 and 9: whose step projects which weights, and by how much."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explicit import largest_gain, same_bits
from maxgain import MaxGain
from maxgain.errors import AttachError
from nets import frozen_sgd, mlp, rows, sgd, train, training, values


@pytest.mark.filterwarnings("ignore:Trained but not bounded")  # the new weight is not, in its first step
@pytest.mark.parametrize("are_tied", [True, False])
def test_promise_08_weights_that_are_tied_or_untied_later_are_followed(are_tied: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
    first, second = model[0].weight, model[1].weight
    optimizer = torch.optim.SGD([first, second], lr=0.0)
    model[1].weight = second if are_tied else first
    MaxGain(model, {"0": 0.5, "1": 0.1}).attach(optimizer)
    model[1].weight = first if are_tied else second
    inputs = rows(), torch.eye(6)
    for _ in range(2):
        sum(layer(x).sum() for layer, x in zip(model, inputs, strict=True)).backward()
        optimizer.step()
    sizes = [largest_gain(x @ layer.weight.T, x) for layer, x in zip(model, inputs, strict=True)]
    assert max(sizes) == pytest.approx(0.1 if are_tied else 0.5, rel=1e-5)
    assert sizes[1] <= 0.1001


def test_promise_09_a_weight_that_is_unfrozen_later_is_bounded_from_then_on() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    constraint, optimizer = training(model, 0.1)
    before = model[0].weight.detach().clone()
    train(model, optimizer, map(rows, range(3)))
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    train(model, optimizer, [rows(3)])
    assert constraint.scales["0"] < 1


@pytest.mark.filterwarnings("ignore:Trained but not bounded")  # each is, while the optimizer holds the other
def test_promise_09_a_parameter_in_the_place_of_another_is_bounded() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([model[0].weight], lr=0.0)
    constraint = MaxGain(model, 0.01).attach(optimizer)
    train(model, optimizer, [rows()])
    optimizer.param_groups[0]["params"] = [model[2].weight]
    train(model, optimizer, [rows()])
    assert constraint.scales["2"] < 1


def test_promise_09_parameters_that_another_optimizer_takes_over_are_its_own() -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    first, second = frozen_sgd(model[0]), torch.optim.SGD([model[2].bias], lr=0.0)
    constraint = MaxGain(model, 0.1).attach(first).attach(second)
    seen = []
    for step in range(4):
        if step == 1:
            second.add_param_group({"params": [model[2].weight.requires_grad_(True)]})
        model(rows(step)).square().mean().backward()
        first.step()
        second.step()
        seen.append(constraint.scales["2"])
    assert seen[0] == 1
    assert min(seen[1:]) < 1


class SAM(torch.optim.Optimizer):
    """As the sharpness-aware minimiser that people copy: an optimizer with another one inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moves = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, by in moves:
            p.add_(by)
        with torch.enable_grad():
            closure()
        for p, by in moves:
            p.sub_(by)
        self.base_optimizer.step()


def test_an_optimizer_inside_another_is_the_one_that_is_attached() -> None:
    """That of Accelerate is in integrations/test_transformers.py."""
    model = mlp()
    optimizer = SAM(model.parameters())
    constraint = MaxGain(model, 0.1).attach(optimizer)
    for step in range(6):

        def closure(step: int = step) -> None:
            optimizer.zero_grad()
            model(rows(step)).square().mean().backward()

        closure()
        optimizer.step(closure)
        assert constraint.scales["0"] < 1 or step


class MuonBesideAdam:
    """As the wrappers of two optimizers that are no optimizers of torch's."""

    def __init__(self, matrices: list[Tensor], others: list[Tensor]) -> None:
        self.inside = torch.optim.SGD(matrices, lr=0.1), torch.optim.Adam(others)
        self.muon, self.adam = self.inside

    @property
    def param_groups(self) -> list[Any]:
        return [*self.muon.param_groups, *self.adam.param_groups]


def test_of_two_optimizers_in_a_wrapper_that_with_the_bounded_weights_is_attached() -> None:
    model = mlp()
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    both = MuonBesideAdam(weights, biases)
    constraint = MaxGain(model, 0.1).attach(both)
    train(model, both.muon, [rows()])
    assert constraint.scales["0"] < 1
    with pytest.raises(AttachError, match="one by one"):
        constraint.attach(MuonBesideAdam(weights[:1], weights[1:]))


class Owner(nn.Module):
    """A model that keeps its own constraint, as a LightningModule may."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.constraint = MaxGain(self, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_promise_12_a_model_that_keeps_its_constraint_can_be_copied(copied: Any) -> None:
    model = Owner()
    optimizer = sgd(model)
    model.constraint.attach(optimizer)
    train(model, optimizer, [rows()])
    gains = model.constraint.gains
    twin = copied(model)
    assert twin.constraint is None, "a constraint does not travel: make one for the copy"
    twin(rows(3))
    assert same_bits(values(twin), values(model))
    assert model.constraint.gains == gains


def test_the_gains_are_there_as_a_tensor_in_the_order_of_the_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    constraint = MaxGain(model, math.inf)
    model(rows())
    constraint.step()
    assert constraint.last_gains.tolist() == list(constraint.gains.values())
