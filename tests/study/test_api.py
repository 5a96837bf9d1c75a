"""The study in Python, on tiny data of one's own."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from maxgain.errors import FolderInUseError, MaxGainError
from maxgain.study import Machine, Recipe, Run, _files, compare, dataset, load, page, train, tune
from maxgain.study import run as runs
from maxgain.study.api import Settings
from maxgain.study.data import Dataset
from maxgain.study.plan import read_plan
from maxgain.study.run import Inputs
from maxgain.study.running import Task

TWO = Machine(jobs=2, device="cpu")
ONE = Machine(jobs=1, device="cpu")
QUICK = {"epochs": 2, "batch_size": 16}


def part(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images whose brighter half is their label."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    images = torch.rand(count, 1, 4, 4, generator=draw) / 2
    images[labels == 1, :, 2:] += 0.3
    images[labels == 0, :, :2] += 0.3
    return images, labels


@pytest.fixture(scope="module")
def halves() -> Dataset:
    return dataset("halves", train=part(80, 0), test=part(40, 1))


def small(shape, classes, batchnorm=False, dropout=None) -> nn.Module:
    noise = [dropout(0.5)] if dropout else []
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), *noise, nn.Linear(8, classes))


def test_a_run_gives_its_model_back(halves, tmp_path) -> None:
    run = train(halves, "maxgain=2", network=small, out=tmp_path, epochs=20)
    assert isinstance(run, Run)
    assert run.result.test_accuracy == 1.0
    images, labels = part(40, 1)
    with torch.no_grad():
        logits = run.model(small)(images * 2 - 1)
    assert (logits.argmax(1) == labels).float().mean() > 0.9
    assert load(tmp_path)[0].recipe.regulariser == "maxgain=2"


def test_what_is_ones_own_has_to_be_passed_again(halves, tmp_path) -> None:
    run = train(halves, "maxgain=2", network=small, out=tmp_path, epochs=1)
    assert run.gains("test", halves, small).gains.keys() == {"1", "3"}
    for call, field in (
        (lambda: run.model(), "network"),
        (lambda: run.model(lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(16, classes))), "network"),
        (lambda: run.gains("test", network=small), "data"),
    ):
        with pytest.raises(MaxGainError) as refusal:
            call()
        assert refusal.value.field == field


class Product(nn.Module):
    """A network without a layer that has a gain."""

    def __init__(self, shape, classes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, classes) / 4)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight


def test_a_network_without_gains_has_a_page(halves, tmp_path) -> None:
    def network(shape, classes) -> nn.Module:
        return Product(shape, classes)

    compare(halves, ["none"], seeds=2, network=network, machine=ONE, out=tmp_path / "two", **QUICK)
    result = train(halves, "none", network=network, out=tmp_path / "one", **QUICK).result
    assert (result.gains, result.history.max_gain) == ({}, {})
    assert "Gains of each layer" not in page(tmp_path, tmp_path / "page.html").read_text(encoding="utf-8")


def test_tune_has_no_test_scores(halves, tmp_path) -> None:
    tuned = tune(halves, "maxgain", grid={"maxgain": [0.1, 2.0]}, out=tmp_path, machine=ONE, epochs=10)
    assert tuned.best == "maxgain=2"
    assert [result.test_accuracy for result in load(tmp_path)] == [None, None]
    assert not any("test" in result.gains or result.correct for result in tuned.results)


@pytest.fixture(scope="module")
def compared(halves, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    rows = ["none", "dropout", "maxgain"]
    how = {"folds": 3, "tuned": "grid", "grid": {"maxgain": [0.1, 2.0], "dropout": [0.5]}, "network": small}
    return folder, lambda **more: compare(halves, rows, **{"out": folder, "machine": TWO, **how, **QUICK, **more})


def test_compare_and_page(compared, tmp_path) -> None:
    folder, again = compared
    comparison = again()
    assert [row.name for row in comparison.rows] == ["none", "dropout", "maxgain"]
    assert len(comparison.to_frame()) == 3
    assert max(map(len, str(comparison).splitlines())) <= 80
    assert read_plan(folder).numbers["maxgain"].keys() == {0, 1, 2}
    assert "<html" in page(folder, tmp_path / "report.html").read_text()


def test_the_same_call_trains_nothing_again(compared) -> None:
    folder, again = compared
    first = again()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    assert str(again()) == str(first)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")} == before


@pytest.mark.parametrize(("machine", "has_gpu"), [(ONE, False), (TWO, True)], ids=["in turn", "threads of a GPU"])
def test_where_runs_are_trained_changes_no_bit(compared, monkeypatch, tmp_path, machine, has_gpu) -> None:
    """Threads are those of a GPU, but on the CPU, where they take turns."""
    folder, again = compared
    expected = str(again())
    monkeypatch.setattr(Machine, "has_gpu", has_gpu)
    assert str(again(out=tmp_path, machine=machine)) == expected
    weights = [{r.key: r.weights_sha256 for r in load(place / "runs")} for place in (folder, tmp_path)]
    assert weights[0] == weights[1]


def test_shards_are_disjoint_and_complete(halves, tmp_path) -> None:
    how = {"seeds": 3, "machine": ONE, "out": tmp_path, **QUICK}
    for shard in ("0/2", "1/2"):
        compare(halves, ["none", "maxgain=2"], shard=shard, **how)
    assert not (tmp_path / "plan.json").exists()
    assert len(load(tmp_path)) == 6
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(compare(halves, ["none", "maxgain=2"], **how).rows[0].scores) == 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == before


def test_one_command_at_a_time_trains_in_a_folder(halves, tmp_path) -> None:
    """A second one once began runs that the first was about to begin, and ended it."""
    how = {"seeds": 2, "machine": ONE, "out": tmp_path, **QUICK}
    with _files.locked(tmp_path / "runs"):
        with pytest.raises(FolderInUseError):
            compare(halves, ["none", "maxgain=2"], **how)
        compare(halves, ["none", "maxgain=2"], shard="0/2", **how)
        compare(halves, ["none", "maxgain=2"], shard="1/2", **how)
        assert len(load(tmp_path)) == 4
        assert compare(halves, ["none", "maxgain=2"], **how).rows[1].missing == 0, "nothing is left to train"


def test_two_threads_with_networks_of_their_own(halves, tmp_path) -> None:
    """Each thread trains its own function, and finds it again."""
    errors, made = [], []

    def one(width: int) -> None:
        def network(shape, classes) -> nn.Module:
            made.append(width)
            return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, classes))

        try:
            run = train(halves, "maxgain", network=network, out=tmp_path / str(width), **QUICK)
            assert run.model(network)[1].out_features == width
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(width,)) for width in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(made) == {3, 5}


def killing(times: int, marks: Path, parent: int) -> Callable[..., nn.Module]:
    """A network that kills the process of a row with dropout, this many times."""

    def network(shape, classes, dropout=None) -> nn.Module:
        if dropout is not None and os.getpid() != parent and len(list(marks.iterdir())) < times:
            (marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        noise = [dropout(0.5)] if dropout else []
        return nn.Sequential(nn.Flatten(), *noise, nn.Linear(16, classes))

    return network


@pytest.mark.parametrize(("times", "status"), [(1, "ok"), (2, "failed")])
def test_a_killed_worker_costs_one_run(halves, tmp_path, times, status) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    network = killing(times, marks, os.getpid())
    how = {"seeds": 1, "network": network, "machine": TWO, "out": tmp_path / "out", **QUICK}
    compare(halves, ["none", "maxgain=2", "dropout"], **how)
    found = {result.recipe.regulariser.partition("=")[0]: result for result in load(tmp_path / "out")}
    assert {name: result.status for name, result in found.items()} == {"none": "ok", "maxgain": "ok", "dropout": status}
    assert found["dropout"].fault == ("machine" if status == "failed" else "")
    compare(halves, ["none", "maxgain=2", "dropout"], **how)  # tries it once more
    assert all(result.status == "ok" for result in load(tmp_path / "out"))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda data, out: train(data, "maxgain", epoch=3, out=out), "epoch"),
        (lambda data, out: train(data, "maxgain", epochs=0, out=out), "epochs"),
        (lambda data, out: train(data, "maxgian", out=out), "regulariser"),
        (lambda data, out: train("digitz", out=out), "recipe"),
        (lambda data, out: train("digits", network=small, out=out), "network"),
        (lambda data, out: train(data, network=lambda shape, classes: 3, out=out), "network"),
        (lambda data, out: train(data, learning_rate="fast", out=out), "learning_rate"),
        (lambda data, out: train(data, include="*", out=out), "include"),
        (lambda data, out: train(data, image_size=16, out=out), "image_size"),
        (lambda data, out: train((data.train, data.test), out=out), "data"),
        (lambda data, out: tune(data, by="late", out=out), "by"),
        (lambda data, out: tune(data, grid={"maxgain": []}, out=out), "grid"),
        (lambda data, out: compare(data, "none", seeds=2, out=out), "rows"),
        (lambda data, out: compare(data, ["none", "maxgain"], seeds=2, tuned="late", out=out), "tuned"),
        (lambda data, out: compare(data, ["none"], seeds=2, decide_by="mood", out=out), "decide_by"),
        (lambda data, out: compare(data, ["none"], seeds=1, machine=Machine(engine="steam"), out=out), "engine"),
        (lambda data, out: tune(data, "maxgain=2", out=out), "regulariser"),
        (lambda data, out: tune(data, "maxgain", grid={"dropout": [1.0]}, out=out), "grid"),
        (lambda data, out: compare(data, ["none"], seeds=2, shard="2/2", out=out), "shard"),
        (lambda data, out: compare(data, ["none"], seeds=2, shard="9", out=out), "shard"),
        (lambda data, out: compare(data, ["none"], seeds=1, machine=Machine(jobs=0), out=out), "jobs"),
    ],
)
def test_refused_before_anything_is_written(halves, tmp_path, call, field) -> None:
    with pytest.raises(MaxGainError) as refusal:
        call(halves, tmp_path / "out")
    assert refusal.value.field == field
    assert not (tmp_path / "out").exists()


def test_a_comparison_whose_data_cannot_be_read_leaves_no_plan(halves, tmp_path) -> None:
    with pytest.raises(MaxGainError):
        compare(halves, ["none", "maxgain=2"], folds=300, network=small, out=tmp_path, machine=ONE, **QUICK)
    assert not (tmp_path / "plan.json").exists()


def test_settings_are_the_recipes_fields() -> None:
    assert {*Settings.__annotations__, "name", "dataset", "network", "regulariser"} == {f.name for f in fields(Recipe)}


def test_a_full_disk_is_a_fault_of_the_machine(halves, tmp_path, monkeypatch) -> None:
    recipe = Recipe("halves", "halves", "mlp", "adam", 1e-3, epochs=1, batch_size=16)
    task = Task(recipe, tmp_path, Inputs(dataset=halves), "cpu", True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runs._files, "write", full)
        assert task.perform().fault == "machine"
    assert task.perform().status == "ok"
