"""What a host asks of a GPU and reads some steps later; without any GPU."""

from types import SimpleNamespace

import pytest
import torch

from maxgain.later import Asked


def test_numbers_are_read_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    host = torch.zeros(2)  # what a copy is on its way to

    class Event:
        def synchronize(self) -> None:
            host.copy_(torch.tensor([1.0, 2.0]))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=Event))
    there = SimpleNamespace(is_cuda=True, device="cuda:0", to=lambda device, non_blocking: host)
    asked = Asked(there)  # type: ignore[arg-type]
    assert host.tolist() == [0, 0], "nobody waits when they are asked for"
    assert asked.read() == [1, 2]


def test_numbers_of_the_host_are_there() -> None:
    assert Asked(torch.tensor([3, 4])).read() == [3, 4]
