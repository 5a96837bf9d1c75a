"""Run what is missing: in processes on a CPU, in threads on a GPU, or as Ray tasks on a cluster."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import joblib
import torch
from joblib.externals.loky.process_executor import ProcessPoolExecutor

from maxgain.errors import FileError, RecipeError

from . import _files, data
from ._names import unknown
from .data import Dataset
from .recipe import Recipe, run_key
from .result import RESULT, Result
from .run import Inputs, MachineError, Run, perform
from .training import DivergedError

SECONDS_TO_SAVE = 30.0
"""How long a run may take to save itself when everything stops."""
SWITCH_SECONDS = 5e-4
"""How long a thread may keep the interpreter; a step on a GPU takes a few milliseconds."""

log = logging.getLogger("maxgain.study")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where runs are trained, and how many at once."""

    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one"""
    jobs: int | None = None
    """runs at once (default: one per core; on a GPU one)"""
    engine: Literal["processes", "ray"] = "processes"
    """processes of this machine, or tasks on a Ray cluster ($RAY_ADDRESS; without it a local one)"""

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise RecipeError(f"jobs must be at least 1, not {self.jobs}.", field="jobs")
        if self.engine not in ("processes", "ray"):
            raise RecipeError(unknown("engine", self.engine, ("processes", "ray")), field="engine")

    @property
    def has_gpu(self) -> bool:
        """Whether runs are trained on a GPU of this machine."""
        return self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available())

    @property
    def at_once(self) -> int:
        """How many runs are trained at a time."""
        return self.jobs or (1 if self.has_gpu else joblib.cpu_count())


@dataclass(frozen=True)
class Task:
    """One run: what to train, on what, and where to keep it."""

    recipe: Recipe
    folder: Path
    inputs: Inputs
    device: str
    test: bool

    def perform(self, stop: threading.Event | None = None) -> Result:
        """Train the run, continue it, or find it finished; a run that failed has a result too."""
        dataset = self.load()
        inputs = replace(self.inputs, dataset=dataset)
        try:
            return perform(self.recipe, self.folder, inputs, device=self.device, test=self.test, stop=stop).result
        except DivergedError:
            return Run(self.folder).result
        except MachineError as error:
            return self.failed(dataset, str(error))

    def load(self) -> Dataset:
        """The run's data, which stay in memory for the next run."""
        recipe, inputs = self.recipe, self.inputs
        if inputs.dataset is None:
            with _loading:  # threads that start at once need the same data
                one = _load(recipe.dataset, inputs.root, recipe.fold, recipe.image_size, recipe.cross_validation)
            inputs = replace(inputs, dataset=one)
        return inputs.load(recipe, self.test)

    def failed(self, dataset: Dataset, error: str) -> Result:
        """Record a fault of the machine; the next attempt replaces it."""
        result = Result(
            key=run_key(self.recipe, dataset.fingerprint),
            fingerprint=dataset.fingerprint,
            recipe=self.recipe,
            status="failed",
            error=error,
            fault="machine",
            classes=len(dataset.classes),
        )
        with suppress(OSError):  # the disk may be full
            _files.write_json(self.folder / RESULT, result)
        return result

    def is_finished(self) -> bool:
        """Whether the run's folder holds its result."""
        with suppress(FileError):
            return _files.read_json(self.folder / RESULT, Result).status == "ok"
        return False


_load, _loading = lru_cache(maxsize=1)(data.load), threading.Lock()


def run_missing(
    recipes: Iterable[Recipe],
    folder: Path,
    *,
    machine: Machine | None = None,
    inputs: Inputs | None = None,
    test: bool = True,
    workers: list[Executor] | None = None,
    shared: bool = False,
) -> Iterator[Result]:
    """Yield the result of each recipe: finished ones first, the others as they end, trained in folders below `folder`.

    A run whose process dies is tried once more, then recorded as a fault of the machine. Without `test` the runs have
    no test part. `workers` (see `reused_workers`) are processes of an earlier call. A `shared` folder is one in which
    other processes train other runs.
    """
    machine, inputs = machine or Machine(), inputs or Inputs()
    _load.cache_clear()  # the files may have changed since
    tasks = {
        recipe.key: Task(recipe, folder / f"{recipe.title}-{recipe.key[:6]}", inputs, machine.device, test)
        for recipe in recipes
    }
    missing = []
    for task in tasks.values():
        if task.is_finished():
            yield task.perform()
        else:
            missing.append(task)
    if missing:
        with nullcontext() if shared else _files.locked(folder), reused_workers(workers) as idle:
            yield from _trained(missing, machine, idle)


