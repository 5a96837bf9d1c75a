"""The command line: ``maxgain COMMAND ...``.

Exit codes: 0 done; 1 a bug, with a traceback; 2 something is wrong with what was asked for, said in one sentence;
130 stopped by Ctrl-C, with everything saved.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import tyro

import maxgain
from maxgain.errors import MaxGainError, RecipeError

from .recipes import RECIPES, recipe_named
from .runs import Interrupted
from .screen import Screen
from .spelling import unknown

# One row a command: what it does in a few words, and whether it works on a recipe, named first.
COMMANDS: dict[str, tuple[str, bool]] = {
    "train": ("train one network by a recipe", True),
    "gains": ("draw the gains of a finished run, layer by layer", False),
    "data": ("list, fetch and check data sets", False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except Interrupted as stopped:
        sys.stderr.write(f"maxgain: stopped and saved in {stopped}; the same command with --resume goes on.\n")
        return 130
    except KeyboardInterrupt:
        sys.stderr.write("maxgain: stopped.\n")
        return 130
    except MaxGainError as error:
        sys.stderr.write(f"maxgain: {error}\n")
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as in `maxgain ... | head`
        sys.stderr.close()
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        sys.stdout.write(f"maxgain {maxgain.__version__}\n")
        return 0
    if name not in COMMANDS:
        raise MaxGainError(unknown("command", name, COMMANDS))
    command = importlib.import_module(f".commands.{name}", __package__)
    options = _parsed(name, command.Options, rest)
    screen = Screen(for_machines=options.json)
    screen.finish(command.run(options, screen))
    return 0


def _parsed(name: str, options_type: Any, rest: list[str]) -> Any:
    """The command's options from its flags; a recipe's own values are the defaults of its flags."""
    description = textwrap.dedent(options_type.__doc__)
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed)
    if not COMMANDS[name][1]:
        return tyro.cli(options_type, args=rest, prog=f"maxgain {name}", description=description, config=config)
    recipes = f"RECIPE is one of {', '.join(RECIPES)}."
    if rest and rest[0] in ("-h", "--help"):
        recipe, prog = recipe_named("digits"), f"maxgain {name} RECIPE"
        recipes += " The defaults below are those of digits."
    elif not rest or rest[0].startswith("-"):
        raise RecipeError(f"'maxgain {name}' needs a recipe first: one of {', '.join(RECIPES)}.")
    else:
        recipe, prog, rest = recipe_named(rest[0]), f"maxgain {name} {rest[0]}", rest[1:]
    description, default = f"{description}\n\n{recipes}", options_type(recipe=recipe)
    return tyro.cli(options_type, args=rest, prog=prog, default=default, description=description, config=config)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, (what, _) in COMMANDS.items())
    return (
        "usage: maxgain COMMAND [options]\n\n"
        "Limit how much each layer of a network may amplify its input, and see when that helps.\n\n"
        f"commands:\n{rows}\n\n"
        "'maxgain COMMAND --help' tells a command's options; --json makes any of them print JSON.\n"
        "exit codes: 0 done, 1 a bug, 2 something is wrong with what was asked for, 130 stopped by Ctrl-C\n"
    )


if __name__ == "__main__":
    sys.exit(main())
