"""Draw the watched GPTs, and print the tables and counts of PLAN-WATCH.md and docs/watching.md.

python -m experiments.watch_figure [RECORD]
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from maxgain.study.report.figures import INK, SERIES, SOFT, panels

from .document import table
from .figures import svg
from .watch_gpt import DOUBLING, EVERY, REMEDIES, Record, read

ROOT = Path(__file__).parents[1]
RECORD, FIGURE = ROOT / "results" / "watch" / "gpt.jsonl", ROOT / "docs" / "figures" / "watch-gpt.svg"
HEALTHY, BAD = 0.1, 0.3
"""Nats above the best rate of the same seed and remedy."""
LOOKS = {
    "none": ("no remedy", INK),
    "cap": ("gains of q and k capped at 2", SERIES[0]),
    "qk-norm": ("QK-norm", SERIES[2]),
}


def judged(runs: Sequence[Record]) -> list[Record]:
    """The runs of whole seeds, which have five rates and the doubling one, with what PLAN-WATCH.md says of each.

    ``lead`` and ``gradient_lead`` are the steps from the first alarm to the spike, or None; ``above`` is how much
    higher the run ended than the best rate of its seed and remedy.
    """
    plain = [run["seed"] for run in runs if run["remedy"] == "none"]
    whole = [run | {"end": value_at([run["last"]], 0)} for run in runs if plain.count(run["seed"]) == 6]
    for run in whole:
        for name, alarms in (("lead", run["alarms"]), ("gradient_lead", run["gradient_alarms"])):
            steps = run["spike"] - alarms[0]["step"] if alarms and run["spike"] is not None else 0
            run[name] = steps if steps > 0 else None
        rates = [one["end"] for one in whole if (one["seed"], one["remedy"]) == (run["seed"], run["remedy"])]
        run["above"] = run["end"] - min(rates)
        run["healthy"] = run["spike"] is None and run["above"] <= HEALTHY
    return whole


def value_at(values: Sequence[float | None], index: int) -> float:
    """A value of a run; infinite if it is not finite, or the run had ended."""
    value = values[index] if index < len(values) else None
    return math.inf if value is None else value


def to_draw(runs: Sequence[Record]) -> list[Record]:
    """The judged runs of the figure: by the rule of PLAN-WATCH.md, and at the doubling rate with the same seed."""
    plain = [run for run in runs if run["remedy"] == "none"]
    spiking = [run for run in plain if run["rate"] is not DOUBLING and run["spike"] is not None]
    rates = [run["rate"] for run in spiking]
    often = [rate for rate in rates if 2 * rates.count(rate) >= len(plain) / 6]
    lowest = [run for run in spiking if run["rate"] == min(often, default=None)]
    warned = sorted((run for run in lowest if run["lead"]), key=lambda run: run["lead"])
    drawn = warned[(len(warned) - 1) // 2 :] or sorted(lowest, key=lambda run: run["seed"])
    seed = (drawn or plain)[0]["seed"]
    return [*drawn[:1], *(run for run in plain if run["rate"] is DOUBLING and run["seed"] == seed)]


def name_of(run: Record) -> tuple[Any, ...]:
    """What tells a run from all others."""
    return run["remedy"], run["rate"], run["seed"]


def by_rate(runs: Sequence[Record]) -> str:
    """What came of every rate and remedy, and of the gradient's norm beside the gains."""
    heads = (
        "rate", "remedy", "runs", "ended at", "spiked", "warned", "lead (steps)", "layer named first", "no spike",
        "of these with an alarm", "healthy", "of these with an alarm", "gradient's norm: warned",
        "no spike, with an alarm",
    )  # fmt: skip
    lines = []
    for rate, remedy in sorted({(run["rate"] or math.inf, REMEDIES.index(run["remedy"])) for run in runs}):
        own = [run for run in runs if (run["rate"] or math.inf, run["remedy"]) == (rate, REMEDIES[remedy])]
        spiked, rest = ([run for run in own if (run["spike"] is None) == calm] for calm in (False, True))
        warned, healthy = [run for run in spiked if run["lead"]], [run for run in own if run["healthy"]]
        cells = (
            "doubling" if math.isinf(rate) else f"{rate:g}", REMEDIES[remedy], len(own),
            spread([run["end"] for run in own], ".2f"), len(spiked), len(warned),
            ", ".join(str(run["lead"]) for run in sorted(warned, key=lambda run: run["lead"])),
            ", ".join(run["alarms"][0]["layer"] for run in warned), len(rest), count(rest, "alarms"),
            len(healthy), count(healthy, "alarms"), count(spiked, "gradient_lead"), count(rest, "gradient_alarms"),
        )  # fmt: skip
        lines.append([*map(str, cells)])
    return table(heads, lines)


