"""One row per table of the paper: which networks are trained, on what, how often, and what is chosen how.

experiments/PLAN.md says the same in words, and was written down before there was any score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..compare.jobs import Job, Pairing, plan, plan_tuning
from ..compare.tuning_rule import Grid
from ..recipes import Recipe, recipe_named

TUNING_SEED = 1000
"""Numbers are chosen with a seed that no final run has."""


@dataclass(frozen=True)
class Experiment:
    """A table of the paper."""

    name: str
    title: str
    recipe: Recipe
    rows: tuple[str, ...]
    """Regularisers, as the paper's rows."""
    pairing: Pairing
    """The seeds or folds on which every row is trained."""
    gammas: tuple[float, ...]
    """The values of γ that are tried for every row with MaxGain."""

    @property
    def tuned_rows(self) -> tuple[str, ...]:
        """The rows that have a γ to choose."""
        return tuple(row for row in self.rows if "maxgain" in row.split("+"))

    def tuning(self) -> list[Job]:
        """The runs on which γ is chosen, scored on the validation part: per fold, or once for all seeds."""
        pairing = self.pairing if self.pairing.over == "fold" else Pairing("seed", (TUNING_SEED,))
        jobs = plan(replace(self.recipe, train_on="train"), self.tuned_rows, pairing)
        tried = plan_tuning(jobs, [Grid("gamma", self.gammas)], len(self.gammas))
        return sorted(tried, key=lambda job: self.tuned_rows.index(job.row))  # so that a network is compiled once

    def final(self) -> list[Job]:
        """The runs of the table, trained on all but the test part, with γ still to be filled in; seed by seed."""
        return plan(replace(self.recipe, train_on="train+validation"), self.rows, self.pairing)


_SEEDS = Pairing("seed", tuple(range(5)))
_CIFAR10_ROWS = (
    "none",
    "dropout",
    "batchnorm",
    "batchnorm+dropout",
    "maxgain",
    "maxgain+dropout",
    "maxgain+batchnorm",
    "maxgain+batchnorm+dropout",
)
_WIDE_ROWS = ("batchnorm", "batchnorm+dropout", "maxgain+batchnorm", "maxgain+batchnorm+dropout")

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "cifar10",
            "CIFAR-10, VGG-19: the paper's first table",
            recipe_named("cifar10"),
            _CIFAR10_ROWS,
            _SEEDS,
            (1.25, 1.5, 2.0, 3.0, 4.0),
        ),
        Experiment(
            "sins10",
            "SINS-10's protocol, WRN-16-4: ten folds, γ chosen on each",
            recipe_named("sins10"),
            _WIDE_ROWS,
            Pairing("fold", tuple(range(10))),
            (1.5, 2.0, 3.0, 4.0, 6.0),
        ),
        Experiment(
            "svhn",
            "SVHN, a network like VGG",
            recipe_named("svhn"),
            ("none", "maxgain", "batchnorm+dropout", "maxgain+batchnorm+dropout"),
            Pairing("seed", tuple(range(3))),
            (1.25, 1.5, 2.0, 2.5, 3.0),
        ),
        Experiment(
            "cifar100",
            "CIFAR-100, WRN-16-4",
            recipe_named("cifar100"),
            _WIDE_ROWS,
            _SEEDS,
            (1.5, 2.0, 3.0, 4.0, 6.0),
        ),
    )
}
