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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
    from ._ray import RayExecutor

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
        self.idle: list[Executor] = []
        self.on_ray: RayExecutor | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self.idle:
            executor.shutdown()
        if self.on_ray is not None:
            self.on_ray.shutdown()
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
        machine, count = self.machine, min(self.machine.at_once, len(missing))
        if not missing:
            return
        with nullcontext() if self.shared else _files.locked(folder):
            if machine.engine == "ray":
                from ._ray import RayExecutor

                on_ray = self.on_ray = self.on_ray or RayExecutor(machine.jobs, machine.device)
                yield from self._side_by_side(missing, on_ray.at_once, lambda: on_ray)
            elif machine.has_gpu and count > 1:
                with _switching_fast():
                    stop = threading.Event()
                    yield from self._side_by_side(missing, count, lambda: ThreadPoolExecutor(1), stop)
            elif count > 1:
                yield from self._side_by_side(missing, count, _Worker)
            else:
                yield from map(Task.perform, missing)

    def _side_by_side(
        self, tasks: Iterable[Task], count: int, start: Callable[[], Executor], stop: threading.Event | None = None
    ) -> Iterator[Result]:
        """Work on `count` tasks at a time, each in an executor of its own: one that dies takes no other with it.

        `stop` is what runs in threads listen to.
        """
        waiting = deque((task, False) for task in tasks)
        running: dict[Future[Result], tuple[Task, bool, Executor]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    task, again = waiting.popleft()
                    executor = self.idle.pop() if self.idle else start()
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
                        result = task.failed("its process died twice, perhaps for lack of memory.")
                    else:
                        self.idle.append(executor)
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
