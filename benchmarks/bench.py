"""What a training step costs with a constraint, as a ratio to the same step without.

    python -m benchmarks                                    # make bench: all of this machine, into benchmarks/here
    python -m benchmarks --networks ResNet-50 Swin-T --modes captured

Each network has a process of its own. They compile at the same time, and are timed one after another: captured steps as
soon as a network is ready, then compiled ones, then eager ones, until the minutes are over. Variants of a network take
turns, so that a machine that slows down slows all of them. Shown are medians over the turns, with the least and the
largest.
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
from dataclasses import asdict, dataclass
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
SETTINGS: dict[str, tuple[float, int]] = {"MaxGain": (2.0, 1), "watching": (float("inf"), 1), "every=8": (2.0, 8)}
"""Bound and ``every`` of one constraint, which are changed in turn: code is compiled once for all of them."""
RIVALS: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "Lipschitz, p = 2": lambda model, optimizer: Lipschitz(model, 2.0).attach(optimizer),
    "naive hook": NaiveMaxGain,
    "torch spectral_norm": lambda model, optimizer: None,
}
"""Timed in eager steps, if they are asked for."""
STEPS = 16
"""In a turn: twice the longest ``every``."""

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
        self,
        network: Network,
        device: torch.device,
        modes: Sequence[str],
        rivals: Sequence[str],
        lock: str = os.devnull,
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
            buffer = constraint._buffer
            assert buffer is not None
            buffer.resting.zero_()
            with contextlib.suppress(AttributeError):  # of an older version
                buffer.idle = set()
            for attached in constraint._attached.values():
                attached.steps += -attached.steps % 8  # the next one measures
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
            for _ in range(8):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        return graph.replay

    def rows(self, mode: str, seconds: float) -> list[dict[str, Any]]:
        """The variants of one mode, taking turns for some seconds."""
        with alone(self.lock):
            return self._rows_of(mode, seconds)

    def _rows_of(self, mode: str, seconds: float) -> list[dict[str, Any]]:
        variants = [WITHOUT, *SETTINGS, *[name for name in RIVALS if name in self.sides and mode == "eager"]]
        for variant in variants:
            for _ in range(2):
                self.start(variant, mode)
        turns: list[dict[str, float]] = []
        until = time.perf_counter() + seconds
        while len(turns) < 3 or (time.perf_counter() < until and len(turns) < 25):
            turns.append({variant: self._milliseconds(variant, mode) for variant in variants})
        return [asdict(row) for row in self._rows(mode, variants, turns)]

    def _rows(self, mode: str, variants: list[str], turns: list[dict[str, float]]) -> Iterator[Row]:
        for variant in variants:
            ratios = sorted(turn[variant] / turn[WITHOUT] for turn in turns)
            side = self.sides["MaxGain" if variant in SETTINGS else variant]
            memory = side.memory / self.sides[WITHOUT].memory if self.on_gpu else None
            yield Row(
                "", mode, variant, round(statistics.median(turn[variant] for turn in turns), 4),
                *(round(ratio, 4) for ratio in (statistics.median(ratios), ratios[0], ratios[-1])),
                None if memory is None else round(memory, 4), len(turns),
            )  # fmt: skip

    def _milliseconds(self, variant: str, mode: str) -> float:
        step = self.start(variant, mode)
        self._wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        self._wait()
        return 1000 * (time.perf_counter() - began) / STEPS

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def fallbacks(self) -> dict[str, str]:
        """The layers that no kernel measured, and why."""
        constraint = self.sides["MaxGain"].constraint
        assert constraint is not None
        slots = zip(constraint.gains, constraint._slots, strict=True)
        return {name: why for name, slot in slots if (why := constraint._fallback(slot))}

    def profile(self, mode: str) -> dict[str, Any]:
        """The GPU's kernels with and without: microseconds and launches per step."""
        activity = torch.profiler.ProfilerActivity
        found = {}
        for variant in (WITHOUT, "MaxGain", "every=8"):
            step = self.start(variant, mode)
            self._wait()
            with torch.profiler.profile(activities=[activity.CUDA if self.on_gpu else activity.CPU]) as profile:
                for _ in range(8):
                    step()
                self._wait()
            times: dict[str, list[float]] = {}
            for event in profile.events():
                if not self.on_gpu or event.device_type == torch.autograd.DeviceType.CUDA:
                    row = times.setdefault(event.name[:110], [0.0, 0])
                    row[0] += (event.device_time if self.on_gpu else event.cpu_time) / 8
                    row[1] += 1 / 8
            found[variant] = {
                "us": round(sum(us for us, _ in times.values()), 1),
                "kernels": {
                    name: [round(us, 2), round(launches, 2)]
                    for name, (us, launches) in sorted(times.items(), key=lambda one: -one[1][0])[:150]
                },
            }
        return found


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
    turns: int


MARK = "@bench "


