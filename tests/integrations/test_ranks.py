"""The callbacks on two ranks: the same weights and gains on both, and one of them writes."""

from pathlib import Path

import pytest
import torch

from torchrun import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_ranks_end_with_the_same_bits_and_one_of_them_writes(tmp_path, framework):
    pytest.importorskip(framework)
    complaint = torchrun(2, Path(__file__).with_name("ranks.py"), framework, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["0.pt", "1.pt"], complaint
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(map(torch.equal, one["weights"], other["weights"]))
    assert one["gains"] == other["gains"]
    assert min(one["divided"]) > 0, one
    assert len(one["written"]) == 6
    assert other["written"] == []
