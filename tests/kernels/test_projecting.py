"""The fused projection divides every weight by its layer's excess, wherever the weight lies, and nothing beside it.

Triton's interpreter runs the kernels where there is no GPU, if that is asked for: see `make kernels`.
"""

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from kernel_runs import needs_interpreter
from maxgain.errors import MeasurementWarning
from maxgain.kernels import FusedProjection, Part, measuring, projecting


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_that_triton_works_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert measuring.compiles.__wrapped__(torch.device("cpu"))


def test_where_triton_cannot_compile_that_is_said_once_and_the_plain_path_is_taken(monkeypatch) -> None:
    def device(chosen: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(measuring, "HAS_TRITON", True)
    monkeypatch.setattr(measuring, "compiles", cache(measuring.compiles.__wrapped__))
    x = torch.randn(4, 6)
    *key, _ = measuring.key_of(x, x, Part("affine", x, x, None, None, 0.0, 1), 1, 2.0, torch.zeros(1))
    key = (*key, torch.device("cuda", 0))
    assert measuring.plan_for(key) is not None
    with pytest.warns(
        MeasurementWarning, match=r"Triton cannot compile for cuda:0 here \((RuntimeError|ModuleNotFound)"
    ):
        assert measuring._launcher(key) is None
    assert measuring._launcher(key) is None


@pytest.fixture
def on_the_host(monkeypatch) -> None:
    """What is launched is run by the interpreter."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(measuring, "direct_launch", lambda compiled, grid: None)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_divided_by_the_excess_over_their_bounds(dtype, on_the_host) -> None:
    memory = torch.randn(3 * projecting.CHUNK).to(dtype)
    odd = memory[1 : 2 * projecting.CHUNK + 8].view(-1, 5)  # over several chunks, and at no round address
    kernels = torch.randn(8, 3, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    within, unmeasured = torch.randn(7).to(dtype), torch.randn(2, 3)
    weights = [odd, kernels, within, unmeasured]
    before, around = [weight.clone() for weight in weights], memory.clone()
    # The second of five layers is not divided: it is frozen, perhaps.
    sizes, bounds = torch.tensor([3.0, 9.0, 5.0, 0.5, -1.0]), torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0])
    kept, scales = torch.full((5,), 7.0), torch.zeros(5)
    project = FusedProjection(weights, [0, 2, 3, 4], 5)
    project(sizes, bounds, kept, scales, None)

    factors = [1.5, 5.0, 1.0, 1.0]
    for weight, old, factor in zip(weights, before, factors, strict=True):
        torch.testing.assert_close(weight, (old.float() / factor).to(old.dtype), rtol=0.01, atol=0)
    assert torch.equal(memory[:1], around[:1])
    assert torch.equal(memory[1 + odd.numel() :], around[1 + odd.numel() :])
    assert kept.tolist() == [3.0, 9.0, 5.0, 0.5, 7.0], "what was not measured keeps the size that it had"
    assert scales.tolist() == pytest.approx([2 / 3, 1.0, 0.2, 1.0, 1.0])
    assert sizes.tolist() == [-1.0] * 5, "what was measured is used up"
    project(sizes, bounds, kept, scales, None)
    assert kept.tolist() == [3.0, 9.0, 5.0, 0.5, 7.0]
    assert scales.tolist() == [1.0] * 5, "the second step finds nothing to divide by"


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_that_was_skipped_divides_nothing_and_uses_up_what_was_measured(on_the_host) -> None:
    weight, sizes = torch.ones(48), torch.tensor([3.0])
    kept, scales = torch.tensor([0.5]), torch.zeros(1)
    project = FusedProjection([weight], [0], 1)
    project(sizes, torch.ones(1), kept, scales, torch.ones(1))
    assert weight.tolist() == [1.0] * 48
    assert (sizes.item(), kept.item(), scales.item()) == (-1.0, 0.5, 1.0)
    sizes.fill_(2.0)
    project(sizes, torch.ones(1), kept, scales, torch.zeros(1))
    assert weight.tolist() == [0.5] * 48
    assert (sizes.item(), kept.item(), scales.item()) == (-1.0, 2.0, 0.5)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(0).bfloat16()])
def test_a_rank_that_holds_nothing_of_a_weight_keeps_its_size_all_the_same(empty, on_the_host) -> None:
    weight, sizes = torch.ones(32), torch.tensor([3.0, 4.0])
    kept, scales = torch.full((2,), torch.nan), torch.ones(2)
    for weights in ([weight, empty], [empty, empty]):
        FusedProjection(weights, [0, 1], 2)(sizes, torch.ones(2), kept, scales, None)
        assert (sizes.tolist(), kept.tolist(), scales.tolist()) == (
            [-1.0, -1.0],
            [3.0, 4.0],
            [pytest.approx(1 / 3), 0.25],
        )
        sizes.copy_(kept)
    assert weight.tolist() == pytest.approx([1 / 3] * 32)
