"""measure="fresh": the bound holds exactly on the step's own batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import MaxGain, measure_gains
from odd_layers import Noisy


def linear_part(layer: nn.Module, x: Tensor, size: torch.Size) -> Tensor:
    """Wx with the weight as it is now, in float64."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, layer.weight.double())
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(x, layer.weight.double(), None, layer.stride, layer.padding, layer.dilation, layer.groups)
    if isinstance(layer, nn.ConvTranspose2d):
        twin = copy.deepcopy(layer).double()
        twin.bias = None
        return twin.forward(x, output_size=list(size))
    assert isinstance(layer, nn.BatchNorm2d)
    assert layer.running_var is not None
    scale = layer.weight.double() / (layer.running_var.double() + layer.eps).sqrt()
    return x * scale.view(-1, 1, 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.up, self.head = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1), nn.Linear(4 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.down(x)))
        out: Tensor = self.head(self.up(y, output_size=x.shape[-2:]).flatten(1))
        return out


def test_fresh_gains_hold_the_bound_exactly_on_the_steps_batches() -> None:
    model = UNet()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    constraint = MaxGain(model, gamma=0.5, measure="fresh").attach(optimiser)
    seen: dict[str, list[tuple[Tensor, torch.Size]]] = {name: [] for name in constraint.bounds}
    for name, records in seen.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, records=records: records.append((args[0].detach().double(), output.shape))
        )
    buffer = torch.empty(4, 3, 8, 8)
    for _ in range(3):
        optimiser.zero_grad()
        for _ in range(2):
            buffer.copy_(torch.randn(4, 3, 8, 8))  # as a loader does that reuses its memory
            model(buffer).square().mean().backward()
        buffer.zero_()
        optimiser.step()
        for name, records in seen.items():
            layer = model.get_submodule(name)
            largest = max(largest_gain(linear_part(layer, x, shape), x) for x, shape in records)
            assert largest <= 0.5 * (1 + 1e-5)
            if constraint.scales[name] < 1:
                assert largest == pytest.approx(0.5, rel=1e-5)
            records.clear()
        assert any(scale < 1 for scale in constraint.scales.values())


@pytest.mark.parametrize("shape", [(4, 2, 5), (2, 5)])
def test_an_output_padding_that_no_output_size_asks_for_is_replayed(shape: tuple[int, ...]) -> None:
    layer = nn.ConvTranspose1d(2, 3, kernel_size=2, padding=1, dilation=2, output_padding=1)
    constraint = MaxGain(layer, 0.1, measure="fresh")
    x = torch.randn(shape)
    layer(x)
    constraint.step()
    assert measure_gains(layer, [x]).gains[""].max() == pytest.approx(0.1, rel=1e-4)


def test_promise_01_a_layer_that_draws_numbers_and_keeps_count_is_not_disturbed() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Noisy(6, 6), nn.Dropout(), Noisy(6, 2))
    watched = copy.deepcopy(plain)
    for model in (plain, watched):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        if model is watched:
            MaxGain(model, gamma=float("inf"), measure="fresh").attach(optimiser)
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 6)).square().sum().backward()
            optimiser.step()
    assert all(map(torch.equal, plain.state_dict().values(), watched.state_dict().values()))
