"""The paper's experiments are what its text says, and what makes no sense is refused in one sentence."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
from torch import nn

from maxgain import MaxGain
from maxgain.errors import MaxGainError, RecipeError, RegulariserError
from maxgain.study.data.table import DATASETS
from maxgain.study.models import NETWORKS
from maxgain.study.recipes import RECIPES, Recipe, from_json, key, recipe_named, run_name, to_json
from maxgain.study.regularisers import REGULARISERS, filled, noise_for, parse, settled, spelt, with_gamma

DIGITS = RECIPES["digits"]


# Learning rates by epoch, counted from 0, at every change and right before it.
SCHEDULES = {
    "cifar10": (140, {0: 1e-4, 99: 1e-4, 100: 1e-5, 119: 1e-5, 120: 1e-6, 139: 1e-6}),
    "cifar100": (200, {0: 0.1, 59: 0.1, 60: 0.02, 119: 0.02, 120: 0.004, 159: 0.004, 160: 0.0008, 199: 0.0008}),
    "svhn": (17, {0: 1e-4, 14: 1e-4, 15: 1e-5, 16: 1e-5}),
    "sins10": (90, {0: 0.1, 59: 0.1, 60: 0.02, 79: 0.02, 80: 0.004, 89: 0.004}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_the_papers(name: str) -> None:
    epochs, rates = SCHEDULES[name]
    assert RECIPES[name].epochs == epochs
    assert {epoch: RECIPES[name].learning_rate_at(epoch) for epoch in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "network", "optimiser", "batch", "decay", "augment"),
    [
        ("cifar10", "vgg19", "adam", 100, 0.0, True),
        ("cifar100", "wrn16_4", "sgd", 50, 2e-4, True),
        ("svhn", "svhn_vgg", "adam", 100, 0.0, False),
        ("sins10", "wrn16_4", "sgd", 50, 2e-4, False),
    ],
)
def test_settings_are_the_papers(name, network, optimiser, batch, decay, augment) -> None:
    recipe = RECIPES[name]
    assert (recipe.network, recipe.optimiser, recipe.batch_size) == (network, optimiser, batch)
    assert (recipe.weight_decay, recipe.augment, recipe.train_on) == (decay, augment, "train")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_what_exists_and_survives_json(name: str) -> None:
    recipe = recipe_named(name)
    assert recipe.name == name
    assert recipe.dataset in DATASETS
    assert recipe.network in NETWORKS
    assert from_json(json.loads(json.dumps(to_json(recipe), allow_nan=False))) == recipe


def test_infinity_survives_strict_json() -> None:
    recipe = replace(DIGITS, regulariser="maxgain=inf", p=math.inf, milestones=(3, 5))
    content = json.loads(json.dumps(to_json(recipe), allow_nan=False))
    assert (content["regulariser"], content["p"], content["milestones"]) == ("maxgain=inf", "inf", [3, 5])
    assert from_json(content) == recipe


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"learning_rate": math.nan}, "learning-rate must be positive, not nan."),
        ({"learning_rate": math.inf}, "learning-rate must be finite, not inf."),
        ({"decay": math.inf}, "decay must be finite, not inf."),
        ({"weight_decay": math.inf}, "weight-decay must be finite, not inf."),
        ({"weight_decay": -0.1}, "weight-decay must not be negative, but is -0.1."),
        ({"weight_decay": math.nan}, "weight-decay must not be negative, but is nan."),
        ({"epochs": 0}, "epochs must be positive, not 0."),
        ({"batch_size": -5}, "batch-size must be positive, not -5."),
        ({"p": 0.5}, "p must be a number from 1 to inf, not 0.5."),
        ({"p": math.nan}, "p must be a number from 1 to inf, not nan."),
        ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, not -1."),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 4294967295, not 4294967296."),
        ({"optimiser": "adm"}, "there is no optimiser 'adm': did you mean 'adam'?"),
        ({"train_on": "test"}, "there is no train-on 'test': there are train, train+validation."),
        ({"measure": "old"}, "there is no measure 'old': there are stale, fresh."),
        ({"batch_size": 1, "regulariser": "batchnorm"}, "batchnorm standardises over the batch"),
        ({"regulariser": "maxgian"}, "there is no regulariser 'maxgian': did you mean 'maxgain'?"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changed, said) -> None:
    with pytest.raises(MaxGainError) as caught:
        replace(DIGITS, **changed)
    assert str(caught.value).startswith(said)


def test_a_recipe_from_before_an_optional_field_is_the_same_recipe() -> None:
    content = {key: value for key, value in to_json(DIGITS).items() if value is not None}
    assert "image_size" not in content
    assert from_json(content) == DIGITS


def test_recipes_from_other_versions_or_hands_are_refused() -> None:
    content = to_json(DIGITS)
    with pytest.raises(RecipeError, match="another version of maxgain: it differs in 'momentum'"):
        from_json(content | {"momentum": 0.9})
    with pytest.raises(RecipeError, match="differs in 'seed'"):
        from_json({key: value for key, value in content.items() if key != "seed"})
    with pytest.raises(RecipeError, match="this is no recipe"):
        from_json(content | {"epochs": "ten"})
    with pytest.raises(RecipeError, match="this is no recipe"):
        from_json(content | {"milestones": 7})
    with pytest.raises(RecipeError, match="there is no recipe 'digit': did you mean 'digits'"):
        recipe_named("digit")


def written(text: str) -> list[tuple[str, float | None]]:
    return [(choice.row.name, choice.value) for choice in parse(text)]


def test_regularisers_are_written_as_the_papers_rows() -> None:
    assert written("none") == [("none", None)]
    assert written("maxgain+batchnorm+dropout") == [("maxgain", None), ("batchnorm", None), ("dropout", None)]
    assert written("maxgain = 1.5 + dropout=0.3") == [("maxgain", 1.5), ("dropout", 0.3)]
    assert written("maxgain=inf") == [("maxgain", math.inf)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no regulariser ''"),
        ("dorpout", "did you mean 'dropout'?"),
        ("maxgain=", "'' is no gamma that maxgain can have: it is 2 by default"),
        ("maxgain=0", "'0' is no gamma that maxgain can have: it is 2 by default"),
        ("maxgain=nan", "'nan' is no gamma that maxgain can have: it is 2 by default"),
        ("maxgain=two", "'two' is no gamma that maxgain can have: it is 2 by default"),
        (
            "dropout=2",
            "'2' is no factor that dropout can have: it is 1 by default, and 'maxgain list dropout' tells about it.",
        ),
        ("batchnorm=3", "batchnorm takes no number, so 'batchnorm=3' makes no sense."),
        ("dropout+dropout=0.5", "dropout+dropout names a regulariser twice."),
        ("none+dropout", "'none' stands alone."),
    ],
)
def test_regularisers_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(RegulariserError) as caught:
        parse(text)
    assert said in str(caught.value)


def test_a_text_has_one_spelling_and_defaults_are_filled_in_where_they_are_used() -> None:
    assert replace(DIGITS, regulariser=" dropout + maxgain=1.50").regulariser == "maxgain=1.5+dropout"
    assert spelt(settled("dropout+batchnorm+maxgain")) == "maxgain=2+batchnorm+dropout=1"
    assert filled("dropout+maxgain=3", {"maxgain": 2.0, "dropout": 0.5}) == "maxgain=3+dropout=0.5"
    assert replace(DIGITS, regulariser="maxgain").gamma == 2
    assert replace(DIGITS, regulariser="maxgain=1.5").gamma == 1.5
    assert replace(DIGITS, regulariser="dropout").gamma is None


@pytest.mark.parametrize("number", [0.1 + 0.2, 1 / 3, 1e-7, 1e22, 12345678.9, math.inf])
def test_no_digit_of_a_number_is_lost_in_the_text(number: float) -> None:
    text = filled("maxgain+weightdecay", {"maxgain": number})
    assert [choice.value for choice in parse(text)] == [number, None]


def test_gamma_on_the_command_line_is_maxgains_number() -> None:
    assert with_gamma(["none", "maxgain+dropout", "maxgain=1"], 3.0) == ("none", "maxgain=3+dropout", "maxgain=1")
    assert with_gamma(["none"], None) == ("none",)
    with pytest.raises(RegulariserError, match="--gamma 3 has no effect with none maxgain=1: name maxgain there"):
        with_gamma(["none", "maxgain=1"], 3.0)
    for nonsense in (-1.0, 0.0, math.nan):
        with pytest.raises(RegulariserError, match=f"gamma must be positive, not {nonsense}"):
            with_gamma(["maxgain"], nonsense)


# Keys.


def test_a_key_is_the_same_for_ever() -> None:
    # Committed results are found by their keys: if this changes, every run in them would be trained again.
    recipe = replace(DIGITS, regulariser="maxgain", milestones=(1, 2), fold=3)
    content = {
        "augment": False,
        "batch_size": 16,
        "dataset": "digits",
        "decay": 0.1,
        "epochs": 60,
        "fold": 3,
        "learning_rate": 0.001,
        "measure": "stale",
        "milestones": [1, 2],
        "network": "cnn",
        "optimiser": "adam",
        "p": 2,
        "regulariser": "maxgain=2",
        "seed": 0,
        "train_on": "train",
        "weight_decay": 0,
    }
    text = json.dumps(content, separators=(",", ":"))
    assert key(recipe) == hashlib.sha256(text.encode()).hexdigest()[:16]


SAME = [
    ({"regulariser": "maxgain"}, {"regulariser": "maxgain=2"}),
    ({"regulariser": "maxgain=2.0+dropout"}, {"regulariser": "dropout=1 + maxgain"}),
    ({"p": 2}, {"p": 2.0}),
    ({"p": math.inf}, {"p": 1.0}),
    ({"measure": "fresh"}, {}),
    ({"regulariser": "dropout", "measure": "fresh", "p": 1.0}, {"regulariser": "dropout"}),
    ({"name": "mine"}, {"name": "yours"}),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=str)
def test_what_makes_no_difference_makes_no_other_key(one, other) -> None:
    assert key(replace(DIGITS, **one)) == key(replace(DIGITS, **other))


OTHER = [
    *({"seed": 1}, {"fold": 0}, {"epochs": 3}, {"milestones": (120, 100)}, {"train_on": "train+validation"}),
    *({"regulariser": "none"}, {"regulariser": "maxgain=2.5"}, {"regulariser": "maxgain+dropout"}),
    *({"p": math.inf}, {"measure": "fresh"}, {"cross_validation": 3, "fold": 0}, {"augment": True}),
]


@pytest.mark.parametrize("change", OTHER, ids=str)
def test_what_makes_a_difference_makes_another_key(change) -> None:
    recipe = replace(DIGITS, regulariser="maxgain=2")
    assert key(replace(recipe, **change)) != key(recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_a_recipe_keeps_its_key_through_a_file(recipe) -> None:
    assert key(from_json(json.loads(json.dumps(to_json(recipe))))) == key(recipe)


def test_recipes_have_different_keys_and_names() -> None:
    assert len({key(recipe) for recipe in RECIPES.values()}) == len(RECIPES)
    assert run_name(DIGITS) == "digits-none-seed0"
    recipe = replace(RECIPES["sins10"], regulariser="dropout+maxgain", fold=7, seed=3)
    assert run_name(recipe) == "sins10-maxgain=2+dropout=1-fold7-seed3"


def rates(regulariser: str) -> list[float]:
    network = NETWORKS["cnn"]((1, 8, 8), 10, dropout=noise_for(settled(regulariser)))
    return [module.p for module in network.modules() if isinstance(module, nn.Dropout)]


def test_dropout_has_the_papers_rate_of_each_place_times_a_factor() -> None:
    assert rates("none") == []
    assert rates("dropout") == [0.2, 0.2, 0.5]
    assert rates("dropout=1") == rates("dropout")
    assert rates("dropout=0.5") == [0.1, 0.1, 0.25]
    assert rates("dropout=1.6") == pytest.approx([0.32, 0.32, 0.8])


@pytest.mark.parametrize("name", REGULARISERS)
def test_every_row_says_what_it_is(name: str) -> None:
    row = REGULARISERS[name]
    assert row.about.endswith(".")
    assert row.default is None or row.valid(row.default)
    assert row.search is None or all(map(row.valid, row.search))
    assert not row.valid(math.nan)


def test_maxgain_is_made_as_the_recipe_says() -> None:
    recipe = Recipe("x", "digits", "mlp", "adam", 0.1, 1, 8, regulariser="maxgain=1.5", p=1.0, measure="fresh")
    (choice,) = recipe.chosen
    assert choice.row.constrain
    constraint = choice.row.constrain(nn.Sequential(nn.Linear(2, 2)), choice.number, recipe)
    assert isinstance(constraint, MaxGain)
    assert (constraint.p, constraint.measure, constraint.bounds) == (1.0, "fresh", {"0": 1.5})
