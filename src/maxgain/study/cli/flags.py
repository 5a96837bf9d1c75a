"""A command's flags: read by tyro, described by the docstrings of its Options, and answered for when they are wrong."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
import shutil
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from maxgain.errors import MaxGainError

from ..data.table import DATASETS
from ..models import NETWORKS
from ..wording import nearest
from . import tyro_box
from .terminal import wrapped

CHOICES: Mapping[str, Collection[str]] = {"network": NETWORKS, "dataset": DATASETS}
"""What may follow a flag; another value is answered by whoever looks it up."""
NARROWEST = 20
"""Columns of a terminal, as far as help is concerned."""
KINDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed)


def read(
    options_type: Any, words: Sequence[str], *, prog: str, about: str = "", recipe: Any = None, begun: bool = False
) -> Any:
    """The options that the words of a command line give; a recipe's own values are the defaults of its flags.

    A command whose Options list names under `refuses` has no flags for those fields of the recipe. What is on or off
    can only be changed, unless the recipe is that of a run that was `begun`: then it may be said again.
    """
    hidden = frozenset(getattr(options_type, "refuses", ()))
    default = {} if recipe is None else {"default": options_type(recipe=recipe)}
    box, manual = io.StringIO(), _AsIfShown()
    try:
        with redirect_stderr(box), redirect_stdout(manual):
            return _parsed(
                options_type,
                args=list(words),
                prog=prog,
                description="\n\n".join(filter(None, [inspect.cleandoc(options_type.__doc__), about])),
                config=CONFIG[1:] if begun else CONFIG,
                registry=_registry(hidden),
                **default,
            )
    except SystemExit as stopped:
        if not stopped.code:  # help was asked for
            shown = wrapped(manual.getvalue(), shutil.get_terminal_size().columns)
            sys.stdout.write(re.sub(r"\n{3,}", "\n\n", shown))  # tyro puts two empty lines before some paragraphs
            raise
        said = _unknown_flag(options_type, words, hidden) or tyro_box.sentence(box.getvalue())
        raise MaxGainError(said if said.endswith("?") else f"{said}; see '{prog} --help'.") from None


def _parsed(options_type: Any, **how: Any) -> Any:
    """`tyro.cli`, which would write the help of a terminal of three columns or fewer for ever."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(max(NARROWEST, shutil.get_terminal_size().columns))
    try:
        return tyro.cli(options_type, **how)
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if before is None else {"COLUMNS": before}


class _AsIfShown(io.StringIO):
    """Keeps what is written, in colour if it will be seen on a terminal."""

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def names(options_type: Any, hidden: Collection[str] = ()) -> list[str]:
    """What a command's flags are called, those of its actions and of its recipe included."""
    found = ["help"]
    for name, hint in get_type_hints(options_type, include_extras=True).items():
        inner = [kind for kind in _types_in(hint) if dataclasses.is_dataclass(kind)]
        if inner:
            found += [flag for kind in inner for flag in names(kind, hidden)]
        elif name not in hidden and get_origin(hint) is not ClassVar:
            found += [_flag(name), f"no-{_flag(name)}"] if hint is bool else [_flag(name)]
    return list(dict.fromkeys(found))


def _unknown_flag(options_type: Any, words: Sequence[str], hidden: Collection[str]) -> str | None:
    """A sentence about the first word that looks like a flag and is none, with the flag that may have been meant."""
    known = names(options_type, hidden)
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or name in known:
            continue
        meant = near(name, known)
        return f"there is no option --{name}" + (f": did you mean --{meant}?" if meant else "")
    return None


def near(name: str, known: Collection[str]) -> str | None:
    """The flag that a wrong one comes nearest to: one that it begins, one that it abbreviates, or one spelt alike."""
    begun = [flag for flag in known if flag.startswith(name)]
    initials = [flag for flag in known if "".join(word[0] for word in flag.split("-")) == name]
    return next(iter([*begun, *initials]), nearest(name, known))


def typed_out(recipe: Any, usual: Any) -> Iterator[str]:
    """The flags that make the one recipe of the other, as they are typed."""
    for field in dataclasses.fields(recipe):
        value, flag = getattr(recipe, field.name), f"--{_flag(field.name)}"
        if value == getattr(usual, field.name):
            continue
        if isinstance(value, bool):
            yield flag if value else f"--no-{_flag(field.name)}"
        else:
            yield flag
            yield from map(str, value if isinstance(value, tuple) else (value,))


def _registry(hidden: frozenset[str]) -> ConstructorRegistry:
    """How tyro is to see the fields of Options and recipes."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def described(info: StructTypeInfo) -> StructConstructorSpec | None:
        kind = info.type
        if not dataclasses.is_dataclass(kind):
            return None
        hints = get_type_hints(kind, include_extras=True)
        about = _docstrings(kind)
        shown = [field for field in dataclasses.fields(kind) if field.name not in hidden]
        kept = {
            field.name: getattr(info.default, field.name) for field in dataclasses.fields(kind) if field not in shown
        }

        def made(**values: Any) -> Any:
            return kind(**kept, **values)

        return StructConstructorSpec(
            instantiate=made,
            fields=tuple(
                _described(field.name, hints[field.name], _default(field, info.default), about.get(field.name, ""))
                for field in shown
            ),
        )

    return registry


def _described(name: str, hint: Any, default: Any, about: str) -> StructFieldSpec:
    base, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not any(map(dataclasses.is_dataclass, _types_in(base))):
        said = "" if _goes_without_saying(default) else "(default: {})"
        about = re.sub(r" \(default: .*\)", "", about) if said else about  # a recipe may have one of its own
        if default is True:  # then the flag is --no-...
            about = f"switch this off: {about}"
        place = f"[{name.upper()}]" if default is None else name.upper()
        metavar = place if tyro.conf.Positional in metadata else _metavar(name, base)
        metadata.insert(0, tyro.conf.arg(metavar=metavar, help_behavior_hint=said.format))
    return StructFieldSpec(name=name, type=Annotated[(base, *metadata)], default=default, helptext=about)  # type: ignore[arg-type]


def _goes_without_saying(default: Any) -> bool:
    return default is None or default is False or default is True or default == ()


def _default(field: dataclasses.Field[Any], parent: Any) -> Any:
    if hasattr(parent, field.name):
        return getattr(parent, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    return tyro.MISSING_NONPROP if field.default_factory is dataclasses.MISSING else field.default_factory()


def _metavar(name: str, base: Any) -> str | None:
    if name in CHOICES:
        return f"{{{','.join(CHOICES[name])}}}"
    choices = [choice for kind in _types_in(base) if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"{{{','.join(map(str, filter(None, choices)))}}}"
    kinds = [kind for kind in _types_in(base) if kind in KINDS]
    if not kinds:
        return None
    return KINDS[kinds[0]] + (" ..." if get_origin(base) is tuple else "")


def _types_in(hint: Any) -> Iterator[Any]:
    """The types that a hint is made of, inside unions, tuples and annotations."""
    if get_origin(hint) is Annotated:
        yield from _types_in(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType, tuple):
        for part in get_args(hint):
            yield from _types_in(part)
    else:
        yield hint


def _docstrings(kind: type) -> dict[str, str]:
    """What is written under each field, in one line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        for field in docstring_parser.parse_from_object(base).params:
            found[field.arg_name] = " ".join((field.description or "").split())
    return found


def _flag(name: str) -> str:
    return name.replace("_", "-")
