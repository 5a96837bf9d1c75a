"""The command line: ``maxgain COMMAND ...``.

Exit codes: 0 done; 1 a bug, with a traceback; 2 something is wrong with what was asked for, said in one sentence;
130 stopped by Ctrl-C, with everything saved (143 by SIGTERM, 129 by SIGHUP); 141 whoever read its output has gone.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any, TextIO

import tyro

import maxgain
from maxgain.errors import MaxGainError, RecipeError

from .. import memory, signals
from ..ranks import HERE
from ..recipes import RECIPES
from ..runs import Interrupted
from ..wording import unknown
from . import flags
from .terminal import PLAINLY, Screen, complain, discard, flush

# One row per command: what it does in a few words, and whether it works on a recipe, named first.
COMMANDS: dict[str, tuple[str, bool]] = {
    "demo": ("the whole story on real data that needs no download", False),
    "train": ("train one network by a recipe", True),
    "tune": ("choose a regulariser's numbers on the validation part", True),
    "compare": ("compare regularisers over folds or seeds, with a significance test", True),
    "merge": ("bring the runs of several machines into one folder", False),
    "gains": ("draw the gains of a finished run, layer by layer", False),
    "report": ("make one page of the results in a folder, to look at offline", False),
    "inspect": ("show gains beside operator norms, layer by layer", False),
    "list": ("list the regularisers, networks and recipes, with their numbers", False),
    "reproduce": ("run the paper's tables and figures again, by a plan", False),
    "bench": ("time a training step with a constraint against one without", False),
    "data": ("list, fetch and check data sets", False),
}

HOME = re.compile(r"^(--[a-z-]+=)?~(?=/|$)")

# What must be added to a command that was stopped so that it goes on.
GOES_ON: dict[str, tuple[str, ...]] = {"train": ("--resume",), "tune": (), "compare": (), "demo": (), "reproduce": ()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A shell leaves the ~ of --out=~/runs as it is, and a folder called ~ is a trap for whoever removes it.
    arguments = [HOME.sub(lambda found: found[0][:-1] + os.path.expanduser("~"), word) for word in arguments]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=PLAINLY)  # a terminal that knows no × gets an x, not a traceback
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")  # the name of a file may be no text
    stop = partial(_stop, for_machines="--json" in arguments)
    goes_on = partial(_how_to_go_on, arguments)
    # Of several ranks the first answers a signal; the others end with it.
    listening = signals.listening(lambda: f"stopped at once{goes_on()}.") if HERE.rank == 0 else nullcontext()
    try:
        with listening, _plain_warnings():
            code = _run(arguments)
            flush()
            return code
    except (Interrupted, KeyboardInterrupt):
        return stop(signals.exit_code(), f"stopped{goes_on()}.")
    except MaxGainError as error:
        return stop(2, str(error))
    except BrokenPipeError:  # the reader of our output has gone, as in `maxgain ... | head`
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except (MemoryError, RuntimeError) as error:
        return stop(2, str(memory.explained(error)))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return stop(2, f"{error.strerror or error}{where}.")


def _how_to_go_on(arguments: Sequence[str]) -> str:
    """The command that goes on with what this one has begun, where there is any."""
    if not arguments or arguments[0] not in GOES_ON:
        return ""
    more = [word for word in GOES_ON[arguments[0]] if word not in arguments]
    return f", and what was saved is kept: {shlex.join(['maxgain', *arguments, *more])} goes on"


def _stop(code: int, sentence: str, *, for_machines: bool) -> int:
    """Says why it ends here: to people in a sentence, and to machines in JSON too; of several ranks, one says it."""
    if HERE.rank > 0:
        return code
    complain(f"maxgain: {sentence}")
    try:
        if for_machines:
            sys.stdout.write(json.dumps({"error": sentence, "exit_code": code}) + "\n")
        flush()
    except OSError:  # which may be what the sentence is about
        discard(sys.stdout)
    return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        sys.stdout.write(f"maxgain {maxgain.__version__}\n")
        return 0
    if name not in COMMANDS:
        raise MaxGainError(unknown("command", name, COMMANDS))
    if name != "train" and HERE.count > 1:
        raise MaxGainError(f"torchrun is for 'maxgain train': start 'maxgain {name}' once, without it.")
    command = importlib.import_module(f".{name}", __package__)
    try:
        options = _parsed(name, command, rest)
    except SystemExit:  # help was asked for and shown
        sys.stdout.write(_examples(command.EXAMPLES))
        flush()
        raise
    screen = Screen(for_machines=options.json, silent=HERE.rank > 0)
    # What anybody else's code prints, a model's for example, is not for machines.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        result = command.run(options, screen)
    screen.finish(result)
    return 0


def _parsed(name: str, command: Any, rest: list[str]) -> Any:
    """The command's options from its flags; a recipe's own values are the defaults of its flags.

    The recipe is named first, unless the command finds one in the folder of a run that it is to go on with.
    """
    how: dict[str, Any] = {"prog": f"maxgain {name}"}
    if COMMANDS[name][1]:
        begun = None
        if name == "train" and "--resume" in rest:
            begun, rest = command.begun(rest)
        if begun is not None:
            how |= {"recipe": begun, "begun": True}
        elif rest and rest[0] in ("-h", "--help"):
            about = f"RECIPE is one of {', '.join(RECIPES)} (see 'maxgain list recipes')."
            about += " The defaults below are those of digits."
            how = {"prog": f"maxgain {name} RECIPE", "about": about, "recipe": RECIPES["digits"]}
        elif not rest or rest[0].startswith("-"):
            raise RecipeError(f"'maxgain {name}' needs a recipe first: one of {', '.join(RECIPES)}.")
        else:
            recipe, *rest = rest
            how = {"prog": f"maxgain {name} {recipe}", "recipe": RECIPES[recipe]}
    options_type = command.Options
    is_narrow = shutil.get_terminal_size().columns < flags.NARROWEST
    if not hasattr(options_type, "refuses") and "begun" not in how and not is_narrow:
        # Flags are described to those who ask for help or are wrong, and to them alone, as that takes a while.
        default = {"default": options_type(recipe=how["recipe"])} if "recipe" in how else {}
        with suppress(SystemExit), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            return tyro.cli(options_type, args=rest, prog=how["prog"], config=flags.CONFIG, **default)
    return flags.read(options_type, rest, **how)


def _examples(examples: Mapping[str, str]) -> str:
    """Commands to begin with, each with what it is for."""
    return "".join(["\nexamples:\n", *(f"  {command}\n      {purpose}\n" for command, purpose in examples.items())])


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
            complain(f"maxgain: warning: {message}")

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
        "'maxgain COMMAND --help' tells a command's options, with examples; --json makes any of them print JSON.\n"
        "exit codes: 0 done, 1 a bug, 2 something is wrong with what was asked for, 130 stopped by Ctrl-C\n"
    )


if __name__ == "__main__":
    sys.exit(main())
