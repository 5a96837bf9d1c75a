"""What a training step costs with a constraint, as a ratio to the same step without.

    python -m benchmarks                                    # make bench: all of this machine, into benchmarks/here
    python -m benchmarks --networks ResNet-50 Swin-T --modes captured

Each network has a process of its own. All compile at the same time; when the last one has, or the time for it is over,
they are timed one after another, alone on the machine: captured steps, compiled ones, eager ones. Variants of a network
take turns, so that a machine that slows down slows all of them. Shown are medians over the turns, with the least and
the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import maxgain
from maxgain import Lipschitz, MaxGain

from .figures import draw
from .networks import ON_CPU, ON_GPU, TINY, Network

Step = Callable[[], Any]
MODES = ("captured", "compiled", "eager")
"""Compiled, and the whole step one CUDA graph; the model compiled; as it is."""

STEPS = {"captured": 16, "compiled": 8, "eager": 8}
"""In a turn, or as many as the longest ``every``."""
OURS = ("gains_kernel", "gains_of_layers_kernel", "project_kernel")

# Variants

WITHOUT = "without"
SETTINGS: dict[str, tuple[float, int]] = {
    "MaxGain": (2.0, 1),
    "watching": (float("inf"), 1),
    "every=8": (2.0, 8),
    "watching, every=64": (float("inf"), 64),
}
"""Bound and ``every`` of one constraint, which are changed in turn: code is compiled once for all of them."""
RARE = "watching, every=64"
"""Timed for the networks that are named with --rare alone, as its turns are long."""


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
"""Timed in eager steps, if they are asked for."""

# One network, in a process of its own


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

    def __init__(
        self, network: Network, device: torch.device, modes: Sequence[str], rivals: Sequence[str], lock: str
    ) -> None:
        self.network, self.device, self.lock = network, device, lock
        self.on_gpu = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.sides: dict[str, Side] = {}
        self.kept: list[Any] = []
        """What captured steps read: they know addresses, not who owns them."""
        if self.on_gpu:
            self.make_side(WITHOUT, is_compiled=False)  # libraries keep memory from their first use on
        is_compiled = bool({"compiled", "captured"} & {*modes})
        for name in (WITHOUT, "MaxGain", *rivals):
            self.sides[name] = self.make_side(name, is_compiled=is_compiled and name not in RIVALS)

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
        with alone(self.lock):
            for _ in range(3):
                step(model)
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                step(model)
                side.memory = torch.cuda.max_memory_allocated() - before
        if is_compiled:
            compiled = torch.compile(model)
            side.step["compiled"] = lambda: step(compiled)
            step(compiled)
            with alone(self.lock):
                for _ in range(2):
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

    def rows(self, mode: str, seconds: float, *rare: str) -> list[dict[str, Any]]:
        """The variants of one mode, taking turns for some seconds, but three times at least."""
        rivals = [name for name in RIVALS if name in self.sides and mode == "eager"]
        variants = [WITHOUT, *[name for name in SETTINGS if name != RARE or rare], *rivals]
        for variant in variants:
            self.start(variant, mode)
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
        slots = zip(constraint.gains, constraint._slots.values(), strict=True)
        plans = [attached.plan for attached in constraint._attached.values()]
        return {
            "layers": len(constraint.gains),
            "fallbacks": {name: why for name, slot in slots if (why := constraint._fallback(slot))},
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


MARK = "@bench "


def serve(network: Network, device: torch.device, modes: Sequence[str], rivals: Sequence[str], lock: str) -> None:
    """Prepare one network, then do what each line of the input asks for, and answer each with a line."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100
    warnings.simplefilter("ignore")  # what the compiler says would hide the table
    tune_alone(lock)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        began = time.perf_counter()
        bench = Bench(network, device, modes, rivals, lock)
        print(MARK + json.dumps(round(time.perf_counter() - began, 1)), flush=True)
        for line in sys.stdin:
            do, *arguments = json.loads(line)
            try:
                answer = getattr(bench, do)(*arguments)
            except Exception:
                answer = {"error": traceback.format_exc()[-1500:]}
            print(MARK + json.dumps(answer), flush=True)


_held = threading.RLock()
_depth: list[Any] = []


@contextlib.contextmanager
def alone(lock: str) -> Iterator[None]:
    """Use the GPU while no other process does."""
    with _held, Path(lock).open("w") as file:
        if not _depth:
            fcntl.flock(file, fcntl.LOCK_EX)
        _depth.append(file)
        try:
            yield
        finally:
            _depth.pop()


