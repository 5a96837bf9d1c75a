"""What people see: words that wrap at words, what to type next, and bars that tell how far many runs are."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from maxgain.study.cli.terminal import Bars, Screen, complain, typed, wrapped
from maxgain.study.wording import counted, duration, signed

SENTENCE = "A measured gain is a lower bound of its layer's operator norm: other inputs may be amplified more."


@pytest.mark.parametrize("width", [20, 60, 200])
def test_text_wraps_at_words(width) -> None:
    lines = wrapped(f"  {SENTENCE}", width).split("\n")
    assert " ".join(lines).split() == SENTENCE.split()
    assert max(map(len, lines)) <= width
    assert all(line.startswith("  ") for line in lines)


def test_a_path_that_is_longer_than_the_line_is_left_whole() -> None:
    path = "/a/very/long/path/that-goes-on/and_on/and=on"
    assert path in wrapped(f"written: {path}", 20).split("\n")


@pytest.mark.parametrize("width", [40, 100])
def test_a_command_ends_with_its_files_and_what_to_type_next(width, tmp_path) -> None:
    screen = Screen()
    screen.console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    screen.end([tmp_path / "a.json", tmp_path / "b.json"], {typed("gains", "my run"): "draw them", "maxgain x": "go"})
    shown = screen.console.file.getvalue()
    assert f"written: a.json, b.json in {tmp_path}" in shown
    assert "next: maxgain gains 'my run'" in shown
    assert "# draw them" in shown
    assert max(len(line) for line in shown.splitlines() if "next" in line) <= width


def frame(bars: Bars) -> list[str]:
    console = bars.console
    with console.capture() as capture:
        for part in bars.get_renderables():
            console.print(part)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_every_run_under_way_has_a_line_with_its_epochs_and_no_hash(width, tmp_path) -> None:
    bars = Bars(Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True), hidden=True)
    runs = bars.many("comparing", 20, 3)
    for name, epochs in (("none, fold 3", 30), ("maxgain=2, fold 3", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("{}\n" * epochs)
        runs.began(name, tmp_path / name, 60)
    runs.began("just begun", tmp_path / "nowhere", 60)
    shown = frame(bars)
    names = ["comparing", "  none, fold 3 ", "  maxgain=2, fold 3 ", "  just begun "]
    assert all(line.startswith(name) for line, name in zip(shown, names, strict=True))
    for line, count in zip(shown, ("4/20", "30/60", "60/60", "0/60"), strict=True):
        assert f" {count} " in line
        assert "…" not in line
        assert len(line) <= width
    runs.ended("none, fold 3", failed=True)
    first, *rest = frame(bars)
    assert "runs, 1 failed" in first
    assert len(rest) == 2


def test_a_status_loses_whole_parts_where_there_is_no_room() -> None:
    bars = Bars(Console(file=io.StringIO(), width=60, color_system=None, force_terminal=True), hidden=True)
    bars.add_task("epoch", total=30, completed=3, status="loss 0.123, train 99.1%, held out 98.2%, gain 2.01")
    (line,) = frame(bars)
    assert "loss 0.123, train 99.1% " in line
    assert "held" not in line


def test_numbers_in_words() -> None:
    assert [counted(1, "run"), counted(0, "run"), counted(1797, "image")] == ["1 run", "0 runs", "1,797 images"]
    assert [signed(0.004), signed(-0.004), signed(1.25), signed(-1.25)] == ["0.00", "0.00", "+1.25", "-1.25"]
    assert [duration(s) for s in (20, 90, 5000, 20_000, 700_000)] == [
        "about 20 seconds",
        "about 2 minutes",
        "about 83 minutes",
        "about 6 hours",
        "about 8 days",
    ]


def test_bars_that_are_really_drawn_follow_the_runs_from_the_first_moment(tmp_path) -> None:
    shown = io.StringIO()
    with Bars(Console(file=shown, width=80, color_system=None, force_terminal=True)) as bars:
        runs = bars.many("comparing", 2, 0)
        (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
        runs.began("maxgain, fold 0", tmp_path, epochs=4)
        bars.refresh()
        runs.ended("maxgain, fold 0")
        bars.refresh()
    assert "2/4 epochs" in shown.getvalue()
    assert "1/2 runs" in shown.getvalue()


def test_a_folder_whose_name_begins_with_a_dash_is_typed_so_that_it_is_no_flag() -> None:
    assert typed("report", Path("-x"), "--out", Path("-x/a page")) == "maxgain report ./-x --out './-x/a page'"


def test_control_codes_in_what_files_say_do_not_reach_the_terminal(capsys) -> None:
    hostile = "note: \x1b]0;title\x07 \x1b[2J \x9b31m\r done\nnext"
    Screen().show(hostile)
    complain(hostile)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert text == r"note: \x1b]0;title\x07 \x1b[2J \x9b31m\x0d done" + "\nnext\n"
