"""The fused kernel computes what the plain path computes; and whatever it does not know takes the plain path.

Where there is no GPU the kernel itself is run by Triton's interpreter, if that is asked for: see `make kernels`.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.networks import import_timm
from torch import nn

from kernel_runs import Part, as_on_a_gpu, buffers, by_record, interpret, interpreted, needs_gpu
from maxgain import MaxGain, gain
from maxgain.constraint import NOT_FINITE
from maxgain.errors import MeasurementWarning
from maxgain.kernels import measuring, planning

each_p = pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
FORMATS = [torch.contiguous_format, torch.channels_last]


each_kernel = pytest.mark.parametrize(
    ("device", "how"),
    [
        pytest.param("cpu", by_record, id="cpu"),
        pytest.param("cuda", by_record, id="cuda", marks=needs_gpu),
        pytest.param("cpu", interpret, id="interpreted", marks=interpreted),
    ],
)


def measured(part: Part, dims: int, p: float, how: Callable[..., None] = by_record) -> tuple[float, int]:
    maxima, dropped, resting = buffers(3, part.x.device)
    how(maxima, dropped, resting, 1, part, dims, p)
    assert maxima[0] == maxima[2] == -1, "other layers' entries are not touched"
    return maxima[1].item(), int(dropped[1])


def in_double(part: Part, dims: int, p: float) -> list[float]:
    """Every instance's gain by the definition, in float64."""
    x = part.x.double()
    if part.z is not None:
        z = part.z.double()
        if part.vector is not None:
            z = z - part.vector.to(part.z.dtype).double().view(-1, *[1] * (part.channel_dims - 1))
    else:
        assert part.vector is not None
        assert part.variance is not None
        scale = part.vector.double() / (part.variance.double() + part.eps).sqrt()
        z = x * scale.view(-1, *[1] * (x.dim() - 2))
    x, z = x.flatten(-dims), z.flatten(-dims)
    ratio = torch.linalg.vector_norm(z, p, -1) / torch.linalg.vector_norm(x, p, -1)
    return torch.where((x == 0).all(-1), 0.0, ratio).flatten().tolist()


def parts(device: str, dtype: torch.dtype, scale: float, memory_format: torch.memory_format) -> list[tuple[Part, int]]:
    torch.manual_seed(0)
    conv, dense = nn.Conv2d(3, 24, 3, padding=1).to(device), nn.Linear(33, 70).to(device)
    x = (torch.randn(7, 3, 9, 10, device=device) * scale).to(dtype)
    z = F.conv2d(x.double(), conv.weight.double(), padding=1)
    rounded = conv.bias.to(dtype).double().view(-1, 1, 1)
    rows = (torch.randn(5, 4, 33, device=device) * scale).to(dtype)
    out = (rows.double() @ dense.weight.double().T + dense.bias.to(dtype).double()).to(dtype)
    alpha, variance = torch.randn(3, device=device), torch.rand(3, device=device) + 0.1
    x = x.contiguous(memory_format=memory_format)
    with_bias, without = ((v.to(dtype).detach().contiguous(memory_format=memory_format)) for v in (z + rounded, z))
    return [
        (Part(x, with_bias, conv.bias.detach(), None, 0.0, 3), 3),
        (Part(x, without, None, None, 0.0, 3), 3),
        (Part(x, None, alpha, variance, 1e-5, 3), 3),
        (Part(rows, out.detach(), dense.bias.detach(), None, 0.0, 1), 1),
        (Part(rows, out.detach(), dense.bias.detach(), None, 0.0, 1), 2),
    ]


@each_p
@each_kernel
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.float32, 1e-12), (torch.float32, 1e15), (torch.bfloat16, 1.0), (torch.float16, 9e3)],
)
def test_the_largest_gain_is_that_of_the_definition(p, device, how, memory_format, dtype, scale):
    # The interpreter cuts off what a GPU rounds, here of biases in bfloat16.
    rel = 2e-3 if how is interpret and dtype == torch.bfloat16 else 1e-5
    for part, dims in parts(device, dtype, scale, memory_format):
        finite = [gain for gain in in_double(part, dims, p) if math.isfinite(gain)]
        largest, dropped = measured(part, dims, p, how)
        assert largest == pytest.approx(max(finite), rel=rel)
        assert dropped == len(in_double(part, dims, p)) - len(finite)


