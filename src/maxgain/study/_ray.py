"""Runs as tasks on a Ray cluster; Ray itself sends a task out again when its worker or node dies."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maxgain.errors import MissingExtraError, RunError

from ._files import LOCK

RETRIES = 4


class RayExecutor(Executor):
    """Submits runs to the cluster of $RAY_ADDRESS, or to a local one, until `shutdown`.

    A run is a task that takes one CPU, and a share of a GPU if there are any.
    """

    def __init__(self, jobs: int | None, device: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("engine='ray' needs Ray: pip install 'maxgain[ray]'.") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(os.environ.get("RAY_ADDRESS"), log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(f"cannot use the Ray cluster: {str(error).splitlines()[0]}") from error
        resources = ray.cluster_resources()
        gpus = 0 if device == "cpu" else resources.get("GPU", 0)
        self.at_once = jobs or int(gpus or resources.get("CPU", 1))
        share = 0 if not gpus else min(1.0, gpus / (jobs or gpus))
        self.ray = ray
        self.task = ray.remote(num_cpus=1, num_gpus=share, max_retries=RETRIES)(_train)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send the task in `args` to a node, and bring its files here when it ends."""
        task, _ = args
        task.folder.parent.mkdir(parents=True, exist_ok=True)
        sent = replace(task, folder=task.folder.absolute())
        future: Future[Any] = Future()

        def done(finished: Future[Any]) -> None:
            try:
                result, files = finished.result()
                for name, content in files.items():
                    (task.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (task.folder / name).write_bytes(content)
                future.set_result(result)
            except Exception as error:
                future.set_exception(RunError(f"its Ray worker failed: {str(error).splitlines()[0]}"))

        self.task.remote(sent).future().add_done_callback(done)
        return future

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        """Leave the cluster."""
        self.ray.shutdown()


def _train(task: Any) -> tuple[Any, dict[str, bytes]]:
    """Train in the run's folder if this node sees it; otherwise in a temporary one, whose files are sent back."""
    torch.set_num_threads(1)
    if task.folder.parent.exists():
        return task.perform(), {}
    with tempfile.TemporaryDirectory(prefix="maxgain-") as temporary:
        here = replace(task, folder=Path(temporary) / task.folder.name)
        result = here.perform()
        return result, {file.name: file.read_bytes() for file in here.folder.iterdir() if file.name != LOCK}
