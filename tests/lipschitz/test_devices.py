"""Norms where the model lies on another device than the current one, or was moved; without any GPU."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import Lipschitz
from maxgain.kernels import Replayed, replaying


def constrained(p: float) -> tuple[nn.Module, Lipschitz]:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    constraint = Lipschitz(model, 0.1, p=p)
    model(torch.randn(2, 2, 6, 6))
    constraint.step()
    return model, constraint


@pytest.mark.parametrize("p", [1, math.inf])
def test_norms_follow_a_model_to_another_device(p: float) -> None:
    model, constraint = constrained(p)
    model.to("meta")  # which computes nothing, but refuses tensors of other devices
    assert {norm.estimate().device.type for norm in constraint._norms} == {"meta"}


def test_a_state_is_taken_up_in_the_tensors_that_a_captured_step_knows() -> None:
    _, constraint = constrained(2)
    earlier = constraint.state_dict()
    known = constraint._state()
    known = {name: tensor for name, tensor in known.items() if tensor.is_floating_point()}
    for _ in range(3):
        constraint.step()
    constraint.load_state_dict(earlier)
    assert all(torch.equal(tensor, earlier[name]) for name, tensor in known.items())


def test_estimates_are_replayed_only_where_all_weights_lie_on_one_gpu() -> None:
    _, constraint = constrained(2)
    here, there = torch.device("cpu"), torch.device("cuda", 1)
    assert all(norm.addresses(here) is not None for norm in constraint._norms)
    assert all(norm.addresses(there) is None for norm in constraint._norms)


def test_a_graph_is_captured_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, captured = ["cuda:0"], []

    @contextmanager
    def device(chosen: torch.device) -> Any:
        before, current[0] = current[0], str(chosen)
        yield
        current[0] = before

    @contextmanager
    def graph(graph: Any, *, stream: Any, capture_error_mode: str) -> Any:
        captured.append((current[0], str(stream.device)))
        yield

    replays: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    replaying._stream_of.cache_clear()
    second, replayed = torch.device("cuda", 1), Replayed[Tensor]()
    for _ in range(replaying.CALLS_BEFORE_CAPTURE + 3):
        replayed(second, "key", lambda: torch.zeros(()))
    replaying._stream_of.cache_clear()
    assert captured == [("cuda:1", "cuda:1")]
    assert len(replays) == 3
