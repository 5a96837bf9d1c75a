"""What a training step costs with a constraint, as a ratio to the same step without.

    python -m benchmarks                                    # make bench: all of this machine, into benchmarks/here
    python -m benchmarks --networks ResNet-50 Swin-T --modes captured

Variants of a network take turns, a few steps each, so that a machine that slows down slows all of them. Shown are
medians over the turns, with the least and the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import maxgain
from maxgain import Lipschitz, MaxGain
from maxgain.study.networks import NETWORKS as STUDY_NETWORKS

Step = Callable[[], Any]
Put = Callable[[nn.Module, Optimizer], object]

# Networks


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


def gpt(depth: int, width: int, words: int, batch: int, length: int) -> Network:
    """A GPT that predicts random words."""
    return Network(
        lambda: GPT(depth, width, words, length),
        lambda: (torch.randint(words, (batch, length)), torch.randint(words, (batch, length))),
    )


def study(name: str, batch: int, side: int = 32, *, batchnorm: bool) -> Network:
    """One of the study's networks."""
    return _on_images(lambda: STUDY_NETWORKS[name]((3, side, side), 10, batchnorm=batchnorm), batch, side, 10)


def timm(name: str, batch: int, side: int = 224) -> Network:
    """A network of timm's, untrained."""
    return _on_images(lambda: _import_timm().create_model(name, num_classes=1000), batch, side, 1000)


def _import_timm() -> Any:
    """Timm, with a stand-in for torchvision where that is missing: these models use nothing of it."""
    parts = ("", ".ops", ".ops.misc", ".models", ".models.feature_extraction", ".transforms", ".transforms.functional")
    stand_ins = {f"torchvision{part}": MagicMock() for part in (*parts, ".datasets")}
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    if "timm" in sys.modules or find_spec("torchvision"):
        return importlib.import_module("timm")
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module("timm")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _on_images(model: Callable[[], nn.Module], batch: int, side: int, classes: int) -> Network:
    return Network(model, lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))))


ON_GPU = {
    "VGG-19": study("vgg19", 100, batchnorm=False),
    "VGG-19 with batch norm": study("vgg19", 100, batchnorm=True),
    "WRN-16-4, 32 px": study("wrn16_4", 100, batchnorm=True),
    "WRN-16-4, 96 px": study("wrn16_4", 50, 96, batchnorm=True),
    "ResNet-50": timm("resnet50", 128),
    "ConvNeXt-T": timm("convnext_tiny", 64),
    "ViT-B": timm("vit_base_patch16_224", 64),
    "Swin-T": timm("swin_tiny_patch4_window7_224", 64),
    "GPT-2, 124M": gpt(12, 768, 50_257, 8, 1024),
}
ON_CPU = {
    "SVHN network with batch norm": study("svhn_vgg", 50, batchnorm=True),
    "GPT, 4 layers": gpt(4, 256, 256, 8, 128),
}

# Variants


class NaiveMaxGain:
    """The method as one would first write it: hooks that keep activations, and a loop over layers at the step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.register_forward_hook(self._keep)
        optimizer.register_step_post_hook(self._project)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        z, bias = output.detach(), module.bias
        if isinstance(bias, Tensor):
            z = z - bias.detach().view(-1, *[1] * (_instance_dims(module) - 1))
        self.seen[module] = args[0].detach(), z

    @torch.no_grad()
    def _project(self, *_: Any) -> None:
        for module, (x, z) in self.seen.items():
            dims = _instance_dims(module)
            gains = z.float().flatten(-dims).norm(dim=-1) / x.float().flatten(-dims).norm(dim=-1)
            assert isinstance(module.weight, Tensor)
            module.weight /= (gains.amax() / 2.0).clamp(min=1.0)
        self.seen.clear()


def _instance_dims(module: nn.Module) -> int:
    return 1 if isinstance(module, nn.Linear) else 3


def _spectral_norm(model: nn.Module) -> None:
    for module in [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]:
        nn.utils.parametrizations.spectral_norm(module)


WITHOUT = "without"
VARIANTS: dict[str, Put] = {
    "MaxGain": lambda model, optimizer: MaxGain(model, 2.0).attach(optimizer),
    "watching": lambda model, optimizer: MaxGain(model, float("inf")).attach(optimizer),
    "Lipschitz, p = 2": lambda model, optimizer: Lipschitz(model, 2.0).attach(optimizer),
    "naive hook": NaiveMaxGain,
}
REPARAMETRISED = {"torch spectral_norm": _spectral_norm}
"""These change the model before the optimizer is made."""
CAPTURABLE = ("MaxGain", "watching")
"""What is timed in a captured step, in which the host takes no part."""
MODES = ("eager", "compiled", "captured")
"""As it is; the model compiled; compiled, and the whole step one CUDA graph."""

# Timing


@dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    device: torch.device
    turns: int = 7
    steps: int = 3
    """In a turn."""
    modes: tuple[str, ...] = MODES[:1]
    variants: tuple[str, ...] = ()
    """Those alone; all if there are none."""


@dataclass(frozen=True)
class Row:
    """One variant on one network in one mode. Ratios are to the step without; their ends are over the turns."""

    network: str
    mode: str
    variant: str
    milliseconds: float
    ratio: float
    lowest: float
    highest: float
    memory: float | None
    """Ratio of peaks of a GPU's memory, in a step and kept between steps; None on a CPU."""


