"""Starts several ranks as users do."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, *command: str | Path) -> str:
    """Run ``torchrun --nproc-per-node RANKS COMMAND`` on this machine, and return what it complained of.

    Judge what the ranks wrote before a last barrier, not how they ended: one in ten times torch's own threads abort a
    process that ends, with or without maxgain.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = (*start, *map(str, command))
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
