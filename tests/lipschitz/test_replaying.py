"""The power iteration's replay on a GPU, as far as it can be tested without one."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from maxgain.kernels import Replayed, replaying


def test_a_graph_is_captured_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, captured, replays = ["cuda:0"], [], []

    @contextmanager
    def device(chosen: torch.device) -> Any:
        before, current[0] = current[0], str(chosen)
        yield
        current[0] = before

    @contextmanager
    def graph(graph: Any, *, stream: Any, capture_error_mode: str) -> Any:
        captured.append((current[0], str(stream.device)))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    replaying._stream_of.cache_clear()
    replayed = Replayed[Tensor]()
    for _ in range(replaying.CALLS_BEFORE_CAPTURE + 3):
        replayed(torch.device("cuda", 1), "key", lambda: torch.zeros(()))
    replaying._stream_of.cache_clear()
    assert captured == [("cuda:1", "cuda:1")]
    assert len(replays) == 3
