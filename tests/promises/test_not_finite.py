"""Promise 7: values that are not finite never reach a weight."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from explicit import bits, largest_gain
from maxgain import MaxGain
from maxgain.errors import MeasurementWarning


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_promise_07_instances_that_are_not_finite_are_dropped_counted_and_warned_about(value: float, p: float) -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(8, 6)
    x[2, 3] = x[5, 0] = value
    good = [row for row in range(8) if row not in (2, 5)]
    expected = largest_gain(x[good] @ layer.weight.T, x[good], p)
    before = layer.weight.detach().clone()
    constraint = MaxGain(layer, gamma=0.1, p=p)
    layer(x)
    with pytest.warns(MeasurementWarning, match="2 instances so far had a gain that is not finite"):
        constraint.step()
    assert constraint.dropped == {"": 2}
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(layer.weight, before * (0.1 / expected))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_promise_07_a_batch_without_a_finite_instance_changes_no_weight(value: float) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    before = [bits(parameter) for parameter in model.parameters()]
    constraint = MaxGain(model, gamma=0.01)
    model(torch.full((2, 2, 4, 4), value))
    with pytest.warns(MeasurementWarning):
        constraint.step()
    assert all(map(torch.equal, before, map(bits, model.parameters())))
    assert constraint.dropped == {"0": 2, "1": 2, "3": 2}


def test_promise_07_what_was_warned_about_once_is_not_warned_about_again() -> None:
    layer = nn.Linear(2, 2)
    constraint = MaxGain(layer)
    layer(torch.tensor([[math.nan, 1.0], [1.0, 1.0]]))
    with pytest.warns(MeasurementWarning):
        constraint.step()
    layer(torch.ones(2, 2))
    constraint.step()
    assert constraint.gains[""] > 0
    layer(torch.tensor([[math.inf, 1.0]] * 9))
    with pytest.warns(MeasurementWarning, match="10 instances"):
        constraint.gains


def test_promise_07_an_accelerator_is_asked_for_its_counts_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of an accelerator, walked on the CPU: a look tells what the look before it asked for."""
    model = nn.Linear(3, 2)
    constraint = MaxGain(model)
    monkeypatch.setattr("maxgain.gain.STEPS_BETWEEN_LOOKS", 2)

    def look() -> None:
        # The counts lie on the host, but the constraint takes it for an accelerator.
        counts = constraint._tally.on(torch.device("cpu")).dropped.clone()
        elsewhere = SimpleNamespace(device=torch.device("meta"), is_cuda=False, to=lambda device, non_blocking: counts)
        constraint._look_at(elsewhere)  # type: ignore[arg-type]

    look()
    model(torch.full((4, 3), math.inf))
    look()
    look()  # asks
    look()
    with pytest.warns(MeasurementWarning, match="4 instances so far"):
        look()
