"""What the promises say of a GPU: CUDA graphs, half precision, models that move, and a step that never waits."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain
from maxgain.kernels import replaying
from maxgain.study.bench.running import captured
from small_net import each_measure

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


def plain_training(dtype: torch.dtype | None = None) -> tuple[nn.Module, MaxGain]:
    model = net().cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimiser)
    for step in range(STEPS):
        optimiser.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = model(images(step)).float().square().mean()
        loss.backward()
        optimiser.step()
    return model, constraint


def assert_same(
    model: nn.Module, constraint: MaxGain, reference: tuple[nn.Module, MaxGain], rtol: float = 1e-3
) -> None:
    assert any(scale < 1 for scale in reference[1].scales.values())
    assert constraint.gains == pytest.approx(reference[1].gains, rel=rtol)
    assert constraint.scales == pytest.approx(reference[1].scales, rel=rtol)
    for one, other in zip(model.parameters(), reference[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * 0.1)


def test_promise_12_a_gpu_measures_what_the_cpu_measures() -> None:
    model, twin = net().double(), net().double().cuda()
    constraint, other = MaxGain(model), MaxGain(twin)
    model(images(0).cpu().double())
    twin(images(0).double())
    assert other.gains == pytest.approx(constraint.gains, rel=1e-9)


def test_promise_12_a_whole_step_can_be_captured_in_a_cuda_graph() -> None:
    model = net().cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimiser)
    batch = images(0)

    def step() -> None:
        optimiser.zero_grad()
        model(batch).square().mean().backward()
        optimiser.step()

    before = copy.deepcopy(model.state_dict())
    replay = captured(step)
    model.load_state_dict(before)  # in place
    for state in optimiser.state.values():
        state["momentum_buffer"].zero_()
    for number in range(STEPS):
        batch.copy_(images(number))
        replay()
    assert_same(model, constraint, plain_training())


def test_promise_12_compiled_steps_are_replayed_as_cuda_graphs() -> None:
    torch._dynamo.reset()
    model = net().cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimiser)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    for step in range(STEPS):
        optimiser.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(images(step)).square().mean().backward()
        optimiser.step()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped, "measuring must not prevent them"
    assert_same(model, constraint, plain_training(), rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_promise_12_autocast_on_a_gpu(dtype: torch.dtype) -> None:
    low, full = plain_training(dtype)[1], plain_training()[1]
    assert low.gains == pytest.approx(full.gains, rel=0.03)


@pytest.mark.parametrize("fused", [False, True])
@each_measure
def test_promise_08_a_skipped_step_on_a_gpu_is_as_if_it_never_was(fused: bool, measure: Any) -> None:
    def train(overflow: bool) -> tuple[dict[str, float], list[Tensor]]:
        model = net().cuda()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        constraint = MaxGain(model, gamma=0.1, measure=measure).attach(optimiser)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        for step in range(3):
            if step == 1 and not overflow:
                continue
            optimiser.zero_grad()
            state = copy.deepcopy(model[1].state_dict())
            loss = model(images(step)).square().mean() * (math.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            if step == 1:  # running statistics are the forward's business, not the step's
                model[1].load_state_dict(state)
        assert scaler.get_scale() == (128.0 if overflow else 256.0)
        return constraint.gains, [parameter.detach() for parameter in model.parameters()]

    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        (gains, weights), (expected, others) = train(overflow=True), train(overflow=False)
    assert gains == pytest.approx(expected, rel=1e-5)
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other)


@each_measure
def test_promise_12_a_model_may_move_to_the_gpu_after_the_constraint_was_made(measure: Any) -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.1, measure=measure)
    model(images(0).cpu())
    constraint.step()
    model.cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint.attach(optimiser)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(16)
    model(images(1)).sum().backward()
    optimiser.step()
    assert all(scale < 1 for scale in constraint.scales.values())
    resumed = MaxGain(model, gamma=0.1, measure=measure)
    resumed.load_state_dict({name: tensor.cpu() for name, tensor in constraint.state_dict().items()})
    assert resumed.gains == constraint.gains


def test_promise_12_a_model_may_lie_on_two_devices() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Linear(6, 6), nn.Linear(6, 6).cuda()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.far(self.near(x).cuda())
            return out

    model = Split()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, gamma=0.01).attach(optimiser)
    model(torch.randn(4, 6)).sum().backward()
    gains = constraint.gains
    optimiser.step()
    assert constraint.gains == gains
    assert constraint.scales == pytest.approx({name: 0.01 / gain for name, gain in gains.items()})


def test_promise_12_a_step_does_not_wait_for_the_gpu() -> None:
    model = net().cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    MaxGain(model, gamma=0.4).attach(optimiser)
    batch = images(0)

    def step() -> None:
        optimiser.zero_grad()
        model(batch).square().mean().backward()
        optimiser.step()

    step()  # the first one looks whether every layer was measured
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_promise_12_channels_last_in_half_precision() -> None:
    model = net().cuda().to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4).attach(optimiser)
    for step in range(STEPS):
        optimiser.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images(step).to(memory_format=torch.channels_last)).float().square().mean()
        loss.backward()
        optimiser.step()
    assert constraint.gains == pytest.approx(plain_training()[1].gains, rel=0.03)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_norms_that_are_replayed_are_those_that_are_computed(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for calls in (2, 10**9):  # replayed from the third step on; never
        monkeypatch.setattr(replaying, "CALLS_BEFORE_CAPTURE", calls)
        model = net()[:5].cuda()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        constraint = Lipschitz(model, 0.5, p=p).attach(optimiser)
        for step in range(12):
            optimiser.zero_grad()
            # In between the images grow, and with them the norms' maps and vectors.
            x = nn.functional.pad(images(step), [0, 4, 0, 4]) if step >= 6 else images(step)
            model(x).square().mean().backward()
            optimiser.step()
        replayed = constraint._replayed._captured is not None
        assert replayed == (calls == 2)
        results.append((constraint.gains, constraint.scales, [w.detach().clone() for w in model.parameters()]))
    (gains, scales, weights), (other_gains, other_scales, other_weights) = results
    assert any(scale < 1 for scale in scales.values())
    assert gains == pytest.approx(other_gains, rel=1e-4)
    assert scales == pytest.approx(other_scales, rel=1e-4)
    for one, other in zip(weights, other_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_promise_11_compiled_steps_measure_batches_of_every_size() -> None:
    torch._dynamo.reset()
    model = net().cuda()
    compiled, constraint = torch.compile(model, fullgraph=True), MaxGain(model, gamma=math.inf)
    for size in (8, 5, 12, 9):
        x, before = images(size, size), copy.deepcopy(model.state_dict())
        compiled(x).sum().backward()
        measured = constraint.gains
        constraint.discard()
        model.load_state_dict(before)  # batch norm's gains depend on its running variances
        model(x)
        assert measured == pytest.approx(constraint.gains, rel=1e-3)
        constraint.discard()
