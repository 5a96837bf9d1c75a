"""One row per table and figure of the paper: which networks are trained, on what, how often, and what is chosen how.

experiments/PLAN.md says the same in words, and was written down before there was any score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..comparing.jobs import Job, Pairing, plan, plan_tuning, tuned_numbers, tuning_runs
from ..comparing.question import Analysis, Question, contrasts
from ..comparing.tuning_rule import Grid
from ..recipes import Recipe, recipe_named
from . import paper

TUNING_SEED = 1000
"""Numbers are chosen with a seed that no final run has."""
ROPE = 0.005
"""Differences of accuracy that do not matter in practice: half a point."""


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    title: str
    claim: str
    """What the paper says, which the experiment is about."""
    recipe: Recipe
    rows: tuple[str, ...]
    """Regularisers, as the paper's rows."""
    pairing: Pairing
    """The seeds or folds on which every row is trained."""
    grids: tuple[Grid, ...] = ()
    """The numbers that are tried for the rows that leave them open."""
    contrasts: tuple[str, ...] = ()
    """What is tested against what, one family, as 'maxgain compare --contrasts' takes it."""
    decide_by: Analysis = "pooled"
    published: paper.Table = field(default_factory=dict)
    """The paper's numbers, by row."""
    same_data: bool = True
    """Whether scores can be compared with the paper's."""
    remarks: tuple[str, ...] = ()
    """What a reader has to know: where it departs from the paper, and why."""
    obtainable: bool = True
    """Whether the data can be obtained at all."""

    @property
    def command(self) -> str:
        """What to type to run it."""
        return f"maxgain reproduce {self.name}"

    def tuning(self) -> list[Job]:
        """The runs on which numbers are chosen, scored on the validation part: per fold, or once for all seeds."""
        pairing = self.pairing if self.pairing.over == "fold" else Pairing("seed", (TUNING_SEED,))
        jobs = plan(replace(self.recipe, train_on="train"), self.rows, pairing)
        tried = plan_tuning(jobs, self.grids, 0) if self.grids else []
        return sorted(tried, key=lambda job: self.rows.index(job.row))  # so that a network is compiled once

    def final(self) -> list[Job]:
        """The runs of the table, trained on all but the test part, with numbers still to be filled in; seed by seed."""
        if not self.pairing.units:
            return []
        return plan(replace(self.recipe, train_on="train+validation"), self.rows, self.pairing)

    def question(
        self, final: Sequence[Job], validation_images: int | None = None, failures: dict[str, int] | None = None
    ) -> Question:
        """What is asked of the records of its final runs, whose numbers are filled in; `failures` are of the tuning."""
        return Question(
            recipe=self.recipe.name,
            dataset=self.recipe.dataset,
            over=self.pairing.over,
            rows={row: tuple(job.planned for job in final if job.row == row) for row in self.rows},
            contrasts=contrasts(self.contrasts, self.rows),
            train_on="train+validation",
            decide_by=self.decide_by,
            rope=ROPE,
            tuning_runs=tuning_runs(self.tuning()),
            chosen=tuned_numbers(self.tuning()),
            validation_images=validation_images,
            tuning_failures=failures or {},
        )


def _gammas(*values: float) -> tuple[Grid, ...]:
    return (Grid("gamma", values),)


