"""maxgain merge: the runs of several machines, in one folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from maxgain.errors import RecipeError

from ..comparing.shards import merge
from ..wording import counted
from .terminal import Common, Screen

EXAMPLES = {
    "maxgain merge compare-digits part-0 part-1 part-2 part-3": "after 'maxgain compare digits ... --shard 0/4' to 3/4",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Copy the finished runs of the folders IN into the folder OUT, each once; or the records of results folders.

    The command that made the parts, with --out OUT (for 'reproduce', --results OUT) and without --shard, then puts them
    to use, and trains nothing but what no part has finished.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """OUT, then IN and IN ..."""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Copies, and says how many."""
    if len(options.folders) < 2:
        raise RecipeError("'maxgain merge' needs the folder to merge into, and one or more to merge.")
    out, *parts = options.folders
    merged = merge(out, parts)
    for warning in merged.warnings:
        screen.show(f"note: {warning}")
    rest = f"{merged.known} there already, {merged.unfinished} not finished"
    screen.show(f"{counted(merged.copied, 'run')} copied into {out}, {rest}")
    screen.show(f"next: the same command as for the parts, with {out} as its folder and without --shard")
    return asdict(merged)
