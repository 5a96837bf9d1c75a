"""How long it will take: the arithmetic is counted right, and somebody who would wait for hours is told before."""

import math

import pytest
import torch
from torch import nn

from maxgain import MaxGain
from maxgain.study import cost
from maxgain.study.cli import app
from maxgain.study.models import NETWORKS


def test_the_arithmetic_of_a_forward_pass_is_that_of_its_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
    expected = 2 * (8 * 3 * 9 * 16 + 128 * 10)
    assert cost.forward_arithmetic(model, torch.zeros(1, 3, 4, 4)) == expected


def test_counting_changes_nothing() -> None:
    model = NETWORKS["cnn"](batchnorm=True)
    constraint = MaxGain(model, gamma=2.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cost.forward_arithmetic(model, torch.zeros(1, 1, 8, 8))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(map(math.isnan, constraint.gains.values()))


@pytest.mark.parametrize(("speed", "told"), [(1e12, False), (1e3, True)])
def test_a_run_of_hours_on_a_cpu_says_so_first_and_says_what_is_quick(speed, told, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cost, "speed", lambda: speed)
    monkeypatch.setattr("maxgain.study.cli.train.SLOW", speed)
    command = ["train", "digits", "--network", "mlp", "--fold", "0", "--epochs", "1", "--device", "cpu"]
    assert app.main([*command, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert ("on this CPU. A GPU (--device cuda) needs a small part of that; quick on a CPU" in shown) == told
    assert not told or shown.index("note: this takes about") < shown.index("accuracy")
