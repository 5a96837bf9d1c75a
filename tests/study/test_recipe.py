"""Recipes: what they refuse, what their key depends on, how learning rates fall."""

import math
from dataclasses import MISSING, fields, replace

import pytest

from maxgain.errors import MaxGainError, RecipeError
from maxgain.study import _files
from maxgain.study.data import DATASETS
from maxgain.study.networks import NETWORKS
from maxgain.study.recipe import RECIPES, Recipe, run_key

DIGITS = RECIPES["digits"]


def test_rows_name_what_exists():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert recipe.dataset in DATASETS
        assert recipe.network in NETWORKS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("epochs", 0),
        ("batch_size", 0),
        ("decay", -1),
        ("milestones", (3, -1)),
        ("weight_decay", -1e-3),
        ("cutout", -1),
        ("label_smoothing", 1),
        ("label_noise", -0.1),
        ("p", 0.5),
        ("p", math.nan),
        ("seed", -1),
        ("seed", 2**32),
        ("optimiser", "adamw"),
        ("schedule", "cosin"),
        ("precision", "float16"),
        ("train_on", "test"),
        ("cross_validation", 2),
        ("regulariser", "maxgian"),
        ("regulariser", "maxgain=-1"),
    ],
)
def test_refusals_name_the_field(name, value):
    with pytest.raises(MaxGainError) as caught:
        replace(DIGITS, **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"cross_validation": 5}, "fold"), ({"regulariser": "batchnorm", "batch_size": 1}, "batch_size")],
)
def test_refused_combinations(changes, field):
    with pytest.raises(RecipeError) as caught:
        replace(DIGITS, **changes)
    assert caught.value.field == field


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'cifar10'"):
        RECIPES["cifar1O"]


# --- The key


OTHER = {
    "dataset": "cifar10", "network": "mlp", "optimiser": "sgd", "learning_rate": 0.1, "epochs": 3, "batch_size": 8,
    "schedule": "cosine", "milestones": (2,), "decay": 0.5, "weight_decay": 0.1, "augment": True, "cutout": 2,
    "label_smoothing": 0.1, "label_noise": 0.1, "train_on": "train+validation", "regulariser": "maxgain",
    "include": ("classifier.*",), "p": math.inf, "seed": 1, "fold": 1, "cross_validation": 5, "image_size": 8,
    "precision": "float32",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe) if field.name != "name"])
def test_every_field_changes_the_key(name):
    recipe = replace(DIGITS, fold=0, regulariser="none" if name == "regulariser" else "maxgain=3")
    assert replace(recipe, **{name: OTHER[name]}).key != recipe.key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "mine"}, {}),
        ({"regulariser": "dropout+maxgain"}, {"regulariser": "maxgain=2.0+dropout=1"}),
        ({"learning_rate": 1}, {"learning_rate": 1.0}),
        ({"include": ("a",)}, {}),  # which maxgain alone reads
        ({"milestones": ()}, {}),
    ],
)
def test_what_changes_no_key(one, other):
    assert replace(DIGITS, **one).key == replace(DIGITS, **other).key


def test_p_is_in_the_key_of_every_run():
    for regulariser in ("none", "maxgain"):
        keys = {replace(DIGITS, regulariser=regulariser, p=p).key for p in (1, 2, math.inf)}
        assert len(keys) == 3


def test_keys_stay():
    """Results are found by their keys: a new optional field must not change them."""
    assert DIGITS.key == "95ea380b4a8dd715"
    assert run_key(DIGITS, "data") == run_key(replace(DIGITS, name="x"), "data") != run_key(DIGITS, "other data")


def test_title():
    assert replace(DIGITS, regulariser="maxgain", fold=3, seed=1).title == "digits-maxgain=2-fold3-seed1"


# --- JSON


@pytest.mark.parametrize("recipe", [*RECIPES.values(), replace(DIGITS, fold=0, p=math.inf, include=("a.*",))])
def test_json_and_back(recipe):
    assert _files.decode(_files.encode(recipe), Recipe) == recipe


def test_older_and_newer_files_are_read():
    content = {field.name: getattr(DIGITS, field.name) for field in fields(Recipe) if field.default is MISSING}
    assert _files.decode(_files.encode({**content, "measure": "stale"}), Recipe) == DIGITS


# --- Schedules


def test_steps():
    recipe = replace(DIGITS, learning_rate=1.0, epochs=6, milestones=(2, 4), decay=0.5)
    assert [recipe.learning_rate_at(epoch) for epoch in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("cosine", [1, 0.904508, 0.654508, 0.345492, 0.095492, 0]), ("triangular", [0, 1, 0.75, 0.5, 0.25, 0])],
)
def test_schedules(schedule, rates):
    recipe = replace(DIGITS, learning_rate=1.0, epochs=5, schedule=schedule)
    assert [recipe.learning_rate_at(epoch) for epoch in range(6)] == pytest.approx(rates, abs=1e-6)