@each_p
@each_kernel
@pytest.mark.parametrize("width", [1, 6, 257, 1000, planning.LONGEST_ROW, planning.LONGEST_ROW + 9])
def test_rows_may_have_any_length(p, device, how, width):
    torch.manual_seed(width)
    x, z, bias = torch.randn(11, width, device=device), torch.randn(11, 5, device=device), torch.randn(5, device=device)
    for one, other, vector in ((x, z, bias), (z, x, x[0].clone()), (x, 3 * x, None)):
        part = Part(one, other, vector, None, 0.0, 1)
        assert measured(part, 1, p, how)[0] == pytest.approx(max(in_double(part, 1, p)), rel=1e-5)


@each_p
@each_kernel
@pytest.mark.parametrize("memory_format", FORMATS)
def test_large_images_are_summed_in_parts(p, device, how, memory_format):
    side = 150
    torch.manual_seed(0)
    x = torch.randn(4, 5, side, side, device=device)
    x[1, 2, 3, 4], x[2] = math.nan, 0.0
    x[3, 4, -1, -1] *= 1000  # the last entry counts too
    z, bias = torch.randn(4, 3, side // 2, side // 2, device=device), torch.randn(3, device=device)
    alpha, variance = torch.randn(5, device=device), torch.rand(5, device=device) + 0.1
    x, z = x.contiguous(memory_format=memory_format), z.contiguous(memory_format=memory_format)
    assert x[0].numel() > planning.LONGEST_WHOLE
    for part in (
        Part(x, z, bias, None, 0.0, 3),
        Part(z, x, None, None, 0.0, 3),
        Part(x, None, alpha, variance, 1e-5, 3),
    ):
        gains = in_double(part, 3, p)
        finite = [gain for gain in gains if math.isfinite(gain)]
        largest, dropped = measured(part, 3, p, how)
        assert largest == pytest.approx(max(finite), rel=1e-5 if how is interpret else 3e-4)  # torch adds one by one
        assert dropped == len(gains) - len(finite) > 0


@each_kernel
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_sums_that_overflow_are_dropped_and_those_that_underflow_have_no_gain(device, how, scale):
    x, z = torch.ones(3, 20, device=device), torch.ones(3, 4, device=device)
    x[1] *= scale
    assert measured(Part(x, z, None, None, 0.0, 1), 1, 2.0, how) == (pytest.approx(0.2**0.5), int(scale > 1))
    z[1] *= scale
    assert measured(Part(x, z, None, None, 0.0, 1), 1, 2.0, how) == (pytest.approx(0.2**0.5), int(scale > 1))


def layouts(device: str) -> dict[str, tuple[Part, int]]:
    """Inputs and outputs as models and compilers lay them out."""
    torch.manual_seed(0)
    images, bias = torch.randn(2, 16, 12, 12, device=device), torch.randn(24, device=device)
    windows = torch.randn(2, 3, 4, 3, 4, 16, device=device).permute(0, 1, 3, 2, 4, 5)
    padded, wide = torch.randn(2, 6, 7, 24, device=device)[:, :, :6], torch.randn(2, 5, 37, device=device)
    outputs, some = torch.randn(2, 24, 12, 12, device=device), images[:, :, ::2, 1:6]
    statistics, columns = torch.rand(2, 16, device=device), torch.randn(40, 70, device=device).T
    strided = torch.randn(24, 2, device=device)[:, 0]
    last = images.contiguous(memory_format=torch.channels_last)
    rows = images.permute(0, 2, 3, 1)
    large = torch.randn(2, 3, 160, 170, device=device)[..., 1:-1, 5:-5]
    volumes = torch.randn(2, 4, 3, 5, 6, device=device)
    return {
        "ConvNeXt: channels first under a permute": (Part(rows, outputs.permute(0, 2, 3, 1).contiguous(), bias), 1),
        "ConvNeXt: the output too": (Part(rows, outputs.permute(0, 2, 3, 1), bias), 1),
        "ConvNeXt: the output alone": (Part(rows.contiguous(), outputs.permute(0, 2, 3, 1), bias), 1),
        "channels last under a permute": (Part(last.permute(0, 2, 3, 1), rows.contiguous() * 2, bias[:16]), 1),
        "Swin: windows of an image": (Part(windows, windows.contiguous() * 2, bias[:16]), 1),
        "Swin: rows at unequal distances": (Part(padded, padded[..., ::2], torch.randn(12, device=device)), 1),
        "rows with gaps": (Part(wide[..., :32], wide[..., :10], bias[:10]), 1),
        "a matrix by columns": (Part(columns, columns * 2, torch.randn(40, device=device)), 1),
        "every third entry": (Part(wide[..., ::3], wide[..., 1::2], None), 1),
        "the same row for all": (Part(wide[:, :1].expand(2, 5, 37), wide, None), 1),
        "the same entry for all": (Part(wide[..., :1].expand(2, 5, 37), wide, None), 1),
        "sequences first": (Part(wide.transpose(0, 1), wide.transpose(0, 1).contiguous(), None), 1),
        "a part of an image": (Part(some, 3 * some, bias[:16], None, 0.0, 3), 3),
        "batch norm of it": (Part(some, None, *statistics, 1e-3, 3), 3),
        "batch norm, channels last": (Part(last, None, *statistics, 1e-3, 3), 3),
        "batches in images": (Part(images.transpose(0, 1), images.transpose(0, 1) * 3, None, None, 0.0, 3), 3),
        "channels last, some of them": (Part(last[:, 2:7], last[:, :8], bias[:8], None, 0.0, 3), 3),
        "a large one without its border": (Part(large, large[:, :1], bias[:1], None, 0.0, 3), 3),
        "volumes, channels last": (
            Part(volumes.contiguous(memory_format=torch.channels_last_3d), volumes, bias[:4], None, 0.0, 4), 4),
        "signals": (Part(images[:, :, 0], outputs[:, :, 1], bias, None, 0.0, 2), 2),
        "instances of several rows": (Part(padded[0], padded[0].transpose(0, 1).contiguous().transpose(0, 1), bias), 2),
        "images of which some channels were taken": (Part(images[:, :3], outputs[:, :2], bias[:2], None, 0.0, 3), 3),
        "a bias in several pieces": (Part(last, torch.randn_like(last)[:, :8], strided[:8], None, 0.0, 3), 3),
    }  # fmt: skip


@each_p
@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(layouts("cpu")))
def test_a_layout_is_read_as_it_is(p, device, how, layout, dtype):
    part, dims = layouts(device)[layout]
    x, z = part.x.to(dtype), None if part.z is None else part.z.to(dtype)  # laid out as before
    if part.vector is not None:
        part.vector.copy_(part.vector.to(dtype))  # so that it does not matter who rounds it
    part = part._replace(x=x, z=z)
    assert measured(part, dims, p, how)[0] == pytest.approx(max(in_double(part, dims, p)), rel=1e-5)


