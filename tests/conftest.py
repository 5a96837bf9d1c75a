"""What every test begins with: one thread, as tests may run side by side, the same random numbers and layer types."""

import os
import signal
from collections.abc import Iterator

import pytest

# Threads that wait for each other burn cores. This is for numpy, which reads it when torch imports it, and for the
# processes that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

from maxgain.layers import KINDS  # noqa: E402

torch.set_num_threads(1)

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


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Begin and end with nothing compiled and nothing counted."""
    from torch._dynamo.utils import counters  # which takes seconds, and most tests compile nothing

    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        if not _:
            yield
