"""One network's training step, with a constraint and without, in every mode and variant."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from maxgain import Lipschitz, MaxGain

from .networks import Network

Step = Callable[[], Any]
MODES = ("captured", "compiled", "eager")
"""Compiled, and the whole step one CUDA graph; the model compiled; as it is."""

STEPS = {"captured": 16, "compiled": 8, "eager": 8}
"""In a turn, or as many as the longest ``every``."""
OURS = ("gains_kernel", "project_kernel")

# Variants

WITHOUT = "without"
SETTINGS: dict[str, tuple[float, int]] = {
    "MaxGain": (2.0, 1),
    "watching": (float("inf"), 1),
    "every=8": (2.0, 8),
    "watching, every=64": (float("inf"), 64),
}
"""Bound and ``every`` of one constraint, which are changed in turn: code is compiled once for all of them."""


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


RIVALS: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "Lipschitz, p = 2": lambda model, optimizer: Lipschitz(model, 2.0).attach(optimizer),
    "naive hook": NaiveMaxGain,
    "torch spectral_norm": lambda model, optimizer: None,
}
"""Timed in eager steps alone."""


@dataclass
class Side:
    """A model that is trained, with a constraint, a rival, or neither."""

    step: dict[str, Step]
    """By mode; a captured one by the variant too."""
    constraint: MaxGain | None = None
    memory: float = 0.0
    """The peak of a GPU's memory in an eager step, with what is kept between steps."""


