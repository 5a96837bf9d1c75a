"""Promise 9: a weight is scaled once, by the largest of its gains."""

import math

import pytest
import torch
from torch import Tensor, nn

from explicit import largest_gain
from maxgain import MaxGain
from maxgain.errors import UnsupportedLayerError
from promises.common import frozen_in_time


def test_promise_09_a_head_tied_to_an_embedding_is_scaled_once() -> None:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 6)
            self.middle = nn.Linear(6, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.middle(self.embed(tokens)))
            return out

    model = Gpt()
    before = model.embed.weight.detach().clone()
    optimiser = frozen_in_time(model.parameters())
    constraint = MaxGain(model, gamma={"head": 0.5, "middle": math.inf}).attach(optimiser)
    model(torch.randint(10, (3, 7))).sum().backward()
    gain = constraint.gains["head"]
    optimiser.step()
    assert gain > 0.5
    torch.testing.assert_close(model.embed.weight, before * (0.5 / gain))
    assert model.head.weight is model.embed.weight


def test_promise_09_a_module_that_runs_twice_is_scaled_once_by_its_larger_gain() -> None:
    layer = nn.Linear(5, 5, bias=False)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    before = layer.weight.detach().clone()
    optimiser = frozen_in_time(model.parameters())
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    x = torch.randn(6, 5)
    first, second = x @ before.T, torch.tanh(x @ before.T) @ before.T
    expected = max(largest_gain(first, x), largest_gain(second, torch.tanh(first)))
    model(x).sum().backward()
    optimiser.step()
    assert list(constraint.gains) == ["0"]
    torch.testing.assert_close(layer.weight, before * (0.1 / expected))


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.4), (0.4, 0.1), (math.inf, 0.1), (0.1, math.inf)])
def test_promise_09_two_layers_that_share_a_weight_scale_it_once_by_the_larger_excess(
    first: float, second: float
) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    constraint = MaxGain(model, gamma={"0": first, "2": second})
    model(torch.randn(7, 5))
    gains = constraint.gains
    constraint.step()
    factor = max(gains["0"] / first, gains["2"] / second)
    assert factor > 1
    torch.testing.assert_close(model[0].weight, before / factor)
    assert constraint.scales == pytest.approx({"0": 1 / factor, "2": 1 / factor})


def test_promise_09_two_parameters_in_the_same_memory_are_divided_once() -> None:
    memory = torch.randn(6, 6)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    for layer in model:
        layer.weight = nn.Parameter(memory)
    optimiser = frozen_in_time(model.parameters())
    constraint = MaxGain(model, 0.5).attach(optimiser)
    before = memory.clone()
    model(torch.randn(8, 6)).sum().backward()
    largest = max(constraint.gains.values())
    optimiser.step()
    torch.testing.assert_close(memory, before * 0.5 / largest)


def test_promise_09_parameters_that_come_to_lie_in_the_same_memory_are_divided_once_and_both_when_they_part() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimiser = frozen_in_time(model.parameters())
    constraint = MaxGain(model, 0.1).attach(optimiser)
    model[1].weight.data = model[0].weight.data
    for dtype in (torch.float32, torch.float64):  # a change of type gives each its own memory
        with torch.no_grad():
            model.to(dtype)[0].weight.fill_(1.0)
            model[1].weight.fill_(1.0)
        model(torch.ones(8, 6, dtype=dtype)).sum().backward()
        optimiser.step()
        assert [layer.weight.mean().item() for layer in model] == pytest.approx([0.1 / 6] * 2), constraint.gains


def test_promise_09_a_weight_that_is_a_part_of_another_is_refused_by_name() -> None:
    model = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data[2:6])
    with pytest.raises(UnsupportedLayerError, match=r"^layer '1' \(Linear\) .* its weight overlaps with that of '0'"):
        MaxGain(model, 0.5).attach(frozen_in_time(model.parameters()))


@pytest.mark.parametrize("sizes", [(6, 5), (6, 6)])
def test_promise_09_a_weight_that_is_tied_by_its_transpose_is_refused_by_name(sizes: tuple[int, int]) -> None:
    encoder, decoder = nn.Linear(*sizes, bias=False), nn.Linear(*reversed(sizes), bias=False)
    decoder.weight = nn.Parameter(encoder.weight.T)
    model = nn.Sequential(encoder, decoder)
    with pytest.raises(
        UnsupportedLayerError, match=r"^layer '1' \(Linear\) .* its weight is that of '0' in another layout"
    ):
        MaxGain(model, 0.5).attach(frozen_in_time(model.parameters()))
    MaxGain(model, 0.5, exclude="1").attach(frozen_in_time(model.parameters()))
