"""Try MaxGain on other people's models, and fill in the table of docs/models.md: `python docs/make_models.py`.

Needs maxgain[transformers], monai, peft and timm; a minute on one core. Every model has random weights. Each layer gets
half of its first gain as its bound, so that every bound binds; then ten steps are taken.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maxgain import MaxGain, split_attention
from maxgain.errors import MeasurementWarning
from maxgain.experts import split_experts
from maxgain.layers import uncovered

DOCS = Path(__file__).parent
RECORD, PAGE = DOCS / "figures" / "models.json", DOCS / "models.md"
sys.path.insert(0, str(DOCS.parent))

from benchmarks.networks import import_timm  # noqa: E402

STEPS = 10
FREE = 1e30
"""A bound that no gain exceeds."""
WORDS = 40
"""The vocabulary of the language models."""
Batch = dict[str, Any] | Tensor
Made = tuple[nn.Module, Batch]


class Family(NamedTuple):
    """One row: a model that stands for its family, and one batch of keyword or positional inputs for it."""

    name: str
    package: str
    make: Callable[[], Made]
    remark: str = ""
    """What is special about it."""


def timm_model(name: str, remark: str = "", *, side: int = 64, **options: Any) -> Family:
    def make() -> Made:
        return import_timm().create_model(name, num_classes=4, **options), torch.randn(4, 3, side, side)

    return Family(name, "timm", make, remark)


def transformers_model(name: str, inputs: Callable[[], Batch], remark: str = "", **sizes: Any) -> Family:
    """A model by the name of its class, which knows its configuration's."""

    def make() -> Made:
        import transformers

        cls = getattr(transformers, name)
        cls._supports_sdpa = getattr(cls, "_supports_sdpa", False)
        return cls(cls.config_class(**sizes)), inputs()

    return Family(name, "transformers", make, remark)


def words(count: int, length: int) -> Tensor:
    return torch.randint(2, WORDS, (count, length))


def sentences() -> dict[str, Tensor]:
    return {"input_ids": words(4, 12)}


TIMM = [
    timm_model("resnet10t"),
    timm_model("vgg11", mlp_ratio=0.05),
    timm_model("densenet121"),
    timm_model("inception_v3", side=96),
    timm_model("mobilenetv3_small_050"),
    timm_model("tf_efficientnet_lite0", "Conv2dSame"),
    timm_model("regnetx_002"),
    timm_model("repvgg_a0"),
    timm_model("hrnet_w18_small"),
    timm_model("convnext_atto"),
    timm_model("fastvit_t8"),
    timm_model("test_nfnet", "ScaledStdConv2d"),
    timm_model("resnetv2_50x1_bit", "StdConv2d"),
    timm_model("vit_tiny_patch16_224", img_size=64, depth=3),
    timm_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24),
    timm_model("beit_base_patch16_224", "its qkv.weight is used directly", img_size=64, depth=2, embed_dim=96),
    timm_model("eva02_tiny_patch14_224", side=56, remark="its weights are used directly", img_size=56, depth=2),
    timm_model("mixer_s32_224", img_size=64),
    timm_model("gmlp_ti16_224", img_size=64),
    timm_model("xcit_nano_12_p16_224"),
    timm_model("cait_xxs24_224", img_size=64, depth=2),
    timm_model("levit_128s", side=224),
    timm_model("coat_lite_tiny", img_size=64),
    timm_model("poolformer_s12"),
    timm_model("test_mambaout"),
]

ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {"vocab_size": WORDS, **WIDTHS, **ENDS}
EXPERTS = {**DENSE, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


TRANSFORMERS = [
    transformers_model("LlamaForCausalLM", sentences, **DENSE, num_key_value_heads=2),
    transformers_model(
        "GPT2LMHeadModel", sentences, "Conv1D, tied head", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, **ENDS
    ),
    transformers_model("BertForSequenceClassification", sentences, **DENSE),
    transformers_model("AlbertForSequenceClassification", sentences, "layers shared", **DENSE, embedding_size=16),
    transformers_model(
        "T5ForConditionalGeneration", lambda: {**sentences(), "decoder_input_ids": words(4, 6)}, vocab_size=WORDS,
        d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0, **ENDS,
    ),
    transformers_model(
        "ViTForImageClassification", lambda: {"pixel_values": torch.randn(4, 3, 32, 32)}, **WIDTHS, image_size=32,
        patch_size=8,
    ),
    transformers_model(
        "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": words(2, 6)},
        vocab_size=WORDS, num_mel_bins=16, d_model=32,
        encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, max_source_positions=20,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, max_target_positions=8,
        decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None, **ENDS,
    ),
    transformers_model(
        "Wav2Vec2ForSequenceClassification", lambda: torch.randn(2, 2000), "a weight-normed convolution", **DENSE,
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


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 6, 32)


def split(family: Family, by: Callable[[nn.Module], nn.Module]) -> Family:
    """The same model taken apart."""

    def make() -> Made:
        model, batch = family.make()
        return by(model), batch

    return Family(f"{family.name}, `{by.__name__}`", family.package, make)


class Recurrent(nn.Module):
    """An LSTM between two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.lstm, self.out = nn.Linear(8, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the last state."""
        return self.out(self.lstm(self.into(x))[0][:, -1])


def unet() -> Made:
    from monai.networks.nets import UNet

    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2}
    return UNet(spatial_dims=2, in_channels=3, out_channels=1, **sizes, norm="batch"), torch.randn(4, 3, 32, 32)


