"""A small GPT learns to write Python, and the gains of its layers are watched.

    python examples/gpt.py                        # watches; changes nothing
    python examples/gpt.py --gamma 3              # and holds every layer to a gain of 3
    python examples/gpt.py --tensorboard runs/gpt

The text is the source of Python's own standard library, byte by byte, so nothing is fetched. Every token is an instance
of a dense layer: the gains are the largest over all tokens of a batch.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.monitor import Monitor

BYTES = 256


def standard_library(size: int) -> Tensor:
    """The first bytes of the standard library's modules, in order of name."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalised sum of what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def batch(text: Tensor, context: int, size: int = 16) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - context - 1, (size,))
    pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


def train(steps: int, gamma: float, writer: Any = None) -> tuple[float, dict[str, float]]:
    """The last loss in nats per byte, and the newest gains."""
    torch.manual_seed(0)
    text, model = standard_library(400_000), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    constraint = MaxGain(model, gamma).attach(optimizer)
    monitor = Monitor(constraint, writer, every=10)
    loss = torch.tensor(0.0)
    for step in range(steps):
        inputs, targets = batch(text, model.context)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        monitor.log(step)
    return loss.item(), constraint.gains


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gamma", type=float, default=float("inf"))
    parser.add_argument("--tensorboard", metavar="DIR", help="where to write the curves")
    options = parser.parse_args(arguments)
    seen: list[dict[str, float]] = []
    if options.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(options.tensorboard) as writer:
            loss, gains = train(options.steps, options.gamma, writer)
    else:
        loss, gains = train(options.steps, options.gamma, lambda numbers, step: seen.append(numbers))
    print(f"{options.steps} steps, γ = {options.gamma:g}: {loss:.3f} nats per byte")
    print(f"{'layer':20}{'first':>10}{'last':>10}")
    for name, gain in gains.items():
        first = f"{seen[0][f'gain/{name}']:.2f}" if seen else ""
        print(f"{name:20}{first:>10}{gain:10.2f}")


if __name__ == "__main__":
    main()