def serve(network: Network, device: torch.device, modes: Sequence[str], rivals: Sequence[str], lock: str) -> None:
    """Prepare one network, then do what each line of the input asks for, and answer each with a line."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100
    warnings.simplefilter("ignore")  # what the compiler says would hide the table
    tune_alone(lock)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        began = time.perf_counter()
        bench = Bench(network, device, modes, rivals, lock)
        answer: Any = round(time.perf_counter() - began, 1)
        print(MARK + json.dumps(answer), flush=True)
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

    def __init__(self, name: str, label: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name, self.label = name, label
        self.answers: queue.Queue[Any] = queue.Queue()
        self.tail: list[str] = []
        command = [sys.executable, "-m", "benchmarks", "--serve", name, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
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
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            return {"error": str(error)}
        return self.answer(until)

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        with contextlib.suppress(OSError):  # what was not sent
            self.process.stdin.close()


def is_error(answer: Any) -> bool:
    """Whether a child could not do it."""
    return isinstance(answer, dict) and "error" in answer


# All of them


def main(arguments: Sequence[str] | None = None) -> None:
    """Time what is asked for, print it, and write bench.json and its figures."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all on a GPU, eager on a CPU")
    parser.add_argument("--networks", nargs="+", help="default: all of the device's")
    parser.add_argument("--rivals", nargs="*", choices=[*RIVALS], default=[], help="eager steps of others, too")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after these, the most valuable first")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the turns of one network in one mode")
    parser.add_argument("--uncaptured", nargs="*", help="time compiled and eager steps of these only, in this order")
    parser.add_argument("--profile", nargs="*", default=[], help="networks whose kernels are listed in profile.json")
    parser.add_argument("--beside", nargs="*", default=[], metavar="LABEL:NAME=VALUE",
                        help="time the VGGs again, captured, with something else in the environment")  # fmt: skip
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
    if strange := {*names, *options.profile} - set(known):
        parser.error(f"there is no network {min(strange)!r}; there are {', '.join(known)}")
    if not (on_gpu or options.tiny) and "captured" in modes:
        parser.error("captured steps need a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    until = began + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        common = [f"{folder}/lock", "--device", options.device, *(["--tiny"] if options.tiny else [])]
        common += ["--rivals", *options.rivals]
        threads = max(1, (os.cpu_count() or 1) // max(1, len(names)))
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} if on_gpu else {}
        children = [Child(name, name, [*common, "--modes", *modes], environment) for name in names]
        for beside in options.beside:
            label, _, setting = beside.partition(":")
            extra = dict([setting.split("=", 1)])
            children += [
                Child(name, f"{name} ({label})", [*common, "--modes", "captured"], environment | extra)
                for name in names
                if name.startswith("VGG")
            ]
        try:
            run(children, modes, options, until, device)
        finally:
            for child in children:
                child.stop()
    print(f"{time.monotonic() - began:.0f} s")


def run(children: list[Child], modes: Sequence[str], options: argparse.Namespace, until: float, device: Any) -> None:
    """Have all children prepare, then time them one by one, and write what is known after each."""
    about: dict[str, Any] = {"prepared_s": {}, "errors": {}, "fallbacks": {}}
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    ready: list[Child] = []

    def write() -> None:
        record = describe(device) | about | {"rows": rows}
        (options.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "profile.json").write_text(json.dumps(profiles) + "\n")

    def time_one(mode: str, child: Child) -> None:
        what = ("profile", modes[0]) if mode == "profile" else ("rows", mode, options.seconds)
        answer = child.ask(until + 20, *what)
        if is_error(answer):
            about["errors"][f"{child.label}, {mode}"] = answer["error"]
            print(f"{child.label}, {mode}: {answer['error']}", flush=True)
        elif mode == "profile":
            profiles[child.label] = answer
        else:
            rows.extend(row | {"network": child.label} for row in answer)
            show(rows[-len(answer) :])
            if child.label not in about["fallbacks"]:
                about["fallbacks"][child.label] = child.ask(until + 20, "fallbacks")
        write()

    waiting = [*children]
    while waiting and time.monotonic() < until - 15:
        child = next((child for child in waiting if not child.answers.empty()), None)
        if child is None:
            time.sleep(0.1)
            continue
        waiting.remove(child)
        answer = child.answer(until)
        if is_error(answer):
            about["errors"][child.label] = answer["error"]
            print(f"{child.label}: not prepared\n{answer['error']}", flush=True)
            continue
        about["prepared_s"][child.label] = answer
        ready.append(child)
        if modes[0] == "captured":
            time_one("captured", child)
    for child in waiting:
        about["errors"][child.label] = "not prepared in time"
        print(f"{child.label}: not prepared in time", flush=True)
    later = [child for child in ready if child.label == child.name]
    if options.uncaptured is not None:
        later = [child for name in options.uncaptured for child in later if child.name == name]
    asked = [(mode, child) for mode in modes if mode != "captured" for child in later]
    asked += [("profile", child) for child in ready if child.label in options.profile]
    for mode, child in asked:
        if time.monotonic() < until:
            time_one(mode, child)
    write()
    for name, layers in about["fallbacks"].items():
        if layers:
            print(f"{name}: {len(layers)} layers are not measured by the kernel, such as {next(iter(layers.items()))}")
    summary(rows)
    draw(rows, options.out)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one network in one mode."""
    for row in rows:
        ends = f"{row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
        memory = "" if row["memory"] is None else f"  memory {row['memory']:.3f}"
        print(f"{row['network']:36} {row['mode']:9} {row['variant']:20} {row['milliseconds']:9.2f} ms  {ends}{memory}",
              flush=True)  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each network."""
    columns = [(mode, variant) for mode in MODES for variant in SETTINGS]
    ratios = {(row["network"], row["mode"], row["variant"]): row["ratio"] for row in rows}
    print(f"\n{'':36}" + "".join(f"{mode:>10}" for mode, _ in columns))
    print(f"{'':36}" + "".join(f"{variant:>10}" for _, variant in columns))
    for name in dict.fromkeys(row["network"] for row in rows):
        found = [ratios.get((name, *column)) for column in columns]
        print(f"{name:36}" + "".join(f"{'' if ratio is None else format(ratio, '.3f'):>10}" for ratio in found))


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
