"""Starts several ranks as users do."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(ranks: int, *command: str | Path, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """``torchrun --nproc-per-node RANKS COMMAND`` on this machine, with the packages of this process, for `Popen`."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    paths = os.pathsep.join(path for path in sys.path if path)
    return {"args": [*start, *map(str, command)], "env": os.environ | {"PYTHONPATH": paths}}


def torchrun(ranks: int, *command: str | Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the command on that many ranks to its end."""
    return subprocess.run(**launch(ranks, *command, options=options), capture_output=True, text=True, check=False)
