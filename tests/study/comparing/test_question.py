"""What is asked: contrasts as people write them, and questions that outlive the command that asked them."""

import json

import pytest

from maxgain.errors import FileError, RecipeError
from maxgain.study.comparing.question import FILE, Planned, Question, against, contrasts, remember, remembered
from maxgain.study.files import alone_in

ROWS = ("none", "maxgain", "dropout", "maxgain+dropout", "dropout+maxgain=3", "batchnorm")


def question(**changes):
    rows = {
        name: tuple(Planned(f"{name}{fold}", name, fold, fold) for fold in range(3)) for name in ("none", "maxgain")
    }
    return Question(
        **{
            "recipe": "digits",
            "dataset": "digits",
            "over": "fold",
            "rows": rows,
            "contrasts": (("maxgain", "none"),),
            "train_on": "train+validation",
            "rope": 0.005,
            "tuning_runs": {"maxgain": 9},
        }
        | changes
    )


def test_one_baseline_is_a_contrast_with_every_other_row():
    assert against("dropout", ROWS[:3]) == (("none", "dropout"), ("maxgain", "dropout"))


def test_contrasts_are_pairs_of_rows():
    assert contrasts(["maxgain+dropout:dropout", "maxgain:none"], ROWS) == (
        ("maxgain+dropout", "dropout"),
        ("maxgain", "none"),
    )


def test_a_contrast_may_be_copied_from_the_table():
    assert contrasts(["maxgain : none"], ROWS) == (("maxgain", "none"),)


def test_matched_finds_every_x_beside_maxgain_and_x_whatever_the_order():
    assert contrasts(["matched"], ROWS) == (
        ("maxgain", "none"),
        ("maxgain+dropout", "dropout"),
        ("dropout+maxgain=3", "dropout"),
    )
    assert contrasts(["matched", "dropout:none"], (*ROWS[:2], "dropout")) == (("maxgain", "none"), ("dropout", "none"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["maxgain"], "'maxgain' is no contrast: write FIRST:SECOND"),
        (["maxgain:l2"], "needs 'l2', which is not one of none, maxgain"),
        (["none:none"], "compares a row with itself"),
        (["maxgain:none", "none:maxgain"], "maxgain:none is named twice"),
        (["matched", "maxgain:none"], "maxgain:none is named twice"),
    ],
)
def test_what_is_no_contrast_is_refused(texts, message):
    with pytest.raises(RecipeError, match=message):
        contrasts(texts, ROWS)


def test_matched_without_a_match_is_refused():
    with pytest.raises(RecipeError, match=r"finds no X beside maxgain\+X in none, dropout"):
        contrasts(["matched"], ["none", "dropout"])


def test_a_question_is_read_as_it_was_written(tmp_path):
    remember(tmp_path, question())
    assert remembered(tmp_path) == [question()]
    assert remembered(tmp_path / "nowhere") == []


def test_a_question_that_is_asked_again_becomes_the_newest(tmp_path):
    first, second = question(), question(rope=None)
    with alone_in(tmp_path, FILE):
        for asked in (first, second, first):
            remember(tmp_path, asked)
    assert remembered(tmp_path) == [second, first]


@pytest.mark.parametrize("content", ["{", "{}", '[{"recipe": 1}]', "[1]"])
def test_a_file_that_holds_no_questions_is_named(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(FileError, match=r"asked\.json cannot be used"):
        remembered(tmp_path)


def test_a_question_of_another_version_is_named(tmp_path):
    content = question().to_json() | {"rows": {"none": [{"name": "none"}]}}
    (tmp_path / FILE).write_text(json.dumps([content]))
    with pytest.raises(FileError, match=r"at \[0\]\.rows"):
        remembered(tmp_path)


def test_a_question_without_rows_is_refused(tmp_path):
    content = question().to_json() | {"rows": {}, "contrasts": []}
    (tmp_path / FILE).write_text(json.dumps([content]))
    with pytest.raises(FileError, match="it has no rows"):
        remembered(tmp_path)


def test_units_follow_from_the_runs():
    runs = tuple(Planned(str(n), "none", 10 * n + fold, fold) for n in range(3) for fold in (4, 2))
    asked = question(rows={"none": runs}, contrasts=())
    assert asked.units == (2, 4)
    assert question(over="seed").units == (0, 1, 2)
