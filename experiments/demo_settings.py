"""Which γ the demo uses.

Claim: none; this is how the demo's one setting was chosen, before its test parts were ever scored.
Command: python experiments/demo_settings.py
Expected: a mean validation accuracy for each γ; the best one is GAMMA in src/maxgain/study/cli/demo.py.
Duration: about four minutes on two cores. Hardware: any CPU; the numbers depend on it in the last digits only.

For every γ of a grid, a network is trained on the training part of each of the ten folds of digits, with the fold's own
seed, and scored on the fold's validation part. The runs have no test part at all. The rule is that of all tuning:
the best accuracy, then the lowest loss, both as means over the folds, then the smallest γ.
"""

from pathlib import Path

from maxgain.study.comparing import jobs as work
from maxgain.study.comparing import records, tuning_rule
from maxgain.study.comparing.engine import Here
from maxgain.study.recipes import recipe_named
from maxgain.study.report import tunings
from maxgain.study.runs import Place

GRID = tuning_rule.Grid("gamma", (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0))


def main() -> None:
    recipe = recipe_named("digits")
    jobs = work.plan_tuning(work.plan(recipe, ["maxgain"], work.folds(recipe, 10)), [GRID], len(GRID.values))
    place = Place(Path("runs/demo-settings"), device="cpu", has_test=False)
    jobs = work.identified(jobs, place)
    work.perform_all(work.missing(jobs, records.read(place.results)), place, Here(2), lambda job, record: None)
    curve = tunings.averaged(records.read(place.results).runs)
    for row in curve:
        print(
            f"gamma {row['values']['maxgain']:<5g} mean validation accuracy {row['validation_accuracy']:.4f}, "
            f"loss {row['validation_loss']:.4f}"
        )
    print(f"chosen: {tuning_rule.best(curve)['values']['maxgain']:g}")


if __name__ == "__main__":
    main()
