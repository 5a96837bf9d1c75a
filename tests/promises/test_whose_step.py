"""Promise 10: a step projects what its optimiser steps, and leaves the optimiser's state alone."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from explicit import norm, same_bits
from maxgain import MaxGain
from promises.common import OPTIMISERS, conv_net, frozen_in_time, images


@pytest.mark.parametrize("make_optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_promise_10_optimiser_state_is_not_touched(make_optimiser: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = conv_net()
    optimiser = make_optimiser(model.parameters())
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append(copy.deepcopy((optimiser.state_dict(), [parameter.detach() for parameter in model.parameters()])))

    optimiser.register_step_post_hook(look)  # hooks run in the order of their registration: before the projection ...
    MaxGain(model, gamma=0.1).attach(optimiser)
    optimiser.register_step_post_hook(look)  # ... and after it
    for batch in images(3):
        model(batch).square().mean().backward()
        optimiser.step()
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert same_bits(before[0], after[0])
        assert not same_bits(before[1], after[1])


def test_promise_10_each_of_two_optimisers_projects_what_it_steps() -> None:
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    gan = nn.ModuleDict({"generator": generator, "judge": judge})
    ours = torch.optim.SGD(generator.parameters(), lr=0.1)
    theirs = torch.optim.Adam(judge.parameters(), lr=0.1)
    constraint = MaxGain(gan, gamma=0.02).attach(ours).attach(theirs)
    noise = torch.randn(5, 4)

    judge(generator(noise)).mean().backward()
    before = copy.deepcopy(gan.state_dict())
    theirs.step()
    assert same_bits(generator.state_dict(), {k[10:]: v for k, v in before.items() if k.startswith("generator")})
    scales = constraint.scales
    assert all((scale < 1) == name.startswith("judge") for name, scale in scales.items())

    judged = judge.state_dict()["0.weight"].clone()
    ours.step()  # the generator's gains of the same forward are still there
    assert all(scale < 1 for scale in constraint.scales.values())
    assert torch.equal(judge.state_dict()["0.weight"], judged)


def test_promise_10_the_judges_window_lasts_from_one_of_its_own_steps_to_the_next() -> None:
    generator, judge = nn.Linear(4, 6), nn.Linear(6, 1, bias=False)
    ours, theirs = frozen_in_time(generator.parameters()), frozen_in_time(judge.parameters())
    constraint = MaxGain(nn.ModuleDict({"g": generator, "j": judge}), gamma=math.inf).attach(ours).attach(theirs)
    row = judge.weight.detach()
    judge(row).sum().backward()  # its largest possible gain, in the generator's phase
    generator(torch.randn(2, 4)).sum().backward()
    ours.step()
    judge(torch.randn(3, 6)).sum().backward()
    theirs.step()
    assert constraint.gains["j"] == pytest.approx(norm(row, 2), rel=1e-6)


def test_promise_10_frozen_weights_and_those_of_no_optimiser_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    optimiser = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    before = copy.deepcopy(model.state_dict())
    constraint = MaxGain(model, gamma=0.01).attach(optimiser)
    model(torch.randn(3, 4)).sum().backward()
    optimiser.step()
    assert same_bits(model.state_dict()["0.weight"], before["0.weight"])
    assert same_bits(model.state_dict()["1.weight"], before["1.weight"])
    assert [constraint.scales[name] < 1 for name in ("0", "1", "2")] == [False, False, True]
    assert all(gain > 0.01 for gain in constraint.gains.values()), "they are measured all the same"
