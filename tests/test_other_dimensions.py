"""Promise 16 for forwards that read their input along other dimensions than their kind does, although the sizes fit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain, measure_gains
from maxgain.errors import UnsupportedLayerError
from odd_layers import train


class LastNormed(nn.BatchNorm1d):
    """Its channels come last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


class ChannelNormed(nn.LayerNorm):
    """As timm's LayerNorm2d."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class LastConvolved(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


class AlongTokens(nn.Linear):
    """As in an MLP-Mixer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


class LookingBack(nn.Linear):
    """Each token is made of the one before it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.roll(1, -2))


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "batch norm": (lambda: LastNormed(6), (4, 6, 6)),
    "layer norm": (lambda: ChannelNormed(6), (4, 6, 6, 6)),
    "a convolution's bias": (lambda: LastConvolved(4, 6, 1), (4, 6, 4)),
    "dense along tokens": (lambda: AlongTokens(6, 6), (4, 6, 6)),
    "dense along tokens, without a bias": (lambda: AlongTokens(6, 6, bias=False), (4, 6, 3)),
    "dense on another token": (lambda: LookingBack(6, 6), (4, 3, 6)),
}
each = pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
says = pytest.raises(UnsupportedLayerError, match=r"^layer '0' .*: it(s output less its bias| reads its input)")


def model_of(make: Any) -> nn.Sequential:
    model = nn.Sequential(make())
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 1, 5)
    return model


@each
def test_promise_16_it_is_refused_before_its_weight_is_touched(make: Any, shape: tuple[int, ...]) -> None:
    model = model_of(make)
    before = model[0].weight.detach().clone()
    with says:
        train(model, torch.randn(shape), constraint=MaxGain(model, 0.5, include="*"))
    assert torch.equal(model[0].weight, before)


@each
def test_a_report_of_gains_refuses_it_too(make: Any, shape: tuple[int, ...]) -> None:
    with says:
        measure_gains(model_of(make), [torch.randn(shape)], include="*")


@pytest.mark.parametrize("make", [lambda: AlongTokens(6, 6, bias=False), lambda: LookingBack(6, 6)])
def test_of_whole_samples_the_gain_is_right(make: Any) -> None:
    model, x = model_of(make), torch.randn(4, 6, 6)
    train(model, x, constraint=MaxGain(model, 0.5, instance="sample"))
    part = (model(x) - model(torch.zeros_like(x))).detach().flatten(1)
    assert float((part.norm(dim=1) / x.flatten(1).norm(dim=1)).amax()) == pytest.approx(0.5, rel=1e-5)


def test_a_batch_norm_whose_channels_do_not_fit_is_named_with_its_sizes() -> None:
    model = model_of(lambda: LastNormed(6))
    with pytest.raises(UnsupportedLayerError, match=r"^layer '0' .*shape \(4, 5, 6\), and its 6 scales do not lie"):
        train(model, torch.randn(4, 5, 6), constraint=MaxGain(model, 0.5))