class Bench:
    """Times the variants of one network."""

    def __init__(self, network: Network, device: torch.device, modes: Sequence[str], variants: Sequence[str]) -> None:
        self.network, self.device, self.variants = network, device, variants
        self.on_gpu = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.kept: list[Any] = []
        """What captured steps read: they know addresses, not who owns them."""
        if self.on_gpu:
            self.make_side(WITHOUT, is_compiled=False)  # libraries keep memory from their first use on
        is_compiled = bool({"compiled", "captured"} & {*modes})
        names = dict.fromkeys((WITHOUT, "MaxGain", *(name for name in variants if name in RIVALS)))
        self.sides = {name: self.make_side(name, is_compiled=is_compiled and name not in RIVALS) for name in names}

    def make_side(self, name: str, *, is_compiled: bool) -> Side:
        """A training step, warmed up in every mode."""
        torch.manual_seed(0)
        gc.collect()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        model = self.network.model()
        if name == "torch spectral_norm":
            _spectral_norm(model)
        layout = torch.channels_last if self.on_gpu else torch.contiguous_format
        model.to(device=self.device, memory_format=layout)  # type: ignore[call-overload]
        rate = torch.tensor(1e-4, device=self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=self.on_gpu, capturable=self.on_gpu)
        side = Side({}, MaxGain(model, 2.0).attach(optimizer) if name == "MaxGain" else None)
        if name in RIVALS:
            RIVALS[name](model, optimizer)
        inputs, targets = (tensor.to(self.device) for tensor in self.network.batch())
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=layout)

        def step(forward: Callable[[Tensor], Tensor]) -> None:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu):
                output = forward(inputs)
            loss = F.cross_entropy(output.float().flatten(0, -2), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        side.step["eager"] = lambda: step(model)
        for _ in range(3):
            step(model)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            step(model)
            side.memory = torch.cuda.max_memory_allocated() - before
        if is_compiled:
            compiled = torch.compile(model)
            side.step["compiled"] = lambda: step(compiled)
            for _ in range(3):
                step(compiled)
        return side

    def set(self, variant: str) -> Side:
        """Return the side of a variant, with the constraint's numbers."""
        side = self.sides["MaxGain" if variant in SETTINGS else variant]
        if (constraint := side.constraint) is not None:
            constraint.gamma, constraint.every = SETTINGS[variant]
            constraint._buffer.resting.zero_()
            constraint._buffer.idle = set()
            for attached in constraint._attached.values():
                attached.steps += -attached.steps % 64  # the next one measures
                self.kept.append(attached.plan)
        return side

    def start(self, variant: str, mode: str) -> Step:
        """Return the step of a variant after a first one."""
        side = self.set(variant)
        step = side.step.get(f"{mode} {variant}", side.step.get(mode))
        if step is None:  # captured now
            step = side.step[f"{mode} {variant}"] = self.captured(side.step["compiled"])
            self.set(variant)
        step()
        return step

    def captured(self, step: Step) -> Step:
        """What replays a step that was captured as one CUDA graph; on a CPU the step itself, to rehearse."""
        if not self.on_gpu:
            return step
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        return graph.replay

    def begin(self, mode: str) -> list[str]:
        """The variants of a mode, each after its first steps."""
        variants = [WITHOUT, *(name for name in self.variants if name in SETTINGS or mode == "eager")]
        for variant in variants:
            self.start(variant, mode)()
        return variants

    def forget_captured(self) -> None:
        """Give back the memory of captured steps; they are captured again when they are needed."""
        self.wait()
        for side in self.sides.values():
            side.step = {mode: step for mode, step in side.step.items() if mode in MODES}
        self.kept.clear()
        gc.collect()
        if self.on_gpu:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def rows(self, mode: str, seconds: float) -> list[dict[str, Any]]:
        """The variants of one mode, taking turns for some seconds, but three times at least."""
        variants = self.begin(mode)
        turns: list[dict[str, float]] = []
        until = time.perf_counter() + seconds
        while len(turns) < 3 or (time.perf_counter() < until and len(turns) < 25):
            turns.append({variant: self.milliseconds(variant, mode) for variant in variants})
        return [self._row(mode, variant, turns) for variant in variants]

    def _row(self, mode: str, variant: str, turns: list[dict[str, float]]) -> dict[str, Any]:
        """One variant in one mode. Ratios are to the step without; their ends are over the turns."""
        ratios = sorted(turn[variant] / turn[WITHOUT] for turn in turns)
        side = self.sides["MaxGain" if variant in SETTINGS else variant]
        return {
            "network": "",
            "mode": mode,
            "variant": variant,
            "milliseconds": round(statistics.median(turn[variant] for turn in turns), 4),
            "ratio": round(statistics.median(ratios), 4),
            "lowest": round(ratios[0], 4),
            "highest": round(ratios[-1], 4),
            "memory": round(side.memory / self.sides[WITHOUT].memory, 4) if self.on_gpu else None,
            "turns": len(turns),
        }

    def milliseconds(self, variant: str, mode: str) -> float:
        """What a step takes, in a turn: with ``every`` one step in so many measures, wherever it begins."""
        step, count = self.start(variant, mode), STEPS[mode]
        count = max(count, SETTINGS.get(variant, (0, 1))[1])
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            step()
        self.wait()
        return 1000 * (time.perf_counter() - began) / count

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def about(self) -> dict[str, Any]:
        """The layers that no kernel measured and why, and whether one launch divides the weights."""
        constraint = self.sides["MaxGain"].constraint
        assert constraint is not None
        why = constraint._buffer.fallbacks
        plans = [attached.plan for attached in constraint._attached.values()]
        return {
            "layers": len(constraint.gains),
            "fallbacks": {layer.name: why[slot] for layer, slot in constraint._slots.items() if slot in why},
            "fused": all(plan is not None and plan.fused is not None for plan in plans),
        }

    def profile(self, mode: str) -> dict[str, Any]:
        """The GPU's kernels with and without: microseconds and launches per step."""
        activity = torch.profiler.ProfilerActivity
        found = {}
        for variant in (WITHOUT, "MaxGain", "every=8"):
            step = self.start(variant, mode)
            self.wait()
            with torch.profiler.profile(activities=[activity.CUDA if self.on_gpu else activity.CPU]) as profile:
                for _ in range(8):
                    step()
                self.wait()
            times: dict[str, list[float]] = {}
            for event in profile.events():
                if not self.on_gpu or event.device_type == torch.autograd.DeviceType.CUDA:
                    row = times.setdefault(event.name[:80], [0.0, 0])
                    row[0] += (event.device_time if self.on_gpu else event.cpu_time) / 8
                    row[1] += 1 / 8
            by_time = sorted(times.items(), key=lambda one: -one[1][0])
            shown = [*by_time[:20], *[one for one in by_time[20:] if one[0] in OURS]]
            found[variant] = {
                "us": round(sum(us for us, _ in times.values()), 1),
                "launches": round(sum(launches for _, launches in times.values()), 1),
                "kernels": {name: [round(us, 2), round(launches, 2)] for name, (us, launches) in shown},
            }
        return found
