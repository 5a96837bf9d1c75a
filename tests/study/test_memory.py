"""Running out of memory is a sentence, whoever notices it."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from maxgain.errors import RunError
from maxgain.study import memory


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**50, dtype=torch.uint8),
        lambda: torch.nn.Linear(2**40, 2**20),
        lambda: torch.zeros(99999, 99999, 99999),
        lambda: torch.zeros(2**40, 2**40, 2**40),
        lambda: np.empty(2**60, np.uint8),
        lambda: bytearray(2**60),
        lambda: raised_by_cudnn(),
    ],
    ids=["tensor", "layer", "shape", "overflow", "array", "bytes", "cudnn"],
)
def test_what_cannot_be_held_is_answered_in_words(allocate) -> None:
    with pytest.raises(RunError, match="there is not enough memory: try a smaller --batch-size"), memory.in_words():
        allocate()


def raised_by_cudnn() -> None:
    raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")


@contextmanager
def capturing() -> Iterator[None]:
    """As a capture ends that has failed."""
    try:
        yield
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_shortage_behind_another_error_is_told() -> None:
    with pytest.raises(RunError, match="there is not enough memory"), memory.in_words(), capturing():
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="a bug"), memory.in_words():
        raise RuntimeError("a bug")
