"""Draw the watched GPTs, and print the tables and counts of PLAN-WATCH.md and docs/watching.md.

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
    return end_of(run) - best


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


def median_of_q_and_k(run: Record) -> list[float | None]:
    """The median gain of all q and k, at every logged step."""
    some = [gains for name, gains in run["gains"].items() if name.endswith(("[q]", "[k]"))]
    return [None if None in row else statistics.median(row) for row in zip(*some, strict=True)]


def thin(lines: Sequence[Record]) -> list[Record]:
    """Keep losses as means of ten, three alarms, the medians of q and k, and the gains of the runs that are drawn."""
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
            if run["remedy"] == "none":
                run |= {"qk": median_of_q_and_k(run)}
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
        ends = sorted(map(end_of, own))
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


def early(runs: Sequence[Record]) -> str:
    """By the rate of runs without a remedy: the loss over steps 200 to 249, and the median gain of q and k then."""
    lines = ["| rate | loss over steps 200 to 249 | q and k at step 240 | at step 400 |", "|---" * 4 + "|"]
    plain = [run for run in runs if run["remedy"] == "none" and run["rate"] is not None]
    for rate in sorted({run["rate"] for run in plain}):
        own = [run for run in plain if run["rate"] == rate]
        losses = [sum(at(run["losses"], ten) for ten in range(20, 25)) / 5 for run in own]
        gains = [[at(run.get("qk", []), step // EVERY) for run in own] for step in (240, 400)]
        lines.append(f"| {rate:g} | {' | '.join(map(spread, (losses, *gains)))} |")
    return "\n".join(lines)


def counts(runs: Sequence[Record]) -> str:
    """What the expectations of PLAN-WATCH.md are judged by."""
    spiked = [run for run in runs if run["remedy"] == "none" and run["spike"] is not None]
    warned = [run for run in spiked if lead(run) is not None]
    by_gradient = [run for run in spiked if lead(run, "gradient_alarms") is not None]
    later = sum((lead(run) or 0) > (lead(run, "gradient_alarms") or 0) for run in warned if run in by_gradient)
    named = [run["alarms"][0]["layer"][-3:] in ("[q]", "[k]") for run in warned if run["rate"] is not None]
    healthy = [run for run in runs if run["spike"] is None and above_best(run, runs) <= HEALTHY]
    slow = [run for run in healthy if run["rate"] in (0.001, 0.003)]
    ends = {(run["seed"], run["rate"], run["remedy"]): end_of(run) for run in runs}
    plain = [run for run in runs if run["remedy"] == "none" and run["rate"] is not None]
    bad = [run for run in plain if run["spike"] is not None or above_best(run, runs) > 0.3]
    none, cap, norm = ([ends.get((run["seed"], run["rate"], remedy), math.nan) for run in bad] for remedy in REMEDIES)
    return "\n".join([
        f"1. spiked without a remedy: {len(spiked)}; warned: {len(warned)}; constant rate and q or k named first: "
        f"{sum(named)} of {len(named)}",
        f"2. healthy at 0.001 and 0.003: {len(slow)}, with an alarm {sum(bool(run['alarms']) for run in slow)}; "
        f"healthy at all rates: {len(healthy)}, with an alarm {sum(bool(run['alarms']) for run in healthy)}",
        f"3. of the same spikes the gradient's norm warned: {len(by_gradient)}; where both did, it came later: {later}",
        f"4. bad without a remedy: {len(bad)}; cap lower than none: {sum(map(float.__lt__, cap, none))}; "
        f"QK-norm lower than the cap: {sum(map(float.__lt__, norm, cap))}",
    ])  # fmt: skip


def at(values: Sequence[float | None], index: int) -> float:
    """A value of a run; infinite if it is not finite, or the run had ended."""
    value = values[index] if index < len(values) else None
    return math.inf if value is None else value


def end_of(run: Record) -> float:
    """The mean of its last losses; infinite if that is not finite."""
    return math.inf if run["last"] is None else float(run["last"])


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


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
        loss.legend(loc="upper center", fontsize=7.5)
        gain.set_yscale("log")
        gain.set_ylim(0.2, 300)
        if first["layer"]:
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
    for seeds, some in (("all seeds", runs), ("without seed 0", [run for run in runs if run["seed"]])):
        print(f"\n{seeds}\n{tables(complete(some))}\n\n{early(complete(some))}\n\n{counts(complete(some))}")
    FIGURE.write_bytes(svg(draw(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
