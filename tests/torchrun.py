"""Starts several ranks as users do."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, *command: str | Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node RANKS COMMAND``, on this machine, with the packages of this process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run([*launch, *map(str, command)], env=environment, capture_output=True, text=True, check=False)
