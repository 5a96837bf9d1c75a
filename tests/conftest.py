"""What every test begins with: one thread, so that tests may run side by side, and the same random numbers."""

import signal

import pytest
import torch

torch.set_num_threads(1)

# In the background or under nohup these are ignored, and so they would be by every command that a test starts.
for _signal, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, _usual)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
