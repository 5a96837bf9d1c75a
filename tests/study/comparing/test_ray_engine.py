"""Runs on a Ray cluster: the records of one machine, whatever happens to workers and nodes on the way."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxgain.errors import FolderInUseError, RunError
from maxgain.study.cli.app import main
from maxgain.study.comparing import jobs as work
from maxgain.study.comparing.workers import data_for
from maxgain.study.files import alone_in
from maxgain.study.recipes import RECIPES
from maxgain.study.runs import Place, Watcher
from one_process import in_this_process

ray_engine = pytest.importorskip("maxgain.study.comparing.ray_engine")
cluster_utils = pytest.importorskip("ray.cluster_utils")

QUICK = replace(RECIPES["digits"], network="mlp", epochs=2, train_on="train+validation")
LONG = replace(QUICK, epochs=60)
COMPARE = ["compare", "digits", "--network", "mlp", "--regularisers", "none", "maxgain", "--folds", "2"]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, with a CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        started = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        started.add_node(num_cpus=1)
        started.wait_for_nodes()
        yield started
        started.shutdown()


def training_on(node: Any) -> list[int]:
    """The processes of a node that train a run this moment."""
    raylet = node.all_processes["raylet"][0].process.pid
    children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_train")]


@contextmanager
def meanwhile(happens: Callable[[], bool]) -> Iterator[None]:
    """In another thread, does something as soon as it can be done; it must have been done when the block ends."""
    over, done = threading.Event(), []

    def keep_trying() -> None:
        while not over.is_set() and not done:
            if happens():
                done.append(True)
            time.sleep(0.02)

    thread = threading.Thread(target=keep_trying)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert done, "it could not be done while there was time"


def has_begun(folder: Path) -> bool:
    """Whether a run below the folder has trained an epoch, and none is finished."""
    lines = [path.read_text().count("\n") for path in folder.glob("**/runs/*/metrics.jsonl")]
    return any(lines) and not any(folder.glob("**/result.json"))


def what_counts(record: Any) -> dict[str, Any]:
    """A record without what differs from one time to the next."""
    changing = ("seconds", "finished", "command", "metrics_sha256", "sha256")
    kept = {name: value for name, value in record.items() if name not in changing}
    return kept | {"history": [{**line, "seconds": 0} for line in record["history"]]}


def recorded(folder: Path) -> dict[str, Any]:
    """What each line of a comparison's records says, by its key; no key has two lines."""
    lines = [json.loads(line) for line in (folder / "results" / "digits.jsonl").read_text().splitlines()]
    found = {line["key"]: what_counts(line) for line in lines}
    assert len(found) == len(lines), "a run was recorded twice"
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What this machine records for this many epochs, without Ray."""

    @cache
    def trained(epochs: int) -> dict[str, Any]:
        recipe = replace(QUICK, epochs=epochs)
        place = Place(tmp_path_factory.mktemp("here"), device="cpu")
        jobs = work.plan(recipe, ["none", "maxgain"], work.folds(recipe, 2))
        for job in jobs:
            work.run_recorded(job, place)
        return recorded(place.folder)

    return trained


def on(cluster: Any, folder: Path, epochs: int) -> list[str]:
    return [*COMPARE, "--epochs", str(epochs), "--engine", "ray", "--address", cluster.address, "--out", str(folder)]


# The same records


@slow
def test_a_killed_worker_and_a_lost_node_change_no_record(cluster, here, tmp_path, capsys):
    doomed = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def kill_worker() -> bool:
        pids = training_on(cluster.head_node) if has_begun(tmp_path) else []
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def lose_node() -> bool:
        if not (has_begun(tmp_path) and training_on(doomed)):
            return False
        cluster.remove_node(doomed, allow_graceful=False)
        return True

    with meanwhile(kill_worker), meanwhile(lose_node):
        assert main([*on(cluster, tmp_path, LONG.epochs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["contrasts"], "Ray wrote nothing between our lines"
    found = recorded(tmp_path)
    assert {line["status"] for line in found.values()} == {"ok"}
    assert found == here(LONG.epochs)


@slow
def test_a_search_on_a_cluster_finds_what_it_finds_here(cluster, tmp_path, monkeypatch):
    tune = ["tune", "digits", "--network", "mlp", "--epochs", "2", "--fold", "0", "--grid", "gamma=1:2:1"]
    command = [*tune, "--regulariser", "maxgain", "--out"]
    assert main([*command, str(tmp_path / "ray"), "--engine", "ray", "--address", cluster.address]) == 0
    in_this_process(monkeypatch)
    assert main([*command, str(tmp_path / "here"), "--jobs", "1"]) == 0
    for name in ("curve.json", "tuned.json"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


@slow
def test_the_example_of_the_documentation_starts_a_cluster_by_itself(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^maxgain (compare digits .*--engine ray.*)$", page, re.MULTILINE)
    assert "--address" not in line
    paths = os.pathsep.join(path for path in sys.path if path)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "maxgain", *shlex.split(line), "--json"],
        cwd=tmp_path,
        env=alone | {"PYTHONPATH": paths, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["contrasts"]
    assert len(recorded(tmp_path / "compare-ray")) == 4


# Where runs are kept, and their data


@slow
def test_ctrl_c_lets_runs_save_themselves_and_the_same_command_goes_on(cluster, here, tmp_path, capsys):
    command = on(cluster, tmp_path, LONG.epochs)

    def press() -> bool:
        if has_begun(tmp_path):
            os.kill(os.getpid(), signal.SIGINT)
            return True
        return False

    with meanwhile(press):
        assert main(command) == 130
    assert "what was saved is kept" in capsys.readouterr().err
    assert list(tmp_path.glob("runs/*/checkpoint.safetensors"))
    assert not (tmp_path / "results").exists()
    assert main(command) == 0
    assert recorded(tmp_path) == here(LONG.epochs)


@slow
def test_a_run_that_somebody_has_seen_enough_of_is_stopped_on_its_node(cluster, tmp_path):
    def enough(line: Any) -> None:
        raise RuntimeError(line["epoch"])

    dataset, place = data_for(LONG, Place(tmp_path)), Place(tmp_path / "runs" / "one", checkpoint_seconds=60)
    with ray_engine.on_ray(cluster.address, None, None, "auto") as ray:
        with pytest.raises(RuntimeError, match="1"):
            ray.perform(LONG, place, dataset, watcher=Watcher(epoch_done=enough))
        assert not any(training_on(node) for node in cluster.list_all_nodes())
    assert (place.folder / "checkpoint.safetensors").exists()


@slow
def test_files_come_back_from_a_node_that_does_not_see_the_folder_and_data_are_placed_once(
    cluster, here, tmp_path, monkeypatch
):
    put, placed = ray_engine.ray.put, []
    monkeypatch.setattr(ray_engine.ray, "put", lambda data: placed.append(data) or put(data))
    monkeypatch.setattr(ray_engine, "_left_to_be_seen", lambda folder: "something that no node sees")
    assert main(on(cluster, tmp_path, 2)) == 0
    assert len(placed) == 2, "once per fold"
    assert recorded(tmp_path) == here(2)


def test_a_node_that_sees_the_folder_works_in_it_and_another_sends_the_files(tmp_path):
    recipe = replace(QUICK, epochs=1)
    packed = ray_engine._packed(data_for(recipe, Place(tmp_path)))
    place = Place(tmp_path / "runs" / "one", device="cpu")
    order = ray_engine._Order(recipe, place, ray_engine._left_to_be_seen(place.folder.parent), tuple(sys.argv))
    files = ray_engine._train(replace(order, seen="something else"), packed)
    assert not place.folder.exists()
    assert ray_engine._train(order, packed) == {}
    assert set(files) == {path.name for path in place.folder.iterdir() if path.name != ".maxgain"}
    assert files["model.safetensors"] == (place.folder / "model.safetensors").read_bytes()


def test_data_are_read_where_they_lie():
    dataset = data_for(QUICK, Place(Path("unused")))
    packed = ray_engine._packed(dataset)
    for _, arrays in packed[1].values():
        arrays.flags.writeable = False  # as the object store hands them out
    unpacked = ray_engine._unpacked(packed)
    assert np.shares_memory(unpacked.train.images.numpy(), packed[1]["train"][0])
    assert unpacked.fingerprint == dataset.fingerprint
    assert unpacked.classes == dataset.classes


def test_a_folder_that_a_dead_node_still_holds_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine.time, "sleep", lambda seconds: held.close())

    def train() -> Any:
        with alone_in(tmp_path):
            pass

    held = Held(tmp_path)
    ray_engine._once_free(train)
    monkeypatch.setattr(ray_engine, "SECONDS_TO_LET_GO", -1)
    held = Held(tmp_path)
    with pytest.raises(FolderInUseError):
        ray_engine._once_free(train)
    held.close()


class Held:
    """A folder that somebody else is at work in."""

    def __init__(self, folder: Path) -> None:
        self._context = alone_in(folder)
        self._context.__enter__()

    def close(self) -> None:
        self._context.__exit__(None, None, None)


# How many runs at a time


@pytest.mark.parametrize(
    ("nodes", "per_gpu", "device", "share"),
    [
        ([{"CPU": 8.0}, {"CPU": 2.0}], None, "auto", (0, 10)),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0}], None, "auto", (1, 2)),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0}], None, "cpu", (0, 10)),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}], 3, "cuda", (1 / 3, 9)),
        ([{"CPU": 3.0, "GPU": 2.0}], 4, "auto", (1 / 4, 3)),
    ],
)
def test_a_run_takes_a_cpu_and_its_part_of_a_gpu(nodes, per_gpu, device, share):
    assert ray_engine._share(nodes, per_gpu, device) == share


@pytest.mark.parametrize(
    ("node", "per_gpu", "device", "sentence"),
    [
        ({"CPU": 8.0}, 3, "auto", "there are no GPUs"),
        ({"CPU": 8.0}, None, "cuda", "there are no GPUs"),
        ({"CPU": 8.0, "GPU": 1.0}, 2, "cpu", "there are no GPUs"),
        ({"GPU": 1.0}, None, "auto", "no node of the Ray cluster has a CPU"),
    ],
)
def test_a_cluster_without_room_for_a_run_is_refused(node, per_gpu, device, sentence):
    with pytest.raises(RunError, match=sentence):
        ray_engine._share([node], per_gpu, device)


@slow
def test_several_runs_share_a_gpu(cluster, tmp_path):
    """Ray believes in the GPU of this node, and lends it by parts; torch does not, so the runs say that it is not."""
    with_gpu = cluster.add_node(num_cpus=4, num_gpus=1)
    cluster.wait_for_nodes()
    try:
        with ray_engine.on_ray(cluster.address, None, 3, "auto") as ray:
            assert (ray.at_once, ray.gpus) == (3, 1 / 3)
            with pytest.raises(RunError, match="there is no device 'cuda'"):
                ray.perform(QUICK, Place(tmp_path / "runs" / "one"), data_for(QUICK, Place(tmp_path)))
    finally:
        cluster.remove_node(with_gpu, allow_graceful=False)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--address", "127.0.0.1:1"], "--address is that of a Ray cluster: it needs --engine ray."),
        (["--engine", "ray", "--address", "somewhere"], "--address must be HOST:PORT"),
        (["--engine", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--engine", "ray", "--address", "no.such.host.invalid:6379"], "no Ray cluster answers at no.such.host"),
        (["--engine", "ray", "--address", "..:6379"], "no Ray cluster answers at ..:6379"),
        (["--engine", "ray", "--address", "127.0.0.1:99999"], "no Ray cluster answers at 127.0.0.1:99999"),
        (["--engine", "ray", "--address", "127.0.0.1:" + "9" * 5000], "--address must be HOST:PORT"),
        (["--engine", "ray", "--address", ""], "--address must be HOST:PORT"),
        (["--engine", "ray", "--address", "127.0.0.1:1", "--jobs", "0"], "--jobs must be"),
        (["--engine", "ray", "--address", "127.0.0.1:1", "--device", "cuda:1"], "Ray chooses the GPU"),
    ],
)
def test_what_cannot_be_used_is_answered_with_a_sentence(arguments, sentence, tmp_path, capsys):
    assert main([*COMPARE, *arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_else_that_answers_is_no_cluster(answer, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert main([*COMPARE, "--engine", "ray", "--address", address, "--out", str(tmp_path / "out")]) == 2
        thread.join()
    assert capsys.readouterr().err == f"maxgain: what answers at {address} is no Ray cluster.\n"


def test_without_ray_a_sentence_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "maxgain.study.comparing.ray_engine")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*COMPARE, "--engine", "ray", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "maxgain: --engine ray needs Ray: pip install 'maxgain[ray]'.\n"
    assert not (tmp_path / "out").exists()


@slow
def test_a_node_with_another_maxgain_or_none_is_named(cluster, tmp_path, monkeypatch):
    with ray_engine.on_ray(cluster.address, None, None, "cpu"):
        with monkeypatch.context() as patch:
            patch.setattr("maxgain.__version__", "0.0.0")
            with pytest.raises(RunError, match=r"has maxgain .*, not 0\.0\.0: install"):
                ray_engine._expect_same_version(ray_engine.ray.nodes())
        (tmp_path / "maxgain.py").write_text("raise ModuleNotFoundError('there is no such thing')")
        paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        bare = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": paths})
        cluster.wait_for_nodes()
        with pytest.raises(RunError, match=r"cannot run maxgain: .*; is it installed there"):
            ray_engine._expect_same_version(ray_engine.ray.nodes())
        cluster.remove_node(bare, allow_graceful=False)
