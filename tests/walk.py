"""The walk of one batch: every function of ours that runs from ``maxgain train`` to the end of the first step.

``python tests/walk.py`` prints it, hop by hop, with the counts at the end.
"""

from __future__ import annotations

import io
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch._dynamo  # noqa: F401  # which the first step would import, slowly, as every call is looked at

from maxgain.study.cli.app import main

SOURCES = Path(__file__).parent.parent / "src" / "maxgain"
COMMAND = ("train", "digits", "--network", "cnn", "--regulariser", "maxgain=2", "--epochs", "1", "--json", "--out")
STEP = "Training.step"


class Hop(NamedTuple):
    """A function that is called for the first time."""

    file: str
    function: str
    in_step: bool


class Counts(NamedTuple):
    """How long a walk is."""

    functions: int
    files: int
    changes_of_file: int


def walk() -> list[Hop]:
    """The functions in the order of their first calls; those of a step once more, as they are called within it."""
    seen: dict[Hop, None] = {}
    ours = f"{SOURCES}/"
    state = {"in_step": False, "done": False}

    def look(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(ours) or code.co_name.startswith("<") or state["done"]:
            return
        is_step = code.co_qualname == STEP
        if event == "call":
            state["in_step"] |= is_step
            file = code.co_filename.removeprefix(ours)
            seen.setdefault(Hop(file, code.co_qualname, False))
            if state["in_step"]:
                seen.setdefault(Hop(file, code.co_qualname, True))
        elif event == "return" and is_step:
            state["done"] = True
            raise KeyboardInterrupt  # the walk ends here, and with it the command

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sys.setprofile(look)
        main([*COMMAND, str(Path(folder) / "run")])
    return list(seen)


def counted(hops: list[Hop], *, in_step: bool) -> Counts:
    """The whole walk, or that of the step alone."""
    files = [hop.file for hop in hops if hop.in_step == in_step]
    changes = sum(one != other for one, other in pairwise(files))
    return Counts(len(files), len(set(files)), changes)


if __name__ == "__main__":
    hops = walk()
    sys.stdout.write("\n".join(f"{hop.file:<28} {hop.function}" for hop in hops if not hop.in_step))
    sys.stdout.write(f"\n\nwhole walk: {counted(hops, in_step=False)}\nthe step:   {counted(hops, in_step=True)}\n")
