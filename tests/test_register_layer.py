"""Layer types of one's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain, register_layer
from maxgain.errors import NothingToConstrainError
from small_net import each_measure, one_step, sgd


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_layer_type_of_ones_own_is_constrained_once_it_is_registered() -> None:
    model = nn.Sequential(Scale())
    with pytest.raises(NothingToConstrainError):
        MaxGain(model)
    register_layer(Scale, instance_dims=1, weight="factor")
    optimiser = sgd(model, lr=0.0)
    constraint = MaxGain(model, gamma=2.0).attach(optimiser)
    one_step(model, optimiser, torch.randn(2, 3))
    assert constraint.gains == {"0": 4.0}
    assert model[0].factor.tolist() == [2.0, 2.0, 2.0]


@each_measure
def test_a_layer_type_is_measured_and_scaled_by_the_linear_part_that_it_was_registered_with(measure: Any) -> None:
    class Shifted(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 100

    register_layer(Shifted, 1, lambda layer, x, output: (x, output - 100), weight="factor")
    model = Shifted()
    constraint = MaxGain(model, gamma=2.0, measure=measure)
    model(torch.randn(2, 3))
    constraint.step()
    assert constraint.gains[""] == pytest.approx(4.0, rel=1e-4)
    torch.testing.assert_close(model.factor, torch.full((3,), 2.0), rtol=1e-4, atol=0)


def test_a_type_that_is_not_taken_by_default_is_left_alone_unless_it_is_named() -> None:
    register_layer(Scale, instance_dims=1, weight="factor", by_default=False)
    model = nn.Sequential(nn.Linear(3, 3), Scale())
    assert list(MaxGain(model).bounds) == ["0"]
    assert list(MaxGain(model, include="1").bounds) == ["1"]
