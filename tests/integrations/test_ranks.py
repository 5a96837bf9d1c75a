"""The callbacks on two ranks: the same weights and gains on both, and one of them writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_ranks_end_with_the_same_bits_and_one_of_them_writes(tmp_path, framework):
    pytest.importorskip(framework)
    command = [*TORCHRUN, Path(__file__).with_name("ranks.py"), framework, tmp_path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # What the ranks wrote before a last barrier is judged, not how they ended: one in ten times torch's own threads
    # abort a process that ends, with or without maxgain.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["0.pt", "1.pt"], done.stderr
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(map(torch.equal, one["weights"], other["weights"]))
    assert one["gains"] == other["gains"]
    assert min(one["divided"]) > 0, one
    assert len(one["written"]) == 6
    assert other["written"] == []
