"""Many runs at once, in processes with one thread each, so that how many there are changes no bit of any result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from maxgain.errors import RecipeError, RunError

from .. import signals
from ..data import table as datasets
from ..data.splits import Dataset
from ..recipes import Recipe, expect_count
from ..runs import Place, chosen_device

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

CHECKPOINT_SECONDS = 60.0
"""How often a run that is one of many saves itself."""
SWITCH_SECONDS = 5e-4
"""For how long a thread may keep Python to itself; a step on a GPU takes some milliseconds."""
PATIENCE = 30.0
"""Seconds that a run gets to save itself when everything is to stop."""


def in_processes(
    work: Callable[[Job], Outcome], jobs: Iterable[Job], processes: int
) -> Generator[tuple[Job, Outcome], None, None]:
    """Works on the jobs, one per process, and yields each with what came of it as soon as it is done.

    A job is taken from `jobs` no sooner than a process is free for it, so what is worth doing next may depend on what
    came of the jobs before. Where one raises, or this process is asked to stop, the others save themselves and stop.
    """
    upcoming = iter(jobs)
    older = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    _start_quiet_tracker()
    running: dict[Future[Outcome], Job] = {}
    with ProcessPoolExecutor(processes, context, initializer=_prepare) as pool:
        try:
            with signals.held():  # by the processes too, until they are prepared
                for job in islice(upcoming, processes):
                    running[pool.submit(work, job)] = job
            yield from _as_they_end(pool, work, running, upcoming)
        except BrokenProcessPool as error:
            raise RunError(
                "a training process was killed, perhaps because memory ran out: the same command goes on from here, "
                "and fewer --jobs need less memory."
            ) from error
        finally:
            if running:
                _stop(running, set(multiprocessing.active_children()) - older)


def in_threads(
    work: Callable[[Job], Outcome], jobs: Iterable[Job], threads: int, stop: Callable[[], None] = lambda: None
) -> Generator[tuple[Job, Outcome], None, None]:
    """As `in_processes`, in threads of this process: for several runs on one GPU, a stream and a graph each.

    `stop` asks those to stop that still run because another one has raised.
    """
    upcoming = iter(jobs)
    running: dict[Future[Outcome], Job] = {}
    with _switching_fast(), ThreadPoolExecutor(threads) as pool:
        try:
            for job in islice(upcoming, threads):
                running[pool.submit(work, job)] = job
            yield from _as_they_end(pool, work, running, upcoming)
        finally:
            if running:
                stop()


def _on_a_gpu(
    work: Callable[[Job], Outcome], jobs: Iterable[Job], threads: int
) -> Generator[tuple[Job, Outcome], None, None]:
    """In threads, which hear of each other's failures as they hear of signals."""
    with signals.asking() as ask:
        yield from in_threads(work, jobs, threads, ask)


def _as_they_end(
    pool: Executor, work: Callable[[Job], Outcome], running: dict[Future[Outcome], Job], upcoming: Iterator[Job]
) -> Iterator[tuple[Job, Outcome]]:
    """Each job that has ended, with what came of it; the next one takes its place among those that are running."""
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()
            running |= {pool.submit(work, job): job for job in islice(upcoming, 1)}


def side_by_side(
    work: Callable[[Job], Outcome], jobs: Iterable[Job], count: int, device: str
) -> Generator[tuple[Job, Outcome], None, None]:
    """Works on this many jobs at once: in processes on a CPU, in threads of this process on a GPU."""
    return (_on_a_gpu if chosen_device(device).type == "cuda" else in_processes)(work, jobs, max(1, count))


def tell_of_each(jobs: Iterable[Job], on_start: Callable[[Job], None]) -> Iterator[Job]:
    """The jobs, each announced as it is taken, which is when a worker is free for it."""
    for job in jobs:
        on_start(job)
        yield job


def runs_at_once(jobs: int | None, per_gpu: int | None, device: str) -> int:
    """How many runs --jobs or --per-gpu asks for; without them one per core, or one on a GPU."""
    on_gpu = chosen_device(device).type == "cuda"
    if per_gpu is not None and not on_gpu:
        raise RecipeError("--per-gpu is for runs on a GPU, and there is none here: use --jobs.")
    for flag, count in (("--jobs", jobs), ("--per-gpu", per_gpu)):
        if count is not None:
            expect_count(flag, count)
    return per_gpu or jobs or (1 if on_gpu else len(os.sched_getaffinity(0)))


def data_for(recipe: Recipe, place: Place) -> Dataset:
    """The recipe's data set, kept for the next run."""
    with _loading:  # threads that begin together need the same one
        return place.load_data(recipe, _loaded)


def fingerprints(recipes: Iterable[Recipe], place: Place) -> list[str]:
    """The fingerprint of each recipe's data; every data set, and every fold of one, is loaded once and let go again."""
    _loaded.cache_clear()  # what an earlier call has left may have changed since, or lie elsewhere now
    known: dict[tuple[object, ...], str] = {}
    found = []
    for recipe in recipes:
        asked = (recipe.dataset, recipe.fold, recipe.image_size, recipe.cross_validation)
        if asked not in known:
            known[asked] = data_for(recipe, place).fingerprint
        found.append(known[asked])
    _loaded.cache_clear()
    return found


# The next job of a process mostly needs the same data set again, and its fingerprint.
_loaded = lru_cache(maxsize=1)(datasets.load)
_loading = threading.Lock()


def _stop(running: Collection[Future[Outcome]], processes: Collection[BaseProcess]) -> None:
    """Asks the runs to stop, which save themselves, and ends what does not listen."""
    for pid in (process.pid for process in processes if process.pid is not None):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    if wait(running, timeout=PATIENCE).not_done:
        for process in processes:
            process.kill()


@contextmanager
def _switching_fast() -> Iterator[None]:
    """A thread that compiles does not keep the others waiting for long, who need Python for a moment in every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _start_quiet_tracker() -> None:
    """Starts Python's keeper of semaphores, told to clean up without a word after a process that was ended at once."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    try:
        resource_tracker.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS")
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def _prepare() -> None:
    """Makes a worker: one thread, out of reach of the terminal, asked and never interrupted, gone with its parent."""
    torch.set_num_threads(1)
    warnings.formatwarning = _sentence
    os.setpgid(0, 0)
    signals.defer_for_good()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _sentence(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as the command line tells it."""
    return f"maxgain: warning: {message}\n"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(1)
