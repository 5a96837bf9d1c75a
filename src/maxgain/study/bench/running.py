"""Timing steps: variants take turns, a few steps each, so that a machine that slows down slows all of them."""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

import maxgain

from ..wording import counted
from .networks import ON_CPU, ON_GPU, SWEEPS, Network
from .variants import CAPTURABLE, REPARAMETRISED, VARIANTS, WITHOUT

Step = Callable[[], None]
MOST_COMPILED = 100
MODES = ("eager", "compile", "reduce-overhead", "whole-step graph")


@dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    device: torch.device
    turns: int = 7
    steps: int = 3
    """In a turn."""
    modes: tuple[str, ...] = ("eager",)
    networks: tuple[str, ...] = ()
    """Those alone; all if there are none."""
    variants: tuple[str, ...] = ()
    """Likewise."""
    sweeps: bool = False


@dataclass(frozen=True)
class Row:
    """One variant on one network in one mode. A ratio is to the step without; its spread is over the turns."""

    network: str
    mode: str
    variant: str
    milliseconds: float
    ratio: float
    lowest: float
    highest: float
    memory: float | None
    """The ratio of the peaks of a GPU's memory in a step, of what such a network keeps between steps too.

    None on a CPU, and of reduce-overhead: its graphs have memory of their own, which torch counts in no replay.
    """


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """All rows so far, with the machine, the versions and the date, after each new one."""
    content = {
        "maxgain": maxgain.__version__,  # the first, by which the program knows its own files
        "machine": _machine(settings.device),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "turns": settings.turns,
        "steps": settings.steps,
    }
    rows = []
    # Memory, waiting and captures are of the current GPU.
    with torch.cuda.device(settings.device) if settings.device.type == "cuda" else contextlib.nullcontext():
        for about, row in _rows(settings):
            rows.append(asdict(row) | about)
            yield content | {"rows": rows}


def networks_on(device: torch.device) -> dict[str, Network]:
    """What is timed on such a device."""
    return ON_GPU if device.type == "cuda" else ON_CPU


def _rows(settings: Settings) -> Iterator[tuple[dict[str, Any], Row]]:
    for name, network in networks_on(settings.device).items():
        for mode in settings.modes if not settings.networks or name in settings.networks else ():
            for row in compared(name, network, mode, settings):
                yield {}, row
    if settings.sweeps:
        for size, networks in SWEEPS.items():
            for value, network in networks.items():
                for row in compared(f"GPT, {size} {value}", network, settings.modes[0], settings, CAPTURABLE):
                    yield {"sweep": size, "value": value}, row


def compared(name: str, network: Network, mode: str, settings: Settings, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """The variants of one mode, taking turns."""
    possible = only or (CAPTURABLE if mode == "whole-step graph" else (*VARIANTS, *REPARAMETRISED))
    names = [WITHOUT, *(name for name in possible if not settings.variants or name in settings.variants)]
    if mode != "eager":
        # Nothing compiled before is timed again. All variants are the same code to the compiler, which by itself gives
        # up on code that it has compiled for a few models.
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILED
    has_peaks = settings.device.type == "cuda" and mode != "reduce-overhead"
    if has_peaks:
        make_step(network, WITHOUT, "eager", settings.device)()  # libraries keep memory from their first use on
    peaks: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for variant in names:
        peak = Peak() if has_peaks else None
        steps[variant] = make_step(network, variant, mode, settings.device, peak)
        peaks[variant] = peak.bytes if peak else 1.0
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
            peaks[variant] / peaks[WITHOUT] if has_peaks else None,
        )


class Peak:
    """The most memory of a GPU that is in use during a block, beyond what was in use when this was made."""

    def __init__(self) -> None:
        gc.collect()
        self.before = torch.cuda.memory_allocated()
        self.bytes = 0

    def __enter__(self) -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *_: object) -> None:
        self.bytes = torch.cuda.max_memory_allocated() - self.before


def make_step(network: Network, variant: str, mode: str, device: torch.device, peak: Peak | None = None) -> Step:
    """A function that does one training step of one variant, warmed up; ``peak`` is told what such a step needs."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = network.model()
    if variant in REPARAMETRISED:
        REPARAMETRISED[variant](model)
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    rate = torch.tensor(1e-4, device=device)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)
    if variant in VARIANTS:
        VARIANTS[variant](model, optimiser)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if mode != "eager":
        forward = torch.compile(model, mode="reduce-overhead" if mode == "reduce-overhead" else "default")
    inputs, targets = (tensor.to(device) for tensor in network.batch())
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=layout)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            output = forward(inputs)
        network.loss(output, targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    with contextlib.nullcontext() if peak is None else peak:
        step()
    return captured(step) if mode == "whole-step graph" else step


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
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

    def replay(keeps_alive: Callable[[], Any] = step) -> Any:  # the graph knows addresses, not who owns what is there
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


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.system()} {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"
