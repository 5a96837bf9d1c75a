"""The command line: what it prints, what it refuses, and what it survives."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import maxgain as maxgain_package
from maxgain.study import _files
from maxgain.study.cli.app import COMMANDS, main
from maxgain.study.result import load

QUICK = ["--epochs", "2", "--network", "mlp", "--device", "cpu"]


@pytest.fixture
def maxgain(tmp_path, monkeypatch, capsys):
    """Run a command in a folder of its own; returns its exit code, output and complaints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    before = signal.getsignal(signal.SIGTERM)

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        return code, said.out, said.err

    yield run
    signal.signal(signal.SIGTERM, before)


def test_a_first_session(maxgain, tmp_path) -> None:
    code, out, _ = maxgain("train", "digits", "--regulariser", "maxgain=2", *QUICK)
    assert code == 0
    assert "next: maxgain inspect runs/digits-maxgain=2-seed0" in out
    code, out, _ = maxgain("inspect", "runs/digits-maxgain=2-seed0")
    assert (code, "classifier.fc1" in out) == (0, True)
    assert (tmp_path / "runs/digits-maxgain=2-seed0/gains.png").exists()
    code, out, _ = maxgain("tune", "digits", "--grid", "maxgain=0.1,2", "--jobs", "1", "--data", ".", *QUICK)
    assert (code, "chosen: maxgain=2" in out) == (0, True)
    assert "next: maxgain train digits --regulariser maxgain=2 --network mlp --epochs 2 --data ." in out
    code, out, _ = maxgain("compare", "digits", "--rows", "none", "maxgain=2", "--folds", "3", "--jobs", "1", *QUICK)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "maxgain=2" in out
    assert "difference" in out
    assert {result.recipe.train_on for result in load("runs/compare-digits")} == {"train+validation"}
    code, out, _ = maxgain("report", "runs", "--out", "page.html")
    assert (code, (tmp_path / "page.html").exists()) == (0, True)


def test_the_same_command_continues(maxgain) -> None:
    first = maxgain("train", "digits", "--out", "here", *QUICK)
    stamp = Path("here/result.json").stat().st_mtime_ns
    assert maxgain("train", "digits", "--out", "here", *QUICK)[:2] == first[:2]
    assert Path("here/result.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_names_the_options(maxgain, name) -> None:
    code, out, _ = maxgain(name, "--help")
    assert (code, "usage: maxgain" in out) == (0, True)


def test_help_has_the_recipes_own_defaults(maxgain) -> None:
    for recipe, epochs in (("digits", 60), ("cifar10", 140)):
        out = maxgain("train", recipe, "--help")[1]
        assert re.search(rf"--epochs INT .*?\(default: {epochs}\)", re.sub(r"[│\s]+", " ", out))
        assert "--name" not in out
        assert "--gamma" not in out


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("trian", "did you mean 'train'?"),
        ("train", "needs a recipe first"),
        ("train digitz", "did you mean 'digits'?"),
        ("train digits --regulariser maxgian", "did you mean 'maxgain'?"),
        ("train digits --regulariser maxgain=-1", "--regulariser"),
        ("train digits --epochs 0", "--epochs must be at least 1"),
        ("train digits --learning-rate 0", "--learning-rate must be positive"),
        ("train digits --device gpu", "--device"),
        ("train folder --data nowhere", "nowhere"),
        ("tune digits --regulariser none", "leaves no number open to tune (--regulariser)"),
        ("tune digits --grid maxgain=x", "is no grid"),
        ("tune digits --early --epochs 3", "--epochs"),
        ("tune digits --early --grid maxgain=2", "--grid"),
        ("tune digits --early --by tpe", "--early and --by"),
        ("tune digits --early --budget 3", "--budget"),
        ("compare digits --rows none maxgain=2 --folds 3 --tuned early", "--rows"),
        ("tune digits --budget 0", "--budget must be at least 1"),
        ("compare digits --folds 3", "--rows"),
        ("compare digits --rows none maxgain", "--folds"),
        ("compare digits --rows none maxgain --folds 11", "--folds"),
        ("compare digits --rows none maxgain --folds 3 --rope 0", "--rope must be between"),
        ("compare digits --rows none maxgain --folds 3 --jobs 0", "--jobs must be at least 1"),
        ("compare digits --rows none maxgain --folds 3 --shard 3/3", "--shard"),
        ("report nowhere", "nowhere"),
        ("inspect nowhere", "nowhere"),
        ("list maxgian", "did you mean 'maxgain'?"),
        ("data check", "needs the name"),
        ("data fetch digitz", "did you mean 'digits'?"),
    ],
)
def test_promise_15_one_clear_sentence(maxgain, tmp_path, command, sentence) -> None:
    code, _, complaint = maxgain(*command.split())
    assert (code, sentence in complaint) == (2, True), complaint
    assert complaint.startswith("maxgain: ")
    assert len(complaint.strip().splitlines()) == 1
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("command", ["train digits --epoch 3", "train digits --epochs many", "list --nothing"])
def test_promise_15_unknown_options(maxgain, command) -> None:
    code, _, complaint = maxgain(*command.split())
    assert (code, bool(complaint.strip())) == (2, True)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--version", ["maxgain "]),
        ("--help", ["usage", *COMMANDS]),
        ("list", ["digits", "maxgain", "vgg19"]),
        ("list maxgain", ["gamma", "ECML", "values to try"]),
        ("list cifar10", ["vgg19", "epochs: 140"]),
        ("list wrn16_4", ["residual"]),
        ("data", ["cifar10", "digits    here"]),
        ("data check digits", ["complete"]),
    ],
)
def test_what_is_there(maxgain, words, parts) -> None:
    code, out, _ = maxgain(*words.split())
    assert code == 0
    assert [part for part in parts if part not in out] == []


