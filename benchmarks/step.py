"""What a training step costs with us, as a ratio to the same step without, in one run.

    make bench                                   on the CPU: the study's SVHN network, batch 50
    python -m benchmarks.step --device cuda      on a GPU: VGG-19 at 32×32, batch 100, bfloat16

Expected: the measuring reads every input and output once, so a step that is bound by arithmetic costs a few per cent
more, and one that is bound by launches costs what the extra launches cost. The rivals that constrain by
reparametrising (spectral norm) pay in every forward and backward.

The variants of a mode take turns, a few steps each, so that a machine that slows down slows all of them; what is
shown is the median over turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from maxgain import Lipschitz, MaxGain
from maxgain.study.models import NETWORKS

Step = Callable[[], None]


def no_constraint(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """The step that all others are compared with."""


def maxgain(model: nn.Module, optimiser: torch.optim.Optimizer, measure: str = "stale") -> None:
    MaxGain(model, 2.0, measure=measure).attach(optimiser)  # type: ignore[arg-type]


def lipschitz(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    Lipschitz(model, 2.0).attach(optimiser)


VARIANTS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "without": no_constraint,
    "maxgain": maxgain,
    "maxgain, fresh": partial(maxgain, measure="fresh"),
    "lipschitz, p = 2": lipschitz,
    "torch spectral_norm": no_constraint,
}
IN_MODE = {
    "eager": tuple(VARIANTS),
    "compile": ("without", "maxgain", "torch spectral_norm"),
    "reduce-overhead": ("without", "maxgain", "torch spectral_norm"),
    "whole-step graph": ("without", "maxgain"),
}


def make_step(variant: str, mode: str, device: torch.device, batch: int) -> Step:
    """A function that does one training step of one variant."""
    torch.manual_seed(0)
    network = NETWORKS["vgg19" if device.type == "cuda" else "svhn_vgg"]
    model = network((3, 32, 32), 10, batchnorm=True).to(device)
    if variant == "torch spectral_norm":
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.utils.parametrizations.spectral_norm(module)
    on_gpu = device.type == "cuda"
    rate = torch.tensor(1e-4, device=device)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)
    VARIANTS[variant](model, optimiser)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if mode in ("compile", "reduce-overhead"):
        forward = torch.compile(model, fullgraph=True, mode="default" if mode == "compile" else mode)
    images = torch.randn(batch, 3, 32, 32, device=device)
    labels = torch.randint(10, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    return captured(step) if mode == "whole-step graph" else step


def captured(step: Step) -> Step:
    """The whole step as one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(keeps_alive: Step = step) -> None:  # the graph knows addresses, not who owns what is there
        graph.replay()

    return replay


def milliseconds(step: Step, steps: int, device: torch.device) -> float:
    """The time of one step, from a turn of several."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=list(IN_MODE), default=None)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", help="also write the times to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    modes = options.modes or (list(IN_MODE) if on_gpu else ["eager"])
    batch, steps = (100, 50) if on_gpu else (50, 2)
    where = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; ms a step, median of {options.turns} turns of {steps}")
    records = []
    for mode in modes:
        made = {variant: make_step(variant, mode, device, batch) for variant in IN_MODE[mode]}
        turns = [{name: milliseconds(step, steps, device) for name, step in made.items()} for _ in range(options.turns)]
        times = {name: statistics.median(turn[name] for turn in turns) for name in made}
        for name, time_ in times.items():
            print(f"{mode:>16}  {name:<20} {time_:8.2f}  {time_ / times['without']:.2f}×", flush=True)
            records.append({"mode": mode, "variant": name, "ms": time_, "ratio": time_ / times["without"]})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"where": where, "torch": torch.__version__, "rows": records}, file, indent=2)


if __name__ == "__main__":
    # A warning of the compiler about something that is not ours would only hide the table.
    warnings.simplefilter("ignore")
    main()
