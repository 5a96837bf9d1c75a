"""results/ holds what the records of the first edition said."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from experiments.thin import PARTS, SCORES, main, recipe_of

from maxgain.study.recipe import run_key
from maxgain.study.result import load

ROOT = Path(__file__).parents[2]
FIRST_EDITION = "f8d6826"
NUMBERS = json.loads(Path(__file__).with_name("first_edition.json").read_text(encoding="utf-8"))
FILES = [(part, name) for part in PARTS for name in ("cifar10", "sins10", "svhn")]


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


def test_the_old_files_make_the_same_results(tmp_path):
    command = ["git", "-C", ROOT, "archive", "--output", tmp_path / "old.tar", FIRST_EDITION, "results"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the history of the first edition is not here")
    shutil.unpack_archive(tmp_path / "old.tar", tmp_path, filter="data")
    main(tmp_path / "results", tmp_path / "new")
    for part, name in FILES:
        made, kept = (folder / part / f"{name}.jsonl" for folder in (tmp_path / "new", ROOT / "results"))
        assert made.read_bytes() == kept.read_bytes()


def test_a_recipe_that_no_run_can_have_any_more_is_refused():
    config = {"name": "digits", "dataset": "digits", "network": "cnn", "optimiser": "adam", "learning_rate": 1e-3}
    config |= {"epochs": 1, "batch_size": 16, "measure": "stale", "strength": None, "include": "*conv*,*fc*"}
    assert recipe_of(config).include == ("*conv*", "*fc*")
    with pytest.raises(ValueError, match="no such recipe"):
        recipe_of(config | {"strength": "rate"})
