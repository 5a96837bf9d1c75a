"""Promise 8 of the design, steps that GradScaler skipped, and what promise 12 says of autocast."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain
from small_net import each_measure, grow, net

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}
each_optimiser = pytest.mark.parametrize("make_optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())


class Training:
    """A loop under GradScaler whose loss can be made to overflow."""

    def __init__(
        self, make_optimiser: Callable[[Any], torch.optim.Optimizer], measure: Any = "stale", every: int = 1
    ) -> None:
        self.model = net()
        self.optimiser = make_optimiser(self.model.parameters())
        self.constraint = MaxGain(self.model, gamma=0.1, measure=measure, every=every).attach(self.optimiser)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self, x: Tensor, overflow: bool = False, clip: bool = False) -> None:
        self.optimiser.zero_grad()
        self.scaler.scale(self.model(x).square().mean() * (math.inf if overflow else 1.0)).backward()
        if clip:
            self.scaler.unscale_(self.optimiser)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimiser)
        self.scaler.update()

    def steepest_input(self) -> Tensor:
        """The input of the largest gain that the first layer has: if it counted, one would see it."""
        return torch.linalg.svd(self.model[0].weight.detach()).Vh[:1]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@each_optimiser
@each_measure
@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled first"])
def test_promise_08_a_skipped_step_is_as_if_it_never_was(
    make_optimiser: Callable[[Any], torch.optim.Optimizer], measure: Any, clip: bool
) -> None:
    first, last = torch.randn(2, 5, 6)
    skipping, plain = Training(make_optimiser, measure), Training(make_optimiser, measure)
    for training in (skipping, plain):
        training.step(first, clip=clip)
        grow(training.model)

    before, gains = skipping.weights(), skipping.constraint.gains
    skipping.step(skipping.steepest_input(), overflow=True, clip=clip)
    assert skipping.scaler.get_scale() == 512.0, "the step was to be skipped"
    assert all(map(torch.equal, skipping.weights(), before))
    assert skipping.constraint.gains == gains

    skipping.step(last, clip=clip)
    plain.step(last, clip=clip)
    assert skipping.constraint.gains == plain.constraint.gains
    assert skipping.constraint.scales == plain.constraint.scales
    assert all(map(torch.equal, skipping.weights(), plain.weights()))
    assert all(scale < 1 for scale in plain.constraint.scales.values())


@each_optimiser
def test_promise_08_a_skipped_step_is_not_counted_where_every_second_step_projects(
    make_optimiser: Callable[[Any], torch.optim.Optimizer],
) -> None:
    skipping, plain = Training(make_optimiser, every=2), Training(make_optimiser, every=2)
    for x in torch.randn(5, 5, 6):
        for training in (skipping, plain):
            training.step(x)
        assert skipping.constraint.scales == plain.constraint.scales
        assert all(map(torch.equal, skipping.weights(), plain.weights()))
        skipping.step(skipping.steepest_input(), overflow=True)


@each_optimiser
def test_promise_08_the_very_first_step_may_be_skipped(make_optimiser: Callable[[Any], torch.optim.Optimizer]) -> None:
    training = Training(make_optimiser)
    training.step(torch.randn(5, 6), overflow=True)
    assert all(math.isnan(gain) for gain in training.constraint.gains.values())
    assert training.constraint.scales == {"0": 1.0, "2": 1.0}


@each_optimiser
def test_promise_08_one_of_two_optimisers_skips(make_optimiser: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = net()
    one, other = make_optimiser(model[0].parameters()), make_optimiser(model[2].parameters())
    constraint = MaxGain(model, gamma=0.1).attach(one).attach(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.randn(5, 6)).sum()).backward()
    assert model[0].weight.grad is not None
    model[0].weight.grad.fill_(math.inf)
    before = model[0].weight.detach().clone()
    seen = constraint.gains
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    assert torch.equal(model[0].weight, before)
    assert math.isnan(constraint.gains["0"])
    assert constraint.gains["2"] == seen["2"]
    assert constraint.scales["2"] < 1


def test_promise_08_a_skipped_step_of_a_wrapper_is_a_skipped_step() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self) -> None:
            self.optimizer.step()

    model, scaler = nn.Linear(6, 3), torch.amp.GradScaler("cpu")
    optimiser: Any = Wrapper(torch.optim.SGD(model.parameters(), lr=0.0))
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    for factor in (1.0, float("inf")):
        scaler.scale(model(torch.randn(4, 6)).sum() * factor).backward()
        scaler.step(optimiser)
        scaler.update()
    gains = constraint.gains
    with torch.no_grad():
        model.weight.zero_()
    model(torch.randn(4, 6))
    assert constraint.gains[""] < 1e-6 < gains[""]  # nothing of the skipped batch is left


def test_promise_08_a_scaler_that_is_switched_off_steps_always() -> None:
    training = Training(OPTIMISERS["sgd"])
    training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.step(torch.randn(5, 6))
    assert all(scale < 1 for scale in training.constraint.scales.values())


def test_promise_08_somebody_elses_wrapper_around_the_scaler_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torch.amp.GradScaler.step
    while hasattr(theirs, "__wrapped__"):  # as torch made it
        theirs = theirs.__wrapped__
    monkeypatch.setattr(torch.amp.GradScaler, "step", functools.wraps(theirs)(lambda *args: theirs(*args)))
    training = Training(OPTIMISERS["sgd"])
    training.step(torch.randn(5, 6))
    gains = training.constraint.gains
    training.step(training.steepest_input(), overflow=True)
    assert training.constraint.gains == gains


def test_promise_08_paused_measurements_outlive_a_skipped_step() -> None:
    training = Training(OPTIMISERS["sgd"])
    training.model(torch.randn(5, 6))
    seen = training.constraint.gains
    with training.constraint.paused():
        training.step(torch.randn(5, 6), overflow=True)
    assert training.constraint.gains == seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_measure
def test_promise_12_under_autocast_the_gains_are_those_of_the_weights(dtype: torch.dtype, measure: Any) -> None:
    def train(autocast: bool) -> MaxGain:
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5)
        )
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
        constraint = MaxGain(model, gamma=0.3, measure=measure).attach(optimiser)
        with torch.autocast("cpu", dtype, enabled=autocast):
            model(torch.randn(4, 3, 8, 8)).float().square().mean().backward()
        optimiser.step()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return constraint

    low, full = train(autocast=True), train(autocast=False)
    assert low.gains == pytest.approx(full.gains, rel=0.01)
    assert low.scales == pytest.approx(full.scales, rel=0.01)
    if measure == "stale":
        assert low.gains != full.gains, "autocast was to round something"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e-4, 1e-6, 1e-8])
def test_promise_02_what_autocast_rounds_off_a_bias_is_no_gain(dtype: torch.dtype, magnitude: float) -> None:
    layer = nn.Linear(64, 64)
    nn.init.orthogonal_(layer.weight)  # every gain is 1
    nn.init.normal_(layer.bias, std=0.5)
    constraint = MaxGain(layer)
    with torch.autocast("cpu", dtype):
        layer(torch.randn(16, 64) * magnitude)
    assert constraint.gains[""] <= 2.0, "what is left of Wx once it was added to a bias is at most twice as large"


@each_measure
def test_promise_12_a_bfloat16_model_trains(measure: Any) -> None:
    model = net().bfloat16()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    constraint = MaxGain(model, gamma=0.5, measure=measure).attach(optimiser)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            x = torch.randn(7, 6)
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(0 < gain < 1 for gain in constraint.gains.values())
