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
from maxgain.kernels import measuring, planning

each_device = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=needs_gpu), pytest.param("interpreted", marks=interpreted)],
)
Layer = tuple[Part, int]


@pytest.fixture
def launched(monkeypatch, device) -> Iterator[list[Any]]:
    """What several layers share is launched from now on; on a CPU by the interpreter."""
    found: list[Any] = []
    launch = measuring._launch

    def noted(plan: Any, *given: Any) -> None:
        found.extend(one for one in plan.launches if len(one.columns[0]) > 1)
        launch(plan, *given)

    monkeypatch.setattr(measuring, "_launch", noted)
    monkeypatch.setattr(measuring, "_plans", {})
    with as_on_a_gpu() if device == "interpreted" else contextlib.nullcontext():
        yield found


class Made:
    """Makes layers on a device."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, *, is_last: bool = True) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = "cpu" if device == "interpreted" else device, dtype
        self.format = torch.channels_last if is_last else torch.contiguous_format

    def image(self, channels: int, side: int) -> Tensor:
        x = torch.randn(5, channels, side, side, device=self.device)
        return x.to(self.dtype).contiguous(memory_format=self.format)

    def vector(self, size: int) -> Tensor:
        return torch.rand(size, device=self.device) + 0.1

    def conv(self, channels: int, side: int, outputs: int, other: int, *, bias: bool = True) -> Layer:
        x, z = self.image(channels, side), self.image(outputs, other)
        return Part(x, z, self.vector(outputs) if bias else None, None, 0.0, 3), 3

    def norm(self, x: Tensor, eps: float = 1e-5) -> Layer:
        dims, channels = x.dim() - 1, x.shape[1]
        return Part(x, None, self.vector(channels), self.vector(channels), eps, dims), dims

    def dense(self, width: int, outputs: int, *, bias: bool = True) -> Layer:
        x, z = (torch.randn(21, size, device=self.device).to(self.dtype) for size in (width, outputs))
        return Part(x, z, self.vector(outputs) if bias else None, None, 0.0, 1), 1

    def all(self) -> list[Layer]:
        """Convolutions, their batch norms and others', and dense layers, of many sizes."""
        plain, biased, large = (
            self.conv(16, 8, 32, 8, bias=False), self.conv(32, 12, 64, 6), self.conv(64, 20, 64, 20)
        )  # fmt: skip
        dense = self.dense(48, 160)
        return [
            plain, self.norm(plain[0].z), biased, self.norm(biased[0].z), large, self.norm(large[0].z),
            self.norm(large[0].z), self.norm(large[0].x), self.conv(3, 4, 16, 4), self.conv(64, 20, 32, 20),
            dense, self.norm(dense[0].z), self.dense(1024, 32, bias=False), self.dense(96, 384), self.dense(48, 10),
            (Part(self.image(16, 9)[:, :, ::2], self.image(24, 5), self.vector(24), None, 0.0, 3), 3),
            self.norm(self.image(32, 8), 0.5), self.conv(32, 20, 96, 20), self.norm(self.image(48, 20)),
        ]  # fmt: skip


def one_by_one(chosen: list[Layer], p: float = 2.0) -> tuple[list[float], list[int]]:
    maxima, dropped, resting = buffers(len(chosen), chosen[0][0].x.device)
    for index, (part, dims) in enumerate(chosen):
        by_record(maxima, dropped, resting, index, part, dims, p)
    return maxima.tolist(), dropped.tolist()


def at_once(chosen: list[Layer], p: float = 2.0, resting: list[int] | None = None) -> tuple[list[float], list[int]]:
    maxima, dropped, rest = buffers(len(chosen), chosen[0][0].x.device)
    if resting is not None:
        rest.copy_(torch.tensor(resting))
    torch.ops.maxgain.record(maxima, dropped, rest, *as_given(chosen), p)
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


def assert_alike(chosen: list[Layer], p: float = 2.0) -> tuple[list[float], list[int]]:
    maxima, dropped = one_by_one(chosen, p)
    shared_maxima, shared_dropped = at_once(chosen, p)
    assert shared_maxima == pytest.approx(maxima, rel=1e-5)
    assert shared_dropped == dropped
    return maxima, dropped


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@each_device
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_are_measured_together_as_they_are_one_by_one(p, device, is_last, dtype, launched):
    if device == "interpreted" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts off what a GPU rounds")
    maxima, _ = assert_alike(Made(device, dtype, is_last=is_last).all(), p)
    assert min(maxima) > 0
    assert bool(launched) is (device != "cpu")


@each_device
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [32, 64, 48])
def test_a_batch_norm_and_the_layer_before_it_share_a_read(device, bias, outputs, launched):
    """Also where the layer's output is the larger one, or its input, or both are cut into parts; and where channels do
    not fill a tile a whole number of times."""
    make = Made(device)
    convs = [make.conv(64, 20, outputs, 20, bias=bias), make.conv(32, 4, outputs, 8, bias=bias)]
    dense = make.dense(64, outputs, bias=bias)
    for layers in ([*convs, *[make.norm(part.z) for part, _ in convs]], [dense, make.norm(dense[0].z)]):
        assert_alike(layers)
        resting = [index % 2 for index in range(len(layers))]
        for rest in (resting, resting[::-1], [1, *[0] * (len(layers) - 1)]):
            maxima, _ = at_once(layers, resting=rest)
            expected = [-1.0 if rests else gain for rests, gain in zip(rest, one_by_one(layers)[0], strict=True)]
            assert maxima == pytest.approx(expected, rel=1e-5)


