"""maxgain bench: what a training step costs with a constraint, against the same step without."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxgain.errors import RecipeError

from ..bench.running import MODES, Settings, measure, networks_on
from ..bench.variants import REPARAMETRISED, VARIANTS
from ..files import alone_in, write_json
from ..recipes import expect_count
from ..report import figures
from ..runs import chosen_device
from ..tables import Column, Table
from ..wording import counted, unknown
from .terminal import Common, Screen

EXAMPLES = {
    "maxgain bench": "here, in a few minutes",
    "maxgain bench --device cuda --modes eager compile 'whole-step graph' --sweeps": "all of it on a GPU",
    "maxgain bench --networks 'GPT, 4 layers' --variants MaxGain 'naive hook'": "a part of it",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Time training steps with MaxGain, its rivals and a naive version, as ratios to the same step without.

    All variants of a network take turns in one run; shown are medians over the turns, and the least and the largest.
    """

    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""
    modes: tuple[str, ...] = ()
    """eager, compile, reduce-overhead, 'whole-step graph' (default: all on a GPU, eager on a CPU)"""
    networks: tuple[str, ...] = ()
    """which of the networks, by the names that the table has (default: all)"""
    variants: tuple[str, ...] = ()
    """which of the variants, by their names in the table; the step without is always timed (default: all)"""
    sweeps: bool = False
    """also tell how the ratio moves with depth, width, batch and sequence length"""
    turns: int = 7
    """how often each variant has its turn"""
    out: Path = Path("bench")
    """where bench.json and the figure go"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Writes bench.json and bench.svg."""
    expect_count("--turns", options.turns)
    device = chosen_device(options.device)
    on_gpu = device.type == "cuda"
    modes = tuple(dict.fromkeys(options.modes)) or (MODES if on_gpu else MODES[:1])
    possible = {
        "mode": (options.modes, MODES),
        "network": (options.networks, networks_on(device)),
        "variant": (options.variants, (*VARIANTS, *REPARAMETRISED)),
    }
    for what, (asked, known) in possible.items():
        for name in asked:
            if name not in known:
                raise RecipeError(unknown(what, name, known))
    if not on_gpu and (beyond := [mode for mode in modes if mode in MODES[2:]]):
        raise RecipeError(f"{beyond[0]!r} needs a GPU.")
    settings = Settings(
        device, options.turns, 30 if on_gpu else 2, modes, options.networks, options.variants, options.sweeps
    )
    written = [options.out / f"bench.{kind}" for kind in ("json", "png", "svg")]
    with alone_in(options.out, *(path.name for path in written)):
        with screen.progress() as bars, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch's compiler says to itself would only hide the table
            task = bars.add_task("timing", total=None, status="")
            for content in measure(settings):
                status = "{network}, {mode}, {variant}: {ratio:.2f}".format(**content["rows"][-1])
                bars.update(task, advance=1, status=status)
                write_json(written[0], content)  # what was timed is kept if the rest never ends
        figures.save(figures.cost_ratios(content["rows"]), options.out, "bench")
    for network in dict.fromkeys(row["network"] for row in content["rows"] if "sweep" not in row):
        screen.show(_table(network, [row for row in content["rows"] if row["network"] == network]))
    screen.show(f"{content['machine']}, torch {torch.__version__}; medians of {counted(options.turns, 'turn')}")
    screen.end(written)
    return content


def _table(network: str, rows: list[dict[str, Any]]) -> Table:
    columns = (
        Column("mode"), Column("variant"), Column("ms per step", spare=2), Column("ratio"), Column("least", spare=1),
        Column("largest", spare=1), Column("memory", spare=3),
    )  # fmt: skip
    names = ("mode", "variant", "milliseconds", "ratio", "lowest", "highest", "memory")
    return Table(network, columns, tuple(tuple(row[name] for name in names) for row in rows))
