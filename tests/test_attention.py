"""Attention as four dense layers: the same outputs, and a gain for each projection."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain, measure_gains, split_attention
from maxgain.errors import MaxGainError, UnsupportedLayerError

LENGTH, SOURCE, BATCH, WIDTH, HEADS = 5, 7, 3, 8, 2
CAUSAL = torch.triu(torch.ones(LENGTH, SOURCE, dtype=torch.bool), 1)
PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 7, [False] + [True] * 6])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other sizes of key and value": {"kdim": 6, "vdim": 4},
    "double precision": {"dtype": torch.float64},
}
CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "boolean mask": {"attn_mask": CAUSAL},
    "additive mask": {"attn_mask": torch.randn(LENGTH, SOURCE)},
    "a mask per head": {"attn_mask": torch.randn(BATCH * HEADS, LENGTH, SOURCE)},
    "padding": {"key_padding_mask": PADDING},
    "both": {
        "attn_mask": torch.zeros(LENGTH, SOURCE).masked_fill(CAUSAL, -torch.inf),
        "key_padding_mask": PADDING * -9.0,
    },
    "weights of each head": {"average_attn_weights": False},
    "a causal mask, said to be one": {"attn_mask": CAUSAL, "is_causal": True},
}


def inputs(attention: nn.MultiheadAttention) -> list[Tensor]:
    lengths, widths = (LENGTH, SOURCE, SOURCE), (attention.embed_dim, attention.kdim, attention.vdim)
    dtype = attention.out_proj.weight.dtype
    found = [torch.randn(length, BATCH, width, dtype=dtype) for length, width in zip(lengths, widths, strict=True)]
    return [x.transpose(0, 1) for x in found] if attention.batch_first else found


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_weights_and_gradients_are_those_of_torchs_own_module(options, call, need_weights):
    torch.manual_seed(0)
    packed = nn.MultiheadAttention(WIDTH, HEADS, **OPTIONS[options])
    split = split_attention(nn.Sequential(packed))[0]
    outcomes = []
    arguments = inputs(packed)
    given = {
        name: value.to(arguments[0]) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in CALLS[call].items()
    }
    for module in (packed, split):
        own = [x.clone().requires_grad_() for x in arguments]
        out, weights = module(*own, need_weights=need_weights, **given)
        out.square().sum().backward()
        outcomes.append([out, *(() if weights is None else (weights,)), *(x.grad for x in own)])
    torch.testing.assert_close(*outcomes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformer_computes_what_it_did_before(training, grad):
    torch.manual_seed(0)
    sizes = {"d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 16}
    model = nn.Transformer(**sizes, dropout=0.0, batch_first=True).train(training)
    source, target = torch.randn(BATCH, SOURCE, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    with torch.set_grad_enabled(grad):
        before = model(source, target, **masks)
        split_attention(model)
        after = model(source, target, **masks)
    torch.testing.assert_close(after, before)
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def test_every_projection_of_a_split_attention_is_bounded_by_its_own_gain():
    torch.manual_seed(0)
    model = split_attention(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0))
    constraint = MaxGain(model, 0.25)
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "linear1", "linear2"]
    assert list(constraint.gains) == names
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for _ in range(8):
        model(x)
        constraint.step()
    assert all(scale < 1.001 for scale in constraint.scales.values())
    assert all(row[-1] < 0.26 for row in measure_gains(model, [x]).quantiles().values())


def test_a_module_that_is_used_twice_stays_one_and_what_is_frozen_stays_frozen():
    shared = nn.MultiheadAttention(WIDTH, HEADS).requires_grad_(False)
    model = split_attention(nn.ModuleList([shared, shared]))
    assert model[0] is model[1]
    assert not any(one.requires_grad for one in model.parameters())


@pytest.mark.parametrize("average", [True, False])
def test_in_training_the_weights_are_those_that_dropout_left_and_a_single_sequence_needs_no_batch(average):
    packed = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5)
    for x in (torch.randn(LENGTH, BATCH, WIDTH), torch.randn(LENGTH, WIDTH)):
        found = []
        for module in (packed, split_attention(nn.Sequential(packed))[0]):
            torch.manual_seed(1)
            found.append(module(x, x, x, average_attn_weights=average))
        torch.testing.assert_close(*found)
        assert (found[0][1] == 0).any()


class Named(nn.MultiheadAttention):
    pass


class Other(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_is_split_and_what_cannot_be_is_named():
    assert len(MaxGain(split_attention(nn.ModuleList([Named(WIDTH, HEADS)]))).gains) == 4
    packed = {"it has a forward": Other(WIDTH, HEADS), "add_bias_kv": Named(WIDTH, HEADS, add_bias_kv=True)}
    for why, module in packed.items():
        with pytest.raises(UnsupportedLayerError, match=rf"layer '0' \(\w+\) cannot be split: {why}"):
            split_attention(nn.Sequential(module))


def test_a_causal_hint_without_its_mask_is_refused_as_by_the_packed_module() -> None:
    packed = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 1, 8)
    for attention in (packed, split_attention(packed)):
        with pytest.raises((RuntimeError, MaxGainError), match="mask"):
            attention(x, x, x, is_causal=True, need_weights=False)
