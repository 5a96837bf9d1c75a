"""MaxGain whose projections weaken with the learning rate, against a twin that does the same in the plainest way."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import MaxGain
from maxgain.errors import MaxGainError

GAMMA = 0.4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def batch(step: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step))


def learn(model: nn.Module, optimiser: torch.optim.Optimizer, rate: float, step: int) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad()
    (5 * model(batch(step)) - 1).square().mean().backward()
    optimiser.step()


def twin(rates: list[float], gamma: float = GAMMA) -> nn.Sequential:
    """Gains by explicit products in float64, powers by Python's own arithmetic."""
    model = net()
    optimiser = torch.optim.Adam(model.parameters())
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for step, rate in enumerate(rates):
        x, gains = batch(step), []
        with torch.no_grad():
            for layer in layers:
                gains.append(largest_gain(x.double() @ layer.weight.double().T, x))
                x = layer(x).relu()
        learn(model, optimiser, rate, step)
        strength = rate / max(rates[: step + 1])
        with torch.no_grad():
            for layer, gain in zip(layers, gains, strict=True):
                layer.weight /= max(1.0, gain / gamma) ** strength
    return model


def constrained(rates: list[float], **options: Any) -> tuple[nn.Sequential, MaxGain]:
    model = net()
    optimiser = torch.optim.Adam(model.parameters())
    constraint = MaxGain(model, GAMMA, **options).attach(optimiser)
    for step, rate in enumerate(rates):
        learn(model, optimiser, rate, step)
    return model, constraint


SCHEDULES = {
    "constant": [0.01] * 8,
    "falls": [0.01] * 4 + [0.001] * 4 + [0.0001] * 4,
    "rises first": [0.001, 0.003, 0.01, 0.01, 0.003, 0.001],
    "ends at zero": [0.01, 0.01, 0.005, 0.0],
}


@pytest.mark.parametrize("rates", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_an_excess_is_divided_away_to_the_power_of_the_rate_over_its_peak(rates: list[float]) -> None:
    model, _ = constrained(rates, strength="rate")
    for one, other in zip(model.parameters(), twin(rates).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_at_a_rate_that_never_falls_it_is_the_paper_bit_for_bit() -> None:
    for rates in ([0.01] * 6, [0.001, 0.002, 0.01]):
        one, other = constrained(rates, strength="rate")[0], constrained(rates)[0]
        assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_at_a_low_rate_it_does_not_shrink_weights_as_the_full_strength_does() -> None:
    left = {}
    for strength in ("full", "rate"):
        before, after = (constrained(rates, strength=strength)[0] for rates in ([0.01] * 20, [0.01] * 20 + [1e-6] * 40))
        left[strength] = [float(after[i].weight.detach().norm() / before[i].weight.detach().norm()) for i in (0, 2, 4)]
    assert max(left["full"]) < 0.99, "the ratchet"
    assert min(left["rate"]) > 0.999


def test_every_parameter_group_has_its_own_rate() -> None:
    model = net()
    optimiser = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters(), "lr": 0.1}], lr=0.1
    )
    constraint = MaxGain(model, GAMMA, strength="rate").attach(optimiser)
    model(batch(0)).square().mean().backward()
    optimiser.step()
    optimiser.param_groups[1]["lr"] = 0.01
    model(batch(1)).square().mean().backward()
    optimiser.step()
    for name, gain in constraint.gains.items():
        expected = max(1.0, gain / GAMMA) ** (1.0 if name == "0" else 0.1)
        assert constraint.scales[name] == pytest.approx(1 / expected, rel=1e-5)


def test_a_rate_that_is_a_tensor_is_followed_where_it_is_changed_in_place() -> None:
    model, rate = net(), torch.tensor(0.1)
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    constraint = MaxGain(model, GAMMA, strength="rate").attach(optimiser)
    for value in (0.1, 0.01):
        rate.fill_(value)
        optimiser.zero_grad()
        model(batch(0)).square().mean().backward()
        optimiser.step()
    for name, gain in constraint.gains.items():
        assert constraint.scales[name] == pytest.approx(max(1.0, gain / GAMMA) ** -0.1, rel=1e-5)


def test_a_run_that_is_resumed_remembers_the_largest_rate() -> None:
    rates = SCHEDULES["falls"]
    model, constraint = constrained(rates[:5], strength="rate")
    optimiser = next(iter(constraint._optimizers))
    other = copy.deepcopy(model)
    resumed = torch.optim.Adam(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))  # or both would share its tensors
    again = MaxGain(other, GAMMA, strength="rate").attach(resumed)
    again.load_state_dict(constraint.state_dict())
    for step in range(5, len(rates)):
        learn(model, optimiser, rates[step], step)
        learn(other, resumed, rates[step], step)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_without_an_optimiser_there_is_no_rate_and_projections_are_full() -> None:
    model = net()
    constraint = MaxGain(model, GAMMA, strength="rate")
    model(batch(0))
    constraint.step()
    for name, gain in constraint.gains.items():
        assert constraint.scales[name] == pytest.approx(1 / max(1.0, gain / GAMMA))


class Adaptive(torch.optim.Optimizer):
    """As Adafactor with steps of its own choice."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_optimiser_without_a_learning_rate_is_named() -> None:
    model = net()
    optimiser = Adaptive(model.parameters())
    MaxGain(model, GAMMA, strength="rate").attach(optimiser)
    model(batch(0)).sum().backward()
    with pytest.raises(MaxGainError, match=r"^strength='rate' follows .* None in this Adaptive: use strength='full'"):
        optimiser.step()


def test_a_strength_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(MaxGainError, match="strength must be 'full' or 'rate', not 'half'"):
        MaxGain(net(), GAMMA, strength="half")  # type: ignore[arg-type]


def test_the_rate_is_followed_after_the_optimiser_took_up_a_state() -> None:
    """Loading a state gives an optimiser new parameter groups; those are the ones whose rates count."""
    rates = [0.03, 0.03, 0.003, 0.0003]
    model = net()
    optimiser = torch.optim.Adam(model.parameters())
    MaxGain(model, GAMMA, strength="rate").attach(optimiser)
    for step, rate in enumerate(rates):
        learn(model, optimiser, rate, step)
        optimiser.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for ours, theirs in zip(model.parameters(), twin(rates).parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of_rate", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_model", [torch.float32, torch.float64, torch.bfloat16])
def test_a_learning_rate_may_be_a_tensor_of_any_type(of_model: torch.dtype, of_rate: torch.dtype) -> None:
    model = nn.Linear(4, 2, dtype=of_model)
    rate = torch.tensor(0.5, dtype=of_rate)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    constraint = MaxGain(model, 0.01, strength="rate").attach(optimiser)
    for value in (0.5, 0.0):
        rate.fill_(value)
        optimiser.zero_grad()
        model(torch.randn(5, 4, dtype=of_model)).sum().backward()
        optimiser.step()
        assert (constraint.scales[""] < 1) == (value > 0)
