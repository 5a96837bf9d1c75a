"""Does a gain rise before the loss does? Train small GPTs at rates that are too high, as PLAN-WATCH.md says.

    python -m experiments.watch_gpt RECORD               # on a GPU, 16 runs for each of six seeds, one after another
    python -m experiments.watch_gpt RECORD --size cpu    # smaller networks

Every run is one of examples/watch_gpt.py. RECORD gets a line of JSON about the machine, then one for each run as it
ends; the same command again makes the runs that are missing. The runs of results/watch/gpt.jsonl were made by the
program of commit 6666540, which trained the 16 networks of a seed side by side, and keep the gains of two runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import runpy
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxgain.alarms import Alarm, Alarms

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "watch_gpt.py"))
REMEDIES = ("none", "cap", "qk-norm")
DOUBLING = None
"""A rate that doubles every 100 steps."""
EVERY = 8
GROWTH = 4.0
"""As planned; the default of ``watch`` is 5 since these runs."""
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {"network": (256, 6, 4, 256), "rates": (0.001, 0.003, 0.01, 0.02, 0.04), "batch": 16, "steps": 1000},
    "cpu": {"network": (64, 4, 4, 64), "rates": (0.001, 0.003, 0.01, 0.03, 0.1), "batch": 16, "steps": 1000},
    "tiny": {"network": (16, 1, 2, 16), "rates": (0.001, 0.003, 0.01, 0.03, 0.1), "batch": 4, "steps": 60},
}
"""Width, depth, heads and context of the network; learning rates, batches and steps."""
TEXT = 4_000_000
"""Bytes of the standard library."""
Record = dict[str, Any]


def jobs(rates: Sequence[float], seed: int) -> Iterator[Record]:
    """The runs of a seed."""
    yield {"remedy": "none", "rate": DOUBLING, "seed": seed}
    for rate in rates:
        for remedy in REMEDIES:
            yield {"remedy": remedy, "rate": rate, "seed": seed}


def train(job: Record, size: Record, text: Tensor) -> Record:
    """Train and watch one network. Kept are means of ten losses, three alarms and, without a remedy, all gains."""
    torch.manual_seed(job["seed"])
    model = EXAMPLE["GPT"](*size["network"], job["remedy"] == "qk-norm").to(text.device)
    logged: list[dict[str, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constraint says in words what the alarms say
        run = EXAMPLE["train"](
            model, text, size["steps"], job["rate"], gamma=EXAMPLE["CAPPED"] if job["remedy"] == "cap" else math.inf,
            batch=size["batch"], seed=job["seed"], to=lambda numbers, step: logged.append(numbers), growth=GROWTH,
        )  # fmt: skip
    tens = [run.losses[start : start + 10] for start in range(0, len(run.losses), 10)]
    record = {
        **job,
        "spike": EXAMPLE["spike_of"](run.losses),
        "last": short(statistics.fmean(run.losses[-50:])),
        "alarms": [as_record(alarm) for alarm in run.alarms[:3]],
        "alarm_count": len(run.alarms),
        "gradient_alarms": [as_record(alarm) for alarm in judge(run.gradients)[:3]],
        "losses": [short(statistics.fmean(ten)) for ten in tens],
    }
    if job["remedy"] == "none":
        names = [name for name in logged[0] if name.startswith("gain/") and name not in ("gain/worst", "gain/median")]
        gains = {name: [numbers.get(name, math.nan) for numbers in logged] for name in names}
        some = zip(*(gains[name] for name in names if name.endswith(("[q]", "[k]"))), strict=True)
        record["qk"] = [short(math.nan if math.nan in row else statistics.median(row)) for row in some]
        record["gains"] = {name: [short(gain) for gain in values] for name, values in gains.items()}
    return record


def judge(gradients: Sequence[float]) -> list[Alarm]:
    """What the watch's own rules make of the norm of all gradients, at the steps that are logged."""
    alarms = Alarms(jump=2.0, growth=GROWTH, warmup=math.ceil(EXAMPLE["WARM_UP"] / EVERY))
    found = (
        alarms.judge(step, {"": gradients[step]}, {"": int(not math.isfinite(gradients[step]))})
        for step in range(0, len(gradients), EVERY)
    )
    return [alarm for alarm in found if alarm]


def as_record(alarm: Alarm) -> Record:
    """An alarm as a record has it."""
    return {"step": alarm.step, "kind": alarm.kind, "layer": alarm.layer, "others": len(alarm.others),
            "gain": short(alarm.gain), "before": short(alarm.before)}  # fmt: skip


def short(number: float) -> float | None:
    """Four significant digits; None for what is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def read(path: Path) -> list[Record]:
    """The lines of a record."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="RECORD", type=Path)
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if cuda else "cpu")
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    size, text = SIZES[options.size], EXAMPLE["standard_library"](TEXT)
    about = {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(), "torch": torch.__version__,
        "python": platform.python_version(), "text_bytes": len(text),
        "text_sha256": hashlib.sha256(text.to(torch.uint8).numpy().tobytes()).hexdigest(), **size,
    }  # fmt: skip
    text = text.to("cuda" if cuda else "cpu")
    kept = read(options.out)
    done = [{name: run[name] for name in ("remedy", "rate", "seed")} for run in kept[1:]]
    with options.out.open("a", encoding="utf-8") as file:
        if not kept:
            print(json.dumps(about), file=file)
        for job in (job for seed in range(options.seeds) for job in jobs(size["rates"], seed) if job not in done):
            record = train(job, size, text)
            print(json.dumps(record, allow_nan=False), file=file, flush=True)
            print(job, f"spike: {record['spike']}, alarms: {len(record['alarms'])}", flush=True)


if __name__ == "__main__":
    main()
