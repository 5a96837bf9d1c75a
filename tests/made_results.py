"""Plans with made-up results: accuracies in, what a finished comparison would have on disk out."""

import base64
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from maxgain.study import _files
from maxgain.study.plan import Plan
from maxgain.study.recipe import RECIPES, run_key
from maxgain.study.result import RESULT, History, Result

BASE = replace(RECIPES["digits"], epochs=3, train_on="train+validation", fold=0)


def pack(correct):
    return base64.b64encode(np.packbits(correct).tobytes()).decode()


def made_result(recipe, accuracy, *, data="data", fault="training", layers=3, images=1000, validation=None, **changes):
    """A run of this recipe; accuracy None is a failed one."""
    about = {"key": run_key(recipe, data), "fingerprint": data, "recipe": recipe, "classes": 10}
    about |= {"finished": "2026-11-18T12:00:00+00:00", "device": "cpu", "torch": "2.13.0", "maxgain": "0.1.0"}
    if accuracy is None:
        return Result(**about | {"status": "failed", "error": "RunError: the loss is nan", "fault": fault} | changes)
    top = min(recipe.gamma or 8.0, 8.0)
    box = tuple(top * share for share in (0.3, 0.5, 0.6, 0.8, 1.0))
    gains = {f"features.{layer}": tuple(value * (1 - 0.1 * layer) for value in box) for layer in range(layers)}
    epochs = range(1, recipe.epochs + 1)
    curve = [accuracy * (1 - 0.5**epoch) for epoch in epochs]
    about |= {"test_accuracy": accuracy, "correct": pack(np.arange(images) < round(images * accuracy))}
    if validation is not None:
        about |= {"test_accuracy": None, "correct": "", "validation_accuracy": validation, "validation_loss": 0.5}
    return Result(
        **{
            **about,
            "status": "ok",
            "train_accuracy": accuracy,
            "train_loss": 0.1,
            "gains": {"train": gains, "test": gains},
            "history": History(
                epoch=list(epochs),
                train_accuracy=curve,
                train_loss=[1 - value for value in curve],
                learning_rate=[0.001] * len(epochs),
                seconds=[1.0] * len(epochs),
            ),
            **changes,
        }
    )


def made_plan(scores, *, over="fold", contrasts=None, **changes):
    """The plan for rows with this many accuracies each; all are compared with the first row."""
    rows, units = tuple(scores), max(map(len, scores.values())) // changes.get("repeats", 1)
    pairs = tuple((row, rows[0]) for row in rows[1:]) if contrasts is None else contrasts
    recipe = changes.pop("recipe", BASE if over == "fold" else replace(BASE, fold=None))
    return Plan(recipe=recipe, rows=rows, over=over, units=tuple(range(units)), contrasts=pairs, **changes)


def made(scores, *, fault="training", result=None, **changes):
    """A plan, and a result for each of {row: accuracies}; None is a failed run, an accuracy left out a missing one."""
    plan = made_plan(scores, **changes)
    options = {"fault": fault, **(result or {})}
    return plan, [
        made_result(recipe, accuracy, **options)
        for row, accuracies in scores.items()
        for recipe, accuracy in zip(plan.recipes(row), accuracies, strict=False)
    ]


def write(folder: Path, plan, results):
    """Put a plan and its results where a comparison would leave them."""
    if plan is not None:
        plan.write(folder)
    for result in results:
        _files.write_json(folder / "runs" / f"{result.recipe.title}-{result.key}" / RESULT, msgspec.to_builtins(result))
    return folder
