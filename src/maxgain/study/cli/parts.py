"""What a command says that has trained one part of the runs, as --shard asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxgain.errors import RunError

from ..wording import counted
from .terminal import Screen


def end_of_part(shard: str, folder: Path, runs: int, done: int, screen: Screen) -> dict[str, Any]:
    """Says how far the part is and how the parts come together; refuses to end well if no run succeeded."""
    screen.show(f"part {shard}: {done} of {counted(runs, 'run')} done in {folder}")
    screen.show("next: maxgain merge OUT and the folders of all parts, then this command on OUT, without --shard")
    if runs and not done:
        raise RunError(f"no run of part {shard} succeeded; {folder} says why.")
    return {"shard": shard, "folder": str(folder), "runs": runs, "done": done}
