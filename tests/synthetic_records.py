"""Records of runs that never were, made by a seeded generator, for tests of what is built from records."""

import math

import numpy as np

from maxgain.study import files
from maxgain.study.comparing import records
from maxgain.study.comparing.records import Records
from maxgain.study.recipes import from_json, recipe_named, run_key, to_json

FINGERPRINT = 8 * "0123abcd"
COMMAND = "maxgain compare digits --regularisers none dropout maxgain --folds 10"


def synthetic_run(regulariser, *, fold=0, seed=0, accuracy=None, epochs=12, layers=6, **overrides):
    """A finished run, with all that a real record has; `overrides` replace or add fields of the record."""
    draw = np.random.default_rng([fold or 0, seed, *map(ord, regulariser)])
    config = to_json(recipe_named("digits")) | {
        "regulariser": regulariser,
        "fold": fold,
        "seed": seed,
        "epochs": epochs,
    }
    config = files.revived(to_json(from_json(config | overrides.pop("config", {}))))
    accuracy = round(float(draw.uniform(0.85, 0.95)), 4) if accuracy is None else accuracy
    names = [f"features.conv{layer}" for layer in range(layers - 1)] + ["classifier.fc"]
    bound = 2.0 if "maxgain" in regulariser else None
    top = bound or 8.0
    quantiles = {
        part: {name: sorted(draw.uniform(0.5, top, 5).tolist()) for name in names} for part in ("train", "test")
    }
    maxima = {part: {name: row[-1] for name, row in rows.items()} for part, rows in quantiles.items()}
    norms = {name: 1.5 * max(maxima["train"][name], maxima["test"][name]) for name in names}
    record = {
        "status": "ok",
        "key": run_key(from_json(config), FINGERPRINT),
        "fingerprint": FINGERPRINT,
        "recipe": "digits",
        "regulariser": regulariser,
        "gamma": bound,
        "p": 2.0,
        "seed": seed,
        "fold": fold,
        "epochs": epochs,
        **{f"{part}_accuracy": accuracy for part in ("train", "validation", "test")},
        **{f"{part}_loss": 1 - accuracy for part in ("train", "validation", "test")},
        "max_gain": maxima,
        "gain_quantiles": quantiles,
        "operator_norms": norms,
        "seconds": 1.5,
        "device": "cpu",
        "machine": "Synthetic x86_64, 1 thread",
        "torch": "2.13.0",
        "maxgain": "0.1.0",
        "command": COMMAND,
        "note": "",
        "config": config,
        "history": [_epoch(number, draw) for number in range(1, epochs + 1)],
    }
    return record | overrides


def failed_run(regulariser, *, fold=0, seed=0, error="the loss is no longer a number"):
    """A run that failed, as `maxgain compare` records it."""
    return as_failed(synthetic_run(regulariser, fold=fold, seed=seed), error)


def as_failed(done, error):
    """What is recorded of the run if it fails instead."""
    kept = {name: done[name] for name in ("recipe", "regulariser", "seed", "fold", "config", "key", "fingerprint")}
    return kept | {"status": "failed", "error": error}


def synthetic_records(scores, *, over="fold", failed=(), **fields):
    """Records in which each regulariser has these accuracies on folds, or with seeds, 0, 1, 2, ..."""
    runs = [
        synthetic_run(name, accuracy=accuracy, **({"fold": None} | {over: number}), **fields)
        for name, row in scores.items()
        for number, accuracy in enumerate(row)
        if accuracy is not None
    ]
    return Records(tuple(runs), tuple(failed), ())


def save(folder, found):
    """The records as `maxgain compare` leaves them in its folder."""
    for record in (*found.runs, *found.failed):
        records.append(folder / "results", record)


def _epoch(number, draw):
    loss = math.exp(-number / 5) * float(draw.uniform(0.8, 1.2)) + 0.05
    accuracy = min(1.0, 1 - 0.4 * loss)
    return {
        "epoch": number,
        "learning_rate": 1e-3,
        "train_loss": loss,
        "train_accuracy": accuracy,
        "validation_loss": 1.2 * loss,
        "validation_accuracy": 0.95 * accuracy,
        "max_gain": {"features.conv0": 2.0},
        "seconds": 0.1,
    }
