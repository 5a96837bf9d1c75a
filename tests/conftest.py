"""What every test begins with: one thread, as tests may run side by side, the same random numbers and layer types."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from maxgain.layers import KINDS

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # also in the processes that a test starts: threads that wait for others burn cores

# In the background or under nohup these are ignored, and so they would be by every command that a test starts.
for _signal, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, _usual)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_layer_types() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    shipped = dict(KINDS)
    yield
    KINDS.clear()
    KINDS.update(shipped)