@each_device
def test_what_is_not_finite_is_counted_where_it_is(device, launched):
    chosen = Made(device).all()
    chosen[0][0].x[2, 1, 3, 3], chosen[2][0].x[1], chosen[4][0].z[4, 5, 6, 7] = math.inf, 0.0, math.nan
    _, dropped = assert_alike(chosen)
    assert dropped[:8] == [1, 0, 0, 0, 1, 1, 1, 0], "a convolution and both batch norms that read it"


@each_device
@pytest.mark.parametrize("enough", [6, 10**6])
def test_a_program_does_more_if_there_are_many(device, enough, launched, monkeypatch):
    """Several tiles of rows, or longer parts of images."""
    monkeypatch.setattr(planning, "ENOUGH_PROGRAMS", enough)
    make = Made(device)
    assert_alike([make.dense(1024, 512), make.dense(64, 480), make.dense(512, 512)])
    conv = make.conv(64, 32, 32, 32)
    assert_alike([conv, make.norm(conv[0].z)])


@each_device
def test_each_launch_has_what_one_kernel_can_read(device, launched):
    """Rows and images, rows of another length, and what is too much for one launch take another one."""
    make = Made(device)
    large = make.conv(64, 20, 32, 20)
    cases: dict[str, tuple[list[Layer], int]] = {
        "epsilons": ([make.norm(make.image(32, 8), eps) for eps in (0.1, 0.5, 0.1, 0.5)], 1),
        "rows": ([make.dense(512, 512), make.dense(64, 32), make.dense(96, 384), make.dense(512, 64)], 1),
        "many": ([(large[0]._replace(x=(1 + n) * large[0].x), 3) for n in range(planning.MAX_ENTRIES + 2)], 2),
        "alone": ([make.dense(512, 512), make.norm(make.image(32, 8))], 0),
        "odd": ([make.dense(48, 10), make.dense(9, 160)], 0),
    }
    for name, (chosen, launches) in cases.items():
        launched.clear()
        assert at_once(chosen)[0] == pytest.approx(one_by_one(chosen)[0], rel=1e-5), name
        assert len(launched) == (0 if device == "cpu" else launches), name
    again = cases["many"][0]
    assert at_once(again) == at_once(again), "the second time by what was planned for the first"


@each_device
def test_tensors_that_begin_at_an_odd_address_are_measured_all_the_same(device, launched):
    chosen = Made(device).all()[:2]
    part, dims = chosen[1]
    shifted = torch.empty(part.x.numel() + 1, device=part.x.device)[1:].as_strided(part.x.shape, part.x.stride())
    chosen[1] = part._replace(x=shifted.copy_(part.x)), dims
    assert_alike(chosen)
    assert not launched


@each_device
@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_bias_that_does_not_lie_in_one_piece_is_subtracted_all_the_same(device, is_expanded, launched):
    make = Made(device)
    chosen = [make.conv(64, 20, 32, 20), make.conv(16, 8, 32, 8), make.conv(32, 12, 64, 6)]
    part, dims = chosen[0]
    bias = torch.rand(32, 2, device=part.x.device)[:, 0]
    chosen[0] = part._replace(vector=bias[:1].expand(32) if is_expanded else bias), dims
    dense = part._replace(vector=chosen[0][0].vector.contiguous()), dims
    assert assert_alike(chosen)[0] == pytest.approx(at_once([dense, *chosen[1:]])[0], rel=1e-5)


@each_device
def test_where_shapes_never_repeat_old_plans_make_room(device, launched, monkeypatch):
    monkeypatch.setattr(measuring, "MAX_PLANS", 2)
    for rows in (5, 4, 3, 5, 2):
        make = Made(device)
        chosen = [
            (part._replace(x=part.x[:rows], z=None if part.z is None else part.z[:rows]), dims)
            for part, dims in (make.conv(16, 8, 32, 8), make.conv(32, 8, 16, 8))
        ]
        assert_alike(chosen)
        assert len(measuring._plans) <= 2
    assert len(launched) == (0 if device == "cpu" else 5)


@pytest.mark.parametrize("device", [pytest.param("interpreted", marks=interpreted)])
def test_other_layers_and_other_batch_sizes_take_no_other_kernel(device, launched, monkeypatch):
    """Which a GPU would wait for, some seconds each time."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    told_apart = set()

    def note(kernel: Any, device: int, grid: Any, tensors: Any, pointers: Any, *numbers: Any) -> None:
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        given = *tensors, *kernel.constants
        told_apart.add(repr([native_specialize_impl(backend, value, False, True, True) for value in given]))

    monkeypatch.setattr(measuring.Kernel, "__call__", note)
    make = Made(device)
    plain, biased = make.conv(16, 8, 32, 8, bias=False), make.conv(32, 12, 64, 6)
    for chosen in ([plain, biased, make.norm(biased[0].z)], [make.norm(plain[0].z), biased, plain]):
        for first, rows in ((0, 5), (1, 5), (16, 5), (0, 4), (0, 1)):
            some = [
                (part._replace(x=part.x[:rows], z=None if part.z is None else part.z[:rows]), dims)
                for part, dims in chosen
            ]
            torch.ops.maxgain.record(*buffers(20), *as_given(some, first), 2.0)
    assert len(launched) == 2 * 5
    assert len(told_apart) == 1
