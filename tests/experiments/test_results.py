"""results/ holds what the records of the first edition said."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from maxgain.study.recipe import run_key
from maxgain.study.result import load

ROOT = Path(__file__).parents[2]
NUMBERS = json.loads(Path(__file__).with_name("first_edition.json").read_text(encoding="utf-8"))
SCORES = [f"{part}_{what}" for part in ("train", "validation", "test") for what in ("loss", "accuracy")]
FILES = [(part, name) for part in ("", "tuning") for name in ("cifar10", "sins10", "svhn")]


def results(part, name):
    return load(ROOT / "results" / part / f"{name}.jsonl")


@pytest.mark.parametrize(("part", "name"), FILES)
def test_every_number_is_that_of_its_record(part, name):
    for result in results(part, name):
        old = NUMBERS[f"{part or 'final'} {result.recipe.title}"]
        assert {score: value for score in SCORES if (value := getattr(result, score)) is not None} == {
            score: value for score, value in old.items() if score != "medians"
        }
        for split, medians in old["medians"].items():
            assert [box[2] for box in result.gains[split].values()] == pytest.approx(medians, rel=1e-4)


def test_no_record_is_lost():
    assert sum(len(results(*file)) for file in FILES) == len(NUMBERS) == 225


@pytest.mark.parametrize(("part", "name"), FILES)
def test_results_are_whole(part, name):
    for result in results(part, name):
        assert result.key == run_key(result.recipe, result.fingerprint)
        assert result.precision == "bfloat16"
        assert result.data_source
        assert len(result.history.epoch) == result.recipe.epochs
        assert len(result.history.gain_epochs) == 10
        if result.test_accuracy is None:
            assert not result.correct
        else:
            bits = np.unpackbits(np.frombuffer(base64.b64decode(result.correct), np.uint8))
            assert bits.sum() / result.test_accuracy == pytest.approx(len(bits), abs=8)
