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
import json
import multiprocessing
import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock

import maxgain

from .figures import draw
from .networks import ON_CPU, ON_GPU, TINY, Network
from .timing import MODES, RIVALS, SETTINGS, STEPS, Bench

# One network, in a process of its own


def serve(name: str, options: argparse.Namespace, lock: str, pipe: Connection) -> None:
    """Prepare a network, then call what the parent asks for, and answer each."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100
    warnings.simplefilter("ignore")  # what the compiler says would hide the table
    alone, device, began = FileLock(lock), torch.device(options.device), time.perf_counter()
    tune_alone(alone)

    def prepare() -> float:
        nonlocal bench
        bench = Bench(known(options)[name], device, options.modes, options.rivals, alone)
        return round(time.perf_counter() - began, 1)

    bench: Bench | None = None
    call: Callable[[], Any] = prepare
    with (
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
        contextlib.suppress(EOFError),
    ):
        while True:
            try:
                pipe.send(call())
            except Exception:
                pipe.send({"error": traceback.format_exc()[-1500:]})
            do, *arguments = pipe.recv()
            call = partial(getattr(bench, do), *arguments)


def tune_alone(alone: FileLock) -> None:
    """Have the compiler try kernels on the GPU while no other process does."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    trying = CachingAutotuner.benchmark_all_configs

    def benchmark_all_configs(*arguments: Any, **options: Any) -> Any:
        with alone:
            return trying(*arguments, **options)

    CachingAutotuner.benchmark_all_configs = benchmark_all_configs


class Child:
    """The process of a network."""

    def __init__(self, name: str, options: argparse.Namespace, lock: str) -> None:
        self.name = name
        start = multiprocessing.get_context("spawn")
        self.pipe, theirs = start.Pipe()
        self.process = start.Process(target=serve, args=(name, options, lock, theirs))
        self.process.start()
        theirs.close()  # else nobody would notice that the process has ended

    def answer(self, until: float) -> Any:
        """The next answer, or an error if it does not come in time."""
        with contextlib.suppress(EOFError):
            return self.pipe.recv() if self.pipe.poll(max(0.1, until - time.monotonic())) else {"error": "out of time"}
        return {"error": "its process has ended"}

    def ask(self, until: float, *what: Any) -> Any:
        """Ask for a method of its bench, and wait for the answer."""
        with contextlib.suppress(BrokenPipeError):  # then the answer says so
            self.pipe.send(what)
        return self.answer(until)

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


# All of them


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the networks, print it, and write bench.json and its figures."""
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
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    options.modes = [mode for mode in MODES if mode in (options.modes or (MODES if on_gpu else MODES[2:]))]
    names = options.networks or [*(TINY if options.tiny else ON_GPU if on_gpu else ON_CPU)]
    if strange := {*names, *options.profile, *options.rare} - set(known(options)):
        parser.error(f"there is no network {min(strange)!r}; there are {', '.join(known(options))}")
    if not (on_gpu or options.tiny) and "captured" in options.modes:
        parser.error("captured steps need a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if on_gpu:  # more than there are cores: most networks have compiled long before the last one
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, 3 * (os.cpu_count() or 1) // len(names)))
    with TemporaryDirectory() as folder:
        children = [Child(name, options, f"{folder}/lock") for name in names]
        try:
            run(children, options, began)
        finally:
            for child in children:
                child.stop()
    print(f"{time.monotonic() - began:.0f} s")


def known(options: argparse.Namespace) -> dict[str, Network]:
    """The networks that can be named."""
    return TINY if options.tiny else {**ON_CPU, **ON_GPU}


def run(children: list[Child], options: argparse.Namespace, began: float) -> None:
    """Have all children prepare, then time them one by one, and write what is known after each."""
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    record: dict[str, Any] = describe(options.device) | {"prepared_s": {}, "errors": {}, "networks": {}, "rows": rows}
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
    tasks = [(mode, child) for mode in options.modes for child in ready]
    tasks += [("profile", child) for child in ready if child.name in options.profile]
    for mode, child in tasks:
        if time.monotonic() > until:
            break
        if mode == "profile":
            answer = child.ask(until + 10, "profile", options.modes[0])
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


def describe(device: str) -> dict[str, Any]:
    """The machine, the versions and the date."""
    threads = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "maxgain": maxgain.__version__,
        "machine": torch.cuda.get_device_name(device) if device.startswith("cuda") else threads,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "steps_per_turn": STEPS,
    }
