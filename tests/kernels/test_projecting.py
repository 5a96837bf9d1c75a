"""The fused projection divides every weight by its layer's excess, wherever the weight lies, and nothing beside it.

Triton's interpreter runs the kernels where there is no GPU, if that is asked for: see `make kernels`.
"""

from contextlib import nullcontext

import pytest
import torch

from kernel_runs import needs_interpreter
from maxgain.constraint import NOT_FINITE
from maxgain.kernels import FusedProjection, measuring, projecting

NEVER = torch.zeros(6, dtype=torch.int32), 0
"""No layer rests, and nothing is counted."""


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_that_triton_works_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert measuring.compile_error.__wrapped__(torch.device("cpu")) == ""


def test_why_triton_cannot_compile_is_kept(monkeypatch) -> None:
    def device(chosen: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(torch.cuda, "device", device)
    error = measuring.compile_error.__wrapped__(torch.device("cuda", 0))
    assert error.startswith(
        ("Triton cannot compile for cuda:0 (RuntimeError: Failed", "Triton cannot compile for cuda:0 (ModuleNotFound")
    )


@pytest.fixture
def _on_the_host(monkeypatch) -> None:
    """What is launched is run by the interpreter."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(measuring, "direct_launch", lambda compiled: None)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_on_the_host")
class TestProjecting:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_weights_are_divided_by_the_excess_over_their_bounds(self, dtype) -> None:
        memory = torch.randn(3 * projecting.CHUNK).to(dtype)
        odd = memory[1 : 2 * projecting.CHUNK + 8].view(-1, 5)  # over several chunks, and at no round address
        kernels = torch.randn(8, 3, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
        within, unmeasured, spoilt = torch.randn(7).to(dtype), torch.randn(2, 3), torch.ones(48)
        weights = [odd, kernels, within, unmeasured, spoilt]
        before, around = [weight.clone() for weight in weights], memory.clone()
        # The second of six layers is not divided: it is frozen, perhaps.
        sizes, bounds = (
            torch.tensor([3.0, 9.0, 5.0, 0.5, -1.0, NOT_FINITE]),
            torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        )
        kept, scales, counts = torch.full((6,), 7.0), torch.zeros(6), torch.zeros(3, 6, dtype=torch.int32)
        project = FusedProjection(weights, [0, 2, 3, 4, 5], 6)
        project(sizes, bounds, kept, scales, counts, *NEVER)

        factors = [1.5, 5.0, 1.0, 1.0, 1.0]
        for weight, old, factor in zip(weights, before, factors, strict=True):
            torch.testing.assert_close(weight, (old.float() / factor).to(old.dtype), rtol=0.01, atol=0)
        assert torch.equal(memory[:1], around[:1])
        assert torch.equal(memory[1 + odd.numel() :], around[1 + odd.numel() :])
        assert kept[:5].tolist() == [3.0, 9.0, 5.0, 0.5, 7.0], "what was not measured keeps the size that it had"
        assert kept[5].isnan(), "and what is not finite has none"
        assert scales.tolist() == pytest.approx([2 / 3, 1.0, 0.2, 1.0, 1.0, 1.0])
        assert sizes.tolist() == [-1.0] * 6, "what was measured is used up"
        assert counts.tolist() == [[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0]]
        project(sizes, bounds, kept, scales, counts, *NEVER)
        assert kept[:5].tolist() == [3.0, 9.0, 5.0, 0.5, 7.0]
        assert scales.tolist() == [1.0] * 6, "the second step finds nothing to divide by"

    @pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(0).bfloat16()])
    def test_a_rank_that_holds_nothing_of_a_weight_keeps_its_size_all_the_same(self, empty) -> None:
        weight, sizes = torch.ones(32), torch.tensor([3.0, 4.0])
        kept, scales, counts = torch.full((2,), torch.nan), torch.ones(2), torch.zeros(3, 2, dtype=torch.int32)
        for weights in ([weight, empty], [empty, empty]):
            FusedProjection(weights, [0, 1], 2)(sizes, torch.ones(2), kept, scales, counts, *NEVER)
            assert (sizes.tolist(), kept.tolist(), scales.tolist()) == (
                [-1.0, -1.0],
                [3.0, 4.0],
                [pytest.approx(1 / 3), 0.25],
            )
            sizes.copy_(kept)
        assert weight.tolist() == pytest.approx([1 / 3] * 32)

    def test_a_step_without_a_bound_keeps_what_was_measured(self) -> None:
        sizes, kept, scales = torch.tensor([3.0, -1.0]), torch.full((2,), torch.nan), torch.zeros(2)
        counts = torch.zeros(3, 2, dtype=torch.int32)
        bounds = torch.full((2,), torch.inf)
        FusedProjection([], [], 2, sizes.device)(sizes, bounds, kept, scales, counts, *NEVER)
        assert kept[0] == 3
        assert kept[1].isnan()
        assert scales.tolist() == [1.0, 1.0]
        assert counts.tolist() == [[1, 0], [0, 0], [0, 0]]
        assert sizes.tolist() == [-1.0, -1.0]

    def test_captured_steps_count_for_how_many_more_layers_rest(self, monkeypatch) -> None:
        monkeypatch.setattr(projecting, "MOST_PROGRAMS", 2)  # each divides several chunks
        weight, sizes = torch.ones(5 * projecting.CHUNK), torch.tensor([2.0, -1.0])
        kept, scales, counts = torch.zeros(2), torch.zeros(2), torch.zeros(3, 2, dtype=torch.int32)
        resting, project = torch.zeros(2, dtype=torch.int32), FusedProjection([weight], [0], 2)
        found = []
        for _ in range(4):
            project(sizes, torch.ones(2), kept, scales, counts, resting, 3)
            found.append((resting.tolist(), scales[0].item()))
        assert found == [([2, 2], 0.5), ([1, 1], 0.5), ([0, 0], 0.5), ([2, 2], 1.0)], "the last step that measured"
        assert (weight == 0.5).all()
        project(sizes, torch.ones(2), kept, scales, counts, resting, 0)
        assert resting.tolist() == [2, 2], "a step that is not captured is counted by the host"
