"""Telling somebody who is about to wait for hours, before the first step, and what would be quick instead."""

from __future__ import annotations

import os
from contextlib import suppress

from maxgain.errors import MaxGainError

from ..cost import LONG, run_seconds, training_seconds
from ..recipes import Recipe
from ..runs import Place, chosen_device
from ..training import Training, to_float
from ..wording import duration
from .terminal import Screen, typed


def warn_of_one(screen: Screen, training: Training) -> None:
    """For a run at its start: says where a CPU will take hours."""
    steps = (training.recipe.epochs - training.epoch) * training.steps_per_epoch
    example = to_float(training.images[:1])
    _warn(screen, training_seconds(training.model, example, steps * training.batch_size, steps))


def warn_of_many(screen: Screen, recipe: Recipe, runs: int, at_once: int, place: Place) -> None:
    """For many runs like this one: says where a CPU will take hours over all of them."""
    with suppress(MaxGainError):  # whoever runs them says what is wrong
        if runs and chosen_device(place.device).type == "cpu":
            cores = min(at_once, len(os.sched_getaffinity(0)))
            _warn(screen, run_seconds(recipe, place.load_data(recipe)) * runs / cores)


def _warn(screen: Screen, seconds: float) -> None:
    if seconds > LONG:
        screen.show(
            f"note: this takes {duration(seconds)} on this CPU. A GPU (--device cuda) needs a small part of that; "
            f"quick on a CPU are '{typed('train', 'digits', '--regulariser', 'maxgain')}', and here --network mlp "
            "with a few --epochs."
        )
