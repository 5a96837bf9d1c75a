"""Layer types of one's own."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, register_layer
from maxgain.errors import NothingToConstrainError, UnsupportedLayerError
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


def test_a_type_that_is_refused_is_used_once_somebody_has_registered_it() -> None:
    model = nn.Bilinear(3, 2, 4, bias=False)
    with pytest.raises(UnsupportedLayerError):
        MaxGain(model)
    register_layer(nn.Bilinear, instance_dims=1)
    constraint = MaxGain(model, gamma=0.1)
    first, second = torch.randn(8, 3), torch.randn(8, 2)
    before = model(first, second)
    constraint.step()
    torch.testing.assert_close(model(first, second), before * constraint.scales[""])
    assert constraint.scales[""] < 1


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


class Router(nn.Linear):
    """As routers of some transformers: its Wx is a part of what it returns."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores.topk(1).indices, scores


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("constrain", [MaxGain, partial(MaxGain, measure="fresh"), Lipschitz])
def test_the_remedy_for_a_layer_that_returns_several_is_to_register_its_linear_part(
    constrain: Any, compiled: bool
) -> None:
    torch.compiler.reset()
    register_layer(Router, 1, lambda layer, x, output: (x, output[1] - layer.bias))
    router, x = Router(4, 3), torch.randn(8, 4)
    before, optimiser = router.weight.detach().clone(), sgd(router, lr=0.0)
    constraint = constrain(router, 0.1).attach(optimiser)
    run = torch.compile(router, backend="eager") if compiled else router
    run(x)[1].sum().backward()
    optimiser.step()
    gain = (x @ before.T).norm(dim=1) / x.norm(dim=1)
    largest = torch.linalg.matrix_norm(before, 2) if constrain is Lipschitz else gain.max()
    assert constraint.gains[""] == pytest.approx(largest.item(), rel=1e-4)
    torch.testing.assert_close(router.weight, before * 0.1 / largest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("linear_part", "said"),
    [
        (lambda layer, x, output: None, "linear_part must return the tensors x and Wx, not NoneType"),
        (lambda layer, x, output: (x, output[1].sum()), r"Wx of \(\) count different instances"),
        (lambda layer, x, output: (x, output[2]), "IndexError"),
    ],
)
def test_what_a_linear_part_does_wrong_is_said_with_the_layers_name(linear_part: Any, said: str) -> None:
    register_layer(Router, 1, linear_part)
    model = nn.Sequential(Router(4, 3))
    MaxGain(model)
    with pytest.raises(UnsupportedLayerError, match=rf"^layer '0' \(Router\) cannot be measured: .*{said}"):
        model(torch.randn(8, 4))


def test_a_type_that_is_not_taken_by_default_is_left_alone_unless_it_is_named() -> None:
    register_layer(Scale, instance_dims=1, weight="factor", by_default=False)
    model = nn.Sequential(nn.Linear(3, 3), Scale())
    assert list(MaxGain(model).bounds) == ["0"]
    assert list(MaxGain(model, include="1").bounds) == ["1"]
