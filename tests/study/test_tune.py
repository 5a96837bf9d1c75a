"""Tuning by grid, TPE and the early rule, with training replaced by a formula."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from maxgain.errors import RecipeError, RunError
from maxgain.study import tuning
from maxgain.study.recipe import RECIPES, Recipe
from maxgain.study.report import early_curve
from maxgain.study.result import History, Result
from maxgain.study.tuning import grid_recipes, numbers_of, open_parts, parse_grid, tune

DIGITS = RECIPES["digits"]


class Fake:
    """Trains nothing: scores follow from the numbers."""

    def __init__(self, score=lambda gamma: 1 - abs(math.log(gamma / 1.5)) / 10, loss=lambda gamma: 1 / gamma) -> None:
        self.score, self.loss = score, loss
        self.trained: list[Recipe] = []

    def __call__(self, recipes: Sequence[Recipe]) -> list[Result]:
        self.trained += recipes
        return [self.result(recipe) for recipe in recipes]

    def result(self, recipe: Recipe) -> Result:
        gamma = recipe.gamma or 1.0
        score = self.score(gamma)
        return Result(
            key=recipe.key, fingerprint="", recipe=recipe, classes=10, status="ok" if score is not None else "failed",
            validation_accuracy=score, validation_loss=score and 1 - score,
            history=History(train_loss=[9.0, self.loss(gamma)]),
        )  # fmt: skip


def recipe(regulariser: str, **changes) -> Recipe:
    return replace(DIGITS, regulariser=regulariser, **changes)


@pytest.mark.parametrize(
    ("regulariser", "grid", "budget", "expected"),
    [
        ("maxgain", {}, 3, [{"maxgain": g} for g in (1.5, 2.0, 3.0)]),
        ("maxgain", {"maxgain": (3.0, 1.0)}, None, [{"maxgain": 1.0}, {"maxgain": 3.0}]),
        ("maxgain+weightdecay", {"maxgain": (1, 2, 3), "weightdecay": (0.1, 0.2)}, 2,
         [{"maxgain": 1, "weightdecay": 0.1}, {"maxgain": 2, "weightdecay": 0.1}]),
        ("maxgain+dropout=1", {"maxgain": (1, 2)}, None, [{"maxgain": 1}, {"maxgain": 2}]),
    ],
)  # fmt: skip
def test_points(regulariser, grid, budget, expected) -> None:
    points = grid_recipes(recipe(regulariser), grid, budget)
    assert [numbers_of(point, open_parts(regulariser)) for point in points] == expected


@pytest.mark.parametrize(("score", "is_said"), [(0.1, True), (0.5, False)])
def test_a_choice_among_guesses_is_said_to_mean_nothing(score, is_said, caplog) -> None:
    tune(recipe("maxgain"), Fake(lambda gamma: score), "grid", budget=3)
    assert ("above chance" in caplog.text) == is_said


def test_all_rows_get_the_same_budget() -> None:
    for row in ("maxgain", "maxgain+dropout", "maxgain+dropout+weightdecay"):
        assert len(grid_recipes(recipe(row), {}, 8)) == 8


@pytest.mark.parametrize(
    ("text", "values"), [("maxgain=1,2.5", (1, 2.5)), ("maxgain=1:2:0.5", (1, 1.5, 2)), ("a=0.1:0.3:0.2", (0.1, 0.3))]
)  # fmt: skip
def test_grid_texts(text, values) -> None:
    assert parse_grid([text]) == {text.partition("=")[0]: values}


@pytest.mark.parametrize("text", ["", "maxgain", "maxgain=", "maxgain=1:2", "maxgain=1:2:0", "a=x", "maxgain=1,1"])
def test_no_grid(text) -> None:
    with pytest.raises(RecipeError) as refusal:
        parse_grid([text])
    assert refusal.value.field == "grid"


def test_grid_chooses_the_best_and_never_tests() -> None:
    run = Fake()
    tuned = tune(recipe("maxgain", train_on="train+validation"), run, "grid", grid={"maxgain": (1, 1.5, 2)})
    assert (tuned.best, tuned.numbers) == ("maxgain=1.5", {"maxgain": 1.5})
    assert {one.train_on for one in run.trained} == {"train"}
    assert "maxgain=1.5" in str(tuned)


def test_ties_go_to_the_smallest_number() -> None:
    assert tune(recipe("maxgain"), Fake(score=lambda gamma: 0.5), "grid").numbers == {"maxgain": 1.0}


def test_failed_runs_are_not_chosen() -> None:
    assert tune(recipe("maxgain"), Fake(score=lambda g: 0.9 if g > 3 else None), "grid").numbers == {"maxgain": 4.0}
    with pytest.raises(RunError):
        tune(recipe("maxgain"), Fake(score=lambda gamma: None), "grid")


def test_tpe_finds_the_optimum() -> None:
    run = Fake()
    tuned = tune(recipe("maxgain"), run, "tpe", budget=25)
    assert len(run.trained) == 25
    assert abs(math.log(tuned.numbers["maxgain"] / 1.5)) < 0.15


def test_tpe_proposes_the_same_again_whatever_failed() -> None:
    runs = [Fake(score=lambda gamma: None if gamma > 4 else 1 / gamma) for _ in range(2)]
    for run in runs:
        tune(recipe("maxgain"), run, "tpe", budget=5, at_once=2)
    assert len(runs[0].trained) == 5
    assert runs[0].trained == runs[1].trained


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"recipe": recipe("none")}, "regulariser"),
        ({"recipe": recipe("maxgain=2")}, "regulariser"),
        ({"budget": 0}, "budget"),
        ({"budget": 100}, "budget"),
        ({"grid": {"maxgain": (0.0, 1.0)}}, "grid"),
        ({"by": "early", "recipe": recipe("dropout")}, "regulariser"),
        ({"by": "early", "grid": {"maxgain": (2.0,)}}, "grid"),
        ({"by": "early", "grid": {"maxgain": (2.0, 1.0)}}, "grid"),
        ({"by": "early", "grid": {"maxgain": (-1.0, 1.0)}}, "grid"),
        ({"by": "early", "recipe": recipe("maxgain", epochs=3)}, "epochs"),
        ({"by": "early", "budget": 3}, "budget"),
        ({"by": "early", "recipe": recipe("maxgain+dropout"), "grid": {"dropout": (0.5, 1.0)}}, "grid"),
        ({"by": "tpe", "grid": {"maxgain": (1.0, 2.0)}}, "grid"),
    ],
)
def test_refused(given, field) -> None:
    run = Fake()
    with pytest.raises(RecipeError) as refusal:
        tune(**({"recipe": recipe("maxgain"), "run": run, "by": "grid"} | given))
    assert (refusal.value.field, run.trained) == (field, [])


# The early rule, which reads training losses.


def by_early(loss, **given) -> tuple[tuning.Tuning, Fake]:
    run = Fake(loss=loss)
    return tune(recipe("maxgain+dropout", epochs=70), run, "early", **given), run


def test_early_trains_a_seventh_and_takes_the_smallest_good_gamma() -> None:
    tuned, run = by_early(lambda gamma: 1.0 if gamma > 3 else 2.0)
    assert tuned.best == "maxgain=3.2+dropout"
    assert {one.epochs for one in run.trained} == {10}
    (axis,) = early_curve(tuned.results, 3.2).axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1.25", "1.7", "2.3", "3.2", "4.3", "5.9", "8"]


@pytest.mark.parametrize(
    ("loss", "tried", "chosen"),
    [
        (lambda gamma: 1 + gamma / 1000 if gamma > 0.8 else 2.0, 9, 0.919),
        (lambda gamma: 1.0 if gamma > 7 else 2.0, 9, 8.0),
        (lambda gamma: 1.0 if gamma > 9 else 1.5 if gamma > 7 else 2.0, 9, 10.8),
        (lambda gamma: 2.1 if gamma > 3 else 2.29, 7, 3.2),  # within 10 %, and no better than guessing
    ],
)
def test_early_widens_its_grid_once(loss, tried, chosen) -> None:
    tuned, run = by_early(loss)
    assert len(run.trained) == tried
    assert tuned.numbers["maxgain"] == pytest.approx(chosen, rel=0.01)


@pytest.mark.parametrize("loss", [lambda gamma: 1 + gamma / 1000, lambda gamma: 1.0])
def test_early_takes_the_smallest_of_its_wider_grid(loss, caplog) -> None:
    tuned, run = by_early(loss)
    assert tuned.numbers == {"maxgain": min(one.gamma for one in run.trained)}
    assert len(run.trained) == 9
    assert "end of the wider grid" in caplog.text


@pytest.mark.parametrize("loss", [lambda gamma: math.log(10), lambda gamma: None])
def test_early_refuses_runs_that_learned_nothing(loss) -> None:
    with pytest.raises(RunError):
        by_early(loss)


def test_early_says_when_the_data_are_learned_at_once(caplog) -> None:
    by_early(lambda gamma: 1.0 if gamma > 3 else 2.0)
    assert "learn the training data" not in caplog.text
    run = Fake(loss=lambda gamma: 0.001 / gamma)
    tune(
        recipe("maxgain"), lambda some: [msgspec.structs.replace(one, train_accuracy=1.0) for one in run(some)], "early"
    )
    assert "learn the training data" in caplog.text


@pytest.mark.parametrize("setting", ["label_smoothing", "label_noise"])
def test_early_says_that_labels_mislead_it(caplog, setting) -> None:
    run = Fake(loss=lambda gamma: 1.0 if gamma > 3 else 2.0)
    assert tune(recipe("maxgain", epochs=70, **{setting: 0.1}), run, "early").numbers == {"maxgain": 3.2}
    assert setting in caplog.text
