"""What every test begins with: one thread, so that tests may run side by side, and the same random numbers."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
