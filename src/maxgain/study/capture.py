"""A training's step on a GPU: compiled where that pays, captured once as a CUDA graph, and replayed.

Several trainings may share a GPU from one process, with a thread, a stream and a graph each. They share neither random
numbers nor memory, so a run's bits do not depend on its neighbours. One at a time is set up, because compiling and
capturing change things that belong to the whole process.
"""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import nn

WARM_UP = 4
"""Eager steps before the capture: they compile, allocate, and make the optimizer's state."""
STEPS_WORTH_COMPILING = 15_000
"""Compiling takes half a minute, and saves a millisecond or two per step."""
MOST_AHEAD = 2
"""Steps of a run that wait in the GPU's queue. Two keep it busy; a whole epoch would make the set-up of another run
wait for seconds."""
MOST_COMPILED = 10_000
"""Networks that a process may compile; torch's own limit is there to find a single one that never ends."""

setting_up = threading.RLock()
"""Held while something changes that belongs to the whole process: random numbers, the compiler, a capture."""


def compile_network(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The compiled network; every run of a process may have one."""
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit = MOST_COMPILED
    compiled: Callable[..., torch.Tensor] = torch.compile(model, fullgraph=True, dynamic=False)
    return compiled


class CapturedStep:
    """A step with random numbers of its own that is taken eagerly a few times, then captured, then replayed."""

    def __init__(self, step: Callable[[], None], generator: torch.Generator) -> None:
        self.step, self.generator = step, generator
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.ends = cycle([torch.cuda.Event(blocking=True) for _ in range(MOST_AHEAD)])  # type: ignore[no-untyped-call]
        """Of the last replays."""

    def __call__(self) -> None:
        """Train on the next batch."""
        if self.taken < WARM_UP:
            with own_randomness(self.generator):
                self.step()
            self.taken += 1
            return
        if self.graph is None:
            # A graph draws from the generator that was the default when its capture began. Other trainings may go on
            # meanwhile, in their threads.
            with own_randomness(self.generator):
                graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
                with torch.cuda.graph(graph, stream=here, capture_error_mode="thread_local"):
                    self.step()
            self.graph = graph
        end = next(self.ends)
        end.synchronize()
        self.graph.replay()
        end.record()


@contextmanager
def stream_for(device: torch.device) -> Iterator[None]:
    """A stream of one's own on a GPU: a graph cannot be captured on the default one, nor run beside others there."""
    # What is left of an earlier run lies in cycles, and Python does not know how much of a GPU's memory they hold.
    gc.collect()
    with torch.cuda.device(device):
        idle = _idle[torch.cuda.current_device()]
        try:
            stream = idle.pop()
        except IndexError:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                yield
                stream.synchronize()
        finally:
            idle.append(stream)


_idle: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""The unused streams of each GPU. Torch has 32 streams, and then hands out the first one again, which another run may
still be training on."""


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[None]:
    """Make this the GPU's default generator; a graph that is captured meanwhile keeps drawing from it.

    As a decorator: take a step with these random numbers.
    """
    index = generator.device.index
    default = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    with setting_up:
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
