"""Promise 6: training-mode forwards since the last step, all of them, and no others."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from explicit import largest_gain, same_bits
from maxgain import MaxGain
from promises.common import conv_net, frozen_in_time, images
from small_net import each_measure


@each_measure
def test_promise_06_evaluation_between_steps_changes_nothing(measure: Any) -> None:
    data = images(6)
    others = torch.randn(100, 3, 8, 8)  # so many that the largest gain is among them

    def train(evaluate: bool) -> Any:
        torch.manual_seed(1)
        model = conv_net()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        constraint = MaxGain(model, gamma=0.3, measure=measure).attach(optimiser)
        history = []
        for batch in data:
            optimiser.zero_grad()
            model(batch).square().mean().backward()
            if evaluate:
                model.eval()
                model(others)
                model.train()
            optimiser.step()
            history.append(constraint.gains)
        return model.state_dict(), history

    assert same_bits(train(evaluate=True), train(evaluate=False))


@each_measure
def test_promise_06_the_maximum_runs_over_all_microbatches_since_the_last_step(measure: Any) -> None:
    layer = nn.Linear(6, 4, bias=False)
    weight = layer.weight.detach().clone()
    optimiser = frozen_in_time(layer.parameters())
    constraint = MaxGain(layer, gamma=math.inf, measure=measure).attach(optimiser)
    batches = torch.randn(2, 3, 5, 6)  # two steps of three microbatches
    windows = [max(largest_gain(x @ weight.T, x) for x in step) for step in batches]
    assert windows[0] != windows[1]
    for step, expected in zip(batches, windows, strict=True):
        for x in step:
            layer(x).sum().backward()
        optimiser.step()
        assert constraint.gains[""] == pytest.approx(expected, rel=1e-6)
