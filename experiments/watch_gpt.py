"""Does a gain rise before the loss does? Train small GPTs at rates that are too high, as PLAN-WATCH.md says.

    python -m experiments.watch_gpt --out FILE              # on a GPU: 16 runs for each seed, as many as 100 s allow
    python -m experiments.watch_gpt --out FILE --size cpu   # smaller networks

FILE gets a line of JSON about the machine, then one for each run as it ends. Runs that are not over when the time is up
are not in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import platform
import runpy
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGUN = time.monotonic()  # importing torch counts too

import torch  # noqa: E402

from maxgain.alarms import Alarm, Alarms  # noqa: E402

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "watch_gpt.py"))
REMEDIES = ("none", "cap", "qk-norm")
DOUBLING = None
"""A rate that doubles every 100 steps."""
EVERY = 8


@dataclass(frozen=True)
class Size:
    """Of a network, its batches and its text, and the learning rates that go with it."""

    width: int
    depth: int
    heads: int
    context: int
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
    batch: int = 16
    steps: int = 1000
    text: int = 4_000_000


SIZES = {
    "gpu": Size(256, 6, 4, 256, (0.001, 0.003, 0.01, 0.02, 0.04)),
    "cpu": Size(64, 4, 4, 64),
    "tiny": Size(16, 1, 2, 16, batch=4, steps=60, text=50_000),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    remedy: str
    rate: float | None
    seed: int


def jobs(size: Size, seeds: int) -> Iterator[Job]:
    """All runs of a seed before those of the next, so that whole seeds are there when the time is up."""
    for seed in range(seeds):
        yield Job("none", DOUBLING, seed)
        for rate in size.rates:
            for remedy in REMEDIES:
                yield Job(remedy, rate, seed)


def run(job: Job, size: Size, device: str) -> dict[str, Any]:
    """Train, and return what is kept of it."""
    begun = time.monotonic()
    torch.manual_seed(job.seed)
    qk_norm, gamma = job.remedy == "qk-norm", EXAMPLE["CAPPED"] if job.remedy == "cap" else math.inf
    model = EXAMPLE["GPT"](size.width, size.depth, size.heads, size.context, qk_norm).to(device)
    text, logged = EXAMPLE["standard_library"](size.text).to(device), list[tuple[int, dict[str, float]]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constraint says in words what the alarms say
        trained = EXAMPLE["train"](
            model, text, size.steps, job.rate, gamma=gamma, batch=size.batch,
            to=lambda numbers, step: logged.append((step, numbers)),
        )  # fmt: skip
    last = trained.losses[-50:]
    names = [name for name in logged[0][1] if name.startswith("gain/") and name not in ("gain/worst", "gain/median")]
    return {
        **asdict(job),
        "spike": EXAMPLE["spike_of"](trained.losses),
        "last": short(sum(last) / len(last)),
        "alarms": [brief(alarm) for alarm in trained.alarms],
        "gradient_alarms": [brief(alarm) for alarm in judge(trained.gradients)],
        "losses": [short(loss) for loss in trained.losses],
        "gradients": [short(norm) for norm in trained.gradients[::EVERY]],
        "gains": {name: [short(numbers.get(name, math.nan)) for _, numbers in logged] for name in names},
        "seconds": round(time.monotonic() - begun, 1),
    }


def judge(gradients: Sequence[float]) -> list[Alarm]:
    """What the watch's own rules make of the norm of all gradients, at the steps that are logged."""
    alarms = Alarms(jump=2.0, growth=4.0, warmup=math.ceil(EXAMPLE["WARM_UP"] / EVERY))
    found = (
        alarms.look(step, {"": norm}, {"": int(not math.isfinite(norm))})
        for step, norm in enumerate(gradients)
        if step % EVERY == 0
    )
    return [alarm for alarm in found if alarm]


def brief(alarm: Alarm) -> dict[str, Any]:
    """An alarm as a record has it."""
    return {"step": alarm.step, "kind": alarm.kind, "layer": alarm.layer, "others": len(alarm.others),
            "gain": short(alarm.gain), "before": short(alarm.before)}  # fmt: skip


def short(number: float) -> float | None:
    """Four significant digits; None for what is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def attempt(task: tuple[Job, Size, str]) -> dict[str, Any]:
    """A run, or why it failed."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    try:
        return run(*task)
    except Exception as error:
        return {**asdict(task[0]), "error": f"{type(error).__name__}: {error}"}


def machine(size: Size, device: str) -> dict[str, Any]:
    """What the runs were made with."""
    text = EXAMPLE["standard_library"](size.text)
    digest = hashlib.sha256(text.to(torch.uint8).numpy().tobytes()).hexdigest()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(), "text_bytes": len(text),
            "text_sha256": digest, **asdict(size)}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if cuda else "cpu")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=8 if cuda else 2)
    parser.add_argument("--seconds", type=float, default=100.0)
    options = parser.parse_args(arguments)
    size, device = SIZES[options.size], "cuda" if cuda else "cpu"
    tasks = [(job, size, device) for job in jobs(size, options.seeds)]
    context = multiprocessing.get_context("spawn")
    with options.out.open("w", encoding="utf-8") as file, context.Pool(options.workers) as pool:
        print(json.dumps(machine(size, device)), file=file, flush=True)
        results = pool.imap_unordered(attempt, tasks)
        for number in range(1, len(tasks) + 1):
            try:
                result = results.next(max(0.0, BEGUN + options.seconds - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            print(json.dumps(result, allow_nan=False), file=file, flush=True)
            alarm = (result.get("alarms") or [{}])[0]
            print(
                f"{time.monotonic() - BEGUN:5.1f} s, {number} of {len(tasks)}: {result['remedy']} {result['rate']} "
                f"seed {result['seed']}: loss {result.get('last')}, spike {result.get('spike')}, first alarm "
                f"{alarm.get('step')} {alarm.get('kind')} {alarm.get('layer')} {result.get('error', '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