@contextmanager
def reused_workers(workers: list[Executor] | None = None) -> Iterator[list[Executor]]:
    """Processes that several calls of `run_missing` share, which end with the block; those of `workers` do not."""
    idle: list[Executor] = [] if workers is None else workers
    try:
        yield idle
    finally:
        for executor in idle if workers is None else ():
            executor.shutdown()


def _trained(tasks: list[Task], machine: Machine, idle: list[Executor]) -> Iterator[Result]:
    count = min(machine.at_once, len(tasks))
    if machine.engine == "ray":
        from ._ray import ray_executor

        with ray_executor(machine) as executor:
            yield from _each(tasks, machine.jobs or executor.room, [], lambda: executor)
    elif machine.has_gpu and count > 1:
        with _switching_fast():
            yield from _each(tasks, count, idle, lambda: ThreadPoolExecutor(1), threading.Event())
    elif count > 1:
        yield from _each(tasks, count, idle, _Worker)
    else:
        yield from map(Task.perform, tasks)


def _each(
    tasks: Iterable[Task],
    count: int,
    idle: list[Executor],
    start: Callable[[], Executor],
    stop: threading.Event | None = None,
) -> Iterator[Result]:
    """Work on `count` tasks at a time, each in an executor of its own, so that one that dies takes no other with it.

    `stop` is what runs in threads listen to.
    """
    waiting = deque((task, False) for task in tasks)
    running: dict[Future[Result], tuple[Task, bool, Executor]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < count:
                task, again = waiting.popleft()
                executor = idle.pop() if idle else start()
                running[executor.submit(Task.perform, task, stop)] = (task, again, executor)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, again, executor = running.pop(future)
                try:
                    result = future.result()
                except BrokenExecutor:
                    log.warning("the process that trained %s died", task.recipe.title)
                    if not again:
                        waiting.append((task, True))
                        continue
                    result = task.failed(task.load(), "its process died twice, perhaps for lack of memory.")
                else:
                    idle.append(executor)
                yield result
    finally:
        if stop is not None:
            stop.set()
        for _, _, executor in running.values():
            if isinstance(executor, _Worker):
                executor.interrupt()
        wait(running, timeout=SECONDS_TO_SAVE)
        for _, _, executor in running.values():
            executor.shutdown(wait=False)


class _Worker(ProcessPoolExecutor):  # type: ignore[misc]
    """One process with one thread, which ends with its parent and hears of Ctrl-C from it alone."""

    def __init__(self) -> None:
        super().__init__(1, initializer=_prepare, initargs=(os.getpid(),))
        self.pid: Future[int] = self.submit(os.getpid)

    def interrupt(self) -> None:
        """Ask its run to save itself and stop; a process that still starts has none, and ends."""
        try:
            os.kill(self.pid.result(timeout=1), signal.SIGINT)
        except TimeoutError:
            self.shutdown(wait=False)
        except (BrokenExecutor, OSError):
            pass

    def shutdown(self, wait: bool = True, **_: object) -> None:
        """End the process."""
        super().shutdown(wait=wait, kill_workers=True)


def _prepare(parent: int) -> None:
    torch.set_num_threads(1)
    warnings.formatwarning = lambda message, *_, **__: f"maxgain: warning: {message}\n"
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))  # only a run that trains has anything to save
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextmanager
def _switching_fast() -> Iterator[None]:
    """Let no thread keep the interpreter for long, because every step of the others needs it for a moment."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
