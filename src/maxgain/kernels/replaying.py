"""Many small operations on a GPU that are the same in every step: captured once as a CUDA graph, then one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")

CALLS_BEFORE_CAPTURE = 2
"""The first calls with tensors at new addresses are taken as they are: they allocate, and choose algorithms."""


class Replayed(Generic[Result]):
    """Calls a function that only computes with tensors, or replays what it did with tensors at the same addresses."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._calls = 0
        self._captured: tuple[torch.cuda.CUDAGraph, Result] | None = None

    def __call__(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """What the function returns; ``key`` has the addresses of all that it reads."""
        if key != self._key:
            self._key, self._calls, self._captured = key, 0, None
        self._calls += 1
        if self._calls <= CALLS_BEFORE_CAPTURE:
            return compute()
        if self._captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = compute()
            self._captured = graph, result
        graph, result = self._captured
        graph.replay()
        return result
