"""Draw the watched GPTs, and print the tables of docs/watching.md.

python -m experiments.watch_figure FILE    # thin what watch_gpt.py wrote into results/watch/gpt.jsonl first
python -m experiments.watch_figure
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from maxgain.study.report.figures import INK, SERIES, SOFT, STYLE

from .figures import svg
from .watch_gpt import EVERY, REMEDIES, short

ROOT = Path(__file__).parents[1]
RECORD, FIGURE = ROOT / "results" / "watch" / "gpt.jsonl", ROOT / "docs" / "figures" / "watch-gpt.svg"
Record = dict[str, Any]
HEALTHY = 0.1
"""Nats above the best rate of the same seed and remedy."""
LOOKS = {
    "none": ("no remedy", INK),
    "cap": ("gains of q and k capped at 2", SERIES[0]),
    "qk-norm": ("QK-norm", SERIES[2]),
}


def complete(runs: Sequence[Record]) -> list[Record]:
    """The runs of those seeds that have all runs without a remedy: five rates and the doubling one."""
    plain = [run["seed"] for run in runs if "error" not in run and run["remedy"] == "none"]
    return [run for run in runs if plain.count(run["seed"]) == 6]


def above_best(run: Record, runs: Sequence[Record]) -> float:
    """How much higher a run ended than the best rate of its seed and remedy."""
    same = [one["last"] for one in runs if (one["seed"], one["remedy"]) == (run["seed"], run["remedy"])]
    best = min(last for last in same if last is not None)
    return math.inf if run["last"] is None else run["last"] - best


def lead(run: Record, alarms: str = "alarms") -> int | None:
    """How many steps before its spike a run raised its first alarm; None if it did not."""
    first = run[alarms][0]["step"] if run[alarms] else math.inf
    return run["spike"] - first if run["spike"] is not None and first < run["spike"] else None


def to_draw(runs: Sequence[Record]) -> list[Record]:
    """The runs of the figure: by the rule of PLAN-WATCH.md, and at the doubling rate with the same seed."""
    plain = [run for run in runs if run["remedy"] == "none"]
    spiking = [run for run in plain if run["rate"] is not None and run["spike"] is not None]
    often = [run for run in spiking if 2 * sum(one["rate"] == run["rate"] for one in spiking) >= len(plain) / 6]
    lowest = [run for run in often if run["rate"] == min(one["rate"] for one in often)]
    warned = sorted((run for run in lowest if lead(run) is not None), key=lambda run: lead(run) or 0)
    drawn = warned[(len(warned) - 1) // 2 :] or sorted(lowest, key=lambda run: run["seed"])
    return [*drawn[:1], *(run for run in plain if run["rate"] is None and run["seed"] == (drawn or plain)[0]["seed"])]


def thin(lines: Sequence[Record]) -> list[Record]:
    """Keep losses as means of ten, three alarms, and the gains of the run that is drawn."""
    machine, *runs = lines
    drawn = to_draw(complete(runs))
    kept = []
    for run in runs:
        if "error" not in run:
            tens = [run["losses"][start : start + 10] for start in range(0, len(run["losses"]), 10)]
            run = run | {"losses": [None if None in ten else short(sum(ten) / len(ten)) for ten in tens]}
            run |= {"alarms": run["alarms"][:3], "alarm_count": len(run["alarms"])}
            run |= {"gradient_alarms": run["gradient_alarms"][:3]}
            run.pop("gradients")
            if not any(
                (run["remedy"], run["rate"], run["seed"]) == (one["remedy"], one["rate"], one["seed"]) for one in drawn
            ):
                run.pop("gains")
        kept.append(run)
    return [machine, *kept]


def tables(runs: Sequence[Record]) -> str:
    """What came of every rate and remedy, and of the gradient's norm beside the gains."""
    heads = (
        "rate", "remedy", "runs", "ended at", "spiked", "warned", "lead (steps)", "layer named first", "no spike",
        "of these with an alarm", "healthy", "of these with an alarm", "gradient's norm: warned",
        "no spike, with an alarm",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups = sorted({(run["rate"] or math.inf, REMEDIES.index(run["remedy"])) for run in runs})
    for rate, remedy in groups:
        own = [run for run in runs if (run["rate"] or math.inf, run["remedy"]) == (rate, REMEDIES[remedy])]
        spiked = [run for run in own if run["spike"] is not None]
        leads = sorted(steps for run in spiked if (steps := lead(run)) is not None)
        named = [run["alarms"][0]["layer"] for run in spiked if lead(run) is not None]
        rest = [run for run in own if run["spike"] is None]
        healthy = [run for run in rest if above_best(run, runs) <= HEALTHY]
        ends = sorted(math.inf if run["last"] is None else run["last"] for run in own)
        cells = [
            "doubling" if math.isinf(rate) else f"{rate:g}", REMEDIES[remedy], len(own),
            f"{statistics.median(ends):.2f} ({ends[0]:.2f} to {ends[-1]:.2f})", len(spiked), len(leads),
            ", ".join(map(str, leads)), ", ".join(named), len(rest), sum(bool(run["alarms"]) for run in rest),
            len(healthy), sum(bool(run["alarms"]) for run in healthy),
            sum(lead(run, "gradient_alarms") is not None for run in spiked),
            sum(bool(run["gradient_alarms"]) for run in rest),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(runs: Sequence[Record]) -> Figure:
    """For each run that is drawn: above, its loss and that with a remedy; below, the gains of every layer without."""
    drawn = to_draw(complete(runs))
    with rc_context(STYLE):
        figure = Figure(figsize=(9.2, 5.0), layout="constrained")
        panels = figure.subplots(2, len(drawn), sharex=True, squeeze=False)
    for run, loss, gain in zip(drawn, *panels, strict=True):
        same = [one for one in runs if (one["rate"], one["seed"]) == (run["rate"], run["seed"])]
        for one in sorted(same, key=lambda one: REMEDIES.index(one["remedy"])):
            label, colour = LOOKS[one["remedy"]]
            loss.plot(*curve(one["losses"], 10), color=colour, label=label)
        first = run["alarms"][0] if run["alarms"] else {"step": None, "layer": None}
        for name, gains in run["gains"].items():
            is_named = name == f"gain/{first['layer']}"
            style: dict[str, Any] = {"color": SERIES[1], "zorder": 3} if is_named else {"color": SOFT, "alpha": 0.25}
            label = f"{first['layer']}, which the first alarm names" if is_named else None
            thinned = curve(gains, EVERY) if is_named else curve(gains[::3], 3 * EVERY)
            gain.plot(*thinned, **style, linewidth=1.8 if is_named else 0.8, label=label)
        for axis in (loss, gain):
            if run["spike"] is not None:
                said = f"the loss spikes: {run['spike']}"
                axis.axvline(run["spike"], color=INK, linestyle=":", linewidth=1.2, label=said)
            if run["alarms"]:
                said = f"first alarm: {first['step']}"
                axis.axvline(first["step"], color=SERIES[1], linestyle="--", linewidth=1, label=said)
        shown = "rate doubles every 100 steps" if run["rate"] is None else f"learning rate {run['rate']:g}"
        loss.set_title(f"{shown}, seed {run['seed']}", loc="left", fontsize=9)
        loss.set_ylim(1, 6)
        loss.legend(loc="upper right", fontsize=7.5)
        gain.set_yscale("log")
        gain.set_ylim(0.2, 300)
        gain.legend(*([part[:1] for part in gain.get_legend_handles_labels()]), loc="upper left", fontsize=7.5)
        gain.set_xlabel("step")
    panels[0, 0].set_ylabel("loss (nats per byte)")
    panels[1, 0].set_ylabel("gain of every layer, no remedy")
    return figure


def curve(values: Sequence[float | None], every: int) -> tuple[list[int], list[float]]:
    """Steps and values, with a gap where one is not finite."""
    return [every * i for i in range(len(values))], [math.nan if value is None else value for value in values]


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str]) -> None:
    if arguments:
        lines = thin(read(Path(arguments[0])))
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    machine, *runs = read(RECORD)
    print(machine, len(runs), "runs;", *sorted({run["seed"] for run in complete(runs)}))
    print(tables(complete(runs)))
    FIGURE.write_bytes(svg(draw(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
