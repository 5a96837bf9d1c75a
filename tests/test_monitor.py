"""Watching gains: what the programs that draw curves are given, and when an alarm sounds."""

import logging
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from maxgain import MaxGain, MaxNorm
from maxgain.errors import MaxGainError, MeasurementWarning
from maxgain.monitor import ENOUGH, Alarm, Monitor, usual

INF = float("inf")


def two_layers(gamma: Any = INF) -> tuple[nn.Module, torch.optim.Optimizer, MaxGain]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, MaxGain(model, gamma).attach(optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
        monitor.log(step)


class Showing:
    """A constraint that shows the gains that a test wants it to."""

    def __init__(self, *names: str) -> None:
        self.bounds = dict.fromkeys(names, INF)
        self.scales = dict.fromkeys(names, 1.0)
        self.gains = dict.fromkeys(names, 1.0)


def alarms_of(gains: list[float], **options: Any) -> list[Alarm]:
    """The alarms that a layer with these gains sounds, one step after the other."""
    constraint, alarms = Showing("layer"), []
    monitor = Monitor(constraint, on_alarm=alarms.append, **options)  # type: ignore[arg-type]
    for step, gain in enumerate(gains):
        constraint.gains["layer"] = gain
        monitor.log(step)
    return alarms


# Writers.


def test_tensorboard_reads_back_the_gains_that_the_constraint_had(tmp_path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer, constraint = two_layers({"0": 0.5, "2": INF})
    seen = []
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        monitor = Monitor(constraint, writer)
        for step in range(4):
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
            monitor.log(step)
            seen.append((constraint.gains, constraint.scales))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == {"gain/0", "gain/2", "scale/0"}
    for name in ("0", "2"):
        events = read.Scalars(f"gain/{name}")
        assert [event.step for event in events] == [0, 1, 2, 3]
        assert [event.value for event in events] == pytest.approx([gains[name] for gains, _ in seen])
    assert [event.value for event in read.Scalars("scale/0")] == pytest.approx([scales["0"] for _, scales in seen])
    assert min(event.value for event in read.Scalars("scale/0")) < 1


def wandb_like(said: list[Any]) -> Any:
    def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        said.append((data, step))

    return SimpleNamespace(log=log)


def trackio_like(said: list[Any]) -> Any:
    def log(metrics: dict[str, Any], step: int | None = None) -> None:
        said.append((metrics, step))

    return SimpleNamespace(log=log)


def lightning_like(said: list[Any]) -> Any:
    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        said.append((metrics, step))

    return SimpleNamespace(log_metrics=log_metrics)


def a_function(said: list[Any]) -> Any:
    return lambda numbers, step: said.append((numbers, step))


@pytest.mark.parametrize("make", [wandb_like, trackio_like, lightning_like, a_function])
def test_every_writer_is_told_all_layers_at_once(make) -> None:
    said: list[Any] = []
    model, optimizer, constraint = two_layers()
    train(model, optimizer, Monitor(constraint, make(said)), steps=2)
    assert [step for _, step in said] == [0, 1]
    assert said[-1][0] == {f"gain/{name}": gain for name, gain in constraint.gains.items()}


def test_only_every_so_many_steps_are_logged() -> None:
    said: list[Any] = []
    model, optimizer, constraint = two_layers()
    train(model, optimizer, Monitor(constraint, a_function(said), every=3), steps=8)
    assert [step for _, step in said] == [0, 3, 6]


def test_a_layer_that_was_not_measured_yet_is_not_logged() -> None:
    said: list[Any] = []
    _, _, constraint = two_layers()
    Monitor(constraint, a_function(said)).log(0)
    assert said == [({}, 0)]


def test_constraints_on_weights_can_be_watched_too() -> None:
    said: list[Any] = []
    layer = nn.Linear(4, 2)
    constraint = MaxNorm(layer, 0.1)
    constraint.step()
    Monitor(constraint, a_function(said)).log(7)
    assert said[0][0]["gain/(itself)"] > 0.1
    assert said[0][0]["scale/(itself)"] < 1


def test_watching_changes_no_bit_of_the_training() -> None:
    trained = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = Monitor(MaxGain(model, INF).attach(optimizer)) if watched else SimpleNamespace(log=lambda step: None)
        train(model, optimizer, monitor, steps=5)  # type: ignore[arg-type]
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


# Alarms.


def test_a_gain_that_leaves_its_history_sounds_one_alarm_with_all_that_matters() -> None:
    assert alarms_of([1.0] * 20 + [2.5, 2.6, 2.7]) == [Alarm("layer", 2.5, 1.0, 20)]


def test_after_it_came_back_the_next_time_sounds_again() -> None:
    assert [alarm.step for alarm in alarms_of([1.0] * 20 + [3.0, 1.0, 3.0])] == [20, 22]


def test_growth_that_is_slow_beside_the_window_is_usual() -> None:
    slow = [math.exp(step / 100) for step in range(300)]
    assert not alarms_of(slow, window=50)
    assert alarms_of(slow, window=300)


def test_the_factor_decides_and_infinity_never_sounds() -> None:
    gains = [1.0] * 20 + [1.6, 1000.0]
    assert [alarm.step for alarm in alarms_of(gains, factor=1.5)] == [20]
    assert [alarm.step for alarm in alarms_of(gains)] == [21]
    assert not alarms_of(gains, factor=INF)


def test_what_came_before_there_was_a_history_is_no_alarm() -> None:
    assert not alarms_of([1.0] * (ENOUGH - 1) + [100.0])
    assert usual([1.0] * (ENOUGH - 1)) == INF


def test_steps_without_a_gain_are_no_part_of_the_history() -> None:
    assert [alarm.usual for alarm in alarms_of([1.0, math.nan] * ENOUGH + [5.0])] == [1.0]


def test_a_layer_that_begins_at_zero_sounds_an_alarm_that_can_be_read() -> None:
    (alarm,) = alarms_of([0.0] * ENOUGH + [3.0])
    assert str(alarm).startswith("step 10: the gain of layer 'layer' is 3, and was usually 0.")


def test_by_default_an_alarm_is_a_warning_that_names_layer_numbers_and_a_remedy() -> None:
    constraint = Showing("features.0", "head")
    monitor = Monitor(constraint)  # type: ignore[arg-type]
    for step in range(ENOUGH):
        monitor.log(step)
    constraint.gains["features.0"] = 4.0
    expected = r"step 10: the gain of layer 'features.0' is 4, 4.0 times its usual 1\. .*give it a bound"
    with pytest.warns(MeasurementWarning, match=expected) as caught:
        monitor.log(ENOUGH)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        monitor.log(ENOUGH + 1)


def test_a_network_that_diverges_is_noticed_before_its_loss_is_infinite() -> None:
    """A learning rate far too large for the second half of a run: the alarm comes while everything is still finite."""
    model, optimizer, constraint = two_layers()
    alarms: list[Alarm] = []
    monitor = Monitor(constraint, on_alarm=alarms.append)
    x, y = torch.randn(64, 6), torch.randn(64, 3)
    for step in range(60):
        if step == 30:
            optimizer.param_groups[0]["lr"] = 3.0
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        if not loss.isfinite():
            break
        loss.backward()
        optimizer.step()
        monitor.log(step)
    assert alarms
    assert 30 < alarms[0].step < step


# Mistakes.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every must be a whole number from 1 to .*, not 0"),
        ({"factor": 1.0}, "factor must be a number greater than 1"),
        ({"factor": math.nan}, "factor must be a number greater than 1"),
        ({"window": 3}, f"window must be a whole number from {ENOUGH} to .*, not 3"),
        ({"writer": 5}, "nothing can be written to int: give a TensorBoard SummaryWriter"),
        ({"writer": logging.getLogger()}, "nothing can be written to RootLogger: give a TensorBoard SummaryWriter"),
    ],
)
def test_mistakes_are_answered_in_words(options, said) -> None:
    with pytest.raises(MaxGainError, match=said):
        Monitor(Showing("layer"), **options)  # type: ignore[arg-type]
