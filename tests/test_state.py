"""A constraint's state: what it has measured and done so far, saved and taken up again."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.errors import MeasurementWarning, StateError
from maxgain.functional import record
from maxgain.observe import RunningMaximum, Tally
from small_net import each_measure, net, one_step


@each_measure
def test_promise_14_a_run_goes_on_from_its_state_to_the_same_bits(measure: Any) -> None:
    data = torch.randn(8, 5, 6)

    def start() -> tuple[nn.Module, torch.optim.Optimizer, MaxGain]:
        model = net()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimiser, MaxGain(model, gamma=0.3, measure=measure).attach(optimiser)

    straight = start()
    for x in data:
        one_step(straight[0], straight[1], x)
    first = start()
    for x in data[:4]:
        one_step(first[0], first[1], x)
    saved = [copy.deepcopy(part.state_dict()) for part in first]
    second = start()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)  # type: ignore[arg-type]
    assert second[2].gains == first[2].gains
    assert second[2].scales == first[2].scales
    for x in data[4:]:
        one_step(second[0], second[1], x)
    assert all(map(torch.equal, second[0].parameters(), straight[0].parameters()))
    assert second[2].gains == straight[2].gains


def test_measurements_of_an_unfinished_step_are_part_of_the_state() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1)
    model(torch.randn(5, 6))
    twin = net()
    resumed = MaxGain(twin, gamma=0.1)
    resumed.load_state_dict(constraint.state_dict())
    constraint.step()
    resumed.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert resumed.scales["0"] < 1


def test_a_state_is_taken_up_where_the_observers_of_every_device_look() -> None:
    here, there = torch.device("cpu"), torch.device("cpu", 0)  # one device by two names: as good as two
    tally = Tally(2, torch.float32, 2.0, "auto")
    own, other = tally.on(here), tally.on(there)
    record(other.maxima, other.dropped, 1, torch.tensor([5.0, torch.inf]))
    tally.load(here, torch.tensor([1.0, 2.0]), torch.tensor([3, 4]))
    assert [one.tolist() for one in tally.over_devices(here)] == [[1.0, 2.0], [3, 4]]
    record(own.maxima, own.dropped, 0, torch.tensor([6.0]))
    record(other.maxima, other.dropped, 1, torch.tensor([7.0, torch.inf]))
    assert [one.tolist() for one in tally.over_devices(here)] == [[6.0, 7.0], [3, 5]]


def test_what_a_model_has_left_on_another_device_counts_once_and_is_not_asked_for_again() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1)
    there = torch.device("cpu", 0)  # where the model has been before, as good as another one
    left = constraint._tally.on(there)
    record(left.maxima, left.dropped, 1, torch.tensor([7.0, torch.inf]))
    model(torch.zeros(5, 6))
    with pytest.warns(MeasurementWarning, match="1 instances so far had a gain that is not finite"):
        constraint.step()
    assert constraint.gains["2"] == 7
    assert constraint.dropped == {"0": 0, "2": 1}
    assert list(constraint._tally.by_device) == [torch.device("cpu")]
    model(torch.zeros(5, 6))
    constraint.step()
    assert constraint.gains["2"] < 7


@pytest.mark.parametrize(("weight", "recorded_on"), [("cuda:1", "cuda:1"), ("cpu", "cuda:0"), ("meta", "cuda:0")])
def test_a_layer_that_is_not_trained_is_not_left_behind_on_another_device(weight: str, recorded_on: str) -> None:
    places = {name: SimpleNamespace(maxima=SimpleNamespace(device=torch.device(name))) for name in ("cuda:0", "cuda:1")}
    maximum = object.__new__(RunningMaximum)
    maximum.layer = SimpleNamespace(weight=SimpleNamespace(device=torch.device(weight)))  # type: ignore[assignment]
    maximum.tally = SimpleNamespace(on=lambda device: places[str(device)])  # type: ignore[assignment]
    maximum.entries = places["cuda:0"]  # type: ignore[assignment]
    maximum.follow()
    assert maximum.entries is places[recorded_on]  # type: ignore[comparison-overlap]


def test_a_state_is_tensors_alone_and_a_copy() -> None:
    constraint = MaxGain(net())
    state = constraint.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    before = {name: value.clone() for name, value in state.items()}
    constraint.model(torch.randn(5, 6))
    constraint.step()
    for name, value in state.items():
        torch.testing.assert_close(value, before[name], equal_nan=True)


def test_what_was_dropped_before_a_resume_is_not_warned_about_again() -> None:
    model = net()
    constraint = MaxGain(model)
    x = torch.ones(2, 6)
    x[0] = math.nan
    model(x)
    with pytest.warns(MeasurementWarning):
        constraint.step()
    resumed = MaxGain(net())
    resumed.load_state_dict(constraint.state_dict())
    assert resumed.dropped == constraint.dropped == {"0": 1, "2": 1}
    resumed.model(torch.ones(2, 6))
    resumed.step()


def test_a_state_of_another_constraint_is_refused() -> None:
    state = MaxGain(net()).state_dict()
    with pytest.raises(StateError, match=r"the state belongs to another MaxGain, .*: it has '2\.dropped'"):
        MaxGain(net(), include="0").load_state_dict(state)
    with pytest.raises(StateError, match=r"the state belongs to another MaxGain, .*: it lacks '2\.dropped'"):
        MaxGain(net()).load_state_dict(MaxGain(net(), include="0").state_dict())


def test_gains_are_nan_until_something_was_measured() -> None:
    model = net()
    constraint = MaxGain(model)
    assert all(map(math.isnan, constraint.gains.values()))
    assert constraint.scales == {"0": 1.0, "2": 1.0}
    model(torch.randn(5, 6))
    since = constraint.gains
    assert all(gain > 0 for gain in since.values())
    constraint.step()
    assert constraint.gains == since


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("0.maximum", torch.tensor(1e300, dtype=torch.float64), "is not finite"),  # in the float32 of this model
        ("0.dropped", torch.tensor(-1), "counts below zero"),
        ("0.resting", torch.tensor(-5), "counts below zero"),
    ],
)
def test_a_state_that_this_model_cannot_hold_is_refused(name: str, value: Tensor, said: str) -> None:
    constraint = MaxGain(net(), every=2)
    with pytest.raises(StateError, match=f"the state's '{name}' {said}"):
        constraint.load_state_dict(constraint.state_dict() | {name: value})
