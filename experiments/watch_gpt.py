"""Does a gain rise before the loss does? Train small GPTs at rates that are too high, as PLAN-WATCH.md says.

    python -m experiments.watch_gpt --out FILE              # on a GPU: 16 runs for each of six seeds
    python -m experiments.watch_gpt --out FILE --size cpu   # smaller networks

The 16 networks of a seed train side by side: on a GPU each one's step is a CUDA graph on a stream of its own, and one
thread replays them in turn. FILE gets a line of JSON about the machine, then one for each run as its seed ends. A seed
whose runs are not over when the time is up is not in it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import runpy
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGUN = time.monotonic()  # importing torch counts too

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from maxgain import MaxGain, watch  # noqa: E402
from maxgain.alarms import Alarm, Alarms  # noqa: E402

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "watch_gpt.py"))
REMEDIES = ("none", "cap", "qk-norm")
DOUBLING = None
"""A rate that doubles every 100 steps."""
EVERY = 8
GROWTH = 4.0
"""As planned; the default of ``watch`` is 5 since these runs."""
EAGER = 3
"""Steps before a GPU's capture: they compile kernels, allocate, and make the optimizer's state."""
CHECK_EVERY = 50
"""A run ends at the first multiple of this whose loss is not finite."""


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


def jobs(size: Size, seed: int) -> Iterator[Job]:
    """The runs of a seed."""
    yield Job("none", DOUBLING, seed)
    for rate in size.rates:
        for remedy in REMEDIES:
            yield Job(remedy, rate, seed)


class Training:
    """A network, its optimizer and its watch. All that a step needs is on the device, so that it can be captured."""

    def __init__(self, job: Job, size: Size, text: Tensor, stream: Any = None) -> None:
        self.job, self.text, self.stream, self.taken = job, text, stream, 0
        device, batches = text.device, torch.Generator().manual_seed(job.seed)
        torch.manual_seed(job.seed)
        model = EXAMPLE["GPT"](size.width, size.depth, size.heads, size.context, job.remedy == "qk-norm").to(device)
        starts = torch.randint(len(text) - size.context, (size.steps, size.batch), generator=batches)
        rates = [EXAMPLE["rate_at"](step, job.rate) for step in range(size.steps)]
        self.model, self.starts, self.rates = model, starts.to(device), torch.tensor(rates, device=device)
        self.places = torch.arange(size.context + 1, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        """The number of the step, on the device."""
        self.curves = torch.zeros(2, size.steps, device=device)
        """Losses and the norms of all gradients."""
        rate = torch.tensor(rates[0], device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, fused=True, capturable=text.is_cuda)
        watched, options = model, {"parts": EXAMPLE["PARTS"]}
        if job.remedy == "cap":
            watched, options = MaxGain(model, EXAMPLE["CAPPED"], **options).attach(self.optimizer), {}
        self.logged, self.alarms = list[tuple[int, dict[str, float]]](), list[Alarm]()
        self.watching = watch(
            watched, every=EVERY, to=lambda numbers, step: self.logged.append((step, numbers)), log="all",
            growth=GROWTH, warmup=EXAMPLE["WARM_UP"], on_alarm=self.alarms.append, **options,
        )  # fmt: skip
        self.step = self.eager_step

    def eager_step(self) -> None:
        """Train on the next batch."""
        start = self.starts.index_select(0, self.at).view(-1, 1)
        pieces = self.text[start + self.places]
        loss = F.cross_entropy(self.model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.curves.index_copy_(1, self.at, torch.stack([loss.detach(), norm]).unsqueeze(1))
        self.optimizer.param_groups[0]["lr"].copy_(self.rates.index_select(0, self.at).squeeze(0))
        self.optimizer.step()
        self.at.add_(1)

    def capture(self) -> None:
        """Take the steps from now on by a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.eager_step()
        self.step = graph.replay

    def advance(self) -> None:
        """Take a step and log it, without waiting for the device."""
        with on(self.stream):
            self.step()
            self.watching.log(self.taken)
        self.taken += 1

    def is_finite(self) -> bool:
        """Whether the newest loss is, which waits for the device."""
        with on(self.stream):
            return math.isfinite(self.curves[0, self.taken - 1].item())

    def record(self) -> dict[str, Any]:
        """What is kept of the run."""
        with on(self.stream):
            self.watching.close()
            losses, gradients = self.curves[:, : self.taken].tolist()
        last = losses[-50:]
        totals = ("gain/worst", "gain/median")
        names = [name for name in self.logged[0][1] if name.startswith("gain/") and name not in totals]
        return {
            **asdict(self.job),
            "spike": EXAMPLE["spike_of"](losses),
            "last": short(sum(last) / len(last)),
            "alarms": [as_record(alarm) for alarm in self.alarms],
            "gradient_alarms": [as_record(alarm) for alarm in judge(gradients)],
            "losses": [short(loss) for loss in losses],
            "gradients": [short(norm) for norm in gradients[::EVERY]],
            "gains": {name: [short(numbers.get(name, math.nan)) for _, numbers in self.logged] for name in names},
        }


