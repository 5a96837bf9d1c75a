"""Many small operations on a GPU that are the same in every step: captured once as a CUDA graph, then one launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")

CALLS_BEFORE_CAPTURE = 2
"""The first calls with tensors at new addresses are taken as they are: they allocate, and choose algorithms."""

_one_at_a_time = threading.Lock()


class Replayed(Generic[Result]):
    """Calls a function that only computes with tensors, or replays what it did with tensors at the same addresses."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._calls = 0
        self._captured: tuple[torch.cuda.CUDAGraph, Result] | None = None

    def __call__(self, device: torch.device, key: Hashable, compute: Callable[[], Result]) -> Result:
        """What the function returns, all of whose work is on this GPU; ``key`` has the addresses of all it reads."""
        if key != self._key:
            self._key, self._calls, self._captured = key, 0, None
        self._calls += 1
        if self._calls <= CALLS_BEFORE_CAPTURE:
            return compute()
        if self._captured is None:
            # Work on another GPU than that of the capturing stream is done, but is no part of the graph. Torch's own
            # stream for captures stays on the GPU of the first one.
            with _one_at_a_time, torch.cuda.device(device):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=_stream_of(device), capture_error_mode="thread_local"):
                    result = compute()
            self._captured = graph, result
        graph, result = self._captured
        graph.replay()
        return result


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a GPU's graphs are captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
