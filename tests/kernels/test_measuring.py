"""The fused kernel computes what the plain path computes; and whatever it does not know takes the plain path.

Where there is no GPU the kernel itself is run by Triton's interpreter, if that is asked for: see `make kernels`.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_runs import interpreted, needs_gpu
from maxgain import MaxGain
from maxgain.functional import record
from maxgain.kernels import Part, measure, measure_compiled, measuring

each_p = pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FORMATS = [torch.contiguous_format, torch.channels_last]


def interpret(maxima: Tensor, dropped: Tensor, index: int, part: Part, dims: int, p: float) -> None:
    """As ``measure`` would launch the kernel for tensors like these on a GPU, without one."""
    from maxgain.kernels.triton_gains import gains_kernel, sums_kernel

    _, x, z, vector, variance, eps, _ = part
    z = x if z is None else z
    *key, _ = measuring.key_of(x, z, part, dims, p, maxima)
    plan = measuring.plan_for((*key, torch.device("cuda")))
    assert plan is not None
    vector = maxima if vector is None else vector
    variance = vector if variance is None else variance
    sums = torch.full((2, plan.rows, max(1, plan.parts)), math.nan)
    if plan.parts:
        sums_kernel[plan.rows, plan.parts, 1](x, z, vector, variance, sums, eps, *plan.for_sums)
    gains_kernel[plan.grid](x, z, vector, variance, sums, maxima, dropped, eps, index, *plan.for_gains)


each_kernel = pytest.mark.parametrize(
    ("device", "how"),
    [
        pytest.param("cpu", measure, id="cpu"),
        pytest.param("cuda", measure, id="cuda", marks=needs_gpu),
        pytest.param("cpu", interpret, id="interpreted", marks=interpreted),
    ],
)


def measured(part: Part, dims: int, p: float, how: Callable[..., None] = measure) -> tuple[float, int]:
    device = part.x.device
    maxima, dropped = torch.full((3,), -1.0, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    how(maxima, dropped, 1, part, dims, p)
    assert maxima[0] == maxima[2] == -1, "other layers' entries are not touched"
    return maxima[1].item(), int(dropped[1])


def in_double(part: Part, dims: int, p: float) -> list[float]:
    """Every instance's gain by the definition, in float64."""
    x = part.x.double()
    if part.form == "affine":
        assert part.z is not None
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
        (Part("affine", x, with_bias, conv.bias.detach(), None, 0.0, 3), 3),
        (Part("affine", x, without, None, None, 0.0, 3), 3),
        (Part("batch_norm", x, None, alpha, variance, 1e-5, 3), 3),
        (Part("affine", rows, out.detach(), dense.bias.detach(), None, 0.0, 1), 1),
        (Part("affine", rows, out.detach(), dense.bias.detach(), None, 0.0, 1), 2),
    ]


@each_p
@each_kernel
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.float32, 1e-25), (torch.float32, 1e30), (torch.bfloat16, 1.0), (torch.float16, 9e3)],
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
@pytest.mark.parametrize("width", [1, 6, 257, 1000, measuring.LONGEST_ROW, measuring.LONGEST_ROW + 9])
def test_rows_may_have_any_length(p, device, how, width):
    torch.manual_seed(width)
    x, z, bias = torch.randn(11, width, device=device), torch.randn(11, 5, device=device), torch.randn(5, device=device)
    for one, other, vector in ((x, z, bias), (z, x, x[0].clone()), (x, 3 * x, None)):
        part = Part("affine", one, other, vector, None, 0.0, 1)
        assert measured(part, 1, p, how)[0] == pytest.approx(max(in_double(part, 1, p)), rel=1e-5)


