"""Ways to call a model, to change it and to step it, with a constraint on it."""

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import Lipschitz, MaxGain, MaxNorm, operator_norms
from maxgain.errors import NotMeasuredError
from small_net import each_measure, grow, net, one_step, sgd


def test_what_a_step_that_is_left_out_showed_can_be_discarded() -> None:
    model = nn.Linear(3, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, gamma=1e-3).attach(optimizer)
    model(torch.randn(4, 3))
    constraint.discard()
    with pytest.raises(NotMeasuredError):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_model_may_be_a_single_layer() -> None:
    model = nn.Linear(6, 3)
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    one_step(model, optimiser)
    assert list(constraint.scales) == [""]
    assert constraint.scales[""] < 1
    assert "gamma=0.1" in repr(constraint)


def test_layers_may_be_called_by_keyword() -> None:
    dense, up = nn.Linear(6, 3), nn.ConvTranspose2d(2, 3, 3, stride=2, bias=False)
    constraint = MaxGain(nn.ModuleDict({"dense": dense, "up": up}))
    x, image = torch.randn(5, 6), torch.randn(2, 2, 4, 4)
    dense(input=x)
    z = up(output_size=[10, 10], input=image)
    assert constraint.gains["up"] == pytest.approx(largest_gain(z, image), rel=1e-5)
    assert constraint.gains["dense"] == pytest.approx(largest_gain(F.linear(x, dense.weight), x), rel=1e-5)


@each_measure
def test_an_empty_batch_says_nothing(measure: Any) -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1, measure=measure)
    model(torch.randn(4, 6))
    model(torch.empty(0, 6))
    constraint.step()
    assert all(scale < 1 for scale in constraint.scales.values())
    before = copy.deepcopy(model.state_dict())
    model(torch.empty(0, 6))
    constraint.step()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@each_measure
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_model_may_change_its_dtype_after_the_constraint_was_made(dtype: torch.dtype, measure: Any) -> None:
    model = net()
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model, gamma=0.1, measure=measure).attach(optimiser)
    one_step(model, optimiser)
    model.to(dtype)
    grow(model)
    x = torch.randn(5, 6).to(dtype)
    before = model[0].weight.detach().double().clone()
    expected = largest_gain(F.linear(x.double(), before), x.double())
    one_step(model, optimiser, x)
    accuracy = 1e-6 if dtype == torch.float64 else 0.02
    assert constraint.gains["0"] == pytest.approx(expected, rel=accuracy)
    torch.testing.assert_close(model[0].weight.double(), before * (0.1 / expected), rtol=accuracy, atol=1e-4)
    assert all(parameter.dtype == dtype for parameter in model.parameters())


def test_a_model_may_be_given_its_memory_after_the_constraint_was_made() -> None:
    with torch.device("meta"):
        model = net()
    constraint = MaxGain(model, gamma=0.1)
    model.to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    optimiser = sgd(model)
    constraint.attach(optimiser)
    one_step(model, optimiser)
    assert all(scale < 1 for scale in constraint.scales.values())


def test_parameters_may_be_added_to_the_optimiser_later() -> None:
    model = net()
    optimiser = sgd(model[2])
    constraint = MaxGain(model, gamma=0.01).attach(optimiser)
    one_step(model, optimiser)
    assert [scale < 1 for scale in constraint.scales.values()] == [False, True]
    optimiser.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    one_step(model, optimiser)
    assert constraint.scales["0"] < 1


def test_an_optimiser_that_evaluates_the_model_itself_is_measured_in_all_of_its_evaluations() -> None:
    model = net()
    optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    x = torch.randn(5, 6)
    seen: list[float] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        seen.append(largest_gain(F.linear(x, model[0].weight), x))
        return loss

    optimiser.step(closure)
    assert len(seen) > 1
    assert constraint.gains["0"] == pytest.approx(max(seen), rel=1e-5)
    assert all(scale < 1 for scale in constraint.scales.values())


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_a_learning_rate_schedule_may_be_made_before_or_after_attaching(scheduler_first: bool) -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma=0.01)
    if not scheduler_first:
        constraint.attach(optimiser)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
    if scheduler_first:
        constraint.attach(optimiser)
    for _ in range(3):
        grow(model)
        one_step(model, optimiser)
        scheduler.step()
        assert constraint.scales["0"] < 1
    assert optimiser.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_step_projects_for_those_who_update_weights_themselves() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1)
    model(torch.randn(5, 6)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    constraint.step()
    for name, scale in constraint.scales.items():
        assert scale < 1
        torch.testing.assert_close(model.state_dict()[f"{name}.weight"], before[f"{name}.weight"] * scale)


def test_counts_may_be_those_of_numpy() -> None:
    assert MaxGain(net(), every=np.int64(2)).every == 2


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm])
def test_a_default_device_of_the_users_changes_nothing(constrain: Any) -> None:
    """As ``torch.set_default_device("cuda")`` does; the meta device has no numbers, and shows whatever lands there."""

    def trained(within: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), OwnForward(12, 4))
        x, optimiser, constraint = torch.randn(5, 2, 6), sgd(model), constrain(model, 0.1)
        with within:
            constraint.attach(optimiser)
            for _ in range(3):
                model(x).square().mean().backward()
                optimiser.step()
            constraint.load_state_dict(constraint.state_dict())
            norms = operator_norms(model, x), operator_norms(model, x, p=1)
        return [*model.parameters(), *(torch.tensor(list(report.norms.values())) for report in norms)]

    assert all(map(torch.equal, trained(torch.device("meta")), trained(contextlib.nullcontext())))
