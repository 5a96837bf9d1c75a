"""The command line: what it prints, for people and for machines, and what it says when something is wrong."""

import io
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from rich.progress import Progress
from safetensors.torch import load_file

import maxgain
from json_values import strictly
from maxgain import measure_gains
from maxgain.study import evaluate, run_files, runs
from maxgain.study.cli import app as cli
from maxgain.study.cli import train as train_command
from maxgain.study.data import table as datasets
from maxgain.study.recipes import RECIPES
from maxgain.study.run_files import CHECKPOINT
from maxgain.study.runs import Place

QUICK = ["--network", "mlp", "--fold", "0", "--epochs", "2"]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found, and nothing is left, in the folder that the tests are run from."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("MAXGAIN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert cli.main(["train", "digits", *QUICK, "--regulariser", "maxgain+dropout", "--out", str(out), "--json"]) == 0
    return out


# Help.


def test_the_overview_names_every_command(capsys) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in cli.COMMANDS)
    assert {"train", "gains", "data", "list"} <= set(cli.COMMANDS)
    assert cli.main([]) == 2
    assert capsys.readouterr().out == shown
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"maxgain {maxgain.__version__}\n"


# What is wrong is said in one sentence.


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trian", "there is no command 'trian': did you mean 'train'?"),
        ("train", "'maxgain train' needs a recipe first: one of digits, cifar10,"),
        ("train digit", "there is no recipe 'digit': did you mean 'digits'?"),
        ("train digits --gamma -1", "gamma must be positive, not -1.0."),
        ("train cifar10 --gamma -1", "gamma must be positive, not -1.0."),
        ("train digits --gamma nan", "gamma must be positive, not nan."),
        ("train digits --gamma 1.5", "--gamma 1.5 has no effect with none: name maxgain there"),
        ("train digits --gamma 3 --regulariser maxgain=2", "--gamma 3 has no effect with maxgain=2"),
        ("train digits --regulariser maxgian", "there is no regulariser 'maxgian': did you mean 'maxgain'?"),
        ("train digits --regulariser maxgain,dropout", "'maxgain,dropout' is not one regulariser: join them by +"),
        ("compare digits --folds 2 --regularisers none,maxgain=3", "'none,maxgain=3' is not one regulariser: join"),
        (
            "tune digits --regulariser dropout --grid gamma=1:2:1",
            "there is no 'gamma' to choose in dropout: there is factor",
        ),
        ("train digits --network vgg91", "there is no network 'vgg91': did you mean 'vgg19'?"),
        ("train digits --network vgg19", "a network that halves the image 5 times needs at least 32×32 pixels"),
        ("train digits --dataset digitz", "there is no data set 'digitz'"),
        ("train digits --device gpu", "there is no device 'gpu' to train on here: use 'cpu'"),
        ("train digits --fold 10", "digits has folds 0 to 9, so there is no fold 10"),
        ("train digits --image-size 16", "digits has images of one size, so 16 cannot be chosen."),
        ("train digits --checkpoint-seconds -1", "checkpoint-seconds must not be negative, but is -1.0."),
        ("train digits --milestones 1 99999999999999999999", "milestones must be epochs from 0 to 1,000,000, not 999"),
        ("train digits --milestones -1", "milestones must be epochs from 0 to 1,000,000, not -1."),
        ("train digits --epochs ten", "--epochs cannot be 'ten'; see 'maxgain train digits --help'."),
        ("train digits --learning-rate high", "--learning-rate cannot be 'high'; see"),
        ("train digits --fold 1e3", "--fold cannot be '1e3'; see"),
        ("train digits --gamma=", "--gamma cannot be ''; see"),
        ("train digits --milestones 1 x", "--milestones cannot be '1 x'; see"),
        ("train digits --batch-size 99999999999999999999", "batch-size must be at most 1,000,000, not 999"),
        ("train digits --epochs", "missing value for argument '--epochs'"),
        ("train digits --optimiser rmsprop", "invalid choice 'rmsprop' for argument '--optimiser'"),
        ("train digits --gama 3", "there is no option --gama: did you mean --gamma?"),
        ("train digits --gam 3", "there is no option --gam: did you mean --gamma?"),
        ("train digits --lr 1", "there is no option --lr: did you mean --learning-rate?"),
        ("train digits --learning_rat=1", "there is no option --learning-rat: did you mean --learning-rate?"),
        ("train digits --nothing-like-it", "there is no option --nothing-like-it; see 'maxgain train digits --help'."),
        ("compare digits --regulariser maxgain", "there is no option --regulariser: did you mean --regularisers?"),
        ("list maxgian", "there is no regulariser, network or recipe 'maxgian': did you mean 'maxgain'?"),
        ("train digits --augment False", "unrecognized options: False; see 'maxgain train digits --help'."),
        ("train cifar10 --data /nowhere", "cifar10 is not in /nowhere, which has no folder cifar-10-batches-bin"),
        ("gains", "missing from maxgain gains: "),
        ("gains /no/where", "there is no folder /no/where: name the one that 'maxgain train' wrote its run into."),
        ("data", "expected one of {list, fetch, check, build-sins10}"),
        ("data check cifar", "there is no data set 'cifar'"),
        ("data check cifar10 --data /nowhere", "cifar10 is not in /nowhere"),
    ],
)
def test_promise_15_what_is_wrong_is_said_in_one_sentence(command, said, capsys, monkeypatch) -> None:
    def step(_: object) -> None:
        raise AssertionError("it trained all the same")

    monkeypatch.setattr(runs.Training, "step", step)
    assert cli.main(command.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"maxgain: {said}")
    assert told.count("\n") == 1
    assert told.endswith((".\n", "?\n"))
    assert not list(Path().iterdir()), "something was left behind"


