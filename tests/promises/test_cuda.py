"""What the promises say of a GPU: CUDA graphs, half precision, models that move, and a step that never waits."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain
from maxgain.errors import MeasurementWarning
from maxgain.kernels import replaying

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    # What torch says to itself while it compiles, and of its own ways to look for waits.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
STEPS = 6


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 49, 10),
    )


def images(step: int, size: int = 8) -> Tensor:
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(step)).cuda()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A whole step as a CUDA graph; returns what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def plain_training(dtype: torch.dtype | None = None) -> tuple[nn.Module, MaxGain]:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = model(images(step)).float().square().mean()
        loss.backward()
        optimizer.step()
    return model, constraint


def assert_same(
    model: nn.Module, constraint: MaxGain, reference: tuple[nn.Module, MaxGain], rtol: float = 1e-3
) -> None:
    assert any(scale < 1 for scale in reference[1].scales.values())
    assert constraint.gains == pytest.approx(reference[1].gains, rel=rtol)
    assert constraint.scales == pytest.approx(reference[1].scales, rel=rtol)
    torch.testing.assert_close([*model.parameters()], [*reference[0].parameters()], rtol=rtol, atol=rtol * 0.1)


def test_promise_12_a_gpu_measures_what_the_cpu_measures() -> None:
    model, twin = net().double(), net().double().cuda()
    constraint, other = MaxGain(model), MaxGain(twin)
    model(images(0).cpu().double())
    twin(images(0).double())
    constraint.step()
    other.step()
    torch.cuda.synchronize()
    with pytest.warns(MeasurementWarning, match="float32, bfloat16 and float16 only"):
        other.step()  # looks at what the first one asked the GPU for
    assert other.gains == pytest.approx(constraint.gains, rel=1e-9)


def test_promise_12_a_whole_step_can_be_captured_in_a_cuda_graph() -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimizer)
    batch = images(0)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    before = copy.deepcopy(model.state_dict())
    replay = captured(step)
    model.load_state_dict(before)  # in place
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    for number in range(STEPS):
        batch.copy_(images(number))
        replay()
    assert_same(model, constraint, plain_training())
    constraint.gamma = math.inf  # which needs another plan; the graph goes on reading the old one
    optimizer.step()
    replay()
    assert set(constraint.scales.values()) == {1.0}


def test_promise_12_replays_of_one_captured_step_measure_every_third_time() -> None:
    layer = nn.Linear(6, 6, bias=False).cuda()
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.arange(1.0, 7.0)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    constraint, x = MaxGain(layer, gamma=math.inf, every=3).attach(optimizer), torch.zeros(1, 6).cuda()

    def step() -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    replay, found = captured(step), list[float]()
    for entry in range(6):
        x.zero_()[0, entry] = 1
        replay()
        found.append(constraint.gains[""])
    assert found == pytest.approx([1, 1, 1, 4, 4, 4])


def test_promise_12_compiled_steps_are_replayed_as_cuda_graphs() -> None:
    torch._dynamo.reset()
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimizer)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(images(step)).square().mean().backward()
        optimizer.step()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped, "measuring must not prevent them"
    assert_same(model, constraint, plain_training(), rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_promise_12_autocast_on_a_gpu(dtype: torch.dtype) -> None:
    low, full = plain_training(dtype)[1], plain_training()[1]
    assert low.gains == pytest.approx(full.gains, rel=0.03)


@pytest.mark.parametrize("fused", [False, True])
def test_promise_06_a_skipped_step_on_a_gpu_is_accumulation(fused: bool) -> None:
    layer = nn.Linear(6, 4, bias=False).cuda()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.0, fused=fused)
    constraint = MaxGain(layer, gamma=math.inf).attach(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    batches = torch.randn(2, 5, 6).cuda()
    with torch.no_grad():
        expected = [(layer(x).norm(dim=1) / x.norm(dim=1)).max().item() for x in batches]
    for x, factor in zip(batches, (math.inf, 1.0), strict=True):
        optimizer.zero_grad()
        scaler.scale(layer(x).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert constraint.gains[""] == pytest.approx(expected[1] if fused else max(expected), rel=1e-4)


def test_promise_12_a_model_may_move_to_the_gpu_after_the_constraint_was_made() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1)
    model(images(0).cpu())
    constraint.step()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint.attach(optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(16)
    model(images(1)).sum().backward()
    optimizer.step()
    assert all(scale < 1 for scale in constraint.scales.values())


def test_promise_12_a_model_may_lie_on_two_devices() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Linear(6, 6), nn.Linear(6, 6).cuda()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.far(self.near(x).cuda())
            return out

    model = Split()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, gamma=0.01).attach(optimizer)
    model(torch.randn(4, 6)).sum().backward()
    with pytest.warns(MeasurementWarning, match="'far' .* several devices"):
        optimizer.step()
    assert constraint.scales == pytest.approx({name: 0.01 / gain for name, gain in constraint.gains.items()})


def test_promise_12_a_step_does_not_wait_for_the_gpu() -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    constraint = MaxGain(model, gamma=0.4).attach(optimizer)
    batch = images(0)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()  # the first one makes the plan
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):  # several are looked at
            step()
            constraint.last_gains
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_promise_12_channels_last_in_half_precision() -> None:
    model = net().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images(step).to(memory_format=torch.channels_last)).float().square().mean()
        loss.backward()
        optimizer.step()
    assert constraint.gains == pytest.approx(plain_training()[1].gains, rel=0.03)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_norms_that_are_replayed_are_those_that_are_computed(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for calls in (2, 10**9):  # replayed from the third step on; never
        monkeypatch.setattr(replaying, "CALLS_BEFORE_CAPTURE", calls)
        model = net()[:5].cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        constraint = Lipschitz(model, 0.5, p=p).attach(optimizer)
        for step in range(12):
            optimizer.zero_grad()
            # In between the images grow, and with them the norms' maps and vectors.
            x = nn.functional.pad(images(step), [0, 4, 0, 4]) if step >= 6 else images(step)
            model(x).square().mean().backward()
            optimizer.step()
        replayed = constraint._replayed._captured is not None
        assert replayed == (calls == 2)
        results.append((constraint.gains, constraint.scales, [w.detach().clone() for w in model.parameters()]))
    (gains, scales, weights), (other_gains, other_scales, other_weights) = results
    assert any(scale < 1 for scale in scales.values())
    assert gains == pytest.approx(other_gains, rel=1e-4)
    assert scales == pytest.approx(other_scales, rel=1e-4)
    torch.testing.assert_close(weights, other_weights, rtol=1e-3, atol=1e-5)


def test_promise_12_compiled_steps_measure_batches_of_every_size() -> None:
    torch._dynamo.reset()
    model = net().cuda()
    compiled, constraint = torch.compile(model, fullgraph=True), MaxGain(model, gamma=math.inf)
    for size in (8, 5, 12, 9):
        x, before = images(size, size), copy.deepcopy(model.state_dict())
        compiled(x).sum().backward()
        constraint.step()
        measured = constraint.gains
        model.load_state_dict(before)  # batch norm's gains depend on its running variances
        model(x)
        constraint.step()
        assert measured == pytest.approx(constraint.gains, rel=1e-3)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_promise_12_dense_layers_on_permuted_images_are_measured_by_the_kernel(is_compiled: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16)
            self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            out: Tensor = x + self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
            return out

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()).cuda(), torch.randn(4, 16, 14, 14).cuda()
    constraint = MaxGain(model, gamma=math.inf)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.compile(model, disable=not is_compiled)(x.contiguous(memory_format=memory_format)).sum().backward()
        constraint.step()
        measured = constraint.gains
        model(x)
        constraint.step()
        assert measured == pytest.approx(constraint.gains, rel=1e-3)
    assert not any(constraint._buffer.fallbacks.values())
