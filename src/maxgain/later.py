"""Numbers on their way from an accelerator to the host, which does not wait for them when it asks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cuda


class Asked:
    """Some numbers, asked for now and read later, when the device has mostly long gone on."""

    def __init__(self, numbers: Tensor) -> None:
        # Only of a GPU is it known when a copy that nobody waits for has arrived.
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self._arrival: Any = cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None

    def read(self) -> list[Any]:
        """The numbers. A host may be several steps ahead of its GPU, and then waits for the step that it asked in."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers.tolist()
