"""Records of an experiment's runs that never were, for tests of what is made of them."""

import numpy as np

from maxgain.study.comparing import records
from maxgain.study.recipes import to_json
from maxgain.study.reproduce.running import Recorded
from maxgain.study.reproduce.state import look
from maxgain.study.runs import TUNING
from synthetic_records import as_failed, synthetic_run


def record_of(job, accuracy=0.9, *, layers=19, has_test=True, **fields):
    """The record of a run that succeeded."""
    recipe = job.recipe
    run = synthetic_run(
        recipe.regulariser,
        fold=recipe.fold,
        seed=recipe.seed,
        epochs=recipe.epochs,
        accuracy=round(accuracy, 5),
        layers=layers,
        config=to_json(recipe),
    )
    if not has_test:
        run |= {"test_accuracy": None, "test_loss": None}
    about = {"recipe": recipe.name, "regulariser": job.row, "tuned": job.chosen, "history": run["history"][:1]}
    setting = {"classes": 10, "validation_images": 10_000, "device": "Imaginary GPU", "seconds": 60.0}
    return run | about | setting | fields


def failure_of(job, error="the loss is no longer a number", **fields):
    """The record of a run that failed."""
    return as_failed(record_of(job), error) | fields


def tune(experiment, results, best=2.0):
    """Records of all runs that choose numbers, of which the best is nearest to `best`."""
    for job in experiment.tuning():
        (value,) = job.chosen.values()
        records.append(results / TUNING, record_of(job, 0.9 - 0.01 * abs(value - best), has_test=False))


def finish(experiment, results, accuracy, but=()):
    """Records of all final runs but those with these (row, seed); `accuracy` is by row, and seeds spread around it."""
    spread = np.random.default_rng(0).normal(0, 0.001, 1000).tolist()
    final = look(experiment, Recorded.read(results)).final
    for number, job in enumerate(final.jobs):
        if (job.row, job.recipe.seed) not in but:
            records.append(results, record_of(job, accuracy(job.row) + spread[number]))
