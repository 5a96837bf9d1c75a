"""The command line: ``maxgain COMMAND ...``.

Exit codes: 0 done; 1 a bug, with a traceback; 2 something is wrong with what was asked for, said in one sentence;
130 stopped by Ctrl-C, with everything saved.
"""

from __future__ import annotations

import importlib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import groupby
from typing import Any, TextIO

import torch
import tyro

import maxgain
from maxgain.errors import MaxGainError, RecipeError

from ..recipes import RECIPES, recipe_named
from ..runs import Interrupted
from ..wording import unknown
from .terminal import Screen

# One row a command: what it does in a few words, and whether it works on a recipe, named first.
COMMANDS: dict[str, tuple[str, bool]] = {
    "demo": ("the whole story on real data that needs no download", False),
    "train": ("train one network by a recipe", True),
    "tune": ("choose a regulariser's numbers on the validation part", True),
    "compare": ("compare regularisers over folds or seeds, with a significance test", True),
    "gains": ("draw the gains of a finished run, layer by layer", False),
    "report": ("make one page of the results in a folder, to look at offline", False),
    "inspect": ("show gains beside operator norms, layer by layer", False),
    "data": ("list, fetch and check data sets", False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no × gets a question mark, not a traceback
    try:
        with _plain_warnings():
            return _run(arguments)
    except Interrupted as stopped:
        sys.stderr.write(f"maxgain: stopped and saved in {stopped}; the same command with --resume goes on.\n")
        return 130
    except KeyboardInterrupt:
        sys.stderr.write("maxgain: stopped; what was finished is recorded, and the same command goes on from there.\n")
        return 130
    except MaxGainError as error:
        sys.stderr.write(f"maxgain: {error}\n")
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as in `maxgain ... | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        sys.stderr.write(f"maxgain: {error.strerror or error}{where}.\n")
        return 2
    except (MemoryError, torch.OutOfMemoryError):
        sys.stderr.write("maxgain: there is not enough memory: try a smaller --batch-size, or another --device.\n")
        return 2


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
    command = importlib.import_module(f".{name}", __package__)
    options = _parsed(name, command.Options, rest)
    screen = Screen(for_machines=options.json)
    screen.finish(command.run(options, screen))
    return 0


def _parsed(name: str, options_type: Any, rest: list[str]) -> Any:
    """The command's options from its flags; a recipe's own values are the defaults of its flags."""
    description = inspect.cleandoc(options_type.__doc__)
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed)
    if not COMMANDS[name][1]:
        return _understood(options_type, args=rest, prog=f"maxgain {name}", description=description, config=config)
    recipes = f"RECIPE is one of {', '.join(RECIPES)}."
    if rest and rest[0] in ("-h", "--help"):
        recipe, prog = recipe_named("digits"), f"maxgain {name} RECIPE"
        recipes += " The defaults below are those of digits."
    elif not rest or rest[0].startswith("-"):
        raise RecipeError(f"'maxgain {name}' needs a recipe first: one of {', '.join(RECIPES)}.")
    else:
        recipe, prog, rest = recipe_named(rest[0]), f"maxgain {name} {rest[0]}", rest[1:]
    description, default = f"{description}\n\n{recipes}", options_type(recipe=recipe)
    return _understood(options_type, args=rest, prog=prog, default=default, description=description, config=config)


def _understood(options_type: Any, prog: str, **how: Any) -> Any:
    """The options that tyro makes of the flags; where it cannot, a sentence instead of its box."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(options_type, prog=prog, **how)
    except SystemExit as stopped:
        if not stopped.code:  # help was asked for and shown
            raise
        raise MaxGainError(f"{_sentence(box.getvalue())}; see '{prog} --help'.") from None


def _sentence(box: str) -> str:
    """What a box of tyro's says under its title: its first part, and the flag that it thinks was meant."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │╭╮╰╯") for line in box.splitlines()[1:]]
    parts = groupby(lines, key=lambda line: bool(line.strip("─-")))
    complaint, *hints = [" ".join(part) for has_words, part in parts if has_words]
    meant = [flag for hint in hints if "Perhaps you meant" in hint for flag in re.findall(r"--[\w-]+", hint)]
    said = complaint[:1].lower() + complaint[1:].rstrip(" .")
    return said + (f" (did you mean {meant[0]}?)" if meant else "")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """A warning is a sentence too, and the same place in the code warns once."""
    seen = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if (filename, lineno) not in seen:
            seen.add((filename, lineno))
            sys.stderr.write(f"maxgain: warning: {message}\n")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


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
