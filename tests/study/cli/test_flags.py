"""Flags and their help: every option is described once, every example works, and a wrong flag is answered kindly."""

import importlib
import os
import re
import shlex
from dataclasses import dataclass
from typing import Literal

import pytest

from maxgain.errors import MaxGainError
from maxgain.study.cli import app, flags, train, tyro_box
from maxgain.study.models import NETWORKS
from maxgain.study.recipes import RECIPES

WIDTHS = (60, 100, 160)


def help_of(capsys, monkeypatch, *words, width=100):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as stopped:
        app.main([*words, "--help"])
    assert not stopped.value.code
    shown = capsys.readouterr()
    assert not shown.err
    return shown.out


def flat(text):
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("width", [1, 3, 20])
def test_help_comes_to_an_end_on_a_terminal_of_any_width(width, capsys, monkeypatch) -> None:
    shown = help_of(capsys, monkeypatch, "list", width=width)
    assert "--json" in shown
    assert os.environ["COLUMNS"] == str(width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help_that_says_everything_once(name, width, capsys, monkeypatch) -> None:
    shown = help_of(capsys, monkeypatch, name, width=width)
    assert shown.startswith(f"usage: maxgain {name}")
    assert "\x1b" not in shown
    options, examples = shown.split("\nexamples:\n")
    assert max(map(len, options.splitlines())) <= width
    assert "None" not in flat(options)
    assert "default: False" not in flat(options)
    assert not re.search(r"\(default: [^)]*\) \(default:", flat(options))
    assert f"maxgain {name}" in examples


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["train", "data", "bench"])
def test_help_in_colour_is_the_same_help(name, width, capsys, monkeypatch) -> None:
    plain = help_of(capsys, monkeypatch, name, width=width)
    monkeypatch.setattr(flags._AsIfShown, "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm")
    coloured = help_of(capsys, monkeypatch, name, width=width)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_a_flag_that_switches_off_says_so(capsys, monkeypatch) -> None:
    shown = flat(help_of(capsys, monkeypatch, "train", "cifar10"))
    assert "--no-graph switch this off: on a GPU, capture" in shown
    assert "--no-augment switch this off: flip" in shown


@pytest.mark.parametrize(
    "words",
    [
        *([], ["--network", "mlp", "--epochs", "2", "--fold", "3"], ["--milestones", "1", "2", "--p", "inf"]),
        *(["--no-augment", "--milestones"], ["--learning-rate", "1e-07", "--strength", "rate"]),
    ],
)
def test_a_recipe_can_be_typed_out(words) -> None:
    recipe = flags.read(train.Options, words, prog="maxgain train", recipe=RECIPES["cifar10"]).recipe
    typed = list(flags.typed_out(recipe, RECIPES["cifar10"]))
    assert flags.read(train.Options, typed, prog="maxgain train", recipe=RECIPES["cifar10"]).recipe == recipe
    assert sorted(typed) == sorted(words)


@pytest.mark.parametrize("action", ["list", "fetch", "check", "build-sins10"])
def test_every_action_on_data_has_help(action, capsys, monkeypatch) -> None:
    assert f"usage: maxgain data {action}" in help_of(capsys, monkeypatch, "data", action)


@pytest.mark.parametrize("name", RECIPES)
def test_help_shows_a_recipes_own_defaults_and_what_there_is_to_choose(name, capsys, monkeypatch) -> None:
    shown, recipe = flat(help_of(capsys, monkeypatch, "train", name, width=160)), RECIPES[name]
    assert f"usage: maxgain train {name}" in shown
    assert f"(default: {recipe.learning_rate})" in shown
    assert f"(default: {recipe.network})" in shown
    assert f"{{{','.join(NETWORKS)}}}" in shown
    assert ("--no-augment" in shown) == recipe.augment
    assert (f"from 0 on (default: {recipe.fold})" in shown) == (recipe.fold is not None)


@pytest.mark.parametrize(("name", "refused"), [("compare", "--regulariser "), ("tune", "--train-on "), ("train", None)])
def test_no_option_is_offered_that_a_command_refuses(name, refused, capsys, monkeypatch) -> None:
    shown = flat(help_of(capsys, monkeypatch, name))
    assert refused is None or refused not in shown
    assert "--seed " in shown


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_example_in_help_can_be_typed(name) -> None:
    command = importlib.import_module(f"maxgain.study.cli.{name}")
    for example in command.EXAMPLES:
        program, typed, *words = shlex.split(example)
        assert (program, typed) == ("maxgain", name)
        if "--resume" in words:  # it finds its recipe in the run's folder, which is not here
            continue
        assert isinstance(app._parsed(name, command, words), command.Options)


def test_a_recipe_keeps_what_a_command_has_no_flag_for() -> None:
    from maxgain.study.cli import compare

    options = app._parsed("compare", compare, ["sins10", "--regularisers", "none", "--epochs", "3"])
    assert options.recipe.epochs == 3
    assert (options.recipe.fold, options.recipe.regulariser) == (0, "batchnorm")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lr", "learning-rate"), ("bs", "batch-size"), ("gam", "gamma"), ("optimizer", "optimiser"), ("xyz", None)],
)
def test_a_flag_that_does_not_exist_gets_the_one_that_was_meant(typed, meant) -> None:
    assert flags.near(typed, ["help", "gamma", "learning-rate", "batch-size", "optimiser"]) == meant


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Something to read."""

    count: int = 1
    """how many"""
    kind: Literal["a", "b"] = "a"
    """which"""
    needed: str
    """what there must be"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--needed x --count two", "--count cannot be 'two'"),
        ("--needed x --count", "missing value for argument '--count'. Expected 1 values"),
        ("--needed x --kind c", "invalid choice 'c' for argument '--kind'. Expected one of ('a', 'b')"),
        ("--needed x stray", "unrecognized options: stray"),
        ("", "missing from maxgain sample: --needed TEXT what there must be (required)"),
    ],
)
def test_the_boxes_of_this_version_of_tyro_are_read_right(words, said) -> None:
    with pytest.raises(MaxGainError) as raised:
        flags.read(Sample, words.split(), prog="maxgain sample")
    assert str(raised.value) == f"{said}; see 'maxgain sample --help'."


def test_an_empty_word_is_shown() -> None:
    with pytest.raises(MaxGainError, match="unrecognized options: ''; see"):
        flags.read(Sample, ["--needed", "x", ""], prog="maxgain sample")


def test_a_box_that_says_nothing_still_makes_a_sentence() -> None:
    assert tyro_box.sentence("") == tyro_box.sentence("╭─ Error ─╮\n╰─────────╯") == tyro_box.UNREADABLE