def test_a_mistyped_number_in_a_grid_gets_a_hint(capsys) -> None:
    assert cli.main(["tune", "digits", "--regulariser", "maxgain", "--grid", "gamm=1:2:1"]) == 2
    assert capsys.readouterr().err == "maxgain: there is no 'gamm' to choose in maxgain: did you mean 'gamma'?\n"


@pytest.mark.parametrize("command", ["trian", "train digits --gamma -1", "train digits --lr 3", "gains /nowhere"])
def test_machines_are_told_what_is_wrong_in_json(command, capsys) -> None:
    assert cli.main([*command.split(), "--json"]) == 2
    shown = capsys.readouterr()
    answer = strictly(shown.out)
    assert answer["exit_code"] == 2
    assert shown.err == f"maxgain: {answer['error']}\n"


@pytest.mark.parametrize("words", [["--out=~/runs/one"], ["--out", "~/runs/one"]], ids=" ".join)
def test_a_tilde_is_the_home_folder_though_the_shell_left_it(words, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.main(["train", "digits", "--network", "mlp", "--fold", "0", "--epochs", "1", *words]) == 0
    assert (tmp_path / "home" / "runs" / "one" / "result.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_was_removed_below_the_shell_is_named_as_that(tmp_path) -> None:
    code = "import os, sys; from maxgain.study.__main__ import main; os.rmdir(os.getcwd()); sys.exit(main())"
    (tmp_path / "removed").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, "list"], cwd=tmp_path / "removed", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "maxgain: the folder that this shell is in was removed: change to another, and try again.\n"


@pytest.mark.parametrize(("missing", "command"), [("tyro", "--help"), ("optuna", "tune digits --help")])
def test_what_is_not_installed_is_named_in_one_sentence(missing, command) -> None:
    code = f"import sys; sys.modules['{missing}'] = None; from maxgain.study.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"maxgain: the command line needs {missing}: pip install 'maxgain[study]'.\n"


def test_the_size_of_images_in_a_folder_can_be_chosen_and_is_kept(tmp_path) -> None:
    for number in range(20):
        folder = tmp_path / "images" / ("dark" if number % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (5 if number % 2 else 200,) * 3).save(folder / f"{number}.png")
    command = "train folder --network mlp --regulariser none --epochs 1 --batch-size 4 --image-size 12 --out run"
    assert cli.main([*command.split(), "--data", str(tmp_path / "images")]) == 0
    assert load_file("run/model.safetensors")["classifier.fc1.weight"].shape[1] == 3 * 12 * 12
    assert cli.main(["gains", "run", "--data", str(tmp_path / "images")]) == 0


def cifar10(folder: Path) -> Path:
    """CIFAR-10's files in form and size, though every picture is black and shows an aeroplane."""
    files = folder / "cifar-10-batches-bin"
    files.mkdir(parents=True)
    for name in (*(f"data_batch_{batch}.bin" for batch in range(1, 6)), "test_batch.bin"):
        with (files / name).open("wb") as file:
            file.truncate(10_000 * 3073)
    return files


def test_a_truncated_data_file_is_named(capsys) -> None:
    files = cifar10(Path("data"))
    assert cli.main(["data", "check", "cifar10", "--data", "data"]) == 0
    os.truncate(files / "data_batch_3.bin", 10_000 * 3073 - 1)
    capsys.readouterr()
    for command in (["data", "check", "cifar10"], ["train", "cifar10", "--out", "run"]):
        assert cli.main([*command, "--data", "data"]) == 2
        told = capsys.readouterr().err
        assert "data_batch_3.bin has 30,729,999 bytes where 30,730,000 are expected" in told
        assert told.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize("flags", [[], ["--tensorboard"]], ids=["", "tensorboard"])
def test_a_folder_that_cannot_be_written_is_known_of_at_once(flags, capsys, monkeypatch) -> None:
    monkeypatch.setattr(runs.Training, "step", None)
    Path("file").write_text("something of value")
    assert cli.main(["train", "digits", "--out", "file/run", *flags]) == 2
    told = capsys.readouterr().err
    assert told == "maxgain: cannot write in file/run: Not a directory.\n"
    assert Path("file").read_text() == "something of value"


@pytest.mark.parametrize("flags", [[], ["--tensorboard"], ["--resume", "--seed", "1"]], ids=" ".join)
def test_promise_21_a_folder_that_holds_a_run_is_left_alone(trained, flags, capsys) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert cli.main(["train", "digits", *QUICK, "--regulariser", "maxgain+dropout", "--out", str(trained), *flags]) == 2
    told = capsys.readouterr().err
    assert ("there seed is 0, here 1" if "--resume" in flags else "holds a run already: go on with --resume") in told
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


@pytest.mark.parametrize("regulariser", ["none", "maxgain"])
def test_a_run_that_diverges_is_one_sentence_and_at_most_one_warning(regulariser, capsys) -> None:
    command = ["train", "digits", *QUICK, "--regulariser", regulariser, "--learning-rate", "1e30", "--out", "run"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(command) == 2
    *warned, told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"maxgain: in epoch 1 .*; the gain of layer '.*' .*; try a lower --learning-rate .*\.", told)
    assert len(warned) == (regulariser == "maxgain")
    assert all(line.startswith("maxgain: warning: ") and "not finite" in line for line in warned)


def test_promise_15_an_error_of_the_system_is_a_sentence_too(monkeypatch, capsys) -> None:
    def denied(*_: object, **how: object) -> None:
        raise PermissionError(13, "Permission denied", "/root/run")

    def full(*_: object, **how: object) -> None:
        raise torch.OutOfMemoryError

    for failing, said in ((denied, "Permission denied: /root/run"), (full, "there is not enough memory: try")):
        monkeypatch.setattr(train_command, "perform", failing)
        assert cli.main(["train", "digits"]) == 2
        assert capsys.readouterr().err.startswith(f"maxgain: {said}")


def test_a_bug_is_not_hidden(monkeypatch) -> None:
    def broken(*_: object, **how: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(train_command, "perform", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "digits"])


# What is shown.


def test_a_run_shows_a_table_and_nothing_else_to_a_pipe(capfd) -> None:
    assert cli.main(["train", "digits", *QUICK, "--regulariser", "maxgain", "--gamma", "1.5"]) == 0
    shown, told = capfd.readouterr()
    assert not told
    assert "\x1b" not in shown
    assert shown.startswith("digits: mlp, maxgain=1.5, 2 epochs → runs/digits-maxgain=1.5-fold0-seed0\n")
    result = strictly(Path("runs/digits-maxgain=1.5-fold0-seed0/result.json").read_text())
    for part in ("train", "validation", "test"):
        row = next(line for line in shown.splitlines() if line.startswith(f"{part} "))
        assert f"{result[f'{part}_accuracy']:.2%}" in row
        assert f"{result[f'{part}_loss']:.4f}" in row
    assert f"{max(result['max_gain']['test'].values()):.3f}" in row


class Terminal(io.StringIO):
    """Takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("flags", [[], ["--train-on", "train+validation"]], ids=["", "nothing held out"])
def test_a_progress_bar_tells_what_matters_within_80_columns(monkeypatch, flags) -> None:
    terminal = Terminal()
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "", "TTY_COMPATIBLE": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["train", "digits", *QUICK, "--epochs", "30", "--regulariser", "maxgain+batchnorm", *flags]) == 0
    frames = [line for line in ESCAPE.sub("", terminal.getvalue()).replace("\r", "\n").splitlines() if "epoch" in line]
    held_out = "" if flags else r", held out [\d.]+%"
    status = rf"loss \d\.\d+, train [\d.]+%{held_out}, gain [\d.]+"
    # Which frames are drawn depends on how fast the run is, and how much of the status fits depends on its numbers.
    assert any(re.search(rf"^epoch [━╸╺ ]+ +\d+/30 {status}", frame) for frame in frames), frames
    assert any(re.search(r"^epoch [━╸╺ ]+ +\d+/30 .*(\d:\d\d|–:––) left", frame) for frame in frames), frames
    assert max(map(len, frames)) <= 80
    assert not any("…" in frame for frame in frames)


def test_the_first_epoch_tells_its_loss_so_far_where_that_is_free() -> None:
    recipe, cpu = replace(RECIPES["digits"], network="mlp", fold=0, epochs=4), torch.device("cpu")
    training = runs.Training(recipe, datasets.load("digits", fold=0), cpu)
    bar = Progress(disable=True)
    watcher = train_command.progress_watcher(bar, recipe)
    watcher.started(training)
    training.begin_epoch()
    for _ in range(3):
        training.step()
        watcher.stepped(training)
    (task,) = bar.tasks
    assert task.fields["status"] == f"so far loss {training.loss / 3:.3f}, train {training.hits / 48:.1%}"
    assert (task.completed, task.total) == (3 / training.steps_per_epoch, 4)
    training.epoch = 2  # resumed
    watcher.started(training)
    assert task.completed == 2 + 3 / training.steps_per_epoch


def test_output_for_machines_is_json_and_nothing_else(trained, capfd) -> None:
    command = ["train", "digits", *QUICK, "--regulariser", "maxgain+dropout", "--out", str(trained), "--resume"]
    assert cli.main([*command, "--json"]) == 0
    shown, told = capfd.readouterr()
    assert not told
    assert strictly(shown) == strictly((trained / "result.json").read_text())
    assert cli.main(["train", "digits", *QUICK, "--regulariser", "maxgain=inf", "--p", "inf", "--json"]) == 0
    result = strictly(capfd.readouterr().out)
    assert (result["gamma"], result["p"], result["config"]["p"]) == ("inf", "inf", "inf")


def test_brackets_and_colons_in_a_path_are_no_markup(capsys) -> None:
    assert cli.main(["train", "digits", *QUICK, "--out", "[bold]:smile:"]) == 0
    assert "→ [bold]:smile:\n" in capsys.readouterr().out
    assert Path("[bold]:smile:/result.json").exists()


def test_resuming_says_where_it_goes_on(capsys) -> None:
    command = ["train", "digits", *QUICK, "--out", "run", "--resume"]
    assert cli.main(command) == 0
    assert "there is no checkpoint yet: starting from the beginning" in capsys.readouterr().out
    assert not Path("run", CHECKPOINT).exists()


@pytest.mark.parametrize("other", [["--out", "other"], ["--out=other"]], ids=" ".join)
def test_a_run_is_not_resumed_in_two_folders(other, capsys) -> None:
    assert cli.main(["train", "digits", *QUICK, "--resume", "run", *other]) == 2
    assert "'--resume run' says which folder to go on in: leave out --out." in capsys.readouterr().err


def test_what_a_terminal_cannot_show_is_no_reason_to_stop() -> None:
    command = [sys.executable, "-m", "maxgain.study.cli.app", "data", "list"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "8x8" in done.stdout


# The other commands.


def test_gains_draws_and_writes_what_the_run_did(trained, capsys) -> None:
    assert cli.main(["gains", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert "Gain by layer on the test set, p = 2" in shown
    assert "classifier.fc1" in shown
    assert (trained / "gains.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    svg = ElementTree.parse(trained / "gains.svg")
    texts = ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"digits, maxgain=2+dropout=1", "train set", "test set", "classifier.fc3"} <= set(texts)

    content = strictly((trained / "gains.json").read_text())
    assert content["bound"] == 2.0
    dataset = datasets.load("digits", fold=0)
    model = run_files.open_run(Place(trained, device="cpu")).model
    for part in ("train", "test"):
        split = getattr(dataset, part)
        report = measure_gains(model, evaluate.batches(split.images))
        for name, row in content[part]["layers"].items():
            assert row["instances"] == len(split)
            assert row["max"] == pytest.approx(float(report.gains[name].max()), rel=1e-6)
            assert row["min"] <= row["lower_quartile"] <= row["median"] <= row["upper_quartile"] <= row["max"]
    capsys.readouterr()
    assert cli.main(["gains", str(trained), "--json"]) == 0
    assert strictly(capsys.readouterr().out) == content


@pytest.mark.parametrize("name", ["gains.json", "gains.svg", "inspect.json", "inspect.png"])
def test_promise_21_a_file_of_somebody_elses_in_a_runs_folder_is_not_replaced(name, capsys) -> None:
    assert cli.main(["train", "digits", *QUICK, "--out", "run"]) == 0
    Path("run", name).write_text("mine")
    assert cli.main([name.partition(".")[0], "run"]) == 2
    assert f"cannot write run/{name}: it exists and maxgain did not write it" in capsys.readouterr().err
    assert Path("run", name).read_text() == "mine"


def test_gains_looks_at_all_that_a_final_run_was_trained_on(capsys) -> None:
    assert cli.main(["train", "digits", *QUICK, "--train-on", "train+validation", "--out", "run"]) == 0
    assert cli.main(["gains", "run"]) == 0
    content = strictly(Path("run/gains.json").read_text())
    result = strictly(Path("run/result.json").read_text())
    assert content["bound"] is None
    assert {row["instances"] for row in content["train"]["layers"].values()} == {108 + 36}
    largest = {name: row["max"] for name, row in content["train"]["layers"].items()}
    assert largest == pytest.approx(result["max_gain"]["train"])


def test_data_sets_are_listed_and_checked(capsys) -> None:
    assert cli.main(["data", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in datasets.DATASETS)
    assert cli.main(["data", "list", "--json"]) == 0
    rows = {row["name"]: row for row in strictly(capsys.readouterr().out)}
    assert set(rows) == set(datasets.DATASETS)
    assert (rows["digits"]["present"], rows["cifar10"]["present"]) == (True, False)
    assert cli.main(["data", "check", "digits"]) == 0
    assert capsys.readouterr().out.startswith("digits is whole\n")
    assert cli.main(["data", "check", "digits", "--json"]) == 0
    assert strictly(capsys.readouterr().out) == {"name": "digits", "problems": [], "note": ""}


# TensorBoard.


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_epoch_once_even_if_the_run_was_killed(monkeypatch) -> None:
    command = ["train", "digits", *QUICK, "--epochs", "4", "--out", "run", "--tensorboard"]
    command += ["--checkpoint-seconds", "1e9"]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs.checkpoint, "save", killed)  # three epochs were shown to TensorBoard, and none saved
        assert cli.main(command) == 130
    assert cli.main([*command, "--resume"]) == 0
    lines = [strictly(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    written = scalars(Path("run/tensorboard"))
    wanted = {f"{what}/{part}": f"{part}_{what}" for part in ("train", "validation") for what in ("loss", "accuracy")}
    for tag, key in wanted.items():
        assert written[tag] == [(line["epoch"], pytest.approx(line[key])) for line in lines]
    for layer in lines[0]["max_gain"]:
        assert written[f"max_gain/{layer}"] == [(n["epoch"], pytest.approx(n["max_gain"][layer])) for n in lines]
    assert len(written) == 4 + len(lines[0]["max_gain"])


# True processes.


@pytest.mark.parametrize("command", ["train digits --gamma -1", "--version"])
def test_the_command_is_a_process_with_an_exit_code(command) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "maxgain.study.cli.app", *command.split()], capture_output=True, text=True, check=False
    )
    expected = (0, f"maxgain {maxgain.__version__}\n", "")
    if command != "--version":
        expected = (2, "", "maxgain: gamma must be positive, not -1.0.\n")
    assert (done.returncode, done.stdout, done.stderr) == expected
