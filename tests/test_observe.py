"""Whatever a layer returns or is called with, it is measured, or the error names the layer and what was seen."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import Lipschitz, MaxGain, measure_gains
from maxgain.errors import MeasurementWarning, UnsupportedLayerError


class Router(nn.Linear):
    """As the routers of mixtures of experts."""

    def forward(self, input: Tensor) -> Any:
        logits = super().forward(input)
        return logits.softmax(-1), logits


class TimeFirst(nn.Conv1d):
    """As a head that is fed (batch, time, channels)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


class ChannelsFirstNorm(nn.LayerNorm):
    """As timm's LayerNorm2d."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ByKeyword(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale * F.linear(x, self.weight)


class Silent(nn.Linear):
    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight.sum()


CASES: dict[str, tuple[Any, Any, str]] = {
    "a tuple": (Router(6, 3), torch.randn(4, 6), "it returns tuple, and which part of that is Wx is not known"),
    "another layout": (
        TimeFirst(6, 3, 1),
        torch.randn(4, 9, 6),
        r"its input has shape \(4, 9, 6\) and its output \(4, 9, 3\), in which the 3 entries of its bias do not lie",
    ),
    "a norm of other dimensions": (ChannelsFirstNorm(5), torch.randn(4, 5, 3, 3), "its type has a forward of its own"),
}


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.odd = nn.Identity(), layer

    def forward(self, x: Tensor) -> Any:
        return self.odd(self.first(x))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("measure", ["stale", "report"])
def test_what_does_not_fit_is_named_in_the_forward(name: str, measure: str) -> None:
    layer, x, reason = CASES[name]
    model = Around(layer)
    said = rf"^layer 'odd' \({type(layer).__name__}\) cannot be measured: .*{reason}.*exclude='odd'"
    if measure == "stale":
        MaxGain(model, include="odd")
    run = model if measure == "stale" else lambda x: measure_gains(model, [x], include="odd")
    with pytest.raises(UnsupportedLayerError, match=said):
        run(x)


def test_lipschitz_names_such_layers_too() -> None:
    model = Around(Router(6, 3))
    Lipschitz(model, 1.0)
    with pytest.raises(UnsupportedLayerError, match=r"^layer 'odd' \(Router\) cannot be measured: it returns tuple"):
        model(torch.randn(4, 6))


def test_the_input_of_a_layer_that_is_called_by_keywords_is_its_first_parameter() -> None:
    layer = ByKeyword(6, 3, bias=False)
    constraint = MaxGain(nn.ModuleDict({"layer": layer}))
    x, scale = torch.randn(4, 6), torch.full((4, 1), 2.0)
    z = layer(scale=scale, x=x)
    assert constraint.gains["layer"] == pytest.approx(largest_gain(z, x), rel=1e-5)


def test_a_layer_that_is_given_nothing_is_named() -> None:
    layer = Silent(6, 3)
    MaxGain(nn.ModuleDict({"layer": layer}))
    with pytest.raises(UnsupportedLayerError, match=r"^layer 'layer' \(Silent\) .* input is not a tensor but missing"):
        layer()


def test_a_batch_norm_that_has_lost_its_statistics_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    MaxGain(model)
    model[1].running_mean = model[1].running_var = None
    with pytest.raises(UnsupportedLayerError, match=r"^layer '1' \(BatchNorm1d\) .* no running variance.*exclude='1'"):
        model(torch.randn(4, 6))


def test_an_error_of_the_model_stays_the_models() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    MaxGain(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        model(torch.randn(4, 5))


def test_a_layer_whose_weight_is_used_without_calling_it_is_named_with_that_reason() -> None:
    class Fused(nn.Module):
        """As the attention of BEiT and EVA."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(6, 18), nn.Linear(18, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(F.linear(x, self.qkv.weight))
            return out

    model = Fused()
    constraint = MaxGain(model)
    model(torch.randn(4, 6))
    with pytest.warns(MeasurementWarning, match="'qkv'.*uses the layer's weight without calling the layer.*exclude"):
        constraint.step()


def test_nan_is_warned_about_at_powers_of_ten_and_not_at_every_step() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    constraint = MaxGain(model)
    x = torch.randn(4, 6)
    x[0] = torch.nan
    said = 0
    for _ in range(50):
        model(x)
        try:
            constraint.step()
        except MeasurementWarning:
            said += 1
            constraint.discard()
    assert said == 2, "after 1 and after 10"
    assert constraint.dropped == {"0": 50}


def test_a_gain_is_taken_where_the_output_is_if_a_forward_fetches_its_input() -> None:
    class Fetching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.device))

    layer = Fetching(6, 3, device="meta")  # as good as a second GPU
    constraint = MaxGain(layer)
    layer(torch.randn(4, 6))
    assert [maximum.entries.maxima.device.type for maximum in constraint._maxima] == ["meta"]
