"""Several layers in one launch are measured as each by itself; and what cannot share one is measured all the same.

Where there is no GPU the kernel is run by Triton's interpreter, if that is asked for: see `make kernels`.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_runs import Part, as_on_a_gpu, buffers, by_record, interpreted, needs_gpu
from maxgain.kernels import measuring, multi_layer

each_device = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=needs_gpu), pytest.param("interpreted", marks=interpreted)],
)
each_p = pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
Layer = tuple[Part, int]


@pytest.fixture
def launched(monkeypatch, device) -> Iterator[list[int]]:
    """How many programs each launch had, from now on; on a CPU the launches are the interpreter's."""
    programs: list[int] = []
    launch = multi_layer.Kernel

    class Counted(launch):  # type: ignore[misc, valid-type]
        def __call__(self, device: int, grid: Any, tensors: Any, pointers: Any, *numbers: float) -> None:
            programs.append(grid[0])
            assert pointers == tuple(
                tuple(one.data_ptr() for one in given) if isinstance(given, tuple) else given.data_ptr()
                for given in tensors
            )
            if device >= 0:
                super().__call__(device, grid, tensors, pointers, *numbers)
            else:
                self.kernel[grid](*tensors, *numbers, *self.constants)

    monkeypatch.setattr(multi_layer, "Kernel", Counted)
    monkeypatch.setattr(multi_layer, "_plans", {})
    with as_on_a_gpu() if device == "interpreted" else contextlib.nullcontext():
        yield programs


def layers(device: str, memory_format: torch.memory_format, dtype: torch.dtype = torch.float32) -> list[Layer]:
    """A convolution with a bias and one without, their batch norms, and dense layers, of many sizes."""
    torch.manual_seed(0)
    if device == "interpreted":
        device = "cpu"

    def image(channels: int, side: int) -> Tensor:
        return torch.randn(5, channels, side, side, device=device).to(dtype).contiguous(memory_format=memory_format)

    def vector(size: int) -> Tensor:
        return torch.rand(size, device=device) + 0.1

    def rows(width: int) -> Tensor:
        return torch.randn(3, 7, width, device=device).to(dtype)

    return [
        (Part(image(16, 8), image(32, 8), vector(32), None, 0.0, 3), 3),
        (Part(image(32, 8), None, vector(32), vector(32), 1e-5, 3), 3),
        (Part(image(32, 12), image(64, 6), None, None, 0.0, 3), 3),
        (Part(image(64, 20), None, vector(64), vector(64), 1e-3, 3), 3),
        (Part(image(3, 4), image(16, 4), vector(16), None, 0.0, 3), 3),
        (Part(image(64, 20), image(32, 20), vector(32), None, 0.0, 3), 3),
        (Part(rows(48), rows(160), vector(160), None, 0.0, 1), 1),
        (Part(rows(1024), rows(32), None, None, 0.0, 1), 1),
        (Part(rows(64)[:, 0].contiguous(), None, vector(64), vector(64), 1e-5, 1), 1),
        (Part(rows(48), rows(10), vector(10), None, 0.0, 1), 1),
        (Part(image(16, 9)[:, :, ::2], image(24, 5), vector(24), None, 0.0, 3), 3),
    ]


def one_by_one(chosen: list[Layer], p: float) -> tuple[list[float], list[int]]:
    maxima, dropped, resting = buffers(len(chosen), chosen[0][0].x.device)
    for index, (part, dims) in enumerate(chosen):
        by_record(maxima, dropped, resting, index, part, dims, p)
    return maxima.tolist(), dropped.tolist()


def at_once(chosen: list[Layer], p: float) -> tuple[list[float], list[int]]:
    maxima, dropped, resting = buffers(len(chosen), chosen[0][0].x.device)
    torch.ops.maxgain.record(maxima, dropped, resting, *as_given(chosen), p)
    return maxima.tolist(), dropped.tolist()


