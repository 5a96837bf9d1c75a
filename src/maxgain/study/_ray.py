"""Runs as tasks on a Ray cluster; Ray itself sends a task out again when its worker or node dies."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from maxgain.errors import MissingExtraError, RunError

from . import _files
from .result import Result
from .running import Task

RETRIES = 4


class Cluster:
    """The cluster of $RAY_ADDRESS, or a local one, until `shutdown`.

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

    def perform(self, task: Task) -> Result:
        """Send the task to a node, wait for it, and bring its files here."""
        task.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            sent = self.task.remote(replace(task, folder=task.folder.absolute()))
            found: tuple[Result, dict[str, bytes]] = self.ray.get(sent)
        except self.ray.exceptions.RayTaskError as error:  # what training raised
            raise RunError(f"its Ray worker failed: {str(error).splitlines()[0]}") from error
        except self.ray.exceptions.RayError as error:  # workers or nodes died too often
            return task.failed(f"its Ray worker died: {str(error).splitlines()[0]}")
        for name, content in found[1].items():
            _files.write(task.folder / name, content)
        return found[0]

    def shutdown(self) -> None:
        """Leave the cluster."""
        self.ray.shutdown()


def _train(task: Task) -> tuple[Result, dict[str, bytes]]:
    """Train in the run's folder if this node sees it; otherwise in a temporary one, whose files are sent back."""
    torch.set_num_threads(1)
    if task.folder.parent.exists():
        return task.perform(), {}
    with tempfile.TemporaryDirectory(prefix="maxgain-") as temporary:
        here = replace(task, folder=Path(temporary) / task.folder.name)
        result = here.perform()
        return result, {file.name: file.read_bytes() for file in here.folder.iterdir() if file.name != _files.LOCK}
