"""The fused projection divides every weight by its layer's excess, wherever the weight lies, and nothing beside it.

Triton's interpreter runs the kernels where there is no GPU, if that is asked for: see `make kernels`.
"""

import os
from contextlib import nullcontext

import pytest
import torch

from maxgain.kernels import FusedProjection, projecting

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and projecting.HAS_TRITON


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1: make kernels")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_divided_by_the_excess_over_their_bounds(dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(projecting, "direct_launch", lambda compiled, grid: None)
    memory = torch.randn(3 * projecting.CHUNK).to(dtype)
    odd = memory[1 : 2 * projecting.CHUNK + 8].view(-1, 5)  # over several chunks, and at no round address
    kernels = torch.randn(8, 3, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    within, unmeasured = torch.randn(7).to(dtype), torch.randn(2, 3)
    weights = [odd, kernels, within, unmeasured]
    before, around = [weight.clone() for weight in weights], memory.clone()
    # The second of five layers is not divided: it is frozen, perhaps.
    sizes, bounds = torch.tensor([3.0, 9.0, 5.0, 0.5, -1.0]), torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0])
    kept, scales = torch.full((5,), 7.0), torch.zeros(5)
    FusedProjection(weights, [0, 2, 3, 4], 5)(sizes, bounds, kept, scales, None)

    factors = [1.5, 5.0, 1.0, 1.0]
    for weight, old, factor in zip(weights, before, factors, strict=True):
        torch.testing.assert_close(weight, (old.float() / factor).to(old.dtype), rtol=0.01, atol=0)
    assert torch.equal(memory[:1], around[:1])
    assert torch.equal(memory[1 + odd.numel() :], around[1 + odd.numel() :])
    assert kept.tolist() == [3.0, 9.0, 5.0, 0.5, 7.0], "what was not measured keeps the size that it had"
    assert scales.tolist() == pytest.approx([2 / 3, 1.0, 0.2, 1.0, 1.0])
