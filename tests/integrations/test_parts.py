"""Blocks of the fused projections of transformers' models: compiled, replicated and sharded as in one process."""

from pathlib import Path

import pytest
import torch

from torchrun import torchrun


@pytest.mark.slow
def test_parts_of_fused_projections_match_the_run_in_one_process(tmp_path):
    pytest.importorskip("transformers")
    complaint = torchrun(2, Path(__file__).with_name("parts.py"), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["0.pt", "1.pt"], complaint
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == 10
        for (model, how), run in found.items():
            plain = found[model, ""]
            torch.testing.assert_close(run["weights"], plain["weights"], rtol=1e-4, atol=1e-5, msg=f"{model} {how}")
            assert run["gains"] == pytest.approx(plain["gains"], rel=1e-4), (model, how)
            divided = {name.rpartition("[")[2] for name, scale in run["least"].items() if scale < 1}
            assert divided <= {"q]", "k]", "q0]", "q1]", "gate]"}
            assert len(divided) > 1, (model, how)
