"""Promise 12: torch.compile, checkpointing and memory formats train as plain code does."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from maxgain import MaxGain
from nets import compiling, conv_net, images, mlp, rows, sgd, train, training

pytestmark = compiling
AS_INDUCTOR = aot_autograd(
    fw_compiler=nop, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
)
"""What is kept for the backward as Inductor does it, without the code."""
# Inductor's code would be the same each time and takes long to build; what differs between tests is what is traced.
TRACE_ONLY = "aot_eager"


def history(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    sizes: tuple[int, ...] = (4, 4, 4),
    microbatches: int = 1,
    gamma: Any = 0.15,
    **options: Any,
) -> list[Any]:
    """The gains and scales of each step, and the weights in the end."""
    constraint, optimizer = training(model, gamma, **options)
    found: list[Any] = []
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            call(images(10 * step + microbatch, size)).square().mean().backward()
        optimizer.step()
        found += [constraint.gains, constraint.scales]
    assert min(min(scales.values()) for scales in found[1::2]) < 1
    constraint.detach()
    return [*found, {name: tensor.double().norm().item() for name, tensor in model.state_dict().items()}]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"microbatches": 3},
    "p = 3": {"p": 3},
    "samples": {"instance": "sample"},
    "every": {"every": 2, "sizes": (4, 4, 4, 4)},
    "parts": {"parts": {"4": [*"abcde"]}},
    "float bounds by glob": {"gamma": {"4": 0.1, "*": 0.3}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_promise_12_a_compiled_model_trains_as_the_plain_one_does(name: str) -> None:
    model, plain = conv_net(), conv_net()
    compiled = torch.compile(model, fullgraph=True, backend=TRACE_ONLY)
    assert_same(history(model, compiled, **OPTIONS[name]), history(plain, plain, **OPTIONS[name]))
    assert counters["stats"]["unique_graphs"] == 1


def whole(model: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend=TRACE_ONLY)


def in_place(model: Any) -> Any:
    model.compile(fullgraph=True, backend=TRACE_ONLY)
    return model


def in_pieces(model: Any) -> Any:
    model[0] = whole(model[0])
    return model


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    return lambda x: checkpoint(model[3:], model[:3](x), use_reentrant=reentrant)


def channels_last(model: Any) -> Any:
    model.to(memory_format=torch.channels_last)
    return lambda x: model(x.to(memory_format=torch.channels_last))


WAYS: dict[str, Callable[[Any], Any]] = {
    "the compiled model": whole,
    "compiled in place": in_place,
    "compiled in pieces": in_pieces,
    "checkpointed": checkpointed,
    "checkpointed, reentrant": partial(checkpointed, reentrant=True),
    "checkpointed and compiled": lambda model: whole(checkpointed(model)),
    "checkpointed, reentrant and compiled": lambda model: whole(checkpointed(model, reentrant=True)),
    "channels last": channels_last,
    "channels last and compiled": lambda model: whole(channels_last(model)),
}


@pytest.mark.parametrize("way", [*WAYS, pytest.param("by Inductor", marks=pytest.mark.slow)])
def test_promise_12_however_a_model_runs_its_gains_are_the_same(way: str) -> None:
    model, plain = conv_net(), conv_net()
    call = WAYS[way](model) if way in WAYS else torch.compile(model, fullgraph=True)
    one = history(
        call if isinstance(call, nn.Module) else model, call
    )  # the constraint may be made of what is compiled
    other = history(plain, plain)
    assert_same(one, other)
    assert one[0].keys() == other[0].keys(), "by the same names"


def test_promise_12_compiled_steps_between_do_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    from maxgain import gain

    calls: list[int] = []
    measure = gain.gain
    monkeypatch.setattr(gain, "gain", lambda *given: calls.append(1) or measure(*given))
    model = mlp()
    constraint, optimizer = training(model, every=3, lr=0.0)
    compiled, counts = torch.compile(model, fullgraph=True, backend="eager"), list[int]()
    for step in range(6):
        calls.clear()
        compiled(rows(step)).sum().backward()
        optimizer.step()
        counts.append(len(calls))
    assert counts[0] == counts[3] == len(constraint.gains)
    assert counts == [counts[0], 0, 0, counts[0], 0, 0]


def test_promise_12_sequences_under_autocast() -> None:
    found = []
    for is_compiled in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
        constraint, optimizer = training(model, 0.3)
        call = torch.compile(model, fullgraph=True, backend=TRACE_ONLY) if is_compiled else model
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                call(rows(step, 10).view(2, 5, 6)).float().square().mean().backward()
            optimizer.step()
        found.append(constraint.gains)
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_promise_12_a_compiled_step_of_the_optimizer_projects() -> None:
    found = []
    for is_compiled in (True, False):
        model = mlp()
        _, optimizer = training(model, 0.2)
        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        for number in range(4):
            model(rows(number)).square().mean().backward()
            step()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found)


def test_promise_12_compiled_code_notices_modes_and_pauses_and_is_not_compiled_for_ever() -> None:
    model = conv_net()
    constraint, optimizer = training(model, float("inf"), lr=0.0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def measured(size: int) -> set[str]:
        before = constraint.gains
        compiled(images(size, size))
        optimizer.step()
        return {name for name, gain in constraint.gains.items() if gain != before[name] and gain == gain}

    for size in range(3, 12):
        assert measured(size) == {"0", "1", "4"}
        with constraint.paused():
            assert not measured(size)
        model[0].eval()
        assert measured(size + 20) == {"1", "4"}
        model[0].train()
        with torch.no_grad():
            assert not measured(size)
    assert counters["stats"]["unique_graphs"] <= 8, "once for the first size and once for any"


def test_promise_12_constraints_may_come_and_go_beside_compiled_code() -> None:
    model = conv_net()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(images())
    first = MaxGain(model, 0.1)
    compiled(images())
    second = MaxGain(model, float("inf"), p=1)
    compiled(images())
    for constraint in (first, second):
        constraint.step()
        assert all(gain > 0 for gain in constraint.gains.values())
    assert first.gains != second.gains
    first.detach()
    optimizer = sgd(model)
    first.attach(optimizer)
    train(compiled, optimizer, [100 * images(1)])
    assert min(first.scales.values()) < 1


def test_promise_12_a_baseline_compiled_earlier_does_not_hide_the_constraint() -> None:
    torch.compile(conv_net(), fullgraph=True, backend="eager")(images())
    first, second = (MaxGain(conv_net()) for _ in range(2))
    for constraint in (first, second):
        torch.compile(constraint.model, fullgraph=True, backend="eager")(images())
        constraint.step()
        assert all(gain > 0 for gain in constraint.gains.values())
    torch.compile(conv_net(), fullgraph=True, backend="eager")(images(1))
    before = first.gains
    first.step()
    assert first.gains == before, "what the others compute is no business of the first"


def test_promise_05_other_hooks_that_replace_the_output_are_not_measured() -> None:
    def triple(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 3 * output

    model, plain = conv_net(), conv_net()
    model[0].register_forward_hook(triple)
    constraint, expected = MaxGain(model), MaxGain(plain)
    plain[0].register_forward_hook(triple)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=TRACE_ONLY)(images()), plain(images()))
    constraint.step()
    expected.step()
    assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)


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


def test_promise_12_what_a_compiled_layer_returns_may_be_changed_in_place() -> None:
    model, plain, x = Momentum(), Momentum(), torch.randn(4, 3, 6)
    constraint, expected = MaxGain(model), MaxGain(plain)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=TRACE_ONLY)(x), plain(x))
    constraint.step()
    expected.step()
    assert constraint.gains["fast"] == pytest.approx(expected.gains["fast"], rel=1e-5)


@pytest.mark.parametrize("kept", ["", "norm", "mm"])
def test_promise_12_what_selective_checkpointing_keeps_is_the_models_alone(kept: str) -> None:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if kept in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 8), nn.Tanh(), nn.Linear(8, 5))
    model = copy.deepcopy(plain)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = history(model, lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    assert_same(found, history(plain, plain))


# --- Apart from measuring, compiled code is what it is without. -------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.GELU, partial(nn.SiLU, inplace=True)])
def test_promise_12_a_compiled_forward_keeps_no_more_for_the_backward(activation: Callable[[], nn.Module]) -> None:
    def kept(constrained: bool) -> int:
        model = nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 16))
        if constrained:
            MaxGain(model)
        sizes: list[int] = []
        saving = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t)
        with saving, torch.autocast("cpu", dtype=torch.bfloat16):
            torch.compile(model, fullgraph=True, backend=AS_INDUCTOR)(torch.ones(4, 16, 16, requires_grad=True))
        torch._dynamo.reset()
        return sum(sizes)

    assert 0 < kept(True) <= kept(False)


class Broken(nn.Module):
    """What is called in its loop is not compiled as a part of it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_()
            torch._dynamo.graph_break()
        return x


def test_promise_12_hooks_are_not_compiled_by_themselves_behind_a_graph_break() -> None:
    graphs = []
    for layers in (3, 5):
        counters.clear()
        model, plain = Broken(layers), Broken(layers)
        constraint, expected = MaxGain(model), MaxGain(plain)
        torch.testing.assert_close(torch.compile(model, backend="eager")(rows()), plain(rows()))
        constraint.step()
        expected.step()
        assert constraint.gains == pytest.approx(expected.gains, rel=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
    assert graphs[0] == graphs[1], "not one more for each layer, until torch gives up"


class Residual(nn.Module):
    """Two convolutions whose outputs are added, so that they get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.last(torch.relu(self.first(x) + self.second(x)))
        return added


def test_promise_12_the_compiled_backward_of_a_residual_network_is_the_one_without() -> None:
    def backward_of(constrained: bool) -> list[str]:
        torch._dynamo.reset()
        model, seen = Residual(), list[str]()
        if constrained:
            MaxGain(model)

        def look(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return make_boxed_func(graph.forward)

        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=nop, bw_compiler=look))
        compiled(torch.ones(2, 3, 8, 8)).sum().backward()
        return seen

    assert backward_of(True) == backward_of(False)