def as_given(chosen: list[Layer], first: int = 0) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
    """What the operator is given: activations and vectors, each once, and the numbers of the layers."""
    activations: list[Tensor] = []
    vectors: list[Tensor] = []
    numbers: list[int] = []
    for slot, (part, dims) in enumerate(chosen, first):
        numbers.append(slot)
        for home, one in (
            (activations, part.x), (activations, part.z), (vectors, part.vector), (vectors, part.variance)
        ):  # fmt: skip
            same = [at for at, other in enumerate(home) if other is one]
            home += [] if same or one is None else [one]
            numbers.append(-1 if one is None else same[0] if same else len(home) - 1)
        numbers += [part.channel_dims, dims]
    return activations, vectors, numbers, [part.eps for part, _ in chosen]


@each_p
@each_device
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_measured_together_as_they_are_one_by_one(p, device, memory_format, dtype, launched):
    if device == "interpreted" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts off what a GPU rounds")
    chosen = layers(device, memory_format, dtype)
    maxima, dropped = one_by_one(chosen, p)
    together_maxima, together_dropped = at_once(chosen, p)
    assert together_maxima == pytest.approx(maxima, rel=1e-5)
    assert min(together_maxima) > 0
    assert together_dropped == dropped
    if device != "cpu":
        small, large = 5 + 5 + 5 + 5, 2 * 5  # which is in two parts; that with another ε is measured by itself
        rows = [6 + 6 + 1]  # of 21 rows, and of 3, in tiles of four
        assert launched == ([small + large, *rows] if memory_format == torch.channels_last else rows)


@each_device
def test_what_is_not_finite_is_counted_where_it_is(device, launched):
    chosen = layers(device, torch.channels_last)
    chosen[0][0].x[2, 1, 3, 3], chosen[2][0].x[1], chosen[3][0].x[4, 5, 6, 7] = math.inf, 0.0, math.nan
    maxima, dropped = one_by_one(chosen, 2.0)
    together_maxima, together_dropped = at_once(chosen, 2.0)
    assert together_maxima == pytest.approx(maxima, rel=1e-5)
    assert together_dropped == dropped
    assert sum(dropped) == 2


@each_device
def test_layers_that_rest_are_not_measured_together_either(device, launched):
    chosen = layers(device, torch.channels_last)
    maxima, dropped, resting = buffers(len(chosen), chosen[0][0].x.device)
    resting[1::2] = 2
    torch.ops.maxgain.record(maxima, dropped, resting, *as_given(chosen), 2.0)
    expected = one_by_one(chosen, 2.0)[0]
    assert maxima[::2].tolist() == pytest.approx(expected[::2], rel=1e-5)
    assert maxima[1::2].tolist() == [-1.0] * len(maxima[1::2])


