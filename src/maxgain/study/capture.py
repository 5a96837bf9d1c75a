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
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .training import Training

WARM_UP = 4
"""Steps before the capture, trained as they are: they compile, allocate, and make the optimiser's state."""
STEPS_WORTH_COMPILING = 15_000
"""Compiling takes half a minute, and saves a millisecond or two per step."""
MOST_AHEAD = 2
"""How many steps of a run wait in the GPU's queue. Two keep the GPU busy. Who sets up a run beside it often has to wait
until all queues are empty, which takes seconds where a whole epoch is waiting."""
MOST_COMPILED = 10_000
"""How many networks a process may compile; torch's own limit is meant to find a single one that never ends."""

setting_up = threading.RLock()
"""Held while something changes that belongs to the whole process: random numbers, the compiler, a capture."""


@dataclass(frozen=True)
class Speed:
    """How a step is run on a GPU. The numbers are the same to rounding."""

    graph: bool = True
    """capture the whole step as one CUDA graph; without it one can look inside"""
    compile: bool = True
    """compile the network, if the run is long enough to earn it"""


def step_of(training: Training, speed: Speed) -> Callable[[], None]:
    """What trains on the next batch on a GPU, as fast as that allows."""
    # By the recipe and the data alone, so that a resumed run does the same. Whoever trains on one fold trains on all of
    # them, with the same compiled code. Compiled code has no second derivative.
    steps = training.recipe.epochs * training.steps_per_epoch * training.folds
    if speed.compile and steps >= STEPS_WORTH_COMPILING and not training.differentiates_images:
        from torch._dynamo import config

        config.recompile_limit = config.accumulated_recompile_limit = MOST_COMPILED
        training.forward = torch.compile(training.model, fullgraph=True, dynamic=False)
    return _Captured(training) if speed.graph else training.step


class _Captured:
    """The step: taken as it is for the first few times, then captured, then replayed."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.ends = cycle([torch.cuda.Event(blocking=True) for _ in range(MOST_AHEAD)])  # type: ignore[no-untyped-call]
        """Of the last replays."""

    def __call__(self) -> None:
        if self.taken < WARM_UP:
            with setting_up:
                self.training.step()
            self.taken += 1
            return
        if self.graph is None:
            with setting_up:
                self.graph = self._capture()
        end = next(self.ends)
        end.synchronize()
        self.graph.replay()
        end.record()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, generator = torch.cuda.CUDAGraph(), self.training.generator
        assert generator is not None
        here = torch.cuda.current_stream()
        # A graph draws from the generator that was the default when its capture began. Other trainings may go on
        # meanwhile, in their threads.
        with own_randomness(generator), torch.cuda.graph(graph, stream=here, capture_error_mode="thread_local"):
            self.training.bare_step()
        return graph


@contextmanager
def stream_for(device: torch.device) -> Iterator[None]:
    """A stream of one's own on a GPU: a graph cannot be captured on the default one, nor run beside others there."""
    if device.type != "cuda":
        yield
        return
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
"""Of each GPU, the streams that no training uses. Torch has 32 streams, and then hands the first one out again: to a
run that captures on it, perhaps, while another one has been training on it all the time."""


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[None]:
    """Within this, a GPU's default generator is this one, and a graph that is captured goes on drawing from it."""
    index = generator.device.index
    default = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    with setting_up:
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
