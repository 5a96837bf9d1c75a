"""register_layer: layer types of one's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import Lipschitz, MaxGain, register_layer
from maxgain.errors import MeasurementWarning, NothingToConstrainError, UnsupportedLayerError
from nets import compiling, frozen_sgd
from odd_layers import Router, Scale


class Shifted(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 100


def step(model: nn.Module, constraint: Any, x: Tensor, run: Any = None) -> None:
    """A training step that only projects."""
    optimizer = frozen_sgd(model)
    constraint.attach(optimizer)
    out = (model if run is None else run)(x)
    (out[1] if isinstance(out, tuple) else out).sum().backward()
    optimizer.step()


def test_a_type_of_ones_own_is_bounded_once_it_is_registered() -> None:
    model = nn.Sequential(Scale())
    with pytest.raises(NothingToConstrainError):
        MaxGain(model)
    register_layer(Scale, dims=1, weight="factor")
    constraint = MaxGain(model, gamma=2.0)
    step(model, constraint, torch.randn(2, 3))
    assert constraint.gains == {"0": 4.0}
    assert model[0].factor.tolist() == [2.0, 2.0, 2.0]


def test_a_type_can_be_named_by_its_path() -> None:
    register_layer(f"{Scale.__module__}.Scale", dims=1, weight="factor")
    assert list(MaxGain(nn.Sequential(Scale(), Shifted())).gains) == ["0", "1"], "and those derived from it"
    with pytest.raises(UnsupportedLayerError, match="layer_type must be"):
        register_layer(Scale(), dims=1)  # type: ignore[arg-type]


def test_a_type_that_is_skipped_is_used_once_it_is_registered() -> None:
    model = nn.Bilinear(3, 2, 4, bias=False)
    with pytest.raises(NothingToConstrainError):
        MaxGain(model)
    register_layer(nn.Bilinear, dims=1)
    constraint = MaxGain(model, gamma=0.1)
    first, second = torch.randn(8, 3), torch.randn(8, 2)
    before = model(first, second)
    constraint.step()
    torch.testing.assert_close(model(first, second), before * constraint.scales[""])
    assert constraint.scales[""] < 1


def test_a_type_is_measured_by_the_linear_part_that_it_was_registered_with() -> None:
    register_layer(Shifted, 1, lambda layer, x, output: (x, output - 100), weight="factor")
    model = Shifted()
    constraint = MaxGain(model, gamma=2.0)
    step(model, constraint, torch.randn(2, 3))
    assert constraint.gains[""] == pytest.approx(4.0, rel=1e-4)
    torch.testing.assert_close(model.factor, torch.full((3,), 2.0), rtol=1e-4, atol=0)


class TestRouter:
    pytestmark = compiling

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("constrain", [MaxGain, Lipschitz])
    def test_a_layer_that_returns_several_is_bounded_by_its_registered_linear_part(
        self, constrain: Any, compiled: bool
    ) -> None:
        register_layer(Router, 1, lambda layer, x, output: (x, output[1] - layer.bias))
        router, x = Router(4, 3), torch.randn(8, 4)
        before = router.weight.detach().clone()
        constraint = constrain(router, 0.1)
        step(router, constraint, x, torch.compile(router, backend="eager") if compiled else router)
        largest = (
            torch.linalg.matrix_norm(before, 2).item() if constrain is Lipschitz else largest_gain(x @ before.T, x)
        )
        assert constraint.gains[""] == pytest.approx(largest, rel=1e-4)
        torch.testing.assert_close(router.weight, before * 0.1 / largest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("linear_part", [lambda layer, x, output: None, lambda layer, x, output: (x, output[2])])
def test_promise_10_a_layer_whose_linear_part_fails_is_named_and_left_out(linear_part: Any) -> None:
    register_layer(Router, 1, linear_part)
    model = nn.ModuleList([Router(4, 3), nn.Linear(3, 2)])
    constraint = MaxGain(model, 0.1)
    before = model[0].weight.detach().clone()
    model[0](torch.randn(8, 4))
    with pytest.warns(MeasurementWarning, match="'0'"):
        constraint.step()
    assert list(constraint.gains) == ["1"]
    assert torch.equal(model[0].weight, before)


def test_a_type_that_is_not_taken_by_default_must_be_named() -> None:
    register_layer(Scale, dims=1, weight="factor", by_default=False)
    model = nn.Sequential(nn.Linear(3, 3), Scale())
    assert list(MaxGain(model).gains) == ["0"]
    assert list(MaxGain(model, include="1").gains) == ["1"]
