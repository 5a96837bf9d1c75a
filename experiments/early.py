"""The early rule, tested: what it would have chosen in every search of γ, and what that loses. PLAN-2.md says how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxgain.study.sentences import listed

from . import paper
from .plan import Experiment, early_choice, early_epoch
from .state import State

PICKED = {
    *(("cifar10", row) for row in paper.CIFAR10),
    *((name, row) for name in ("svhn", "svhn8") for row in ("maxgain", "maxgain+batchnorm+dropout")),
    *(("sins10", row) for row in paper.SINS10),
}
"""The searches that the early rule was made on."""
TESTS = 6
"""The cases that PLAN-2.md tests it on."""
HEADS = ("recipe", "row", "read after epoch", "rule's γ", "best γ", "points lost", "by a random γ")


@dataclass(frozen=True)
class Case:
    """What the early rule would have chosen in a complete search of γ, and what that loses on validation images."""

    experiment: Experiment
    row: str
    rule: float
    lost: Mapping[float, float]
    """Points of validation accuracy that each γ loses against the best of the grid."""

    @property
    def regret(self) -> float:
        """What the rule's γ loses."""
        return self.lost[self.rule]

    @property
    def guess(self) -> float:
        """What a γ drawn at random from the grid loses in the mean."""
        return float(np.mean(list(self.lost.values())))

    @property
    def is_test(self) -> bool:
        """Whether the rule was not made on this case."""
        return (self.experiment.name, self.row) not in PICKED

    @property
    def line(self) -> tuple[str, ...]:
        """Its line in a table with `HEADS`."""
        recipe = self.experiment.recipe
        best = min(gamma for gamma, points in self.lost.items() if points == 0)
        numbers = (f"{self.rule:g}", f"{best:g}", f"{self.regret:.2f}", f"{self.guess:.2f}")
        return recipe.name, self.row, f"{early_epoch(recipe)} of {recipe.epochs}", *numbers


def cases(states: Mapping[str, State]) -> Iterator[Case]:
    """Every search of γ that is complete, means over folds."""
    for state in states.values():
        searches: dict[str, dict[float, list[Any]]] = {}
        for (row, _), recipes in (state.settled.tuning() if state.settled else {}).items():
            for recipe in recipes if "maxgain" in state.experiment.grid else ():
                searches.setdefault(row, {}).setdefault(recipe.gamma or 0.0, []).append(state.tuned.get(recipe.key))
        for row, runs in searches.items():
            if any(None in found for found in runs.values()):
                continue
            rule = early_choice(list(runs.values()))
            accuracies = {
                gamma: 100 * float(np.mean([run.validation_accuracy for run in found])) for gamma, found in runs.items()
            }
            best = max(accuracies.values())
            yield Case(state.experiment, row, rule, {gamma: best - found for gamma, found in accuracies.items()})


def outcome(tests: Sequence[Case]) -> str:
    """Whether the rule passed, by PLAN-2.md."""
    limits = [2.0 if case.experiment.recipe.label_noise else 1.0 for case in tests]
    beyond = [case for case, limit in zip(tests, limits, strict=True) if case.regret > limit]
    if lost := [f"{case.regret:.2f} points on {case.experiment.name}" for case in beyond]:
        said = f"**It failed**: it lost {listed(lost)}."
    elif len(tests) < TESTS:
        said = "Nothing has failed so far."
    else:
        regret, guess = (float(np.mean(points)) for points in zip(*((c.regret, c.guess) for c in tests), strict=True))
        verdict = "passed" if regret < guess / 4 else "failed"
        said = f"**It {verdict}**: it lost {regret:.2f} points in the mean, a random γ {guess:.2f}."
    return (
        f"{len(tests)} of {TESTS} cases are run. The plan allows 1 point (2 on noisy labels), and in the mean a "
        f"quarter of what a random γ loses. {said}"
    )