def at_step_240(runs: Sequence[Record]) -> str:
    """By the rate of runs without a remedy: the loss over steps 200 to 249, and the median gain of q and k then."""
    lines = []
    plain = [run for run in runs if run["remedy"] == "none" and run["rate"] is not DOUBLING]
    for rate in sorted({run["rate"] for run in plain}):
        own = [run for run in plain if run["rate"] == rate]
        losses = [sum(value_at(run["losses"], ten) for ten in range(20, 25)) / 5 for run in own]
        gains = [[value_at(run["qk"], step // EVERY) for run in own] for step in (240, 400)]
        lines.append((f"{rate:g}", *map(spread, (losses, *gains))))
    return table(("rate", "loss over steps 200 to 249", "q and k at step 240", "at step 400"), lines)


def counts(runs: Sequence[Record]) -> str:
    """What the expectations of PLAN-WATCH.md are judged by."""
    plain = [run for run in runs if run["remedy"] == "none"]
    spiked = [run for run in plain if run["spike"] is not None]
    warned = [run for run in spiked if run["lead"]]
    later = sum(run["lead"] > run["gradient_lead"] for run in warned if run["gradient_lead"])
    named = [run["alarms"][0]["layer"].endswith(("[q]", "[k]")) for run in warned if run["rate"] is not DOUBLING]
    healthy = [run for run in runs if run["healthy"]]
    slow = [run for run in healthy if run["rate"] in (0.001, 0.003)]
    ends = {name_of(run): run["end"] for run in runs}
    bad = [
        [ends.get((remedy, run["rate"], run["seed"]), math.nan) for remedy in REMEDIES]
        for run in plain
        if run["rate"] is not DOUBLING and (run["spike"] is not None or run["above"] > BAD)
    ]
    return "\n".join([
        f"1. spiked without a remedy: {len(spiked)}; warned: {len(warned)}; constant rate and q or k named first: "
        f"{sum(named)} of {len(named)}",
        f"2. healthy at 0.001 and 0.003: {len(slow)}, with an alarm {count(slow, 'alarms')}; "
        f"healthy at all rates: {len(healthy)}, with an alarm {count(healthy, 'alarms')}",
        f"3. of the same spikes the gradient's norm warned: {count(spiked, 'gradient_lead')}; where both did, it came "
        f"later: {later}",
        f"4. bad without a remedy: {len(bad)}; cap lower than none: {sum(cap < none for none, cap, _ in bad)}; "
        f"QK-norm lower than the cap: {sum(norm < cap for _, cap, norm in bad)}",
    ])  # fmt: skip


def count(runs: Sequence[Record], name: str) -> int:
    """How many runs have this."""
    return sum(bool(run[name]) for run in runs)


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def draw(runs: Sequence[Record]) -> Figure:
    """For each run that is drawn: above, its loss and that with a remedy; below, the gains of every layer without."""
    drawn = to_draw(judged(runs))
    figure, axes = panels(2, len(drawn), (9.2, 5.0), sharex=True)
    for run, loss, gain in zip(drawn, axes[: len(drawn)], axes[len(drawn) :], strict=True):
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
        shown = "rate doubles every 100 steps" if run["rate"] is DOUBLING else f"learning rate {run['rate']:g}"
        loss.set_title(f"{shown}, seed {run['seed']}", loc="left", fontsize=9)
        loss.set_ylim(1, 6)
        loss.legend(loc="upper center", fontsize=7.5)
        gain.set_yscale("log")
        gain.set_ylim(0.2, 300)
        gain.yaxis.set_major_formatter("{x:g}")
        if first["layer"]:
            gain.legend(*([part[:1] for part in gain.get_legend_handles_labels()]), loc="upper left", fontsize=7.5)
        gain.set_xlabel("step")
    axes[0].set_ylabel("loss (nats per byte)")
    axes[len(drawn)].set_ylabel("gain of every layer, no remedy")
    return figure


def curve(values: Sequence[float | None], every: int) -> tuple[list[int], list[float]]:
    """Steps and values, with a gap where one is not finite."""
    return [every * i for i in range(len(values))], [math.nan if value is None else value for value in values]


def main(record: Path = RECORD) -> None:
    machine, *runs = read(record)
    print(machine, len(runs), "runs;", *sorted({run["seed"] for run in judged(runs)}))
    for seeds, some in (("all seeds", runs), ("without seed 0", [run for run in runs if run["seed"]])):
        whole = judged(some)
        print(f"\n{seeds}\n{by_rate(whole)}\n\n{at_step_240(whole)}\n\n{counts(whole)}")
    FIGURE.write_bytes(svg(draw(runs)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