@each_p
@each_kernel
def test_what_lies_in_too_many_levels_is_copied(p, device, how):
    x = torch.randn(4, 4, 4, 4, 4, 4, device=device)[:, :3, :3, :3, :3, :3]
    for dims, wx in ((5, 2 * x), (1, x.permute(3, 1, 2, 0, 4, 5).contiguous().permute(3, 1, 2, 0, 4, 5))):
        part = Part(x, wx, None, None, 0.0, dims)
        assert measured(part, dims, p, how)[0] == pytest.approx(max(in_double(part, dims, p)), rel=1e-5)


def test_why_there_is_no_kernel_is_told():
    x = torch.randn(4, 6)
    for part, p, reason in (
        (Part(x, x), 3.0, "p = 1, 2 and inf, not 3"),
        (Part(x.double(), x), 2.0, "float32, bfloat16 and float16"),
        (Part(x, x[:2]), 2.0, "number of instances"),
    ):
        with as_on_a_gpu():
            assert reason in measuring.measure(*buffers(4), 0, *part, 1, p)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", ["convnext_atto", "mobilevit_xxs", "coat_lite_tiny"])
@pytest.mark.parametrize("device", [pytest.param("interpreted", marks=interpreted)])
def test_the_kernel_reads_every_layer_of_a_model_where_it_is(device, name, memory_format, monkeypatch):
    """Convolutions, batch norms, and dense layers on permuted images and windows of them."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    timm, reasons = import_timm(), list[str]()
    plan_for = measuring._plan

    def plan(*given: Any) -> Any:
        made = plan_for(*given)
        reasons.append(made.reason)
        return made

    monkeypatch.setattr(measuring, "_plan", plan)
    monkeypatch.setattr(measuring.Kernel, "__call__", lambda *given: None)
    monkeypatch.setattr(gain, "record", lambda *given: measuring.measure(*given))
    model = timm.create_model(name).to(memory_format=memory_format)
    constraint = MaxGain(model, 2.0)
    with as_on_a_gpu():
        model(torch.randn(2, 3, 224, 224).contiguous(memory_format=memory_format))
    assert set(reasons) == {""}
    constraint.detach()


@each_p
@each_kernel
def test_tensors_may_begin_at_any_address(p, device, how):
    torch.manual_seed(0)
    memory = torch.randn(6 * 32 + 8, device=device).bfloat16()
    z = torch.randn(6, 32, device=device).bfloat16()
    for offset in (0, 1, 8, 3, 0):  # in turn, as a kernel may be launched directly from its second launch on
        x = memory[offset : offset + 6 * 32].view(6, 32)
        part = Part(x, z, None, None, 0.0, 1)
        assert measured(part, 1, p, how)[0] == pytest.approx(max(in_double(part, 1, p)), rel=1e-5)


def test_a_tensor_at_an_odd_address_is_launched_by_triton_itself_and_the_others_directly(monkeypatch):
    launched: list[str] = []

    class Dispatched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, num_warps: launched.append("by Triton")

    monkeypatch.setattr(measuring, "direct_launch", lambda compiled: lambda *all: launched.append("directly"))
    kernel, x = measuring.Kernel(Dispatched(), (), 4), torch.zeros(3)
    for pointers in (None, (0,), (0,), None, (0,)):
        kernel(0, (1, 1, 1), (x,), pointers)
    assert launched == ["by Triton", "by Triton", "directly", "by Triton", "directly"]


@each_p
@each_kernel
@pytest.mark.parametrize("shape", [(4,), (5, 150, 150)])
def test_recording_keeps_the_largest_counts_what_is_not_finite_and_rests(p, device, how, shape):
    maxima, dropped, resting = buffers(3, device)
    x, dims = torch.ones(2, *shape, device=device), len(shape)

    def measure(slot: int, *gains: float) -> None:
        z = x * x.new_tensor(gains).view(-1, *[1] * dims)
        how(maxima, dropped, resting, slot, Part(x, z, None, None, 0.0, dims), dims, p)

    for gains in ([1.0, 3.0], [2.0, math.nan], [math.inf, 0.5]):
        measure(1, *gains)
    measure(2, math.nan, math.inf)
    assert maxima.tolist() == [-1, pytest.approx(3), NOT_FINITE], "which is neither zero nor unmeasured"
    assert dropped.tolist() == [0, 2, 2]
    before, resting[:] = maxima.tolist(), 3
    measure(0, 9.0, 9.0)
    measure(1, math.nan, 9.0)
    assert maxima.tolist() == before
    assert dropped.tolist() == [0, 2, 2]


def test_a_layer_that_no_kernel_measures_is_reported_with_the_reason():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    constraint = MaxGain(model, 1.0)
    constraint._buffer.fallbacks[1] = "its {input} is odd"
    model(torch.randn(3, 4)).sum().backward()
    with pytest.warns(MeasurementWarning, match=r"slower operations: .1. .*its \{input\} is odd"):
        constraint.step()
    model(torch.randn(3, 4)).sum().backward()
    constraint.step()  # says it once
