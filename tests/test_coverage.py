"""Promise 17: nothing that carries weight is left out in silence."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain, register_layer
from maxgain.errors import MeasurementWarning
from odd_layers import each_constraint


class Experts(nn.Module):
    """As the experts of Mixtral: all of a layer's in one parameter."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 8, 12))
        self.down = nn.Parameter(torch.randn(count, 12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,eij,ejk->nk", x, self.gate_up, self.down)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.dense = nn.Linear(8, 8)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(self.dense(x))
        return out


@each_constraint
def test_promise_17_a_sizeable_share_without_a_bound_is_named_once(constrain: Any) -> None:
    with pytest.warns(MeasurementWarning) as said:
        constraint = constrain(Block(), 1.0)
    assert len(said) == 1
    text = str(said[0].message)
    assert text.startswith("92% of the weights in this model's matrices have no bound")
    assert "'experts.gate_up', 'experts.down'" in text
    assert "split_experts() takes the packed experts of transformers' models apart." in text
    assert "register_layer() teaches a type; exclude says that it is meant." in text
    assert "experts.gate_up" in constraint.unconstrained


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda model: None, {"exclude": "experts"}),
        (lambda model: None, {"exclude": ["experts.gate_up", "experts.d*"]}),
        (lambda model: None, {"include": "dense"}),
        (lambda model: model.experts.requires_grad_(False), {}),
        (lambda model: setattr(model, "experts", nn.Identity()), {}),
    ],
    ids=["excluded", "excluded by parameter", "included", "frozen", "embeddings alone"],
)
def test_promise_17_what_is_meant_or_not_trained_is_not_mentioned(change: Any, options: Any) -> None:
    model = Block()
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MaxGain(model, **options)


@pytest.mark.parametrize("when", ["before attaching", "while it trains"])
def test_promise_17_layers_that_are_added_later_are_named_once(when: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    constraint = MaxGain(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    if when == "while it trains":
        constraint.attach(optimiser)
    model.append(nn.Linear(4, 4))
    optimiser.add_param_group({"params": model[2].parameters()})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if when == "before attaching":
            constraint.attach(optimiser)
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimiser.step()
    (text,) = [str(warning.message) for warning in said]
    assert text.startswith("50% of the weights in this model's matrices have no bound, because they were added to the")
    assert "'2.weight'" in text


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_promise_17_a_part_in_torchscript_is_named_and_the_rest_is_constrained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.warns(MeasurementWarning, match=r"'1\.weight'"):
        assert list(MaxGain(model).bounds) == ["0", "2"]
    assert list(MaxGain(model, exclude="1.weight").bounds) == ["0", "2"]


def test_promise_17_experts_can_be_registered() -> None:
    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 12, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ni,eij->nej", x, self.weight)

    register_layer(Down, 1, lambda layer, x, output: (x, output.flatten(1)))
    model = nn.Sequential(nn.Linear(8, 12), Down())
    constraint = MaxGain(model, 1.0)
    model(torch.randn(5, 8))
    constraint.step()
    model(torch.randn(5, 8))
    assert constraint.gains["1"] < 3


def test_lora_is_said_to_be_bounded_in_parts() -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8).requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

    with pytest.warns(MeasurementWarning, match=r"LoRA: 'lora_A\.default' and 1 more are bounded each on its own"):
        MaxGain(LoRA())
