"""maxgain list: what there is to choose from, and what each of them does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from maxgain.errors import MaxGainError

from ..models import NETWORKS
from ..recipes import RECIPES, Recipe, to_json
from ..regularisers import REGULARISERS, Regulariser
from ..tables import Column, Table
from ..wording import unknown
from .terminal import Common, Screen, typed

EXAMPLES = {
    "maxgain list": "everything there is to choose from",
    "maxgain list regularisers": "the regularisers alone, with their numbers",
    "maxgain list maxgain": "all there is to know about one of them",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """List the regularisers with their numbers, the networks and the recipes, or tell all about one of them."""

    what: Annotated[str | None, tyro.conf.Positional] = None
    """regularisers, networks, recipes, or the name of one (default: everything)"""


def run(options: Options, screen: Screen) -> Any:
    """Shows tables, or everything about one thing."""
    if options.what in (None, *KINDS):
        kinds = KINDS if options.what is None else {options.what: KINDS[options.what]}
        for kind in kinds.values():
            screen.show(kind.table())
        if options.what is None:
            one, several = typed("list", "maxgain"), typed("train", "digits", "--regulariser", "maxgain+batchnorm")
            screen.end(steps={one: "all about one of these", several: "regularisers are joined by +"})
        return {name: kind.content() for name, kind in kinds.items()}
    wanted = str(options.what)
    found = {name: kind.one(wanted) for name, kind in KINDS.items() if wanted in kind.names}
    if not found:
        everything = [*KINDS, *dict.fromkeys(name for kind in KINDS.values() for name in kind.names)]
        raise MaxGainError(unknown("regulariser, network or recipe", wanted, everything))
    for name, content in found.items():
        screen.show(_in_full(name.removesuffix("s"), content))
    return found


def _regulariser(row: Regulariser) -> dict[str, Any]:
    about, *source = _sentences(row.about)
    return {
        "name": row.name,
        "number": row.parameter,
        "default": row.default,
        "searched": row.search,
        "about": about,
        "more": " ".join(source),
    }


def _regularisers() -> Table:
    rows = [_regulariser(row) for row in REGULARISERS.values()]
    return Table(
        "Regularisers, as --regulariser takes them: NAME, NAME=NUMBER, or several joined by +",
        (
            Column("name"),
            Column("number", spare=1),
            Column("default"),
            Column("searched from … to", spare=2),
            Column("what it does", prose=True),
        ),
        tuple((row["name"], row["number"], _number(row), _range(row["searched"]), row["about"]) for row in rows),
    )


def _number(row: dict[str, Any]) -> str | None:
    """The number that a regulariser has where none is given; some leave it to the network or the recipe."""
    if row["number"] is None:
        return None
    return "varies" if row["default"] is None else f"{row['default']:g}"


def _range(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:g} … {ends[1]:g}"


def _network(name: str) -> dict[str, Any]:
    builder: Any = NETWORKS[name]
    about, *more = _sentences(inspect.getdoc(getattr(builder, "func", builder)) or "")
    sizes = ", ".join(f"{key} {value}" for key, value in getattr(builder, "keywords", {}).items())
    return {"name": name, "about": f"{about} Here: {sizes}." if sizes else about, "more": " ".join(more)}


def _networks() -> Table:
    rows = [_network(name) for name in NETWORKS]
    columns = (Column("name"), Column("what it is", prose=True))
    return Table("Networks, as --network takes them", columns, tuple((row["name"], row["about"]) for row in rows))


def _recipes() -> Table:
    return Table(
        "Recipes, the first word after train, tune and compare",
        (
            Column("name"),
            Column("network"),
            Column("optimiser", spare=3),
            Column("rate", spare=2),
            Column("epochs"),
            Column("batch", spare=1),
            Column("regulariser", spare=4),
            Column("augmented", spare=5),
        ),
        tuple(
            (
                recipe.name,
                recipe.network,
                recipe.optimiser,
                f"{recipe.learning_rate:g}",
                recipe.epochs,
                recipe.batch_size,
                recipe.regulariser,
                "yes" if recipe.augment else "no",
            )
            for recipe in RECIPES.values()
        ),
    )


def _recipe(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in to_json(recipe).items() if value not in (None, [])}


@dataclass(frozen=True)
class Kind:
    """Things of one kind: their names, a table of them, and each for machines."""

    names: Iterable[str]
    table: Callable[[], Table]
    one: Callable[[str], dict[str, Any]]

    def content(self) -> list[dict[str, Any]]:
        """All of them for machines."""
        return [self.one(name) for name in self.names]


KINDS = {
    "regularisers": Kind(REGULARISERS, _regularisers, lambda name: _regulariser(REGULARISERS[name])),
    "networks": Kind(NETWORKS, _networks, _network),
    "recipes": Kind(RECIPES, _recipes, lambda name: _recipe(RECIPES[name])),
}


def _in_full(kind: str, content: dict[str, Any]) -> str:
    lines = [f"{content['name']}, a {kind}"]
    for name, value in content.items():
        if name != "name" and value not in (None, ""):
            shown = " to ".join(f"{end:g}" for end in value) if name == "searched" else value
            lines.append(f"  {shown}" if name in ("about", "more") else f"  {name.replace('_', ' ')}: {shown}")
    return "\n".join(lines)


def _sentences(text: str) -> list[str]:
    """The sentences of a docstring, in one line each, without the marks of its markup."""
    plain = re.sub(r"\s+", " ", text.replace("``", "")).strip()
    return re.split(r"(?<=[.])\s+(?=[A-Z])", plain)
