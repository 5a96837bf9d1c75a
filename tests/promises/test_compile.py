"""Promise 12 of the design: torch.compile, activation checkpointing, memory formats; and 11: hooks that come late."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from maxgain import Lipschitz, MaxGain
from maxgain.errors import UnsupportedLayerError
from promises.common import compiling, forget_compiled_code
from small_net import each_measure

pytestmark = compiling
# Inductor's code would be the same each time and takes long to build; what differs between tests is what is traced.
TRACE_ONLY = "aot_eager"


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def train(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    *,
    microbatches: int = 1,
    sizes: tuple[int, ...] = (4, 4, 4),
    **options: Any,
) -> list[dict[str, float]]:
    """A few steps of accumulated microbatches; the gains and scales of each step."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, gamma=0.4, **options).attach(optimiser)
    data = torch.Generator().manual_seed(5)
    history = []
    for size in sizes:
        optimiser.zero_grad()
        for _ in range(microbatches):
            call(torch.randn(size, 3, 6, 6, generator=data)).square().mean().backward()
        optimiser.step()
        history += [constraint.gains, constraint.scales]
    return history


def assert_same_training(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert any(scale < 1 for scales in one[1::2] for scale in scales.values())
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("backend", ["eager", TRACE_ONLY, "inductor"])
def test_promise_12_a_compiled_model_trains_as_the_plain_one_does(backend: str) -> None:
    model, plain = net(), net()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_same_training(train(model, compiled), train(plain, plain))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


class Momentum(nn.Module):
    """Adds to what it computed without gradients, in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.slow, self.fast = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.slow(x)
        out += self.fast(x)
        return out.relu_()


def test_promise_12_what_a_compiled_layer_returns_without_gradients_may_be_changed_in_place() -> None:
    model, plain, x = Momentum(), Momentum(), torch.randn(4, 3, 6)
    constraint, expected = MaxGain(model), MaxGain(plain)
    compiled = torch.compile(model, fullgraph=True, backend=TRACE_ONLY)
    torch.testing.assert_close(compiled(x), plain(x))
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)


def test_promise_02_a_hook_that_was_put_before_the_constraints_is_not_measured_in_compiled_code() -> None:
    model, plain, x = net(), net(), torch.randn(4, 3, 6, 6)
    constraint, expected = MaxGain(model), MaxGain(plain)
    for one in (model, plain):
        one[0].register_forward_hook(lambda layer, args, output: 3 * output, prepend=True)
    plain(x)
    with pytest.raises(Unsupported, match=r"layer '0' \(Conv2d\) cannot be measured: a forward hook was put"):
        torch.compile(model, fullgraph=True, backend="eager")(x)
    torch.compile(model, backend="eager")(x)  # which may fall back to code that is not compiled
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)
    torch.compile(model, fullgraph=True, backend="eager")(2 * x)
    assert constraint.gains["0"] == pytest.approx(expected.gains["0"], rel=1e-5)


def test_promise_02_compiled_code_notices_a_hook_that_is_put_before_the_constraints_later() -> None:
    model, plain, x = net(), net(), torch.randn(4, 3, 6, 6)
    constraint, expected = MaxGain(model), MaxGain(plain)
    compiled = torch.compile(model, backend="eager")
    for call, one in ((compiled, model), (plain, plain)):
        call(x)
        one[0].register_forward_hook(lambda layer, args, output: 3 * output, prepend=True)
        call(2 * x)
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)


@pytest.mark.parametrize("is_older", [True, False])
def test_promise_02_a_strangers_hook_comes_after_the_constraints_in_compiled_code_too(is_older: bool) -> None:
    def triple(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 3 * output

    model, plain, x = net(), net(), torch.randn(4, 3, 6, 6)
    if is_older:
        model[0].register_forward_hook(triple)
    constraint, expected = MaxGain(model), MaxGain(plain)
    if not is_older:
        model[0].register_forward_hook(triple)
    plain[0].register_forward_hook(triple)
    compiled = torch.compile(model, fullgraph=True, backend=TRACE_ONLY)
    torch.testing.assert_close(compiled(x), plain(x))
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)


def test_promise_12_the_constraint_may_be_made_of_the_compiled_model_itself() -> None:
    model = net()
    compiled = torch.compile(model, fullgraph=True, backend=TRACE_ONLY)
    plain = net()
    assert_same_training(train(compiled, compiled), train(plain, plain))  # same names, too
    single = torch.compile(nn.Linear(2, 2), backend=TRACE_ONLY)
    assert list(MaxGain(single).bounds) == [""]


def test_promise_12_a_model_may_be_compiled_in_place_or_in_parts() -> None:
    whole, parts, plain = net(), net(), net()
    whole.compile(fullgraph=True, backend=TRACE_ONLY)
    parts[0] = torch.compile(parts[0], fullgraph=True, backend=TRACE_ONLY)
    expected = train(plain, plain)
    assert_same_training(train(whole, whole), expected)
    assert_same_training(train(parts, parts), expected)


def test_promise_12_a_compiled_step_of_the_optimiser_projects_and_is_not_compiled_again_for_it() -> None:
    def trained(*, gamma: float | None, compiled: bool) -> Tensor:
        model = net()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        if gamma is not None:
            MaxGain(model, gamma=gamma).attach(optimiser)
        step = torch.compile(optimiser.step, backend="eager") if compiled else optimiser.step
        for seed in range(4):
            inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
            model(inputs).square().mean().backward()
            step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    trained(gamma=None, compiled=True)
    graphs = counters["stats"]["unique_graphs"]
    forget_compiled_code()
    torch.testing.assert_close(trained(gamma=0.4, compiled=True), trained(gamma=0.4, compiled=False))
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_promise_12_sizes_modes_and_pauses_do_not_compile_for_ever() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    constraint = MaxGain(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in range(3, 15):
        compiled(torch.randn(size, 6))
        constraint.step()
    assert counters["stats"]["unique_graphs"] <= 2, "one for the first size, one for any"
    for size in range(3, 9):
        model.eval()
        compiled(torch.randn(size, 6))
        model.train()
        with constraint.paused():
            compiled(torch.randn(size, 6))
        compiled(torch.randn(size, 6))
    assert counters["stats"]["unique_graphs"] <= 4, "one more for evaluation, one for pauses"


def test_promise_12_compiled_code_notices_modes_and_pauses() -> None:
    model, x = net(), torch.randn(4, 3, 6, 6)
    constraint = MaxGain(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def measured() -> set[str]:
        constraint.discard()
        compiled(x)
        return {name for name, gain in constraint.gains.items() if gain == gain}

    everything = measured()
    assert everything == constraint.bounds.keys()
    with constraint.paused():
        assert not measured()
    model[0].eval()
    assert measured() == everything - {"0"}
    model[0].train()
    assert measured() == everything


def test_promise_12_models_of_one_architecture_share_compiled_code_where_their_constraints_are_alike() -> None:
    x = torch.randn(4, 3, 6, 6)
    for p, graphs in ((2.0, 1), (2.0, 1), (1.0, 2)):
        model, plain = net(), net()
        constraint, expected = MaxGain(model, p=p), MaxGain(plain, p=p)
        torch.compile(model, fullgraph=True, backend="eager")(x)
        plain(x)
        assert constraint.gains == pytest.approx(expected.gains, rel=1e-4)
        assert counters["stats"]["unique_graphs"] == graphs


def test_promise_12_fresh_gains_can_be_compiled_and_accumulated() -> None:
    model, plain = net(), net()
    compiled = torch.compile(model, fullgraph=True, backend=TRACE_ONLY)
    options: dict[str, Any] = {"measure": "fresh", "microbatches": 10, "sizes": (4, 4)}
    assert_same_training(train(model, compiled, **options), train(plain, plain, **options))
    assert counters["stats"]["unique_graphs"] == 1, "not one for each microbatch, nor one for the first"


def test_promise_12_sizes_that_a_compiled_forward_shows_do_not_compile_it_again() -> None:
    def trained(*, compiled: bool) -> dict[str, float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        constraint = Lipschitz(model, 0.4).attach(optimiser)
        call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        for size in (6, 6, 7, 9, 8, 11):
            for more in range(2):  # the last forward is not always the one with the largest images
                call(torch.ones(2, 3, size - more, size - more)).square().mean().backward()
            optimiser.step()
        return constraint.gains

    found = trained(compiled=True)
    assert counters["stats"]["unique_graphs"] <= 2, "one for the first size, one for any"
    assert found == pytest.approx(trained(compiled=False), rel=1e-4)


class Scaled(nn.Linear):
    """Is given more than its input."""

    def forward(self, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return nn.functional.linear(scale * x, self.weight, self.bias)


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, 2.0)
        return out


def test_promise_16_a_forward_of_its_own_that_was_only_compiled_asks_for_one_batch_that_is_not() -> None:
    model, x = Calling(), torch.randn(4, 6)
    constraint = MaxGain(model, gamma=0.1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(x)
    with pytest.raises(UnsupportedLayerError, match="is seen in a batch that is not compiled: run one first"):
        constraint.step()
    model(x)
    compiled(x)
    constraint.step()
    assert constraint.scales["inner"] < 1


def test_promise_12_a_copy_of_a_constrained_model_compiles() -> None:
    model = net()
    constraint = MaxGain(model)
    twin = copy.deepcopy(model)
    torch.compile(twin, fullgraph=True, backend="eager")(torch.randn(2, 3, 6, 6))
    assert all(gain != gain for gain in constraint.gains.values()), "a copy's forwards are not the model's"


def test_promise_12_a_detached_model_that_was_compiled_can_be_attached_again() -> None:
    model = net()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    constraint = MaxGain(model, gamma=0.4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        constraint.attach(optimiser)
        compiled(torch.randn(4, 3, 6, 6)).sum().backward()
        optimiser.step()
        assert any(scale < 1 for scale in constraint.scales.values())
        constraint.detach()


def test_promise_11_a_constraint_that_was_made_after_the_first_compiled_call_measures() -> None:
    model = net()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(torch.randn(4, 3, 6, 6))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model).attach(optimiser)
    compiled(torch.randn(4, 3, 6, 6)).sum().backward()
    assert all(gain > 0 for gain in constraint.gains.values())
    optimiser.step()


def test_promise_11_a_model_of_the_same_architecture_that_was_compiled_before_does_not_hide_the_constraint() -> None:
    torch.compile(net(), fullgraph=True, backend="eager")(torch.randn(4, 3, 6, 6))
    first, second = (MaxGain(net()) for _ in range(2))
    for constraint, scale in ((first, 1.0), (second, 3.0)):
        torch.compile(constraint.model, fullgraph=True, backend="eager")(scale * torch.randn(4, 3, 6, 6))
        assert all(gain > 0 for gain in constraint.gains.values())
    before = first.gains
    torch.compile(second.model, fullgraph=True, backend="eager")(torch.randn(4, 3, 6, 6))
    torch.compile(net(), fullgraph=True, backend="eager")(torch.randn(4, 3, 6, 6))
    assert first.gains == before, "what the others compute is no business of the first"


def test_promise_11_nor_does_a_constraint_that_was_compiled_with_hide_a_second_one() -> None:
    model = net()
    first = MaxGain(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(torch.randn(4, 3, 6, 6))
    second = MaxGain(model)
    compiled(torch.randn(4, 3, 6, 6))
    for constraint in (first, second):
        assert all(gain > 0 for gain in constraint.gains.values())


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_promise_13_tensor_parallel_layers_can_be_compiled(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    model, x = copy.deepcopy(plain), torch.randn(4, 5, 6)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    constraint, expected = MaxGain(model), MaxGain(plain)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=TRACE_ONLY)(x), plain(x))
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle = nn.Conv2d(3, 6, 3), nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU(inplace=True))
        self.last = nn.Linear(24, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        out: Tensor = self.last(x.flatten(1))
        return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("compiled", "measure"),
    [(False, "stale"), (False, "fresh"), (True, "stale"), (True, "fresh")],
)
def test_promise_12_activation_checkpointing_changes_no_gain(reentrant: bool, compiled: bool, measure: Any) -> None:
    model, plain = Checkpointed(reentrant), Checkpointed(None)
    call = torch.compile(model, fullgraph=True, backend=TRACE_ONLY) if compiled else model
    # Otherwise torch refuses that a checkpointed region keeps its inputs, and names this as the way out.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=measure == "fresh"):
        assert_same_training(train(model, call, measure=measure), train(plain, plain, measure=measure))


@pytest.mark.parametrize("kept", ["", "norm", "mm"])
def test_promise_12_what_selective_checkpointing_keeps_is_the_models_alone(kept: str) -> None:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if kept in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 8), nn.Tanh(), nn.Linear(8, 5))
    model = copy.deepcopy(plain)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    history = train(model, lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    assert_same_training(history, train(plain, plain))


@each_measure
def test_promise_12_channels_last_changes_no_gain(measure: Any) -> None:
    model, plain = net().to(memory_format=torch.channels_last), net()
    history = train(model, lambda x: model(x.to(memory_format=torch.channels_last)), measure=measure)
    assert_same_training(history, train(plain, plain, measure=measure))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
