"""Runs on the nodes of a Ray cluster, several per GPU if asked for.

This process has a thread for each run under way. It does what a worker process does on one machine: it records the
result, and asks optuna whether to go on. Only the training is sent to a node, so a result is recorded once, by whoever
started the command. Ray sends a run out again when its worker or its node has died.

The data are read here and put into Ray's object store, which brings them to a node once, for all runs there.

A run is kept in the folder where this machine keeps it, if its node sees that folder too: then a run that is sent out
again goes on from its checkpoint. Otherwise it is kept in a temporary folder of the node, and its files come here when
it ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import maxgain
from maxgain.errors import FolderInUseError, MissingExtraError, RecipeError, RunError

from ..data.splits import Dataset, Split
from ..data.table import data_root
from ..files import alone_in, make_folder, write_bytes, write_text
from ..recipes import Recipe, expect_count
from ..run_files import FILES, METRICS, RESULT, read_metrics
from ..runs import Interrupted, Place, Watcher, perform
from ..schema import Result
from ..signals import deferred
from ..wording import first_line
from .workers import PATIENCE, in_threads

# Ray would write what happens to its nodes between our own lines, also where these are JSON.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
try:
    import ray
    from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtraError("--engine ray needs Ray: pip install 'maxgain[ray]'.") from error

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

RETRIES = 4
"""How often a run is sent out again whose worker or node has died."""
SECONDS_TO_ANSWER = 5.0
"""How long a cluster has to answer a greeting; Ray itself would wait for minutes."""
SECONDS_TO_BEGIN = 120.0
"""How long a node has to start a worker and import this package."""
SECONDS_TO_LET_GO = 120.0
"""How long the folder of a run may still be locked by a node that has died, as network file systems have it."""
SECONDS_BETWEEN_LOOKS = 0.5
"""How often to look at the epochs of a run, and whether it is to be stopped."""
SEEN = ".seen"
"""A file beside the runs, by whose content a node knows that it sees the same folder."""


@contextmanager
def on_ray(address: str | None, jobs: int | None, per_gpu: int | None, device: str) -> Iterator[OnRay]:
    """The engine on the cluster at an address; without one, and without $RAY_ADDRESS, on one that is started here."""
    if jobs is not None:
        expect_count("--jobs", jobs)
    if per_gpu is not None:
        expect_count("--per-gpu", per_gpu)
    if device not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"on a Ray cluster --device is cpu, cuda or auto, not {device!r}: Ray chooses the GPU.")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    _connect("local" if address is None else address)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        gpus, room = _share([node["Resources"] for node in nodes], per_gpu, device)
        _expect_same_version(nodes)
        yield OnRay(jobs or room, gpus)
    finally:
        ray.shutdown()


def _share(nodes: Sequence[Mapping[str, float]], per_gpu: int | None, device: str) -> tuple[float, int]:
    """What a run takes of a GPU, and how many runs have room on the nodes; each takes a CPU too."""
    per_gpu, asked = per_gpu or 1, per_gpu is not None
    if device == "cpu" or not any(node.get("GPU") for node in nodes):
        if device == "cuda" or asked:
            raise RunError("there are no GPUs for runs on the Ray cluster: leave out --per-gpu, and use --device cpu.")
        gpus, room = 0.0, sum(int(node.get("CPU", 0)) for node in nodes)
    else:
        gpus = 1 / per_gpu
        room = sum(min(int(node.get("CPU", 0)), int(node.get("GPU", 0) * per_gpu)) for node in nodes)
    if not room:
        raise RunError("no node of the Ray cluster has a CPU, and a GPU if one is needed, for a run: see 'ray status'.")
    return gpus, room


@dataclass(frozen=True)
class OnRay:
    """A Ray cluster that this process is connected to."""

    at_once: int
    gpus: float
    """What a run takes of a GPU."""
    _placed: dict[str, Any] = field(default_factory=dict)
    """Data in the object store, by their fingerprints."""
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def each(
        self, work: Callable[[Job], Outcome], jobs: Iterable[Job], at_most: int
    ) -> Generator[tuple[Job, Outcome], None, None]:
        """See `Engine`."""
        self._stopping.clear()
        return in_threads(work, jobs, max(1, min(self.at_once, at_most)), self._stopping.set)

    def perform(
        self, recipe: Recipe, place: Place, dataset: Dataset, *, resume: bool = False, watcher: Watcher | None = None
    ) -> Result:
        """As `runs.perform`, on a node; the watcher hears of epochs alone, and only where the node sees the folder."""
        if not (place.folder / RESULT).exists():
            with self._one_at_a_time:
                seen = _left_to_be_seen(place.folder.parent)
            folder, data = place.folder.absolute(), data_root(place.data).absolute()
            there = replace(place, folder=folder, data=data, device="cuda" if self.gpus else "cpu")
            order = _Order(recipe, there, seen, tuple(sys.argv))
            files = self._sent_out(order, self._place(dataset), watcher or Watcher())
            if files:
                with alone_in(folder, *FILES):
                    for name in sorted(files, key=lambda name: name == RESULT):  # which says that all is there
                        write_bytes(folder / name, files[name])
        return perform(recipe, place, dataset, resume=True)

    def _place(self, dataset: Dataset) -> Any:
        with self._one_at_a_time:
            if dataset.fingerprint not in self._placed:
                self._placed[dataset.fingerprint] = ray.put(_packed(dataset))
            return self._placed[dataset.fingerprint]

    def _sent_out(self, order: _Order, data: Any, watcher: Watcher) -> dict[str, bytes]:
        """What comes back from a node that trained the run; the run saves itself there where it is to be stopped."""
        task = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=RETRIES, retry_exceptions=[Interrupted])(_train)
        running = task.remote(order, data)
        told = 0
        try:
            with deferred() as interrupted:
                while not ray.wait([running], timeout=SECONDS_BETWEEN_LOOKS)[0]:
                    if interrupted() or self._stopping.is_set():
                        raise Interrupted(str(order.place.folder))
                    epochs = read_metrics(order.place.folder) if (order.place.folder / METRICS).exists() else []
                    for line in epochs[told:]:
                        watcher.epoch_done(line)
                    told = max(told, len(epochs))
            files: dict[str, bytes] = ray.get(running)
            return files
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            raise RunError(f"its worker on the Ray cluster died {RETRIES + 1} times: {first_line(error)}.") from error
        except BaseException:
            ray.cancel(running)
            ray.wait([running], timeout=PATIENCE)
            raise


# What happens on a node


@dataclass(frozen=True)
class _Order:
    """A run that a node is to train."""

    recipe: Recipe
    place: Place
    seen: str
    """What `SEEN` holds beside the run's folder."""
    command: tuple[str, ...]
    """What the user typed, which results keep."""