def measure(networks: dict[str, Network], settings: Settings) -> Iterator[Row]:
    """Every variant of every network in every mode."""
    # Memory, waiting and captures are of the current GPU.
    on_gpu = settings.device.type == "cuda"
    with torch.cuda.device(settings.device) if on_gpu else contextlib.nullcontext():
        for name, network in networks.items():
            for mode in settings.modes:
                yield from compared(name, network, mode, settings)


def compared(name: str, network: Network, mode: str, settings: Settings) -> Iterator[Row]:
    """The variants of one mode, taking turns."""
    possible = CAPTURABLE if mode == "captured" else (*VARIANTS, *REPARAMETRISED)
    names = [WITHOUT, *(one for one in possible if not settings.variants or one in settings.variants)]
    if mode != "eager":  # all variants are the same code to the compiler, which gives up after a few models
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100
    on_gpu = settings.device.type == "cuda"
    if on_gpu:
        make_step(network, WITHOUT, "eager", settings.device)()  # libraries keep memory from their first use on
    steps: dict[str, Step] = {}
    peaks: dict[str, float] = {}
    for variant in names:
        before = _allocated() if on_gpu else 0
        steps[variant] = make_step(network, variant, mode, settings.device)
        peaks[variant] = torch.cuda.max_memory_allocated() - before if on_gpu else 0.0
    turns = [
        {variant: _milliseconds(step, settings.steps, settings.device) for variant, step in steps.items()}
        for _ in range(settings.turns)
    ]
    for variant in names:
        ratios = sorted(turn[variant] / turn[WITHOUT] for turn in turns)
        yield Row(
            name,
            mode,
            variant,
            statistics.median(turn[variant] for turn in turns),
            statistics.median(ratios),
            ratios[0],
            ratios[-1],
            peaks[variant] / peaks[WITHOUT] if on_gpu else None,
        )


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def make_step(network: Network, variant: str, mode: str, device: torch.device) -> Step:
    """A training step of one variant, warmed up; the peak of memory is then that of its last step."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = network.model()
    if variant in REPARAMETRISED:
        REPARAMETRISED[variant](model)
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    rate = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)
    if variant in VARIANTS:
        VARIANTS[variant](model, optimizer)
    forward: Callable[[Tensor], Tensor] = model if mode == "eager" else torch.compile(model)
    inputs, targets = (tensor.to(device) for tensor in network.batch())
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=layout)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            output = forward(inputs)
        loss = F.cross_entropy(output.float().flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    step()
    return captured(step) if mode == "captured" else step


def captured(step: Step) -> Step:
    """What replays a step that was taken three times and then captured as one CUDA graph, and returns its result."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay(keeps_alive: Step = step) -> Any:  # the graph knows addresses, not who owns them
        graph.replay()
        return result

    return replay


def _milliseconds(step: Step, steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / steps


# Output


def record(rows: Sequence[Row], settings: Settings) -> dict[str, Any]:
    """The rows with the machine, the versions and the date."""
    on_gpu = settings.device.type == "cuda"
    threads = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "maxgain": maxgain.__version__,
        "machine": torch.cuda.get_device_name(settings.device) if on_gpu else threads,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "turns": settings.turns,
        "steps": settings.steps,
        "rows": [asdict(row) for row in rows],
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of MaxGain's ratios, one per mode and network, with the ends over the turns."""
    from matplotlib.figure import Figure

    ours = [row for row in rows if row.variant == "MaxGain"]
    names, modes = list(dict.fromkeys(row.network for row in ours)), list(dict.fromkeys(row.mode for row in ours))
    figure = Figure(figsize=(7.6, 1 + 0.5 * len(names)), layout="constrained")
    axis = figure.subplots()
    for index, mode in enumerate(modes):
        bars = {row.network: row for row in ours if row.mode == mode}
        places = [names.index(name) + (index - (len(modes) - 1) / 2) * 0.25 for name in bars]
        ratios = [row.ratio for row in bars.values()]
        ends = [[row.ratio - row.lowest for row in bars.values()], [row.highest - row.ratio for row in bars.values()]]
        axis.barh(places, [ratio - 1 for ratio in ratios], 0.22, left=1, xerr=ends, label=mode, error_kw={"lw": 0.8})
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("step with MaxGain / step without")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Time what is asked for, print it, and write bench.json and bench.svg."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all on a GPU, eager on a CPU")
    parser.add_argument("--networks", nargs="+", help="default: all of the device's")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, *REPARAMETRISED], default=[])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/here"))
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    on_gpu, known = device.type == "cuda", {**ON_CPU, **ON_GPU}
    if strange := set(options.networks or ()) - set(known):
        parser.error(f"there is no network {min(strange)!r}; there are {', '.join(known)}")
    modes = tuple(options.modes or (MODES if on_gpu else MODES[:1]))
    if not on_gpu and "captured" in modes:
        parser.error("captured steps need a GPU")
    names = options.networks or (ON_GPU if on_gpu else ON_CPU)
    settings = Settings(device, options.turns, 30 if on_gpu else 2, modes, tuple(options.variants))
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler says would hide the table
        for row in measure({name: known[name] for name in names}, settings):
            rows.append(row)
            ends = f"{row.ratio:.3f} ({row.lowest:.3f} to {row.highest:.3f})"
            print(f"{row.network:28} {row.mode:9} {row.variant:20} {row.milliseconds:9.2f} ms  {ends}", flush=True)
            (options.out / "bench.json").write_text(json.dumps(record(rows, settings), indent=1) + "\n")
    draw(rows, options.out / "bench.svg")
