"""What files say of a run, described once: a line of metrics.jsonl, result.json, and a line of the records.

In memory an infinite number is a float, and a number that there is not is None; `files` says how files hold them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict, cast

import msgspec

Number = float | None
Count = Annotated[int, msgspec.Meta(ge=1)]
ByLayer = dict[str, Number]
"""A number for each layer, by its dotted name."""
Quantiles = dict[str, tuple[Number, Number, Number, Number, Number]]
"""By layer: the least, the quartiles and the largest gain of a part of the data; None where there is no number."""
Config = dict[str, Any]
"""A recipe, as `recipes.to_json` writes it."""


class Metrics(TypedDict):
    """What is kept of an epoch. Accuracies are fractions, losses are in nats."""

    epoch: int
    """Counted from 1."""
    learning_rate: float
    train_loss: float | None
    train_accuracy: float
    """In training mode, on the batches as they were trained on."""
    validation_loss: float | None
    validation_accuracy: float | None
    """None where the validation part was trained on too."""
    max_gain: ByLayer
    """On the first training images, in evaluation mode."""
    seconds: float


class Result(TypedDict, total=False):
    """What a finished run came to. Scores are of whole parts of the data, in evaluation mode.

    What is not marked as required may be missing where the run failed, or in files of earlier versions.
    """

    key: Required[str]
    """What the run computes and on which data, in brief: see `recipes.run_key`."""
    fingerprint: Required[str]
    """The data that it was trained and scored on: see `Dataset.fingerprint`."""
    recipe: Required[str]
    regulariser: Required[str]
    config: Required[Config]
    """The whole recipe."""
    gamma: float | None
    p: float
    seed: int
    fold: int | None
    epochs: int
    train_loss: float | None
    train_accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    """None where the validation part was trained on too."""
    test_loss: float | None
    test_accuracy: float | None
    """None where there is no test part: whoever tunes has none."""
    max_gain: dict[str, ByLayer]
    """By part of the data."""
    gain_quantiles: dict[str, Quantiles]
    operator_norms: ByLayer
    weights_sha256: str
    """Of the file of the trained weights."""
    metrics_sha256: str
    """Of all epochs, as `files.checksum` has it."""
    predictions_sha256: str | None
    """Of what was predicted for the test part: see `predictions.Predictions`. None where there is none."""
    seconds: float
    finished: str
    """When, as in 2026-05-31T12:00:00+00:00."""
    device: str
    machine: str
    torch: str
    maxgain: str
    command: str
    note: str
    """What a reader has to know about this copy of the data."""
    sha256: str
    """Of all else: see `files.sealed`."""


class Record(Result, total=False):
    """A run in a results folder: its result and how it went; or why it failed, without any scores."""

    status: Required[Literal["ok", "failed"]]
    error: str
    """Of a run that failed: why, in words."""
    fault: Literal["training", "machine"]
    """Of a run that failed: training itself did, which is a result; or its machine, as with a disk that is full."""
    history: list[Metrics]
    tuned: dict[str, float]
    """The numbers that were chosen for this run, by regulariser."""
    classes: Count
    """How many the data set has, which says what guessing is worth."""
    validation_images: Count


def score(run: Metrics | Result, name: str) -> float | None:
    """The score of that name, such as 'test_accuracy', if the run has it."""
    return cast("float | None", run.get(name))
