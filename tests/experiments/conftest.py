"""Makes experiments/ and benchmarks/ importable, which are no part of the package; takes back what they set."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def _same_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