def tune_alone(lock: str) -> None:
    """Have the compiler try kernels on the GPU while no other process does."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    trying = CachingAutotuner.benchmark_all_configs

    def benchmark_all_configs(*arguments: Any, **options: Any) -> Any:
        with alone(lock):
            return trying(*arguments, **options)

    CachingAutotuner.benchmark_all_configs = benchmark_all_configs


class Child:
    """A process that times one network."""

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.answers: queue.Queue[Any] = queue.Queue()
        self.tail: list[str] = []
        command = [sys.executable, "-m", "benchmarks", "--serve", name, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.output:
            if line.startswith(MARK):
                self.answers.put(json.loads(line[len(MARK) :]))
            else:
                self.tail = [*self.tail[-25:], line]
        self.answers.put({"error": "".join(self.tail)[-3000:]})

    def answer(self, until: float) -> Any:
        """The next answer, or an error if it does not come in time."""
        try:
            return self.answers.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            return {"error": "out of time"}

    def ask(self, until: float, *what: Any) -> Any:
        """Send a line and wait for the answer."""
        try:
            self.input.write(json.dumps(what) + "\n")
            self.input.flush()
        except OSError as error:
            return {"error": str(error)}
        return self.answer(until)

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.output.close()
        with contextlib.suppress(OSError):  # what was not sent
            self.input.close()


# All of them


def main(arguments: Sequence[str] | None = None) -> None:
    """Time what is asked for, print it, and write bench.json and its figures."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all on a GPU, eager on a CPU")
    parser.add_argument("--networks", nargs="+", help="default: all of the device's")
    parser.add_argument("--rivals", nargs="*", choices=[*RIVALS], default=[], help="eager steps of others, too")
    parser.add_argument("--rare", nargs="*", default=[], help="networks that are also watched in every 64th step")
    parser.add_argument("--profile", nargs="*", default=[], help="networks whose kernels are listed in profile.json")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the turns of a network, twice if captured")
    parser.add_argument("--prepare", type=float, default=900.0, help="seconds in which networks may compile")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all, the most valuable first")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny networks")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/here"))
    parser.add_argument("--serve", nargs=2, metavar=("NETWORK", "LOCK"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    known = TINY if options.tiny else {**ON_CPU, **ON_GPU}
    modes = tuple(mode for mode in MODES if mode in (options.modes or (MODES if on_gpu else MODES[2:])))
    if options.serve:
        serve(known[options.serve[0]], device, modes, options.rivals, options.serve[1])
        return
    names = options.networks or [*(TINY if options.tiny else ON_GPU if on_gpu else ON_CPU)]
    if strange := {*names, *options.profile, *options.rare} - set(known):
        parser.error(f"there is no network {min(strange)!r}; there are {', '.join(known)}")
    if not (on_gpu or options.tiny) and "captured" in modes:
        parser.error("captured steps need a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        common = [f"{folder}/lock", "--device", options.device, *(["--tiny"] if options.tiny else [])]
        common += ["--rivals", *options.rivals, "--modes", *modes]
        # More than there are cores: most networks have compiled long before the last one.
        threads = max(1, 3 * (os.cpu_count() or 1) // max(1, len(names)))
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} if on_gpu else {}
        children = [Child(name, common, environment) for name in names]
        try:
            run(children, modes, options, began, device)
        finally:
            for child in children:
                child.stop()
    print(f"{time.monotonic() - began:.0f} s")


def run(
    children: list[Child], modes: Sequence[str], options: argparse.Namespace, began: float, device: torch.device
) -> None:
    """Have all children prepare, then time them one by one, and write what is known after each."""
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    record: dict[str, Any] = describe(device) | {"prepared_s": {}, "errors": {}, "networks": {}, "rows": rows}
    ready, until = [], began + options.limit

    def note(what: str, answer: Any) -> bool:
        """Keep an error, and return whether there is none."""
        is_error = isinstance(answer, dict) and "error" in answer
        if is_error:
            record["errors"][what] = answer["error"]
            print(f"{what}: {answer['error']}", flush=True)
        return not is_error

    for child in children:
        answer = child.answer(min(until, began + options.prepare))
        if note(f"{child.name}, prepared", answer):
            record["prepared_s"][child.name] = answer
            ready.append(child)
        else:
            child.stop()  # nothing else runs while the others are timed
    print(f"prepared after {time.monotonic() - began:.0f} s: {record['prepared_s']}", flush=True)
    asked = [(mode, child) for mode in modes for child in ready]
    asked += [("profile", child) for child in ready if child.name in options.profile]
    for mode, child in asked:
        if time.monotonic() > until:
            break
        if mode == "profile":
            answer = child.ask(until + 10, "profile", modes[0])
            profiles |= {child.name: answer} if note(f"{child.name}, profile", answer) else {}
        else:
            rare = ["rare"] if child.name in options.rare else []
            seconds = options.seconds * (1 + (mode == "captured"))
            answer = child.ask(until + 10, "rows", mode, seconds, *rare)
            if note(f"{child.name}, {mode}", answer):
                rows.extend(row | {"network": child.name} for row in answer)
                show(rows[-len(answer) :])
                record["networks"][child.name] = child.ask(until + 10, "about")
        (options.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    if profiles:
        (options.out / "profile.json").write_text(json.dumps(profiles) + "\n")
    for name, about in record["networks"].items():
        if fallbacks := about.get("fallbacks"):
            print(f"{name}: {len(fallbacks)} layers are not measured by the kernel: {next(iter(fallbacks.items()))}")
    with contextlib.suppress(ImportError):  # benchmarks.figures draws a record elsewhere, too
        draw(rows, options.out)
    summary(rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one network in one mode."""
    for row in rows:
        ends = f"{row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
        memory = "" if row["memory"] is None else f"  memory {row['memory']:.3f}"
        print(f"{row['network']:28} {row['mode']:9} {row['variant']:20} {row['milliseconds']:9.2f} ms  {ends}{memory}",
              flush=True)  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each network and mode."""
    print(f"\n{'':38}" + "".join(f"{variant:>20}" for variant in SETTINGS))
    ratios = {(row["network"], row["mode"], row["variant"]): row["ratio"] for row in rows}
    for name, mode in dict.fromkeys((row["network"], row["mode"]) for row in rows):
        found = [ratios.get((name, mode, variant)) for variant in SETTINGS]
        print(f"{name:28}{mode:10}" + "".join(f"{'' if one is None else format(one, '.3f'):>20}" for one in found))


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, the versions and the date."""
    on_gpu = device.type == "cuda"
    threads = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "maxgain": maxgain.__version__,
        "machine": torch.cuda.get_device_name(device) if on_gpu else threads,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "steps_per_turn": STEPS,
    }
