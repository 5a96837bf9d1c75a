"""The models of docs/models.md: one row each, with random weights and small enough for a laptop.

None was written for this project. A row makes a model and one batch of keyword or positional inputs for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn

from maxgain import split_attention
from maxgain.experts import split_experts

Batch = dict[str, Any] | Tensor
Made = tuple[nn.Module, Batch]
WORDS = 40
"""The vocabulary of the language models."""


@dataclass(frozen=True)
class Family:
    """One row: a model that stands for its family."""

    name: str
    package: str
    make: Callable[[], Made]
    remark: str = ""
    """What is special about it."""


def images(size: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, size, size)


def sentences(length: int = 12, count: int = 4) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, WORDS, (count, length))}


# timm


@cache
def import_timm() -> Any:
    """Timm, with a stand-in for torchvision where that has no build for this torch: models use nothing of it."""
    try:
        return importlib.import_module("timm")
    except Exception:  # torchvision fails in many ways where it was built for another torch
        for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
            del sys.modules[name]
    parts = ("", ".ops", ".ops.misc", ".models", ".models.feature_extraction")
    stand_ins = {
        f"torchvision{part}": MagicMock() for part in (*parts, ".transforms", ".transforms.functional", ".datasets")
    }
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    with patch.dict(sys.modules, stand_ins):
        timm = importlib.import_module("timm")
        loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "timm"}
    sys.modules.update(loaded)
    return timm


def timm_model(name: str, size: int, remark: str = "", **options: Any) -> Family:
    def make() -> Made:
        return import_timm().create_model(name, num_classes=4, **options), images(size)

    return Family(name, "timm", make, remark)


TIMM = [
    timm_model("resnet10t", 64),
    timm_model("vgg11", 64, mlp_ratio=0.05),
    timm_model("densenet121", 64),
    timm_model("inception_v3", 96),
    timm_model("mobilenetv3_small_050", 64),
    timm_model("tf_efficientnet_lite0", 64, "Conv2dSame"),
    timm_model("regnetx_002", 64),
    timm_model("repvgg_a0", 64),
    timm_model("hrnet_w18_small", 64),
    timm_model("convnext_atto", 64),
    timm_model("fastvit_t8", 64),
    timm_model("test_nfnet", 64, "ScaledStdConv2d"),
    timm_model("resnetv2_50x1_bit", 64, "StdConv2d"),
    timm_model("vit_tiny_patch16_224", 64, img_size=64, depth=3),
    timm_model("swin_tiny_patch4_window7_224", 64, img_size=64, window_size=4, embed_dim=24),
    timm_model("beit_base_patch16_224", 64, "its qkv.weight is used directly", img_size=64, depth=2, embed_dim=96),
    timm_model("eva02_tiny_patch14_224", 56, "its weights are used directly", img_size=56, depth=2),
    timm_model("mixer_s32_224", 64, img_size=64),
    timm_model("gmlp_ti16_224", 64, img_size=64),
    timm_model("xcit_nano_12_p16_224", 64),
    timm_model("cait_xxs24_224", 64, img_size=64, depth=2),
    timm_model("levit_128s", 224),
    timm_model("coat_lite_tiny", 64, img_size=64),
    timm_model("poolformer_s12", 64),
    timm_model("test_mambaout", 64),
]


# transformers


def transformers_model(name: str, inputs: Callable[[], Batch], remark: str = "", **sizes: Any) -> Family:
    """A model by the name of its class, and its configuration's by the same stem."""

    def make() -> Made:
        import transformers

        cls = getattr(transformers, name)
        cls._supports_sdpa = getattr(cls, "_supports_sdpa", False)
        return cls(cls.config_class(**sizes)), inputs()

    return Family(name, "transformers", make, remark)


ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {"vocab_size": WORDS, **WIDTHS, **ENDS}
EXPERTS = {**DENSE, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def speech() -> Batch:
    return torch.randn(2, 2000)


def log_mel() -> Batch:
    return {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": torch.randint(2, WORDS, (2, 6))}


def translated() -> Batch:
    return {**sentences(), "decoder_input_ids": torch.randint(2, WORDS, (4, 6))}


TRANSFORMERS = [
    transformers_model("LlamaForCausalLM", sentences, **DENSE, num_key_value_heads=2),
    transformers_model(
        "GPT2LMHeadModel", sentences, "Conv1D, tied head", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, **ENDS
    ),
    transformers_model("BertForSequenceClassification", sentences, **DENSE),
    transformers_model("AlbertForSequenceClassification", sentences, "layers shared", **DENSE, embedding_size=16),
    transformers_model(
        "T5ForConditionalGeneration", translated, vocab_size=WORDS, d_model=32, d_ff=48, d_kv=8, num_layers=2,
        num_heads=4, decoder_start_token_id=0, **ENDS,
    ),
    transformers_model(
        "ViTForImageClassification", lambda: {"pixel_values": images(32)}, **WIDTHS, image_size=32, patch_size=8
    ),
    transformers_model(
        "WhisperForConditionalGeneration", log_mel, vocab_size=WORDS, num_mel_bins=16, d_model=32,
        encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, max_source_positions=20,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, max_target_positions=8,
        decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None, **ENDS,
    ),
    transformers_model(
        "Wav2Vec2ForSequenceClassification", speech, "a weight-normed convolution", **DENSE,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, classifier_proj_size=16, mask_time_prob=0.0,
    ),
    transformers_model("MixtralForCausalLM", sentences, "packed experts", **EXPERTS),
    transformers_model("GptOssForCausalLM", sentences, "packed experts", **EXPERTS, head_dim=8),
    transformers_model(
        "Qwen2MoeForCausalLM", sentences, "packed experts", **DENSE, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
    ),
    transformers_model("PhimoeForCausalLM", sentences, "a router that returns a tuple", **EXPERTS),
    transformers_model(
        "MambaForCausalLM", sentences, "its weights are used directly", vocab_size=WORDS, hidden_size=32,
        state_size=4, num_hidden_layers=2, **ENDS,
    ),
]  # fmt: skip


# torch, MONAI and PEFT


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 6, 32)


def split_encoder() -> Made:
    model, batch = encoder()
    return split_attention(model), batch


def split(family: Family) -> Family:
    """The same model with its experts taken apart."""

    def make() -> Made:
        model, batch = family.make()
        return split_experts(model), batch

    return Family(f"{family.name}, `split_experts`", family.package, make)


class Recurrent(nn.Module):
    """An LSTM between two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.lstm, self.out = nn.Linear(8, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.into(x))
        out: Tensor = self.out(hidden[:, -1])
        return out


def unet() -> Made:
    from monai.networks.nets import UNet

    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2}
    return UNet(spatial_dims=2, in_channels=3, out_channels=1, **sizes, norm="batch"), images(32)


def adapted() -> Made:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**DENSE, num_key_value_heads=2))
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, options), sentences()


OTHERS = [
    Family("nn.TransformerEncoder", "torch", encoder, "nn.MultiheadAttention"),
    Family("nn.TransformerEncoder, `split_attention`", "torch", split_encoder),
    Family("an LSTM between dense layers", "torch", lambda: (Recurrent(), torch.randn(4, 6, 8))),
    Family("UNet", "monai", unet, "transposed convolutions"),
    Family("Llama with LoRA", "peft", adapted, "the adapters alone are trained"),
]

SPLIT = [split(family) for family in TRANSFORMERS if family.remark == "packed experts"]
FAMILIES = [*OTHERS, *TRANSFORMERS, *SPLIT, *TIMM]
