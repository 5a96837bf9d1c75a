"""The networks that steps are timed on, one row each: the model, a batch, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import NETWORKS as STUDY_NETWORKS

WORDS = 256
"""The GPT reads bytes."""


@dataclass(frozen=True)
class Network:
    """A model with a batch of data to train it on."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    """Inputs and targets."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of every prediction."""
        return F.cross_entropy(output.float().flatten(0, -2), target.flatten())


class Block(nn.Module):
    """A transformer's block: attention and an MLP, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch of sequences."""
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return added


class Transformer(nn.Module):
    """A GPT over bytes, or a ViT over the patches of images."""

    def __init__(self, depth: int, width: int, heads: int, length: int, patch: int | None = None) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Embedding(WORDS, width) if patch is None else nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=patch is None) for _ in range(depth)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS if patch is None else 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits: of every next byte, or of every image's class."""
        x = self.embed(x)
        if self.patch is not None:
            x = x.flatten(2).transpose(1, 2)
        x = self.last(self.blocks(x + self.places))
        logits: Tensor = self.head(x if self.patch is None else x.mean(1))
        return logits


def images(network: str, batch: int, side: int = 32, *, batchnorm: bool) -> Network:
    """One of the study's networks on images."""
    return Network(
        lambda: STUDY_NETWORKS[network]((3, side, side), 10, batchnorm=batchnorm),
        lambda: (torch.randn(batch, 3, side, side), torch.randint(10, (batch,))),
    )


def gpt(depth: int, width: int, batch: int, length: int) -> Network:
    """A GPT whose heads are 64 wide."""
    return Network(
        lambda: Transformer(depth, width, max(1, width // 64), length),
        lambda: (torch.randint(WORDS, (batch, length)), torch.randint(WORDS, (batch, length))),
    )


def vit(depth: int, width: int, batch: int, side: int = 96) -> Network:
    """A ViT on patches of 16 by 16 pixels, whose heads are 64 wide."""
    return Network(
        lambda: Transformer(depth, width, max(1, width // 64), (side // 16) ** 2, patch=16),
        lambda: (torch.randn(batch, 3, side, side), torch.randint(10, (batch,))),
    )


ON_GPU: dict[str, Network] = {
    "VGG-19": images("vgg19", 100, batchnorm=False),
    "VGG-19 with batch norm": images("vgg19", 100, batchnorm=True),
    "WRN-16-4, 32 px": images("wrn16_4", 100, batchnorm=True),
    "WRN-16-4, 96 px": images("wrn16_4", 50, 96, batchnorm=True),
    "GPT, 12 layers": gpt(12, 768, 16, 512),
    "ViT-S": vit(12, 384, 128),
}
ON_CPU: dict[str, Network] = {
    "SVHN network with batch norm": images("svhn_vgg", 50, batchnorm=True),
    "GPT, 4 layers": gpt(4, 256, 8, 128),
}
SWEEPS: dict[str, dict[int, Network]] = {
    "depth": {n: gpt(n, 256, 8, 256) for n in (2, 4, 8, 16)},
    "width": {n: gpt(4, n, 8, 256) for n in (128, 256, 512, 1024)},
    "batch": {n: gpt(4, 256, n, 256) for n in (1, 4, 16, 64)},
    "sequence length": {n: gpt(4, 256, 8, n) for n in (64, 256, 1024)},
}
"""How the ratio moves with one size, all others fixed."""
