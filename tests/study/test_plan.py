"""Plans: which runs there are, which pairs are tested, what is refused, and what JSON keeps."""

from dataclasses import replace

import pytest

from maxgain.errors import MaxGainError, RecipeError
from maxgain.study.plan import Plan, make_plan, parse_contrasts, read_plan
from maxgain.study.recipe import RECIPES

DIGITS = RECIPES["digits"]


def plan(rows=("none", "maxgain"), **given) -> Plan:
    return make_plan(DIGITS, rows, **({"seeds": 2} | given))


def test_seeds_are_paired() -> None:
    runs = [plan(seeds=3).recipes(row) for row in ("none", "maxgain=2")]
    assert [[run.seed for run in row] for row in runs] == [[0, 1, 2]] * 2
    assert [row[0].regulariser for row in runs] == ["none", "maxgain=2"]


def test_own_folds_are_used() -> None:
    runs = plan(folds=3, seeds=2, own_folds=10).recipes("none")
    assert [(run.fold, run.seed, run.cross_validation) for run in runs] == [
        (0, 0, None), (0, 1000, None), (1, 1, None), (1, 1001, None), (2, 2, None), (2, 1002, None),
    ]  # fmt: skip


def test_data_without_folds_are_cross_validated() -> None:
    runs = plan(folds=4, seeds=None).recipes("none")
    assert [(run.fold, run.cross_validation) for run in runs] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_chosen_numbers_are_filled_in() -> None:
    chosen = replace(plan(rows=("none", "maxgain+dropout=1.5")), numbers={"maxgain+dropout=1.5": {0: {"maxgain": 3.0}}})
    assert [run.gamma for run in chosen.recipes("maxgain+dropout=1.5")] == [3.0, 2.0]


@pytest.mark.parametrize(
    ("texts", "rows", "pairs"),
    [
        (["maxgain:none"], ["none", "maxgain"], [("maxgain", "none")]),
        (["matched"], ["none", "maxgain=2", "dropout", "maxgain+dropout"],
         [("maxgain=2", "none"), ("maxgain+dropout", "dropout")]),
        ([], ["none"], []),
    ],
)  # fmt: skip
def test_contrasts(texts, rows, pairs) -> None:
    assert parse_contrasts(texts, rows) == tuple(pairs)


def test_the_first_row_is_the_baseline() -> None:
    assert plan(rows=("dropout", "none", "maxgain")).contrasts == (("none", "dropout"), ("maxgain", "dropout"))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"seeds": None}, "folds"),
        ({"seeds": 0}, "seeds"),
        ({"folds": 2}, "folds"),
        ({"folds": 11, "own_folds": 10}, "folds"),
        ({"rows": ("none", "maxgain", "maxgain=2")}, "rows"),
        ({"rows": ("dropout+maxgain", "maxgain+dropout")}, "rows"),
        ({"rows": ()}, "rows"),
        ({"contrasts": ["maxgain"]}, "contrasts"),
        ({"contrasts": ["maxgain:dropout"]}, "contrasts"),
        ({"contrasts": ["maxgain:none", "none:maxgain"]}, "contrasts"),
        ({"rows": ("none", "dropout"), "contrasts": ["matched"]}, "contrasts"),
        ({"rope": 0.0}, "rope"),
        ({"budget": 3}, "budget"),
        ({"grid": {"maxgain": (1.0, 2.0)}}, "grid"),
    ],
)
def test_refused(given, field) -> None:
    with pytest.raises(RecipeError) as refusal:
        plan(**given)
    assert refusal.value.field == field


def test_a_tuned_number_is_not_the_default() -> None:
    assert plan(rows=("maxgain", "maxgain=2"), tuned="grid").rows == ("maxgain", "maxgain=2")


def test_json_keeps_everything(tmp_path) -> None:
    original = replace(
        plan(tuned="grid", budget=4, grid={"maxgain": (1.0, float("inf"))}, rope=0.5),
        recipe=replace(DIGITS, p=float("inf")),
        numbers={"maxgain": {0: {"maxgain": 3.0}, 1: {"maxgain": float("inf")}}},
    )
    original.write(tmp_path)
    assert read_plan(tmp_path) == original


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"rows": 3}'])
def test_a_damaged_plan_is_refused(tmp_path, content) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(MaxGainError, match=r"plan\.json"):
        read_plan(tmp_path)