@each_p
@each_kernel
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_large_images_are_summed_in_parts(p, device, how, memory_format, scale):
    side = 150
    torch.manual_seed(0)
    x = scale * torch.randn(4, 5, side, side, device=device)
    x[1, 2, 3, 4], x[2] = math.nan, 0.0
    x[3, 4, -1, -1] *= 1000  # the last entry counts too
    z, bias = torch.randn(4, 3, side // 2, side // 2, device=device) * scale, torch.randn(3, device=device)
    alpha, variance = torch.randn(5, device=device), torch.rand(5, device=device) + 0.1
    x, z = x.contiguous(memory_format=memory_format), z.contiguous(memory_format=memory_format)
    assert x[0].numel() > measuring.LONGEST_WHOLE
    for part in (
        Part("affine", x, z, bias, None, 0.0, 3),
        Part("affine", z, x, None, None, 0.0, 3),
        Part("batch_norm", x, None, alpha, variance, 1e-5, 3),
    ):
        gains = in_double(part, 3, p)
        finite = [gain for gain in gains if math.isfinite(gain)]
        largest, dropped = measured(part, 3, p, how)
        assert largest == pytest.approx(max(finite), rel=1e-5)
        assert dropped == len(gains) - len(finite) > 0


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_measures_an_input_as_autocast_rounds_it_and_no_other_is_rounded(device):
    torch.manual_seed(0)
    x, z = torch.randn(5, 6, device=device), torch.randn(5, 4, device=device)
    cast = Part("affine", x, z.bfloat16(), None, None, 0.0, 1)
    rounded = cast._replace(x=x.bfloat16())
    assert measured(cast, 1, 2.0, measure_compiled) == pytest.approx(measured(rounded, 1, 2.0))
    wide = Part("affine", 1e200 * x.double(), z, None, None, 0.0, 1)
    assert measured(wide, 1, 2.0, measure_compiled) == measured(wide, 1, 2.0) == (0.0, 0)


@each_p
@each_kernel
def test_instances_that_are_not_finite_are_dropped_and_zeros_have_no_gain(p, device, how):
    x = torch.randn(6, 2, 4, 4, device=device)
    x[1], x[2, 0, 0, 0], x[3, 0, 0, 1], x[4] = math.nan, math.inf, -math.inf, 0.0
    part = Part("affine", x, 2 * x, None, None, 0.0, 3)
    largest, dropped = measured(part, 3, p, how)
    assert largest == pytest.approx(2, rel=1e-6)
    assert dropped == 3


@pytest.mark.parametrize("device", DEVICES)
def test_strides_that_the_kernel_does_not_know_are_measured_all_the_same(device):
    x = torch.randn(4, 3, 8, 8, device=device)[:, :, ::2]
    part = Part("affine", x, 3 * x, None, None, 0.0, 3)
    assert measured(part, 3, 2.0)[0] == pytest.approx(3, rel=1e-6)
    assert measuring._layout(x.shape, x.stride(), 3) is None


@each_p
@each_kernel
@pytest.mark.parametrize("gap", [0, 3, 16])
def test_instances_may_lie_apart(p, device, how, gap, monkeypatch):
    """As the rows of a matrix do that a compiler has padded, or the images of which some channels were taken."""
    monkeypatch.setattr(measuring, "HAS_TRITON", True)
    torch.manual_seed(gap)
    x, z = torch.randn(5, 7, 32 + gap, device=device)[..., :32], torch.randn(5, 7, 10 + gap, device=device)[..., :10]
    images = torch.randn(4, 3 + gap, 6, 6, device=device)[:, :3]
    large = torch.randn(2, 2 + gap, 190, 190, device=device)[:, :2]  # summed in parts
    last = torch.randn(4, 6, 6, 3 + gap, device=device)[:2].as_strided((2, 3, 6, 6), (36 * (3 + gap), 1, 18, 3))
    for part, dims in (
        (Part("affine", x, z, torch.randn(10, device=device), None, 0.0, 1), 1),
        (Part("affine", z, x, None, None, 0.0, 1), 1),
        (Part("affine", x[:, 0], z[:, 0], None, None, 0.0, 1), 1),
        (Part("affine", images, images[:, :2], torch.randn(2, device=device), None, 0.0, 3), 3),
        (Part("batch_norm", images, None, torch.randn(3, device=device), torch.rand(3, device=device), 0.1, 3), 3),
        (Part("affine", large, large[:, :1], None, None, 0.0, 3), 3),
        (Part("affine", last, 2 * last.contiguous(), None, None, 0.0, 3), 3),
        (Part("affine", x[:1, :1].expand(5, 7, 32), z, None, None, 0.0, 1), 1),
    ):
        assert measured(part, dims, p, how)[0] == pytest.approx(max(in_double(part, dims, p)), rel=1e-5)
        *key, _ = measuring.key_of(part.x, part.x if part.z is None else part.z, part, dims, p, torch.zeros(1))
        assert measuring.plan_for((*key, torch.device("cuda"))) is not None


@each_p
@each_kernel
def test_tensors_may_begin_at_any_address(p, device, how):
    torch.manual_seed(0)
    memory = torch.randn(6 * 32 + 8, device=device).bfloat16()
    z = torch.randn(6, 32, device=device).bfloat16()
    for offset in (0, 1, 8, 3, 0):  # in turn, as a kernel may be launched directly from its second launch on
        x = memory[offset : offset + 6 * 32].view(6, 32)
        part = Part("affine", x, z, None, None, 0.0, 1)
        assert measured(part, 1, p, how)[0] == pytest.approx(max(in_double(part, 1, p)), rel=1e-5)


def test_a_tensor_at_an_odd_address_is_launched_by_triton_itself_and_the_others_directly(monkeypatch):
    launched: list[str] = []

    class Dispatched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, num_warps: launched.append("by Triton")

    monkeypatch.setattr(measuring, "direct_launch", lambda compiled, grid: lambda *all: launched.append("directly"))
    kernel, x = measuring.Kernel(Dispatched(), (1, 1, 1), (), 4), torch.zeros(3)
    for pointers in (None, (0,), (0,), None, (0,)):
        kernel(0, (x,), pointers)
    assert launched == ["by Triton", "by Triton", "directly", "by Triton", "directly"]


def test_a_bias_along_the_last_dimension_is_not_taken_for_one_of_channels_last(monkeypatch):
    monkeypatch.setattr(measuring, "HAS_TRITON", True)
    x, z = torch.randn(2, 7, 3), torch.randn(2, 5, 7).mT  # of a dense layer with a forward of its own
    for bias, is_known in ((torch.randn(5), False), (None, True)):
        *key, _ = measuring.key_of(x, z, Part("affine", x, z, bias, None, 0.0, 1), 2, 2.0, torch.zeros(1))
        assert (measuring.plan_for((*key, torch.device("cuda"))) is not None) is is_known


def test_a_plan_is_not_taken_over_by_statistics_of_another_type(monkeypatch):
    monkeypatch.setattr(measuring, "HAS_TRITON", True)
    x, scale = torch.randn(2, 3, 4, 4), torch.ones(3)
    keys = [
        measuring.key_of(x, x, Part("batch_norm", x, None, scale, scale.to(dtype), 0.0, 3), 3, 2.0, torch.zeros(1))[:-1]
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    assert len(set(keys)) == 3
    assert [measuring.plan_for((*key, torch.device("cuda"))) is not None for key in keys] == [True, True, False]


def test_a_layout_is_known_where_every_instance_lies_in_one_piece():
    x = torch.empty(4, 3, 8, 8)
    cases: dict[str | None, Tensor] = {
        "contiguous": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        None: x.transpose(0, 1),
    }
    for layout, tensor in cases.items():
        assert measuring._layout(tensor.shape, tensor.stride(), 3) == layout
    assert measuring._step((4, 3, 8, 8), (192, 64, 8, 1), 3) == 192
    assert measuring._step((4, 3, 5), (90, 30, 1), 1) == 30
    assert measuring._step((4, 3, 5), (91, 30, 1), 1) is None, "from the last of three to the next one it is further"
    assert measuring._step((1, 5), (7, 1), 1) == 5, "a stride that nobody steps over does not matter"


def test_recording_keeps_the_largest_and_counts_what_is_not_finite():
    maxima, dropped = torch.full((2,), -1.0), torch.zeros(2, dtype=torch.int64)
    for gains in ([1.0, 3.0], [2.0, math.nan], [math.inf, 0.5]):
        record(maxima, dropped, 1, torch.tensor(gains))
    assert maxima.tolist() == [-1, 3]
    assert dropped.tolist() == [0, 2]


@needs_gpu
@pytest.mark.parametrize("measure_when", ["stale", "fresh"])
def test_a_gpu_projects_as_a_cpu_does(measure_when: Any) -> None:
    def train(device: str) -> tuple[nn.Module, MaxGain]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, 4)
        )
        model.to(device)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        constraint = MaxGain(model, {"4": 0.2, "*": 0.5}, measure=measure_when).attach(optimiser)
        for step in range(5):
            x = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        return model, constraint

    (one, mine), (other, theirs) = train("cpu"), train("cuda")
    assert any(scale < 1 for scale in mine.scales.values())
    assert theirs.gains == pytest.approx(mine.gains, rel=1e-3)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4)


def test_shapes_that_never_repeat_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(measuring, "MOST_PLANS", 2)
    monkeypatch.setattr(measuring, "_launches", {})
    for rows in range(1, 6):
        x = torch.ones(rows, 4)
        assert measured(Part("affine", x, 3 * x, None, None, 0.0, 1), 1, 2.0) == (pytest.approx(3.0), 0)
    assert len(measuring._launches) == 2
