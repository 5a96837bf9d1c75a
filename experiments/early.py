"""The early rule, tested: what it would have chosen in every search of γ, and what that loses. PLAN-2.md says how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxgain.study.sentences import listed

from .plan import PAPER, Experiment
from .state import State, early_choice, early_epoch

PICKED = {
    *(("cifar10", row) for row in PAPER["cifar10"]),
    *((name, row) for name in ("svhn", "svhn8") for row in ("maxgain", "maxgain+batchnorm+dropout")),
    *(("sins10", row) for row in PAPER["sins10"]),
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
        for row, points in state.points.items():
            runs = [run for (of, _), runs in state.tuning.items() if of == row for run in runs.values()]
            if "maxgain" in state.experiment.grid and all(run.key in state.tuned for run in runs):
                means = {
                    gamma: 100 * float(np.mean([one.validation_accuracy for one in results]))
                    for gamma, results in points.items()
                }
                lost = {gamma: max(means.values()) - mean for gamma, mean in means.items()}
                yield Case(state.experiment, row, early_choice(points), lost)


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
