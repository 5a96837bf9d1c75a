"""Where the kernels' tests run: on a GPU, or by Triton's interpreter if that is asked for (see `make kernels`)."""

import os

import pytest
import torch

from maxgain.kernels import measuring

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and measuring.HAS_TRITON
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
needs_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1: make kernels")
interpreted = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's of 0/0 and overflow, which the kernel sees to
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
