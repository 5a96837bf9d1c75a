"""What a run's folder says of it, and that a run is never taken for one of another recipe or of other data."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maxgain.errors import CheckpointError, FileError, MaxGainError, RunError
from maxgain.study.cli.app import main
from maxgain.study.data.splits import Dataset
from maxgain.study.recipes import RECIPES
from maxgain.study.run_files import CHECKPOINT, open_run, read_begun, read_metrics, read_result
from maxgain.study.runs import Place, Watcher, perform

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], network="mlp", epochs=2, fold=0)
LINE = {"epoch": 1, "learning_rate": 0.1, "train_loss": "inf", "train_accuracy": 0.5, "validation_loss": None}
LINE |= {"validation_accuracy": None, "max_gain": {"fc": 2.0}, "seconds": 1}


@pytest.fixture(scope="module")
def others(digits: Dataset) -> Dataset:
    """The same images with one pixel changed."""
    images = digits.train.images.clone()
    images[0, 0, 0, 0] ^= 1
    return replace(digits, train=replace(digits.train, images=images))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    perform(RECIPE, Place(out), digits)
    return out


# Reading


def test_metrics_of_a_killed_run_are_its_whole_lines(tmp_path: Path) -> None:
    text = json.dumps(LINE)
    (tmp_path / "metrics.jsonl").write_text(f'{text}\n{text}\n{{"epo')
    assert read_metrics(tmp_path) == 2 * [LINE | {"train_loss": float("inf")}]


def test_folders_that_hold_no_run_are_named(tmp_path: Path) -> None:
    for read in (read_begun, read_result):
        with pytest.raises(RunError, match="is not the folder of a finished run"):
            read(tmp_path)
    with pytest.raises(RunError, match="holds no readable metrics"):
        read_metrics(tmp_path)


def test_epochs_that_a_result_is_not_about_are_refused(tmp_path: Path, finished: Path) -> None:
    """As weights are: a flipped bit is no other number, and a line that is missing is not passed over."""
    result = read_result(finished)
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert len(read_metrics(finished, result)) == len(lines)
    changed = [lines[0].replace('"epoch": 1', '"epoch": 3'), *lines[1:]]
    for damaged in (changed, lines[:-1], lines[::-1], [*lines, lines[0]]):
        (tmp_path / "metrics.jsonl").write_text("".join(damaged))
        with pytest.raises(RunError, match=r"metrics\.jsonl is damaged or of another run"):
            read_metrics(tmp_path, result)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"[1, 2", "config.json cannot be used: it is not JSON"),
        ("config.json", b"[1, 2]", "expected `object`, got `array`"),
        ("config.json", b"{}", "was written by another version of maxgain"),
        (
            "model.safetensors",
            b"half of the wei",
            "is damaged or of another run: its checksum is not the one",
        ),
        ("result.json", b"{}", "missing required field `key`"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, finished: Path, name: str, content: bytes, said: str) -> None:
    for path in finished.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MaxGainError, match=said):
        open_run(Place(tmp_path, device="cpu"))


def test_a_result_that_is_not_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"key": 3}')
    with pytest.raises(FileError, match=r"result\.json cannot be used: at key: expected `str`, got `int`"):
        read_result(tmp_path)


# Identity of data


def test_promise_18_a_run_is_not_resumed_with_other_data(tmp_path: Path, digits: Dataset, others: Dataset) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    place = Place(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, place, digits, watcher=Watcher(epoch_done=stop))
    before = {path.name: path.read_bytes() for path in place.folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"run is of other data: .* use the same --data"):
        perform(RECIPE, place, others, resume=True)
    assert {path.name: path.read_bytes() for path in place.folder.iterdir()} == before
    perform(RECIPE, place, digits, resume=True)


def test_promise_18_a_finished_run_is_no_result_for_other_data(finished: Path, digits: Dataset, others) -> None:
    with pytest.raises(CheckpointError, match=r"run is of other data: .* use the same --data, or another --out"):
        perform(RECIPE, Place(finished), others, resume=True)
    assert perform(RECIPE, Place(finished), digits, resume=True)["fingerprint"] == digits.fingerprint


def test_promise_18_each_data_set_has_a_folder_of_its_own(tmp_path: Path, digits: Dataset, others: Dataset) -> None:
    one, other = (Place(tmp_path).of(RECIPE, data.fingerprint).folder for data in (digits, others))
    assert one != other
    assert one.parent == other.parent == tmp_path / "runs"


def images_in(folder: Path, shade: int) -> Path:
    """A folder data set of two classes of grey images."""
    from PIL import Image

    for label in range(2):
        for number in range(6):
            path = folder / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (shade + 9 * number, 120 * label, number)).save(path)
    return folder


FOLDER = ["train", "folder", "--network", "mlp", "--epochs", "1", "--image-size", "8", "--batch-size", "4"]
FOLDER += ["--regulariser", "none", "--out", "run"]


@pytest.fixture
def _in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_in")
def test_the_data_of_a_run_are_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images_in(tmp_path / "a", 0)
    assert main([*FOLDER, "--data", "a"]) == 0
    assert read_begun(Path("run")).data == str(tmp_path / "a")
    assert main(["gains", "run"]) == 0
    assert main(["inspect", "run"]) == 0
    images_in(tmp_path / "b", 77)
    capsys.readouterr()
    for command in (["gains", "run"], ["inspect", "run"], [*FOLDER, "--resume"]):
        assert main([*command, "--data", "b"]) == 2
        assert "run is of other data: the images or labels there have the fingerprint" in capsys.readouterr().err
    assert "a" not in json.loads(Path("run/result.json").read_text())["config"], "a path is no part of a result"


def test_a_run_without_a_test_part_is_opened_without_one(tmp_path: Path, digits: Dataset) -> None:
    perform(RECIPE, Place(tmp_path / "run", has_test=False))
    opened = open_run(Place(tmp_path / "run", device="cpu"))
    assert list(opened.parts) == ["train"]
    assert len(opened.parts["train"]) == len(digits.train)


def test_opening_a_run_changes_no_random_numbers_and_watches_nothing(finished: Path) -> None:
    opened = open_run(Place(finished, device="cpu"))
    assert not any(module._forward_hooks for module in opened.model.modules())
    assert opened.title == "digits, none"


# Going on


QUICK = ["--network", "mlp", "--epochs", "3", "--fold", "0", "--seed", "7", "--regulariser", "maxgain+dropout"]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the command line that was stopped after its first epoch."""
    monkeypatch.chdir(tmp_path)

    def stop(*_: object, **how: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("maxgain.study.cli.train.largest", stop)  # what an epoch came to is about to be shown
        assert main(["train", "digits", *QUICK, "--gamma", "3", "--out", "run"]) == 130
    assert (tmp_path / "run" / CHECKPOINT).exists()
    return Path("run")


@pytest.mark.parametrize(
    "words",
    [
        ["--resume", "run"],
        ["digits", "--resume", "run"],
        ["digits", "--out", "run", "--resume"],
        ["--resume", "--out", "run", "--json"],
        ["--resume", "run", "--seed", "7", "--gamma", "3", "--device", "cpu"],
        ["--resume", "run", "--regulariser", "dropout+maxgain=3"],
    ],
    ids=" ".join,
)
def test_a_run_goes_on_with_the_options_in_its_folder(stopped: Path, words: list[str]) -> None:
    assert main(["train", *words]) == 0
    result = read_result(stopped)
    assert (result["regulariser"], result["seed"], result["epochs"]) == ("maxgain=3+dropout=1", 7, 3)
    assert len(read_metrics(stopped)) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--resume", "run", "--seed", "8"],
            "run is of another recipe: there seed is 7, here 8; 'maxgain train",
        ),
        (["--resume", "run", "--regulariser", "none"], "there regulariser is 'maxgain=3+dropout=1', here 'none'"),
        (["--resume", "run", "--gamma", "2"], "--gamma 2 has no effect with maxgain=3+dropout=1"),
        (["svhn", "--resume", "run"], "run holds a run of the recipe 'digits', and not of 'svhn'."),
        (["--resume", "nowhere"], "nowhere holds no run to go on with: it has no config.json."),
        (["--resume"], "'maxgain train' needs a recipe first"),
        (["--resume", "run", "--device", "gpu"], "there is no device 'gpu'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_the_folder_are_refused_and_nothing_is_lost(stopped: Path, capsys, words, said) -> None:
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}
    capsys.readouterr()
    assert main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before


