"""A run gives the bits of the commit 1bdface, by the weights and losses in bits.json.

They were those of the first edition, f8d6826, but for spectralnorm, whose power iteration its measuring stepped.
lipschitz-1, lipschitz-inf and maxnorm have summed in another order since: losses differ by 2e-8 at most.
`python tests/study/test_bits.py` adds this machine's to the file: run it at a commit that is trusted.
"""

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from maxgain.study.recipe import RECIPES
from maxgain.study.regularisers import REGULARISERS
from maxgain.study.run import perform

FILE = Path(__file__).with_name("bits.json")
BITS = json.loads(FILE.read_text())
ROWS = next(iter(BITS.values()))


def kernels():
    """What decides bits beside our code: a hash of what torch's own layers and optimizers make of fixed numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        conv, dense = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 64, 10)
        optimizer = torch.optim.Adam([*conv.parameters(), *dense.parameters()])
        for _ in range(5):
            dense(conv(torch.randn(16, 3, 8, 8)).relu().flatten(1)).logsumexp(1).sum().backward()
            optimizer.step()
    torch.set_num_threads(threads)
    probe = hashlib.sha256(conv.weight.detach().numpy().tobytes() + dense.weight.detach().numpy().tobytes())
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {probe.hexdigest()[:8]}"


def recipe_with(settings):
    changed = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if "p" in changed:
        changed["p"] = float(changed["p"])
    return replace(RECIPES["digits"], **changed)


def outcome(settings, folder):
    result = perform(recipe_with(settings), folder, device="cpu").result
    return [result.weights_sha256[:16], [result.train_loss, result.validation_loss, result.test_loss]]


@pytest.mark.skipif(kernels() not in BITS, reason=f"the bits of {kernels()} are not known")
@pytest.mark.parametrize("row", BITS.get(kernels(), ROWS), ids=[json.dumps(row[0]) for row in ROWS])
def test_bits(row, tmp_path):
    settings, *expected = row
    assert outcome(settings, tmp_path) == expected


def test_every_regulariser_is_there():
    own = REGULARISERS.keys() - {"plaindropout"}  # which experiments/ adds
    assert {settings.get("regulariser", "none") for settings, *_ in ROWS} >= own


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        own = [[row[0], *outcome(row[0], Path(folder, str(number)))] for number, row in enumerate(ROWS)]
    parts = []
    for name, rows in (BITS | {kernels(): own}).items():
        parts.append(json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
