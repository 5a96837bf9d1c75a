"""The networks whose steps are timed: the paper's, and those that people train today, at real sizes and untrained."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxgain.study.networks import NETWORKS as STUDY_NETWORKS


@dataclass(frozen=True)
class Network:
    """A model and a batch to train it on."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    """Inputs and targets."""


class Block(nn.Module):
    """Attention and an MLP, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return added


class GPT(nn.Module):
    """A GPT with heads of 64; 12 layers of 768 over 50,257 words are GPT-2's 124 million parameters."""

    def __init__(self, depth: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(depth)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.places.weight[: words.shape[1]]
        logits: Tensor = self.head(self.last(self.blocks(x)))
        return logits


def import_timm() -> Any:
    """Timm, with stand-ins for torchvision where that has no build for this torch: timm's models use nothing of it."""
    try:
        return importlib.import_module("timm")
    except Exception:  # torchvision fails in many ways
        parts = ("", ".ops", ".ops.misc", ".models", ".models.feature_extraction", ".datasets", ".transforms")
        names = [*(f"torchvision{part}" for part in parts), "torchvision.transforms.functional"]
    sys.modules |= {name: MagicMock(FrozenBatchNorm2d=type("FrozenBatchNorm2d", (nn.Module,), {})) for name in names}
    try:
        return importlib.import_module("timm")
    finally:
        for name in names:
            del sys.modules[name]


def gpt(depth: int, width: int, words: int, batch: int, length: int) -> Network:
    """A GPT that predicts random words."""
    return Network(
        lambda: GPT(depth, width, words, length),
        lambda: (torch.randint(words, (batch, length)), torch.randint(words, (batch, length))),
    )


def study(name: str, batch: int, side: int = 32, *, batchnorm: bool) -> Network:
    """One of the study's networks."""
    return _on_images(lambda: STUDY_NETWORKS[name]((3, side, side), 10, batchnorm=batchnorm), batch, side, 10)


def timm(name: str, batch: int, side: int = 224, **options: Any) -> Network:
    """A network of timm's."""
    return _on_images(lambda: import_timm().create_model(name, num_classes=1000, **options), batch, side, 1000)


def _on_images(model: Callable[[], nn.Module], batch: int, side: int, classes: int) -> Network:
    return Network(model, lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))))


ON_GPU = {
    "VGG-19": study("vgg19", 100, batchnorm=False),
    "VGG-19 with batch norm": study("vgg19", 100, batchnorm=True),
    "GPT-2, 124M": gpt(12, 768, 50_257, 8, 1024),
    "ViT-B": timm("vit_base_patch16_224", 64),
    "ResNet-50": timm("resnet50", 64),
    "ConvNeXt-T": timm("convnext_tiny", 64),
    "Swin-T": timm("swin_tiny_patch4_window7_224", 64),
    "WRN-16-4, 96 px": study("wrn16_4", 50, 96, batchnorm=True),
}
ON_CPU = {
    "SVHN network with batch norm": study("svhn_vgg", 50, batchnorm=True),
    "GPT, 4 layers": gpt(4, 256, 256, 8, 128),
}
TINY = {
    "VGG-19": study("vgg19", 2, batchnorm=False),
    "GPT-2, 124M": gpt(1, 64, 97, 2, 16),
    "ConvNeXt-T": timm("convnext_tiny", 2, 32, depths=(1, 1, 1, 1)),
    "Swin-T": timm("swin_tiny_patch4_window7_224", 1, 224, depths=(1, 1, 1, 1)),
}
"""To rehearse a run in a minute."""
