"""maxgain list: what there is to choose from, for people and for machines."""

import json

import pytest

from maxgain.study.cli.app import main
from maxgain.study.models import NETWORKS
from maxgain.study.recipes import RECIPES
from maxgain.study.regularisers import REGULARISERS

ALL = {"regularisers": REGULARISERS, "networks": NETWORKS, "recipes": RECIPES}


def test_everything_is_listed_with_a_sentence(capsys) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for names in ALL.values() for name in names)
    assert "1 … 8" in shown  # where gamma is looked for
    assert "next: maxgain list maxgain" in shown
    assert main(["list", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {kind: [row["name"] for row in rows] for kind, rows in content.items()} == {
        kind: list(names) for kind, names in ALL.items()
    }
    for row in content["regularisers"] + content["networks"]:
        assert row["about"].endswith(".")
        assert "``" not in row["about"]


@pytest.mark.parametrize("kind", ALL)
def test_one_kind_can_be_asked_for(kind, capsys) -> None:
    assert main(["list", kind, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [kind]


def test_all_about_one_thing(capsys) -> None:
    assert main(["list", "maxgain"]) == 0
    shown = capsys.readouterr().out
    assert "searched: 1 to 8" in shown
    assert "ECML PKDD 2018" in shown
    assert main(["list", "cifar100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"]["milestones"] == [60, 120, 160]
