"""A run gives the bits of the first edition: bits.json has weights and losses that commit f8d6826 computed.

One row is of that commit with its gains measured in evaluation mode: measuring in training mode, as it did, steps the
power iteration of spectralnorm, so that the measurement changed the run.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maxgain.study.recipe import RECIPES
from maxgain.study.regularisers import REGULARISERS
from maxgain.study.run import perform

BITS = json.loads(Path(__file__).with_name("bits.json").read_text())
HERE = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def recipe_with(settings):
    changed = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if "p" in changed:
        changed["p"] = float(changed["p"])
    return replace(RECIPES["digits"], **changed)


@pytest.mark.skipif(
    any(BITS[name] != here for name, here in HERE.items()),
    reason=f"other kernels: bits are of torch {BITS['torch']} on {BITS['cpu']}, here {HERE['torch']} on {HERE['cpu']}",
)
@pytest.mark.parametrize(
    ("settings", "weights", "losses"), BITS["rows"], ids=[json.dumps(row[0]) for row in BITS["rows"]]
)
def test_first_edition(settings, weights, losses, tmp_path):
    result = perform(recipe_with(settings), tmp_path, device="cpu").result
    assert result.weights_sha256[:16] == weights
    assert [result.train_loss, result.validation_loss, result.test_loss] == losses


def test_every_regulariser_is_there():
    own = REGULARISERS.keys() - {"plaindropout"}  # which experiments/ adds
    assert {settings.get("regulariser", "none") for settings, *_ in BITS["rows"]} >= own
