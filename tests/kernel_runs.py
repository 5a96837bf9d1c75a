"""Where the kernels' tests run: on a GPU, or by Triton's interpreter if that is asked for (see `make kernels`)."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from maxgain.gain import record
from maxgain.kernels import measuring

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and measuring.HAS_TRITON
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
needs_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1: make kernels")
interpreted = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's of 0/0 and overflow, which the kernel sees to
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Part(NamedTuple):
    """What ``record`` takes of a layer."""

    x: Tensor
    z: Tensor | None
    vector: Tensor | None = None
    variance: Tensor | None = None
    eps: float = 0.0
    channel_dims: int = 1


def by_record(maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, part: Part, dims: int, p: float) -> None:
    """Measure as a hook does: by the kernel on a GPU, by torch's own operations elsewhere."""
    if part.x.is_cuda:
        assert measuring.measure(maxima, dropped, resting, slot, *part, dims, p) == ""
    else:
        record(maxima, dropped, resting, slot, *part, dims, p)


def buffers(count: int, device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, dropped and resting, as they are before a step."""
    maxima = torch.full((count,), -1.0, device=device)
    dropped = torch.zeros(count, dtype=torch.int64, device=device)
    return maxima, dropped, torch.zeros_like(maxima, dtype=torch.int32)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Plan and launch for tensors of the host as for those of a GPU; the interpreter runs what is launched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "HAS_TRITON", True)
        patch.setattr(measuring, "DEVICES", {"cpu"})
        patch.setattr(measuring, "compile_error", lambda device: "")
        patch.setattr(measuring, "direct_launch", lambda compiled: None)
        patch.setattr(measuring, "_plans", {})
        patch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        yield


def interpret(maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, part: Part, dims: int, p: float) -> None:
    """Measure as on a GPU, without one."""
    with as_on_a_gpu():
        assert measuring.measure(maxima, dropped, resting, slot, *part, dims, p) == ""
