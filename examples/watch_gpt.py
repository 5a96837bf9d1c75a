"""A small GPT at learning rates that are too high: what the watch says before the loss does, and what a bound does.

    python examples/watch_gpt.py              # two minutes for each seed on one core
    python examples/watch_gpt.py --to gains   # and the gains as gains-0.jsonl, gains-1.jsonl, ...
    python examples/watch_gpt.py --compile    # the same under torch.compile

1. The learning rate doubles every 100 steps, from 0.003 on. The loss jumps at step 604, 582 and 529 with seeds 0, 1, 2;
   the first alarm sounds 340, 150 and 81 steps before, for a k, an attention output and a v.
2. A constant 0.03 without a warm-up hardly learns: 2.66, 2.73 and 2.66 nats per byte after 700 steps. With the gains
   of q and k held at 2: 2.18, 2.06 and 1.99. QK-norm is the better remedy where the architecture may change.

The text is the source of Python's standard library, byte by byte, so nothing is fetched. An instance is a token.
"""

import argparse
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maxgain import MaxGain, watch
from maxgain.alarms import Alarm

PARTS = {"*.qkv": ("q", "k", "v")}
CAPPED = {"*.qkv[q]": 2.0, "*.qkv[k]": 2.0, "*": math.inf}


def standard_library(size: int = 400_000) -> Tensor:
    """The first bytes of the standard library's modules, in order of name."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalised sum of what came before."""

    is_causal = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def train(
    rate: Callable[[int], float],
    steps: int,
    seed: int,
    gamma: Any = math.inf,
    beta2: float = 0.95,
    to: Any = None,
    compiled: bool = False,
) -> tuple[list[float], list[Alarm]]:
    """Train with the learning rate of each step; return the losses in nats per byte, and the alarms."""
    torch.manual_seed(seed)
    text, model, alarms, losses = standard_library(), GPT(), list[Alarm](), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, beta2))
    constraint = MaxGain(model, gamma, parts=PARTS).attach(optimizer)
    watching = watch(constraint, to=to, warmup=100, on_alarm=alarms.append)
    forward = torch.compile(model) if compiled else model
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        pieces = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(65)]
        loss = nn.functional.cross_entropy(forward(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watching.log(step)
        losses.append(loss.item())
    return losses, alarms


def jump_of(losses: list[float], by: float = 0.5, over: int = 10) -> int | None:
    """The first step at which the mean of the last losses is ``by`` nats above the lowest such mean; None if never."""
    lowest = math.inf
    for end in range(over, len(losses) + 1):
        mean = sum(losses[end - over : end]) / over
        lowest = min(lowest, mean)
        if mean > lowest + by:
            return end - 1
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--to", metavar="NAME", help="write the gains of the first part")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    compiled = options.compile
    for seed in range(options.seeds):
        to = f"{options.to}-{seed}.jsonl" if options.to else None
        losses, alarms = train(lambda step: 0.003 * 2 ** (step // 100), options.steps, seed, to=to, compiled=compiled)
        jump = jump_of(losses)
        said = "the loss does not jump" if jump is None else f"the loss jumps at step {jump}"
        print(f"seed {seed}, doubling: {said}; {len(alarms)} alarms", *alarms[:2], sep="\n    ")
        for name, gamma in (("no bound", math.inf), ("q and k at 2", CAPPED)):
            losses, alarms = train(lambda step: 0.03, options.steps, seed, gamma, beta2=0.999, compiled=compiled)
            last = sum(losses[-50:]) / min(50, options.steps)
            print(f"seed {seed}, constant 0.03, {name}, {len(alarms)} alarms: {last:.2f} nats per byte")


if __name__ == "__main__":
    main()