def test_a_run_of_a_search_is_taken_up_without_its_test_part(tmp_path: Path) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    place = Place(tmp_path / "run", has_test=False)
    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, place, watcher=Watcher(epoch_done=stop))
    assert main(["train", "--resume", str(place.folder)]) == 0
    assert read_result(place.folder)["test_accuracy"] is None


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("place", [9, 1000, -1])
def test_weights_with_a_flipped_bit_are_named_and_not_used(finished: Path, tmp_path: Path, place: int) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    flipped(run / "model.safetensors", place)
    with pytest.raises(RunError, match=r"model\.safetensors is damaged or of another run: its checksum is not"):
        open_run(Place(run))


@pytest.mark.parametrize("name", ["result.json", "config.json"])
def test_a_result_or_a_config_with_a_changed_digit_is_named_and_not_used(
    finished: Path, tmp_path: Path, name: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    text = (run / name).read_text()
    (run / name).write_text(text.replace('"batch_size": 16', '"batch_size": 17'))
    with pytest.raises(FileError, match=rf"{name} cannot be used: it is damaged: its checksum does not fit"):
        open_run(Place(run))


def test_a_result_of_another_run_is_not_taken_for_this_ones(finished: Path, tmp_path: Path, digits: Dataset) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    perform(replace(RECIPE, seed=7), Place(tmp_path / "other"), digits)
    shutil.copy(tmp_path / "other" / "result.json", run / "result.json")
    with pytest.raises(CheckpointError, match=r"result\.json is of another recipe: there seed is 7, here 0"):
        open_run(Place(run))
    with pytest.raises(CheckpointError, match=r"result\.json is of another recipe: there seed is 7, here 0"):
        perform(RECIPE, Place(run), digits, resume=True)
