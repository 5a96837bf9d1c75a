"""Packed experts as dense layers: the same outputs, and a gain for each matrix of each expert."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from maxgain import MaxGain
from maxgain.errors import MeasurementWarning, UnsupportedLayerError
from maxgain.experts import split_experts

WORDS = 40
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def gpt_oss() -> nn.Module:
    """Transposed and with biases, which begin at zero."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, head_dim=8))
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            nn.init.normal_(parameter)
    return model


class Ungated(nn.Module):
    """As the experts of Nemotron-H: an activation instead of a gate; and a norm at the end, as others have."""

    num_experts, has_gate, has_bias, is_transposed, has_post_expert_norm = 3, False, False, False, True

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(3, 12, 8)), nn.Parameter(torch.randn(3, 8, 12))
        self.act_fn, self.post_expert_norm = nn.SiLU(), nn.LayerNorm(8)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it has none")

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(torch.einsum("ni,eji->nej", x, self.up_proj))
        every = self.post_expert_norm(torch.einsum("nej,eij->nei", inner, self.down_proj))
        rows = torch.arange(len(x))[:, None]
        return (every[rows, chosen] * weights[..., None]).sum(1)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_a_model_computes_what_it_did_before_and_learns_the_same(make):
    torch.manual_seed(0)
    packed = make().train()
    split = split_experts(copy.deepcopy(packed))
    tokens = torch.randint(2, WORDS, (4, 12))
    outs = [model(input_ids=tokens).logits for model in (packed, split)]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    for out in outs:
        out.square().mean().backward()
    experts, theirs = split.model.layers[0].mlp.experts, packed.model.layers[0].mlp.experts
    gradients = torch.stack([layer.weight.grad for layer in experts.down])
    expected = theirs.down_proj.grad.transpose(1, 2) if theirs.is_transposed else theirs.down_proj.grad
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


def test_experts_without_a_gate_and_with_a_norm():
    model = nn.Sequential(Ungated())
    x, chosen = torch.randn(10, 8), torch.rand(10, 3).argsort(1)[:, :2]
    weights = torch.rand(10, 2)
    before = model[0](x, chosen, weights)
    split_experts(model)
    torch.testing.assert_close(model[0](x, chosen, weights), before)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))[0](x, chosen, weights), before)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_every_expert_is_bounded_by_its_own_gain(make):
    torch.manual_seed(0)
    model = split_experts(make()).train()
    tokens = torch.randint(2, WORDS, (8, 12))
    constraint = MaxGain(model, 0.5)
    experts = {f"model.layers.0.mlp.experts.{side}.{i}" for side in ("up", "down") for i in range(4)}
    assert experts <= set(constraint.gains)
    for _ in range(7):
        model(input_ids=tokens)
        constraint.step()
    assert max(constraint.gains.values()) < 0.51


def test_experts_on_several_devices_are_refused_by_name_and_other_models_stay_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4))
    assert split_experts(model) is model
    model = nn.Sequential(Ungated())
    model[0]._is_expert_parallel = True
    with pytest.raises(
        UnsupportedLayerError, match=r"^layer '0' \(Ungated\) cannot be split: its experts lie on several"
    ):
        split_experts(model)


class AnotherLayout(nn.Module):
    """As the experts of Llama 4, whose layout is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 8))


def test_splitting_is_advised_where_it_helps_alone():
    model = nn.ModuleDict({"mine": Ungated(), "experts": AnotherLayout(), "head": nn.Linear(4, 4)})
    with pytest.warns(MeasurementWarning) as caught:
        MaxGain(model).detach()
    assert re.search(r"'mine\.\w+', 'mine\.\w+' \(of unknown types: call .*split_experts", str(caught[0].message))
    with pytest.warns(MeasurementWarning, match=r"'experts\.gate_up_proj' \(.*: register_layer") as caught:
        MaxGain(split_experts(model))
    assert "split_experts" not in str(caught[0].message)