@each_device
@pytest.mark.parametrize(("enough", "steps"), [(6, 2), (7, 1)])
def test_a_program_does_several_tiles_of_rows_if_there_are_many(device, enough, steps, launched, monkeypatch):
    monkeypatch.setattr(multi_layer, "ENOUGH_PROGRAMS", enough)
    chosen = layers(device, torch.channels_last)[6:9]
    assert at_once(chosen, 2.0)[0] == pytest.approx(one_by_one(chosen, 2.0)[0], rel=1e-5)
    if device != "cpu":
        assert launched == [6 // steps + 6 // steps + 1]


@each_device
def test_norms_with_another_epsilon_share_another_launch(device, launched):
    first, norm, second, *_ = layers(device, torch.channels_last)
    other = norm[0]._replace(eps=0.5), norm[1]
    chosen = [first, norm, other, second, other]
    assert at_once(chosen, 2.0)[0] == pytest.approx(one_by_one(chosen, 2.0)[0], rel=1e-5)
    if device != "cpu":
        assert launched == [15, 10]


@each_device
def test_launches_that_sum_in_parts_do_not_disturb_each_other(device, launched):
    part, dims = layers(device, torch.channels_last)[5]
    chosen = [(part._replace(x=(1 + index) * part.x), dims) for index in range(multi_layer.ENTRIES + 2)]
    assert at_once(chosen, 2.0)[0] == pytest.approx(one_by_one(chosen, 2.0)[0], rel=1e-5)
    if device != "cpu":
        assert launched == [10 * multi_layer.ENTRIES, 20]


@each_device
def test_more_layers_than_one_launch_takes_are_measured_in_several(device, launched):
    chosen = layers(device, torch.channels_last)[:1] * (multi_layer.ENTRIES + 2)
    assert at_once(chosen, 2.0)[0] == pytest.approx(one_by_one(chosen, 2.0)[0], rel=1e-5)
    if device != "cpu":
        assert launched == [5 * multi_layer.ENTRIES, 10]
    assert at_once(chosen, 2.0) == at_once(chosen, 2.0), "the second time by what was planned for the first"


@each_device
def test_tensors_that_begin_at_an_odd_address_are_measured_all_the_same(device, launched):
    chosen = layers(device, torch.channels_last)[:2]
    part, dims = chosen[1]
    shifted = torch.empty(part.x.numel() + 1, device=part.x.device)[1:].as_strided(part.x.shape, part.x.stride())
    chosen[1] = part._replace(x=shifted.copy_(part.x)), dims
    assert at_once(chosen, 2.0)[0] == pytest.approx(one_by_one(chosen, 2.0)[0], rel=1e-5)
    assert not launched


@each_device
@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_bias_that_does_not_lie_in_one_piece_is_subtracted_all_the_same(device, is_expanded, launched):
    chosen = [layers(device, torch.channels_last)[index] for index in (5, 0, 2)]
    part, dims = chosen[0]
    bias = torch.rand(32, 2, device=part.x.device)[:, 0]
    chosen[0] = part._replace(vector=bias[:1].expand(32) if is_expanded else bias), dims
    dense = part._replace(vector=chosen[0][0].vector.contiguous()), dims
    assert at_once(chosen, 2.0)[0] == pytest.approx(at_once([dense, *chosen[1:]], 2.0)[0], rel=1e-5)
    assert one_by_one(chosen, 2.0)[0] == pytest.approx(one_by_one([dense, *chosen[1:]], 2.0)[0], rel=1e-5)


@each_device
def test_where_shapes_never_repeat_old_plans_make_room(device, launched, monkeypatch):
    monkeypatch.setattr(measuring, "MAX_PLANS", 2)
    for rows in (5, 4, 3, 5, 2):
        chosen = [
            (part._replace(x=part.x[:rows], z=None if part.z is None else part.z[:rows]), dims)
            for part, dims in layers(device, torch.channels_last)[:2]
        ]
        assert at_once(chosen, 2.0)[0] == pytest.approx(one_by_one(chosen, 2.0)[0], rel=1e-5)
        assert len(multi_layer._plans) <= 2
    if device != "cpu":
        assert launched == [10, 8, 6, 10, 4]


@pytest.mark.parametrize("device", [pytest.param("interpreted", marks=interpreted)])
def test_other_layers_and_other_batch_sizes_take_no_other_kernel(device, launched, monkeypatch):
    """Which a GPU would wait for, some seconds each time."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    told_apart = set()

    def note(kernel: Any, device: int, grid: Any, tensors: Any, *others: Any) -> None:
        launched.append(grid[0])
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        kinds = [native_specialize_impl(backend, value, False, True, True) for value in (*tensors, *kernel.constants)]
        told_apart.add((kernel.kernel.__name__, repr(kinds)))

    monkeypatch.setattr(multi_layer.Kernel, "__call__", note)
    all_layers = [(part._replace(eps=1e-5), dims) for part, dims in layers(device, torch.channels_last)]
    for chosen in (all_layers[:4], all_layers[:4][::-1]):
        for first, rows in ((0, 5), (1, 5), (16, 5), (0, 4), (0, 1)):
            some = [
                (part._replace(x=part.x[:rows], z=None if part.z is None else part.z[:rows]), dims)
                for part, dims in chosen
            ]
            torch.ops.maxgain.record(*buffers(20), *as_given(some, first), 2.0)
    assert len(launched) == 2 * 5
    assert len(told_apart) == 1