_FIVE_SEEDS, _THREE_SEEDS = Pairing("seed", tuple(range(5))), Pairing("seed", tuple(range(3)))
_NO_SEEDS = Pairing("seed", ())
_WIDE_ROWS = ("batchnorm", "batchnorm+dropout", "maxgain+batchnorm", "maxgain+batchnorm+dropout")
# The paper trains for 17 epochs of 594,388 images, 101,031 steps, and lowers the rate for the last two. Without `extra`
# an epoch is 732 steps: 138 epochs are 101,016 of them, and 15 of 17 parts end after the 122nd.
_SVHN = replace(recipe_named("svhn"), epochs=138, milestones=(122,))
_SVHN_REMARKS = (
    "SVHN's `extra` images, 88 % of the paper's 604,388, cannot be obtained, and the 32×32 crops are "
    "reconstructed from the full photographs. So accuracies are not comparable with the paper's.",
    "The number of steps is the paper's: 17 epochs of 594,388 images, all but 10,000 for validation, in batches of 100 "
    "are 101,031 steps, and 138 epochs of the 73,257 images here are 101,016. The learning rate falls after 122 of the "
    "138, as it does after 15 of the 17. Runs that choose γ see 63,257 images for the same 138 epochs.",
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "cifar10",
            "CIFAR-10, VGG-19",
            "MaxGain helps on its own, and on top of dropout, of batch norm and of both.",
            recipe_named("cifar10"),
            tuple(paper.CIFAR10),
            _FIVE_SEEDS,
            _gammas(1.25, 1.5, 2.0, 3.0, 4.0),
            contrasts=("matched",),
            published=paper.CIFAR10,
            remarks=(
                "γ alone is chosen. Dropout has the same rates in every row, 0.2 before convolutions and 0.5 before "
                "hidden dense layers, and was not tuned.",
            ),
        ),
        Experiment(
            "gains",
            "Figures 1 and 2: gains by layer, VGG-19 on CIFAR-10",
            "Constraining the gain on training images also constrains it on test images; without it, layers' gains "
            "are larger and differ more.",
            recipe_named("cifar10"),
            ("none", f"maxgain={paper.GAINS_GAMMA:g}"),
            _FIVE_SEEDS,
            remarks=(
                "γ is the paper's own for these figures, 2, whatever is best here. Where the table's runs are of that "
                "kind they serve here too, and are not trained twice.",
            ),
        ),
        Experiment(
            "sins10",
            "SINS-10's protocol on a stand-in, WRN-16-4",
            "On ten disjoint folds neither difference that MaxGain makes is significant.",
            recipe_named("sins10"),
            _WIDE_ROWS,
            Pairing("fold", tuple(range(10))),
            _gammas(1.5, 2.0, 3.0, 4.0, 6.0),
            contrasts=("matched",),
            decide_by="paired",
            published=paper.SINS10,
            same_data=False,
            remarks=(
                "SINS-10 itself cannot be obtained. This is its protocol on ten disjoint folds of Imagenette at 96×96, "
                "of 1,339 images each instead of 10,000: the question is the paper's, and its accuracies are not "
                "comparable.",
                "γ alone is chosen on each fold. The paper chooses dropout's rate there too; here it is 0.3 in both "
                "rows, and was not tuned. The network's depth, 16, is a guess, as the paper gives its width alone.",
            ),
        ),
        Experiment(
            "svhn",
            "SVHN, a network like VGG",
            "MaxGain helps on its own, and on top of batch norm and dropout.",
            _SVHN,
            ("none", "maxgain", "batchnorm+dropout", "maxgain+batchnorm+dropout"),
            _THREE_SEEDS,
            _gammas(1.25, 1.5, 2.0, 2.5, 3.0),
            contrasts=("matched",),
            published=paper.SVHN,
            same_data=False,
            remarks=_SVHN_REMARKS,
        ),
        Experiment(
            "gamma-curve",
            "Figure 3: γ from 1.25 to 3, SVHN",
            "A small γ underfits; as γ grows the training loss goes to zero, while the loss on other images falls and "
            "rises again.",
            _SVHN,
            ("maxgain",),
            _NO_SEEDS,
            (Grid("gamma", paper.GAMMA_CURVE.gammas),),
            same_data=False,
            remarks=(
                *_SVHN_REMARKS,
                "The paper shows test images; here the curve is on validation images, one run per γ, and no test image "
                "is looked at.",
            ),
        ),
        Experiment(
            "lipschitz",
            "Lipschitz rows on CIFAR-10, VGG-19",
            "A bound on a layer's operator norm regularises too: in the paper's source, commented out, are rows for ℓ1 "
            "and ℓ∞.",
            recipe_named("cifar10"),
            ("none", "maxgain", "lipschitz-1", "lipschitz-2", "lipschitz-inf"),
            _THREE_SEEDS,
            (
                Grid("gamma", (1.25, 1.5, 2.0, 3.0, 4.0)),
                Grid("lipschitz-1", (12, 20, 33, 55, 90)),
                Grid("lipschitz-2", (2, 4, 6, 8, 12)),
                Grid("lipschitz-inf", (12, 20, 33, 55, 90)),
            ),
            contrasts=(
                *(f"lipschitz-{p}:none" for p in ("1", "2", "inf")),
                *(f"maxgain:lipschitz-{p}" for p in ("1", "2", "inf")),
            ),
            published={name: paper.CIFAR10[name] for name in ("none", "maxgain")} | paper.LIPSCHITZ["CIFAR-10"],
            remarks=(
                "The budget is the table's, five runs per row. `none` and `maxgain` are the table's own runs with "
                "seeds 0 to 2. These contrasts are a family of their own, and no part of H1 to H4.",
            ),
        ),
        Experiment(
            "cifar100",
            "CIFAR-100, WRN-16-4",
            "MaxGain helps on top of batch norm, and of batch norm and dropout, in a residual network.",
            recipe_named("cifar100"),
            _WIDE_ROWS,
            _FIVE_SEEDS,
            _gammas(1.5, 2.0, 3.0, 4.0, 6.0),
            contrasts=("matched",),
            published=paper.CIFAR100,
            obtainable=False,
        ),
    )
}
