"""watch(): what is measured, when a step is over, where numbers go, and what stops a run."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from maxgain import Lipschitz, MaxGain, watch
from maxgain.errors import MaxGainError, MeasurementWarning
from maxgain.integrations.callback import GainCallback
from maxgain.watching import Watch
from nets import StopError, stop

INF = float("inf")


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def batches(count=1):
    torch.manual_seed(2)
    return [torch.randn(16, 4) for _ in range(count)]


def fit(model, watching=None, steps=17, spoil=None):
    """Train; ``spoil(step)`` replaces a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, x in enumerate(batches(steps)):
        x = spoil(step, x) if spoil else x
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if watching:
            watching.log(step)
    return model


class Kept(list):
    def __call__(self, numbers, step):
        self.append((step, numbers))


def test_watching_changes_no_bit_of_the_training():
    watched, plain = net(), net()
    fit(watched, watch(watched))
    fit(plain)
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))


def test_every_eighth_step_is_logged_with_the_worst_layer_under_its_name():
    model, kept = net(), Kept()
    watching = watch(model, to=kept)
    fit(model, watching)
    assert [step for step, _ in kept] == [0, 8, 16]
    gains = watching.constraint.gains
    worst = max(gains, key=gains.get)
    expected = {"gain/worst": gains[worst], "gain/median": sorted(gains.values())[1], f"gain/{worst}": gains[worst]}
    assert kept[-1][1] == watching.numbers == expected


def test_the_largest_of_accumulated_batches_counts():
    model, kept = net(), Kept()
    watching = watch(model, every=1, to=kept)
    singly = []
    for x in batches(3):
        model(x).sum().backward()
        watching.log(0)
        singly.append(kept.pop()[1]["gain/worst"])
    for x in batches(3):
        model(x).sum().backward()
    watching.log(1)
    assert kept[-1][1]["gain/worst"] == max(singly)


