"""Which histories of gains are an alarm, and which are not."""

import math

import pytest

from maxgain.alarms import Alarms

HEALTHY = [1.0, 1.3, 0.8] * 20


def alarms(series, jump=2.0, growth=4.0, warmup=0, dropped=None):
    """The alarms of one layer's gains, as (logged step, kind)."""
    alarms_of = Alarms(jump, growth, warmup)
    counts = dropped or [0] * len(series)
    found = [alarms_of.judge(step, {"a": g}, {"a": n}) for step, (g, n) in enumerate(zip(series, counts, strict=True))]
    return [(alarm.step, alarm.kind) for alarm in found if alarm]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (HEALTHY, []),
        ([*HEALTHY, 2.1], [(60, "jump")]),
        ([*HEALTHY, 1.9], []),
        ([*HEALTHY, *[9.0] * 9], [(60, "jump")]),  # once
        ([*HEALTHY, 9.0, *HEALTHY], [(60, "jump")]),  # one spike is no growth
        ([1.0, 5.0, 25.0], []),  # no past yet
        ([0.0] * 12 + [1.0], [(12, "jump")]),  # a layer that began at zero
        ([*HEALTHY, math.nan, 1.0], []),  # not measured
    ],
)
def test_jump(series, expected):
    assert alarms(series) == expected


def test_slow_growth_sounds_at_each_multiple_of_the_first_gains():
    series = [1.02**step for step in range(180)]
    found = alarms(series)
    assert [kind for _, kind in found] == ["growth"] * 2
    recent = [series[step - 10] for step, _ in found]
    assert recent[0] == pytest.approx(4 * series[5], rel=0.1)
    assert recent[1] == pytest.approx(16 * series[5], rel=0.1)


def test_warm_up_is_silent_and_no_part_of_the_past():
    growing = [1.2**step for step in range(30)]
    assert alarms([*growing, *[200.0] * 40], warmup=30) == []
    assert alarms(growing, warmup=math.inf) == []
    assert alarms([*growing, *[200.0] * 40], warmup=0) != []


def test_not_finite_sounds_at_once_and_once_while_it_lasts():
    dropped = [0, 3, 9, 9, 12]
    assert alarms([1.0] * 5, warmup=99, dropped=dropped) == [(1, "not finite"), (4, "not finite")]


def test_one_alarm_per_step_names_the_worst_layer_first():
    alarms_of = Alarms(2.0, 4.0, 0)
    for step in range(12):
        alarms_of.judge(step, dict.fromkeys("abcdef", 1.0), dict.fromkeys("abcdef", 0))
    jumped = dict(zip("abcdef", [3.0, 9.0, 1.0, 4.0, 5.0, 2.5], strict=True))
    alarm = alarms_of.judge(12, jumped, dict.fromkeys("abcdef", 0))
    assert (alarm.layer, alarm.gain, alarm.before, alarm.others) == ("b", 9.0, 1.0, ("e", "d", "a", "f"))
    assert str(alarm) == "step 12: the gain of layer 'b' jumped from 1 to 9 (9.0 times); also 'e', 'd', 'a', 'f'."
    worse = alarms_of.judge(13, jumped, dict.fromkeys("abcdef", 0) | {"c": 1})
    assert (worse.kind, worse.layer, worse.others) == ("not finite", "c", ())
