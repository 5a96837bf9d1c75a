"""Tables: nothing is cut at any width, numbers line up, and names break where a person would break them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from maxgain.study.cli.terminal import Screen
from maxgain.study.tables import Column, Table, uniform

LAYERS = [f"features.conv{stage}_{number}" for stage in range(1, 6) for number in range(1, 5)] + ["classifier.fc1"]
WIDE = Table(
    "cifar10, maxgain=2: gains (p = 2) and operator norms",
    (
        Column("layer"),
        Column("train max"),
        Column("train median", spare=3),
        Column("test max", spare=1),
        Column("test median", spare=3),
        Column("‖W‖1", spare=4),
        Column("‖W‖2"),
        Column("gain / norm", spare=2),
    ),
    tuple((layer, 2.0, 1.83, 1.985, 1.1, 12.25, 7.5, 0.26) for layer in LAYERS),
)


def shown(table: Table, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table.drawn(width))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_a_table_fits_and_nothing_in_it_is_cut(width) -> None:
    lines = shown(WIDE, width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for layer in LAYERS:
        (line,) = [line for line in lines if line.startswith(f"{layer} ")]
        assert {"2", "7.5"} <= set(line.split())


def test_where_columns_have_no_room_every_row_becomes_lines() -> None:
    columns = (Column("contrast"), Column("difference"), Column("p (Holm)"), Column("verdict"))
    table = Table("contrasts", columns, (("maxgain=3 : none", "-2.78", "0.423", "inconclusive"),))
    lines = ["", "contrasts", "maxgain=3 : none", "  difference: -2.78", "  p (Holm): 0.423", "  verdict: inconclusive"]
    assert shown(table, 38) == lines
    assert "maxgain=3        -2.78   0.423  inconclusive" in shown(table, 44)


def test_columns_are_left_out_by_rank_and_named() -> None:
    narrow, left_out = WIDE.fitted(44)
    assert [column.title for column in narrow.columns] == ["layer", "train max", "test max", "‖W‖2", "gain / norm"]
    assert left_out == ["train median", "test median", "‖W‖1"]
    assert "no room for: train median, test median, ‖W‖1;" in " ".join(" ".join(shown(WIDE, 44)).split())
    assert WIDE.fitted(160) == (WIDE, [])


def test_a_name_that_is_too_long_breaks_between_its_parts() -> None:
    name = "maxgain=1.75+batchnorm+gaussiandropout=0.25"
    table = Table("", (Column("regulariser"), Column("accuracy")), ((name, "91.25 ± 0.31"),))
    lines = [line.split()[0] for line in shown(table, 40)[4:]]
    assert "".join(lines) == name
    assert all(re.search(r"[+.]$", line) for line in lines[:-1])


def test_sentences_wrap_at_words() -> None:
    sentence = "Divides the weight of every layer whose largest gain exceeds gamma by the excess."
    table = Table("", (Column("name"), Column("what it does", prose=True)), (("maxgain", sentence),))
    words = " ".join(shown(table, 40)[4:]).split()
    assert words == ["maxgain", *sentence.split()]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([2, 1.83, 1.985], ["2.000", "1.830", "1.985"]),
        ([1.25, 1.5, 2.0], ["1.25", "1.50", "2.00"]),
        ([3, 14], ["3", "14"]),
        ([0.00042, 1.5], ["0.00042", "1.50000"]),
        ([1e-12, 5.0], ["1.000e-12", "5.000e+00"]),
        ([None, 1.5, float("inf"), float("nan"), "failed"], ["–", "1.5", "∞", "–", "failed"]),
        ([0.0, 0.0], ["0", "0"]),
        ([], []),
    ],
)
def test_the_numbers_of_a_column_have_the_same_decimals(values, texts) -> None:
    assert uniform(values) == texts


@given(st.lists(st.floats(-1e300, 1e300), min_size=1))
def test_no_number_is_far_from_what_is_shown(values) -> None:
    texts = uniform(values)
    assert len({len(text.partition(".")[2].partition("e")[0]) for text in texts}) == 1
    largest = max(map(abs, values))
    for value, text in zip(values, texts, strict=True):
        assert float(text) == pytest.approx(value, abs=1e-3 * largest, rel=1e-3)


def test_print_and_notebooks_show_the_table() -> None:
    table = Table("A < B", (Column("name"), Column("gain")), (("<b>", 2.5), ("c", 3.25)), bold=frozenset([1]))
    assert str(table).splitlines()[-2:] == ["<b>   2.50", "c     3.25"]
    html = table._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>3.25</b>" in html
    assert "<caption>A &lt; B</caption>" in html


def test_where_there_is_no_terminal_nothing_is_left_out(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = [Column("row"), *(Column(f"number-{place:03}-of-many", spare=1) for place in range(20))]
    table = Table("a wide one", tuple(columns), (("one", *map(float, range(20))),))
    assert table.needs() > 160
    Screen().show(table)
    for text in (str(table), capsys.readouterr().out):
        assert "no room" not in text
        assert all(column.title in text for column in columns)