def on(stream: Any) -> Any:
    """The context in which a stream is the current one; None: a CPU, which has none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def train(
    some: Sequence[Job], size: Size, text: Tensor, streams: Sequence[Any], until: float = math.inf
) -> list[dict[str, Any]]:
    """Train networks side by side, and return their records; none if time is up before all are over."""
    trainings = []
    for job, stream in zip(some, streams, strict=True):
        with on(stream):  # what a graph reads is made on its stream
            trainings.append(training := Training(job, size, text, stream))
        if stream is not None:
            for _ in range(EAGER):
                training.advance()
            training.capture()
    going = trainings
    for step in range(EAGER if text.is_cuda else 0, size.steps):
        for training in going:
            training.advance()
        if step % CHECK_EVERY == CHECK_EVERY - 1:
            going = [training for training in going if training.is_finite()]
        if time.monotonic() > until:
            return []
    return [training.record() for training in trainings]


def judge(gradients: Sequence[float]) -> list[Alarm]:
    """What the watch's own rules make of the norm of all gradients, at the steps that are logged."""
    alarms = Alarms(jump=2.0, growth=GROWTH, warmup=math.ceil(EXAMPLE["WARM_UP"] / EVERY))
    found = (
        alarms.judge(step, {"": norm}, {"": int(not math.isfinite(norm))})
        for step, norm in enumerate(gradients)
        if step % EVERY == 0
    )
    return [alarm for alarm in found if alarm]


def as_record(alarm: Alarm) -> dict[str, Any]:
    """An alarm as a record has it."""
    return {"step": alarm.step, "kind": alarm.kind, "layer": alarm.layer, "others": len(alarm.others),
            "gain": short(alarm.gain), "before": short(alarm.before)}  # fmt: skip


def short(number: float) -> float | None:
    """Four significant digits; None for what is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def machine(size: Size, text: Tensor) -> dict[str, Any]:
    """What the runs are made with."""
    digest = hashlib.sha256(text.to(torch.uint8).numpy().tobytes()).hexdigest()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(), "text_bytes": len(text),
            "text_sha256": digest, **asdict(size)}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else the streams of 16 networks share eight queues
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if cuda else "cpu")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    size, until = SIZES[options.size], BEGUN + options.seconds
    text = EXAMPLE["standard_library"](size.text)
    seeds = [list(jobs(size, seed)) for seed in range(options.seeds)]
    streams = [torch.cuda.Stream() if cuda else None for _ in jobs(size, 0)]
    with options.out.open("w", encoding="utf-8") as file:
        print(json.dumps(machine(size, text)), file=file, flush=True)
        text = text.to("cuda" if cuda else "cpu")
        for some in seeds:
            begun = time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the constraint says in words what the alarms say
                records = train(some, size, text, streams, until)
            if cuda:
                torch.cuda.synchronize()
            gc.collect()  # graphs lie in cycles
            if not records:
                print(f"time was up during seed {some[0].seed}", flush=True)
                break
            for record in records:
                print(json.dumps(record, allow_nan=False), file=file, flush=True)
            now = time.monotonic()
            spiked, alarmed = (sum(bool(record[key]) for record in records) for key in ("spike", "alarms"))
            print(
                f"{now - BEGUN:5.1f} s: seed {some[0].seed} took {now - begun:.1f} s; of {len(records)} runs {spiked} "
                f"spiked, {alarmed} raised an alarm",
                flush=True,
            )


if __name__ == "__main__":
    main()
