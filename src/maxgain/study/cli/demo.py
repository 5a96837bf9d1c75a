"""The demo: regularisers on digits with a third of the training labels random; experiments/PLAN-DEMO.md is its plan."""

from __future__ import annotations

from .. import api
from ..running import Machine
from . import options
from .commands import console, save_gains, suggest

ROWS = ("none", "weightdecay", "dropout", "maxgain", "maxgain+weightdecay")
GRID = {
    "maxgain": (1, 1.5, 1.25, 2, 0.75, 3),
    "weightdecay": (0.01, 0.003, 0.03, 0.001, 0.02, 0.1),
    "dropout": (1, 1.5, 0.5, 1.25, 0.75, 0.25),
}
"""Values to try, most plausible first; a row with two numbers takes the first of each."""


def demo(asked: options.Demo) -> None:
    """Compare, then show one sentence, one table, one picture and the next command."""
    console.print("digits, a third of the training and validation labels random, test labels clean")
    settings: api.Settings = {} if asked.epochs is None else {"epochs": asked.epochs}
    compared = api.compare(
        "noisy-digits",
        ROWS,
        folds=asked.folds,
        tuned="grid",
        grid=GRID,
        budget=asked.budget,
        out=asked.out,
        machine=Machine(device="cpu", jobs=asked.jobs),
        **settings,
    )
    console.print(str(compared), markup=False, soft_wrap=True)
    shown = {row: compared.results[row][0] for row in ("none", "maxgain") if compared.results.get(row)}
    console.print(f"gains without and with MaxGain: {save_gains(shown, asked.out / 'gains.png')}", soft_wrap=True)
    suggest(("report", asked.out))
