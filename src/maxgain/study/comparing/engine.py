"""Where many runs are trained: in processes of this machine, in this process, or on the nodes of a Ray cluster.

An engine decides where a run is trained and how many are trained at a time. What is trained, recorded and chosen is the
business of those who use it, and the same for every engine. So the records of all engines are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from maxgain.errors import RecipeError

from ..runs import perform
from ..schema import Result
from .workers import runs_at_once, side_by_side

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")
Name = Literal["local", "ray"]


class Engine(Protocol):
    """Works on many jobs, each of which is mostly a run."""

    @property
    def at_once(self) -> int:
        """How many runs are trained at a time."""

    @property
    def perform(self) -> Callable[..., Result]:
        """What a job calls to train its run: `runs.perform`, or what takes the same arguments and trains elsewhere."""

    def each(
        self, work: Callable[[Job], Outcome], jobs: Iterable[Job], at_most: int
    ) -> Generator[tuple[Job, Outcome], None, None]:
        """Works on the jobs, several at a time but never more than `at_most`, and yields each with what came of it.

        A job is taken from `jobs` no sooner than there is room for it. Where one raises, or the generator is closed,
        the others save themselves and stop.
        """


@dataclass(frozen=True)
class Here:
    """This machine: processes on a CPU, threads on a GPU."""

    at_once: int
    device: str = "auto"

    @property
    def perform(self) -> Callable[..., Result]:
        """See `Engine`."""
        return perform

    def each(
        self, work: Callable[[Job], Outcome], jobs: Iterable[Job], at_most: int
    ) -> Generator[tuple[Job, Outcome], None, None]:
        """See `Engine`."""
        return side_by_side(work, jobs, min(self.at_once, at_most), self.device)


@dataclass(frozen=True)
class InTurn:
    """This process, one run after another: it alone knows a network that it was given as a function."""

    at_once: int = 1

    @property
    def perform(self) -> Callable[..., Result]:
        """See `Engine`."""
        return perform

    def each(
        self, work: Callable[[Job], Outcome], jobs: Iterable[Job], at_most: int
    ) -> Generator[tuple[Job, Outcome], None, None]:
        """See `Engine`."""
        for job in jobs:
            yield job, work(job)


@contextmanager
def engine_for(name: Name, address: str | None, jobs: int | None, per_gpu: int | None, device: str) -> Iterator[Engine]:
    """The engine that --engine, --address, --jobs, --per-gpu and --device ask for, for as long as it is needed."""
    if name == "local":
        if address is not None:
            raise RecipeError("--address is that of a Ray cluster: it needs --engine ray.")
        yield Here(runs_at_once(jobs, per_gpu, device), device)
        return
    from .ray_engine import on_ray  # Ray is an extra, and slow to import

    with on_ray(address, jobs, per_gpu, device) as engine:
        yield engine