def on_a_gpu(is_captured):
    """What is logged of nine steps, the last six of which may be replays."""
    stream, kept = torch.cuda.Stream(), Kept()
    with torch.cuda.stream(stream):
        model, x = net().cuda(), torch.zeros(16, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        watching = watch(model, every=2, to=kept)

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        take = step
        for number, batch in enumerate(batches(9)):
            x.copy_(batch)
            if is_captured and number == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
                take = graph.replay
            take()
            watching.log(number)
        watching.close()
    return kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_captured_steps_show_the_same_too():
    eager, captured = on_a_gpu(False), on_a_gpu(True)
    assert [step for step, _ in captured] == [0, 2, 4, 6, 8]
    for (_, one), (_, two) in zip(eager, captured, strict=True):
        assert two == pytest.approx(one, rel=1e-4)


def test_a_bounded_constraint_is_watched_and_steps_once():
    model, kept = net(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    constraint = MaxGain(model, gamma=0.3).attach(optimizer)
    watching = watch(constraint, every=1, to=kept)
    for step, x in enumerate(batches(5)):
        if step == 3:
            watching.close()
            assert constraint._hooks, "it belongs to the user"
            constraint.detach()
        model(x).square().mean().backward()
        optimizer.step()
        watching.log(step)
    assert kept[0][1]["scale/smallest"] == pytest.approx(0.3 / kept[0][1]["gain/worst"])
    assert [step for step, _ in kept] == [0, 1, 2], "nothing old is written again"


def test_close_leaves_a_plain_module_behind_and_ends_the_curves():
    model, kept = net(), Kept()
    watching = watch(model, every=1, to=kept, log="all", parts={"0": ("q", "k")})
    fit(model, watching, steps=2)
    watching.close()
    with pytest.warns(MeasurementWarning, match=r"closed.*Make another"):
        fit(model, watching, steps=2)
    assert len(kept) == 2
    assert {"gain/0[q]", "gain/0[k]", "gain/2", "gain/4"} < kept[0][1].keys()
    assert not any(module._forward_hooks for module in model.modules())


# What is not measured has no numbers, and is named.


def test_a_layer_that_is_measured_no_more_is_named_and_its_last_gain_is_not_written_again():
    model, kept = net(), Kept()
    watching = watch(model, every=1, to=kept, log="all")
    fit(model, watching, steps=3)
    model[2].eval()
    model[4] = nn.Linear(8, 2)
    said = r"Not measured: '2' \(eval mode\)\..*Not measured: '4' \(no longer in the model\)"
    with pytest.warns(MeasurementWarning, match=said) as caught:
        fit(model, watching, steps=3)
    assert len(caught) == 1
    assert [[name for name in numbers if name[-1].isdigit()] for _, numbers in kept] == [
        *[["gain/0", "gain/2", "gain/4"]] * 3, *[["gain/0"]] * 3
    ]  # fmt: skip


def test_a_model_that_is_not_measured_at_all_is_no_silent_gap():
    model, kept = net().eval(), Kept()
    with pytest.warns(MeasurementWarning, match=r"'0', '2', '4' \(eval mode\)"):
        fit(model, watch(model, to=kept))
    assert kept == []
    with pytest.warns(MeasurementWarning, match="no training forward"):
        watch(net()).log(0)


@pytest.mark.filterwarnings("error")
def test_a_layer_that_a_step_does_not_need_is_a_silent_gap():
    model, kept = net(), Kept()
    watching = watch(model, every=1, to=kept, log="all")
    for step, x in enumerate(batches(4)):
        (model if step % 2 else model[:3])(x).sum().backward()
        watching.log(step)
    assert ["gain/4" in numbers for _, numbers in kept] == [False, True] * 2


# Where numbers go.


def test_runs_and_loggers():
    for name in ("log", "log_metrics"):  # of trackio, of Lightning
        model, kept = net(), Kept()
        fit(model, watch(model, to=SimpleNamespace(**{name: lambda numbers, step, kept=kept: kept(numbers, step)})), 9)
        assert [step for step, _ in kept] == [0, 8]
        assert kept[0][1]["gain/worst"] > 0


def test_weights_and_biases_gets_an_axis_of_its_own_because_it_drops_earlier_steps():
    class Run:
        axes, logged = {}, []

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

        def log(self, data, step=None, commit=None):
            assert step is None
            self.logged.append(data)

    model, run = net(), Run()
    fit(model, watch(model, to=run), steps=9)
    assert [row[run.axes["gain/*"]] for row in run.logged] == [0, 8]
    assert run.logged[0]["gain/worst"] > 0


def test_json_lines(tmp_path):
    watching = watch(nn.Linear(4, 4), every=1, to=tmp_path / "gains.jsonl")
    watching.constraint.model(torch.ones(2, 4))
    watching.log(torch.tensor(0))  # as any whole number
    watching.constraint.model(torch.full((2, 4), math.nan))
    with pytest.warns(MeasurementWarning):
        watching.log(1)
    first, last = map(json.loads, (tmp_path / "gains.jsonl").read_text().splitlines())
    assert first["step"] == 0
    assert first["gain/worst"] > 0
    assert last["gain/worst"] is None


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = net()
    with SummaryWriter(tmp_path) as writer:
        fit(model, watch(model, to=writer))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("gain/worst")] == [0, 8, 16]


WRONG = [
    {"to": object()}, {"to": lambda numbers: None}, {"to": logging.getLogger("x")}, {"log": "best"}, {"jump": 1.0},
    {"jump": None}, {"warmup": None}, {"on_alarm": "stop"}, {"on_alarm": lambda: None}, {"gamma": 2.0},
    {"growth": math.nan}, {"every": 0}, {"every": True}, {"parts": {"0": "qk"}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(MaxGainError):
        watch(net(), **wrong)


def test_misspelt_arguments_and_those_of_a_constraint_that_exists_are_refused():
    with pytest.raises(TypeError, match="'evry'"):
        watch(net(), evry=2)
    with pytest.raises(MaxGainError, match="pass p to it"):
        watch(MaxGain(net(), INF), p=1)


# Alarms.


def spike(step, x):
    return x * math.nan if step == 5 else x


def test_a_jump_names_its_layer_and_may_stop_the_run():
    model = net()

    def grow(step, x):
        model[2].weight.data.mul_(10.0 if step >= 20 else 1.0)
        return x

    with pytest.raises(StopError) as stopped:
        fit(model, watch(model, every=1, warmup=0, on_alarm=stop), 40, spoil=grow)
    alarm = stopped.value.args[0]
    assert (alarm.kind, alarm.layer, alarm.step) == ("jump", "2", 20)
    assert alarm.times > 5


@pytest.mark.filterwarnings("ignore:.*that are not finite")  # the constraint itself says so, too
def test_what_is_not_finite_is_an_alarm_even_between_logged_steps_and_in_warm_up():
    model, heard = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = watch(MaxGain(model, INF).attach(optimizer), every=8, on_alarm=heard.append)
    for step, x in enumerate(batches(10)):
        model(spike(step, x)).sum()
        optimizer.step()
        watching.log(step)
    (alarm,) = heard
    assert (alarm.step, alarm.kind, alarm.layer, alarm.others) == (8, "not finite", "0", ("2", "4"))


@pytest.mark.filterwarnings("ignore:.*that are not finite")
def test_what_was_not_finite_before_the_watch_began_is_no_alarm():
    model, heard = net(), []
    constraint = MaxGain(model, INF).attach(torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.full((2, 4), math.nan)).sum()
    (optimizer,) = constraint._attached
    optimizer.step()
    watching = watch(constraint, every=1, on_alarm=heard.append)
    for step, x in enumerate(batches(3)):
        model(x).sum()
        optimizer.step()
        watching.log(step)
    assert not heard


def test_an_alarm_warns_at_the_users_line():
    model = net()
    with pytest.warns(MeasurementWarning, match="layer '0' has inputs or outputs that are not finite") as caught:
        fit(model, watch(model, every=1), 6, spoil=spike)
    assert any(warning.filename == __file__ for warning in caught)


@pytest.fixture
def late(monkeypatch):
    """Have the numbers of a step arrive as late as those of a GPU may."""
    now, never = Watch._snapshot, SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    monkeypatch.setattr(Watch, "_snapshot", lambda watching: (now(watching)[0], never))


def test_numbers_that_arrive_late_are_those_of_their_step(late):
    model, kept = net(), Kept()
    watching = watch(model, to=kept)
    fit(model, watching)
    assert [step for step, _ in kept] == [0, 8]
    watching.close()
    assert [step for step, _ in kept] == [0, 8, 16]


@pytest.mark.filterwarnings("ignore:.*that are not finite")
@pytest.mark.parametrize("is_callback", [False, True])
def test_an_alarm_that_is_late_and_raises_leaves_a_plain_module(late, is_callback):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_callback:
        callback = GainCallback(on_alarm=stop)
        callback.begin(model, [optimizer], is_writing=True)
        watching, end = callback.watching, callback.end
    else:
        watching = watch(model, on_alarm=stop)
        end = watching.close
    model(batches()[0] * math.nan)
    optimizer.step()
    watching.log(0)
    with pytest.raises(StopError):
        end()
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_post_hooks


# Padding.


def test_masked_tokens_do_not_count():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1.0, 1.0, 1.0, 50.0])))
    x = torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(2, 3, 4).clone()
    x[1, 2] = torch.tensor([0.0, 0.0, 0.0, 1.0])  # the padded token, on which the layer amplifies
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    watching = watch(model, every=1)
    for step, (chosen, expected) in enumerate([(None, 50.0), (mask, 1.0)]):
        watching.mask = chosen
        model(x)
        watching.log(step)
        assert watching.numbers["gain/worst"] == pytest.approx(expected)
    watching.mask = mask[:, :2]
    model(x)
    with pytest.raises(MaxGainError, match=r"no layer took the mask of shape \(2, 2\)"):
        watching.log(2)
    with pytest.raises(MaxGainError, match="not list"):
        watching.mask = [[1, 1, 1], [1, 1, 0]]


def test_a_mask_needs_instances_that_are_tokens():
    model = net()
    for constraint in (MaxGain(model, INF, instance="sample"), Lipschitz(model, 2.0)):
        with pytest.raises(MaxGainError, match="tokens"):
            watch(constraint).mask = torch.ones(16)


def test_a_mask_for_each_batch_goes_with_steps_that_measure_nothing():
    model = net()
    watching = watch(model, every=3)
    for step, x in enumerate(batches(7)):
        watching.mask = torch.ones(16)
        model(x)
        watching.log(step)
    watching.mask = torch.ones(15)
    for step in (7, 8):  # these measure nothing
        model(x)
        watching.log(step)
    model(x)
    with pytest.raises(MaxGainError, match="no layer took the mask"):
        watching.log(9)


def test_compiled_forwards_refuse_a_mask():
    model = net()
    forward = torch.compile(model, backend="aot_eager")
    watching = watch(model, every=1)
    watching.mask = torch.ones(16)
    forward(batches()[0])
    with pytest.raises(MaxGainError, match="compiled"):
        watching.log(0)
