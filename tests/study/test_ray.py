"""Runs as Ray tasks on two nodes, of which a worker and a node are killed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from maxgain.study import Machine, compare, dataset, load

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def network_for(marks: Path):
    """A network that notes its process and then takes its time."""

    def network(shape, classes) -> nn.Module:
        (marks / str(os.getpid())).touch()
        time.sleep(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))

    return network


def test_a_worker_and_a_node_are_killed(cluster, tmp_path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    part = (torch.rand(24, 1, 2, 2), torch.arange(24) % 2)
    data = dataset("tiny", train=part, test=part)
    parent, stopped = os.getpid(), []

    def kill() -> None:
        workers: list[Path] = []
        while not workers:
            time.sleep(0.2)
            workers = [mark for mark in marks.iterdir() if int(mark.name) != parent]
        os.kill(int(workers[0].name), signal.SIGKILL)
        stopped.append("worker")
        time.sleep(2)
        cluster.remove_node(cluster.second, allow_graceful=False)
        stopped.append("node")

    killer = threading.Thread(target=kill)
    killer.start()
    machine = Machine(engine="ray", device="cpu")
    how = {"network": network_for(marks), "out": tmp_path / "out", "epochs": 2, "machine": machine}
    comparison = compare(data, ["none", "maxgain=2"], seeds=3, **how)
    killer.join()
    assert stopped == ["worker", "node"]
    assert [len(row.scores) for row in comparison.rows] == [3, 3]
    assert {result.status for result in load(tmp_path / "out")} == {"ok"}


def test_a_run_whose_workers_all_die_is_a_fault_of_the_machine(cluster, tmp_path, monkeypatch) -> None:
    parent = os.getpid()

    def network(shape, classes) -> nn.Module:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))

    monkeypatch.setattr("maxgain.study._ray.RETRIES", 0)
    part = (torch.rand(24, 1, 2, 2), torch.arange(24) % 2)
    data = dataset("tiny", train=part, test=part)
    machine = Machine(engine="ray", device="cpu")
    comparison = compare(data, ["none"], seeds=1, network=network, out=tmp_path, epochs=1, machine=machine)
    assert [(result.fault, "Ray worker died" in result.error) for result in comparison.failed] == [("machine", True)]
