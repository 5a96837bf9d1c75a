"""A small GPT at a learning rate that is too high: what the watch says, and when the loss says it.

    python examples/watch_gpt.py                       # a rate that doubles every 100 steps; a minute on one core
    python examples/watch_gpt.py --rate 0.03           # 200 steps of warm-up, then this rate
    python examples/watch_gpt.py --rate 0.03 --remedy cap      # with the gains of q and k held at 2
    python examples/watch_gpt.py --rate 0.03 --remedy qk-norm  # with q and k normalised instead
    python examples/watch_gpt.py --to gains.jsonl      # and every logged gain of every layer

The text is the source of Python's standard library, byte by byte, so nothing is fetched. An instance is a token.
experiments/watch_gpt.py trains many of these; docs/watching.md has what came of it.
"""

import argparse
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxgain import MaxGain, watch
from maxgain.alarms import Alarm

PARTS = {"*.qkv": ("q", "k", "v")}
CAPPED = {"*.qkv[q]": 2.0, "*.qkv[k]": 2.0, "*": math.inf}
WARM_UP = 200
"""Steps of the learning rate's warm-up, and those in which the watch raises no alarm."""


def standard_library(size: int = 400_000) -> Tensor:
    """The first bytes of the standard library's modules, in order of name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalised sum of what came before."""

    is_causal = True

    def __init__(self, width: int, heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads, self.qk_norm = heads, qk_norm
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(
        self, width: int = 64, depth: int = 4, heads: int = 4, context: int = 64, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, qk_norm) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


@dataclass
class Run:
    """What a training showed, step by step."""

    losses: list[float]
    """Nats per byte."""
    gradients: list[float]
    """The norm of all gradients."""
    alarms: list[Alarm]


def rate_at(step: int, peak: float | None) -> float:
    """The learning rate: a warm-up to its peak; without a peak it doubles every 100 steps."""
    return 0.001 * 2 ** (step // 100) if peak is None else peak * min(1.0, (step + 1) / WARM_UP)


def train(
    model: GPT,
    text: Tensor,
    steps: int,
    peak: float | None,
    *,
    gamma: Any = math.inf,
    batch: int = 16,
    seed: int = 0,
    to: Any = None,
    growth: float = 5.0,
    compiled: bool = False,
) -> Run:
    """Train a model with AdamW as torch has it, on batches drawn by this seed, and watch it."""
    alarms: list[Alarm] = []
    batches = torch.Generator().manual_seed(seed)
    losses, gradients = torch.zeros(2, steps, device=text.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=text.is_cuda)
    constraint = MaxGain(model, gamma, parts=PARTS, every=8 if gamma == math.inf else 1).attach(optimizer)
    watching = watch(constraint, every=8, to=to, log="all", growth=growth, warmup=WARM_UP, on_alarm=alarms.append)
    forward = torch.compile(model) if compiled else model
    places = torch.arange(model.context + 1, device=text.device)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate_at(step, peak)
        starts = torch.randint(len(text) - model.context, (batch, 1), generator=batches)
        pieces = text[starts.to(text.device) + places]
        loss = F.cross_entropy(forward(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        losses[step], gradients[step] = loss.detach(), nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        watching.log(step)
        if step % 50 == 49 and not losses[step].isfinite():
            break
    watching.close()
    return Run(losses[: step + 1].tolist(), gradients[: step + 1].tolist(), alarms)


def spike_of(losses: Sequence[float], by: float = 0.5, over: int = 10) -> int | None:
    """The first step at which the mean of the last losses is ``by`` nats above the lowest such mean, or not finite."""
    lowest = math.inf
    for end in range(over, len(losses) + 1):
        mean = sum(losses[end - over : end]) / over
        lowest = min(lowest, mean)
        if not mean <= lowest + by:
            return end - 1
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="the learning rate after a warm-up; without one it keeps doubling")
    parser.add_argument("--remedy", choices=["none", "cap", "qk-norm"], default="none")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--to", metavar="FILE", help="write the gains of all layers as lines of JSON")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    text = standard_library()
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        model, gamma = GPT(qk_norm=options.remedy == "qk-norm"), CAPPED if options.remedy == "cap" else math.inf
        run = train(
            model, text, options.steps, options.rate, gamma=gamma, seed=seed, to=options.to, compiled=options.compile
        )
        spike, last = spike_of(run.losses), run.losses[-50:]
        said = "does not spike" if spike is None else f"spikes at step {spike}"
        print(f"seed {seed}: the loss {said} and ends at {sum(last) / len(last):.2f} nats per byte")
        print(*(f"    {alarm}" for alarm in run.alarms[:3]), f"    {len(run.alarms)} alarms", sep="\n")


if __name__ == "__main__":
    main()