def adapted() -> Made:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**DENSE, num_key_value_heads=2))
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, options), sentences()


ENCODER = Family("nn.TransformerEncoder", "torch", encoder, "nn.MultiheadAttention")
OTHERS = [
    ENCODER,
    split(ENCODER, split_attention),
    Family("an LSTM between dense layers", "torch", lambda: (Recurrent(), torch.randn(4, 6, 8))),
    Family("UNet", "monai", unet, "transposed convolutions"),
    Family("Llama with LoRA", "peft", adapted, "the adapters alone are trained"),
]
SPLIT = [split(family, split_experts) for family in TRANSFORMERS if family.remark == "packed experts"]
FAMILIES = [*OTHERS, *TRANSFORMERS, *SPLIT, *TIMM]


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.manual_seed(1)  # of dropout
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    while not isinstance(result, Tensor):
        result = next(iter(result.values())) if isinstance(result, Mapping) else result[0]
    result.float().square().mean().backward()
    optimizer.step()


def tried(family: Family) -> dict[str, Any]:
    """What came of one model: its bounded layers, the largest gain over its bound after ten steps, the warnings."""
    torch.manual_seed(0)
    model, batch = family.make()
    optimizer = torch.optim.SGD([p for p in model.train().parameters() if p.requires_grad], lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeasurementWarning)
        constraint = MaxGain(model, FREE).attach(optimizer)
        step(model, batch, optimizer)
        gains = {name: gain for name, gain in constraint.gains.items() if not math.isnan(gain)}
        step(model, batch, optimizer)  # after which everything has been said
    constraint.gamma = bounds = {name: gain / 2 for name, gain in gains.items() if gain > 0} | {"*": math.inf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasurementWarning)
        for _ in range(STEPS + 1):
            step(model, batch, optimizer)
    trained = {name for name in bounds if name != "*" and model.get_submodule(name).weight.requires_grad}
    measured = [layer for layer in constraint._slots if layer.name in gains]
    return {
        "model": family.name,
        "remark": family.remark,
        "package": family.package,
        "layers": len(measured),
        "bounded": 1 - uncovered(model, measured, constraint.skipped, ())[0],
        "gain over bound": max(constraint.gains[name] / bounds[name] for name in trained),
        "warnings": [str(one.message) for one in caught if one.category is MeasurementWarning],
    }


def table(found: list[dict[str, Any]]) -> str:
    """A line for each package's models that are bounded whole, and one for each other model."""
    whole: dict[str, list[dict[str, Any]]] = {}
    rows, others = [], []
    for one in found:
        if one["bounded"] > 0.985:
            whole.setdefault(one["package"], []).append(one)
            continue
        remark = f" ({one['remark']})" if one["remark"] else ""
        others.append((f"{one['model']}{remark}", one["layers"], f"{one['bounded']:.0%}", one["gain over bound"]))
    for package, models in whole.items():
        names = "; ".join(one["model"] for one in models)
        layers = " to ".join(dict.fromkeys(str(pick(one["layers"] for one in models)) for pick in (min, max)))
        lowest = f"{min(one['bounded'] for one in models):.0%}"
        rows.append((f"{package}: {names}", layers, lowest, max(one["gain over bound"] for one in models)))
    rows += others
    return "".join(f"| {name} | {layers} | {bounded} | {excess:.2f} |\n" for name, layers, bounded, excess in rows)


def main() -> None:
    torch.set_num_threads(1)  # the models are too small for more
    found = []
    for family in FAMILIES:
        found.append(tried(family))
        print(family.name, flush=True)
    RECORD.write_text(json.dumps({"torch": torch.__version__, "models": found}, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    place = re.compile(r"(<!-- models -->\n\n(?:\|.*\n){2})(?:\|.*\n)*")
    PAGE.write_text(place.sub(lambda head: head[1] + table(found), page), encoding="utf-8")


if __name__ == "__main__":
    main()
