"""Which γ the demo uses.

Claim: none; this is how the demo's one setting was chosen, before its test parts were ever scored.
Command: python experiments/demo_settings.py
Expected: a mean validation accuracy for each γ; the best one is GAMMA in maxgain/study/commands/demo.py.
Duration: about four minutes on two cores. Hardware: any CPU; the numbers depend on it in the last digits only.

For every γ of a grid, a network is trained on the training part of each of the ten folds of digits and scored on the
fold's validation part. The runs have no test part at all. The rule: the best mean accuracy, ties to the larger γ,
which constrains less.
"""

from dataclasses import replace
from pathlib import Path

from maxgain.study.compare import jobs as compare
from maxgain.study.compare import records
from maxgain.study.recipes import recipe_named
from maxgain.study.runs import Place

GAMMAS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)


def main() -> None:
    recipe = recipe_named("digits")
    jobs = [
        compare.Job(f"maxgain={gamma:g}", replace(recipe, regulariser=f"maxgain={gamma:g}", fold=fold))
        for gamma in GAMMAS
        for fold in range(10)
    ]
    place = Place(Path("runs/demo-settings"), device="cpu", has_test=False)
    compare.perform_all(compare.missing(jobs, records.read(place.results)), place, 2, lambda job, record: None)
    found = records.read(place.results)
    means = {}
    for gamma in GAMMAS:
        runs = [found.find(job.key) for job in jobs if job.row == f"maxgain={gamma:g}"]
        scores = [run["validation_accuracy"] for run in runs if run is not None]
        means[gamma] = sum(scores) / len(scores)
        print(f"gamma {gamma:<5g} mean validation accuracy {means[gamma]:.4f} over {len(scores)} folds")
    print(f"chosen: {max(means, key=lambda gamma: (means[gamma], gamma)):g}")


if __name__ == "__main__":
    main()