def _train(order: _Order, data: _Packed) -> dict[str, bytes]:
    """Trains a run, and returns its files if whoever ordered it cannot see them."""
    sys.argv = list(order.command)
    torch.set_num_threads(1)  # as in every worker, so that where a run is trained changes no bit of it
    folder = order.place.folder
    if _seen(folder.parent) == order.seen:
        _once_free(lambda: perform(order.recipe, order.place, _unpacked(data), resume=True))
        return {}
    with tempfile.TemporaryDirectory(prefix="maxgain-") as temporary:
        here = Path(temporary) / folder.name
        perform(order.recipe, replace(order.place, folder=here), _unpacked(data))
        return {name: (here / name).read_bytes() for name in FILES if (here / name).exists()}


def _once_free(train: Callable[[], Result]) -> None:
    """Trains as soon as the run's folder is free, which a node that died may hold for a while."""
    patience = time.monotonic() + SECONDS_TO_LET_GO
    while True:
        try:
            train()
            return
        except FolderInUseError:
            if time.monotonic() > patience:
                raise
            time.sleep(1)


def _left_to_be_seen(folder: Path) -> str:
    """Leaves something in the folder that only those see who see this very folder."""
    if not (folder / SEEN).exists():
        make_folder(folder)
        write_text(folder / SEEN, secrets.token_hex(16))
    return _seen(folder)


def _seen(folder: Path) -> str:
    try:
        return (folder / SEEN).read_text(encoding="utf-8")
    except OSError:
        return ""


_Packed = tuple[dict[str, Any], dict[str, tuple[Any, Any]]]


def _packed(dataset: Dataset) -> _Packed:
    """The data set with numpy's arrays, which all processes of a node read where they lie in the object store."""
    content = {one.name: getattr(dataset, one.name) for one in fields(dataset)}
    parts = {name: content.pop(name) for name in ("train", "validation", "test")}
    return content, {name: (part.images.contiguous().numpy(), part.labels.numpy()) for name, part in parts.items()}


def _unpacked(packed: _Packed) -> Dataset:
    content, parts = packed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")  # nobody writes to images or labels
        splits = {name: Split(*map(torch.from_numpy, arrays)) for name, arrays in parts.items()}
    return Dataset(**(content | splits))


# Finding a cluster


def _connect(address: str) -> None:
    """Connects to the cluster, or starts one; signals stay ours, and Ray keeps its remarks to itself."""
    if address not in ("local", "auto"):
        _expect_answer(address)
    how: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **how)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        ray.shutdown()
        reason = f"{first_line(error)}; if it asks for a token, set RAY_AUTH_MODE=token"
        raise RunError(f"cannot use the Ray cluster {address!r}: {reason}.") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _expect_answer(address: str) -> None:
    """Refuses an address where nothing answers as Ray does: with HTTP/2, of which it speaks the first words here."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or len(port) > len("65535"):
        raise RecipeError(f"--address must be HOST:PORT, as 'ray start --head' shows it, or auto, not {address!r}.")
    settings = bytes(3) + b"\x04" + bytes(5)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            answer = connection.recv(len(settings))
    except (OSError, OverflowError, UnicodeError) as error:
        raise RunError(f"no Ray cluster answers at {address}: {first_line(error)}.") from error
    if answer[3:4] != settings[3:4] and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise RunError(f"what answers at {address} is no Ray cluster.")


def _version() -> str:
    return maxgain.__version__


def _expect_same_version(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a cluster with a node that has no maxgain, or another one."""
    names = [node["NodeManagerAddress"] for node in nodes]
    where = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    answers = [ray.remote(num_cpus=0, scheduling_strategy=there)(_version).remote() for there in where]
    for name, answer in zip(names, answers, strict=True):
        try:
            version = ray.get(answer, timeout=SECONDS_TO_BEGIN)
        except (TaskUnschedulableError, NodeDiedError):  # it has just left the cluster
            continue
        except RayError as error:
            reason = first_line(error.cause if isinstance(error, RayTaskError) else error)
            raise RunError(f"the Ray node {name} cannot run maxgain: {reason}; is it installed there?") from error
        if version != maxgain.__version__:
            raise RunError(f"the Ray node {name} has maxgain {version}, not {maxgain.__version__}: install this there.")
