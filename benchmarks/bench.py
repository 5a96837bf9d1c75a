"""What a training step costs with a constraint, as a ratio to the same step without.

    python -m benchmarks                                    # make bench: all of this machine, into benchmarks/here
    python -m benchmarks --networks ResNet-50 Swin-T --modes captured

Networks are compiled and timed one after another, each in a process of its own that has the machine alone; with --after
all are compiled at once, while other work goes on, and are timed one after another when the caller has made a file.
Variants of a network take turns, so that a machine that slows down slows all of them. Shown are medians over the turns,
with the least and the largest. bench.json is written after each network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

import maxgain

from .figures import draw
from .networks import ON_CPU, ON_GPU, TINY, Network
from .timing import MODES, RIVALS, SETTINGS, STEPS, Bench


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time one network: its rows, what is known of its layers, and its kernels where they are asked for."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100
    warnings.simplefilter("ignore")  # what the compiler says would hide the table
    device, began = torch.device(options.device), time.perf_counter()
    if device.index:
        torch.cuda.set_device(device)
    bench = Bench(known(options)[name], device, options.modes, options.variants)
    for mode in options.modes if options.after else ():  # nothing is left to compile
        bench.begin(mode)
        bench.forget_captured()
    found: dict[str, Any] = {"prepared_s": round(time.perf_counter() - began, 1), "rows": []}
    while options.after and not options.after.exists():
        time.sleep(0.2)
    with FileLock(f"{options.after}.lock") if options.after else contextlib.nullcontext():
        for mode in options.modes:
            rows = bench.rows(mode, options.seconds * (1 + (mode == "captured")))
            found["rows"] += [row | {"network": name} for row in rows]
            for row in rows:
                ends = f"{row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
                memory = "" if row["memory"] is None else f"  memory {row['memory']:.3f}"
                print(
                    f"{name:28} {mode:9} {row['variant']:20} {row['milliseconds']:9.2f} ms  {ends}{memory}", flush=True
                )
        found["about"] = bench.about()
        if name in options.profile:
            found["profile"] = bench.profile(options.modes[0])
    return found


def measured(names: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Future[dict[str, Any]]]]:
    """What each network's process found, as they end."""

    def in_a_process(name: str) -> dict[str, Any]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(measure, name, options).result()

    threads = ThreadPoolExecutor(len(names) if options.after else 1)
    found = {threads.submit(in_a_process, name): name for name in names}
    try:
        yield from ((found[future], future) for future in as_completed(found))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the networks, print it, and write bench.json and its figures."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all on a GPU, eager on a CPU")
    parser.add_argument("--networks", nargs="+", help="default: all of the device's")
    parser.add_argument("--variants", nargs="+", choices=[*SETTINGS, *RIVALS], default=[*SETTINGS][:3],
                        help="default: the first three; rivals are timed in eager steps")  # fmt: skip
    parser.add_argument("--profile", nargs="*", default=[], help="networks whose kernels are listed in profile.json")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the turns of a network, twice if captured")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny networks")
    parser.add_argument("--after", type=Path, help="compile all networks at once; time them when there is this file")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/here"))
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    options.modes = [mode for mode in MODES if mode in (options.modes or (MODES if on_gpu else MODES[2:]))]
    names = options.networks or [*(TINY if options.tiny else ON_GPU if on_gpu else ON_CPU)]
    if strange := {*names, *options.profile} - set(known(options)):
        parser.error(f"there is no network {min(strange)!r}; there are {', '.join(known(options))}")
    if not (on_gpu or options.tiny) and "captured" in options.modes:
        parser.error("captured steps need a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = describe(options.device) | {"prepared_s": {}, "errors": {}, "networks": {}, "rows": []}
    profiles = {}
    for name, future in measured(names, options):
        try:
            found = future.result()
        except Exception:
            record["errors"][name] = traceback.format_exc()[-1500:]
            print(f"{name}: {record['errors'][name]}", flush=True)
            continue
        record["prepared_s"][name], record["networks"][name] = found["prepared_s"], found["about"]
        record["rows"] += found["rows"]
        (options.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
        if "profile" in found:
            profiles[name] = found["profile"]
            (options.out / "profile.json").write_text(json.dumps(profiles) + "\n")
        if fallbacks := found["about"]["fallbacks"]:
            print(f"{name}: {len(fallbacks)} layers are not measured by the kernel: {next(iter(fallbacks.items()))}")
    with contextlib.suppress(ImportError):  # benchmarks.figures draws a record elsewhere, too
        draw(record["rows"], options.out)


def known(options: argparse.Namespace) -> dict[str, Network]:
    """The networks that can be named."""
    return TINY if options.tiny else {**ON_CPU, **ON_GPU}


def describe(device: str) -> dict[str, Any]:
    """The machine, the versions, the date, and the commit: $MAXGAIN_COMMIT on a machine without the checkout."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    commit = os.environ.get("MAXGAIN_COMMIT") or subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    threads = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "maxgain": maxgain.__version__,
        "commit": commit,
        "machine": torch.cuda.get_device_name(device) if device.startswith("cuda") else threads,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "steps_per_turn": STEPS,
    }
