"""Run what is missing: in processes on a CPU, in threads on a GPU, or as Ray tasks on a cluster."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import joblib
import torch
from joblib.externals.loky.process_executor import ProcessPoolExecutor

from maxgain.errors import FileError, RecipeError

from . import _files
from ._names import unknown
from .recipe import Recipe, run_key
from .result import RESULT, Inputs, Result, Run, read_data
from .run import MachineError, perform
from .sentences import counted
from .training import DivergedError

if TYPE_CHECKING:
    from ._ray import Cluster

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
        try:
            run = perform(self.recipe, self.folder, self.inputs, device=self.device, test=self.test, stop=stop)
        except DivergedError:
            run = Run(self.folder)
        except MachineError as error:
            return self.failed(str(error))
        return run.result

    def failed(self, error: str) -> Result:
        """Record a fault of the machine; the next attempt replaces it."""
        data = self.inputs.load(self.recipe, self.test)
        result = Result(
            key=run_key(self.recipe, data.fingerprint),
            fingerprint=data.fingerprint,
            recipe=self.recipe,
            status="failed",
            error=error,
            fault="machine",
            classes=len(data.classes),
        )
        with suppress(OSError):  # the disk may be full
            _files.write_json(self.folder / RESULT, result)
        return result

    def is_finished(self) -> bool:
        """Whether the run's folder holds its result."""
        with suppress(FileError):
            return Run(self.folder).result.status == "ok"
        return False


class Runner:
    """Trains what is missing of many runs; its processes stay for the next call, until the block ends.

        with Runner(machine, inputs) as runner:
            results = list(runner.run(recipes, folder))

    In a `shared` folder other processes train other runs meanwhile.
    """

    def __init__(self, machine: Machine | None = None, inputs: Inputs | None = None, *, shared: bool = False) -> None:
        self.machine, self.inputs, self.shared = machine or Machine(), inputs or Inputs(), shared
        self.idle: list[_Worker] = []
        self.busy: list[_Worker] = []
        self.cluster: Cluster | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.idle:
            worker.shutdown()
        if self.cluster is not None:
            self.cluster.shutdown()
        read_data.cache_clear()

    def run(
        self, recipes: Iterable[Recipe], folder: Path, *, test: bool = True, what: str = "training"
    ) -> Iterator[Result]:
        """Yield the result of each recipe: finished ones first, the others as they end, in folders below `folder`.

        A run whose process dies is tried once more, then recorded as a fault of the machine. Without `test` the runs
        have no test part. `what` is done, by the log.
        """
        tasks = {
            recipe.key: Task(
                recipe, folder / f"{recipe.title}-{recipe.key[:6]}", self.inputs, self.machine.device, test
            )
            for recipe in recipes
        }
        total = len(tasks)
        if total:
            log.info("%s: %s", what, counted(total, "run"), extra={"done": 0, "total": total})
        for done, result in enumerate(self._results([*tasks.values()], folder), start=1):
            outcome = "done" if result.status == "ok" else f"failed: {result.error}"
            text = f"{what}: {done} of {total} runs, {result.recipe.title} {outcome}"
            log.info("%s", text, extra={"done": done, "total": total})
            yield result

    def _results(self, tasks: Sequence[Task], folder: Path) -> Iterator[Result]:
        missing = []
        for task in tasks:
            if task.is_finished():
                yield task.perform()
            else:
                missing.append(task)
        if not missing:
            return
        machine, stop = self.machine, threading.Event()
        count = min(machine.at_once, len(missing))
        with nullcontext() if self.shared else _files.locked(folder):
            if machine.engine == "ray":
                from ._ray import Cluster

                self.cluster = self.cluster or Cluster(machine.jobs, machine.device)
                yield from self._side_by_side(self.cluster.perform, missing, self.cluster.at_once, stop)
            elif count == 1:
                yield from map(Task.perform, missing)
            elif machine.has_gpu:
                before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_SECONDS)
                try:
                    yield from self._side_by_side(partial(Task.perform, stop=stop), missing, count, stop)
                finally:
                    sys.setswitchinterval(before)
            else:
                yield from self._side_by_side(partial(self._in_process, stop=stop), missing, count, stop)

    def _side_by_side(
        self, perform: Callable[[Task], Result], tasks: Iterable[Task], count: int, stop: threading.Event
    ) -> Iterator[Result]:
        """Perform `count` tasks at a time; where that is interrupted, those that are begun save themselves."""
        pool = ThreadPoolExecutor(count)
        futures = [pool.submit(perform, task) for task in tasks]
        try:
            yield from (future.result() for future in as_completed(futures))
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            busy = list(self.busy)
            for worker in busy:
                worker.interrupt()
            wait([future for future in futures if not future.cancelled()], timeout=SECONDS_TO_SAVE)
            for worker in busy:
                worker.shutdown(wait=False)

    def _in_process(self, task: Task, stop: threading.Event) -> Result:
        """Perform the task in a process of its own, which takes no other task with it when it dies."""
        for _ in range(2):
            try:
                worker = self.idle.pop()
            except IndexError:
                worker = _Worker()
            self.busy.append(worker)
            try:
                if stop.is_set():  # since then nobody interrupts this worker
                    raise KeyboardInterrupt
                result: Result = worker.submit(Task.perform, task).result()
            except BrokenExecutor:
                if stop.is_set():
                    raise
                log.warning("the process that trained %s died", task.recipe.title)
            else:
                self.idle.append(worker)
                return result
            finally:
                self.busy.remove(worker)
        return task.failed("its process died twice, perhaps for lack of memory.")


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