def test_a_comparison_that_the_disk_ended_is_no_success(maxgain, monkeypatch) -> None:
    write = _files.write

    def full(path: Path, content: bytes) -> None:
        if path.name == "model.safetensors" and "maxgain" in str(path):
            raise OSError(28, "No space left on device")
        write(path, content)

    words = ["compare", "digits", "--rows", "none", "maxgain=2", "--folds", "2", "--jobs", "1", "--out", "here", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(_files, "write", full)
        code, out, complaint = maxgain(*words)
    assert (code, "0 of 2 runs" in out or "2 of 2" in out, "2 runs could not be finished" in complaint) == (
        2,
        True,
        True,
    )
    assert maxgain(*words)[0] == 0


# Stopped and killed


def start(*words: str, folder: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(maxgain_package.__file__).parents[1])}
    command = [sys.executable, "-m", "maxgain", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(*words: str, folder: Path) -> int:
    process = start(*words, folder=folder)
    process.communicate(timeout=240)
    return process.returncode


def wait_for(pattern: str, folder: Path, count: int = 1) -> None:
    """Wait until the folder holds so many files of that pattern."""
    patience = time.monotonic() + 120
    while len(list(folder.rglob(pattern))) < count:
        assert time.monotonic() < patience
        time.sleep(0.05)


LONG = ["--network", "mlp", "--epochs", "12", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_promise_15_train_saves_when_asked_to_stop(tmp_path, number) -> None:
    words = ["train", "digits", "--out", "run", *LONG]
    process = start(*words, folder=tmp_path)
    wait_for("checkpoint*", tmp_path)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=60)
    assert (process.returncode, f"to continue: maxgain {' '.join(words)}" in complaint) == (130, True)
    assert finish(*words, folder=tmp_path) == 0
    assert finish("train", "digits", "--out", "whole", *LONG, folder=tmp_path) == 0
    assert len({result.weights_sha256 for result in load(tmp_path)}) == 1


STAGES = {
    "train": (["train", "digits", *LONG], "checkpoint*"),
    "tune": (["tune", "digits", "--grid", "maxgain=1,2", "--jobs", "2", *LONG], "tuning/*/checkpoint*"),
    "compare": (
        ["compare", "digits", "--rows", "none", "maxgain", "--seeds", "2", "--jobs", "2", *LONG], "runs/*/checkpoint*",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_promise_14_killed_and_resumed(tmp_path, stage) -> None:
    words, begun = STAGES[stage]
    process = start(*words, "--out", "killed", folder=tmp_path)
    wait_for(begun, tmp_path)
    process.kill()
    process.communicate()  # which waits for its workers to notice and end
    for out in ("killed", "whole"):
        assert finish(*words, "--out", out, folder=tmp_path) == 0
    killed, whole = ({r.key: r.weights_sha256 for r in load(tmp_path / out)} for out in ("killed", "whole"))
    assert killed == whole
