"""Lipschitz: what it divides by, and what it remembers; what all constraints promise is in ../test_core.py."""

import copy
import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from explicit import same_bits
from maxgain import Lipschitz, operator_norms
from maxgain.errors import BoundError, MaxGainError, MeasurementWarning, NormError, StateError
from maxgain.kernels import Replayed, replaying
from nets import compiling, frozen_sgd
from odd_layers import Calling, Routed, Same, Scaled, Squared

each_p = pytest.mark.parametrize("p", [1, 2, math.inf])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, stride=2, groups=2),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 7 * 7, 5),
    )


def batches(count: int) -> Tensor:
    return torch.randn(count, 6, 2, 8, 8, generator=torch.Generator().manual_seed(2))


def train(model: Any, constraint: Lipschitz, data: Tensor, optimizer: Any = None, microbatches: int = 1) -> Any:
    if optimizer is None:
        optimizer = torch.optim.SGD(constraint.model.parameters(), lr=0.02, momentum=0.9)
        constraint.attach(optimizer)
    for number, x in enumerate(data, 1):
        (model(x) - 3).square().mean().backward()
        if number % microbatches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


@each_p
def test_the_bound_holds_after_training(p: float) -> None:
    model, x = net(), batches(1)[0]
    bounds = {"0": 0.5, "1": 0.8, "3": 0.5, "5": 0.5, "7": 0.2}
    before = operator_norms(model, x, p=p).norms
    assert all(before[name] > 1.1 * bound for name, bound in bounds.items()), "or it has nothing to do"
    constraint = Lipschitz(model, bounds, p=p)
    train(model, constraint, batches(60))
    norms = operator_norms(model, x, p=p).norms
    assert all(norms[name] <= bound * (1.01 if p == 2 else 1.00001) for name, bound in bounds.items())
    for _ in range(200):  # with weights that stand still the iteration converges
        constraint.step()
    norms = operator_norms(model, x, p=p).norms
    assert all(norms[name] <= 1.0001 * bound for name, bound in bounds.items())


@each_p
def test_a_step_divides_each_weight_by_its_norm_over_the_bound(p: float) -> None:
    model, x = net().eval(), batches(1)[0]
    before = copy.deepcopy(model)
    constraint = Lipschitz(model, 0.1, p=p, iterations=300)
    model(x)
    constraint.step()
    expected = operator_norms(before, x, p=p).norms
    assert constraint.gains == pytest.approx(expected, rel=1e-4)
    for name, norm in expected.items():
        scaled = before.get_submodule(name).weight * (0.1 / norm)
        torch.testing.assert_close(model.get_submodule(name).weight, scaled, rtol=1e-4, atol=1e-6)
        assert torch.equal(model.get_submodule(name).bias, before.get_submodule(name).bias)


def test_the_iteration_follows_when_another_direction_becomes_the_largest() -> None:
    layer = nn.Linear(4, 4, bias=False)
    constraint = Lipschitz(layer, math.inf)
    for step in range(40):
        layer.weight.data = torch.diag(torch.tensor([2.0 - step / 40, 1.0 + step / 40, 0.1, 0.2]))
        constraint.step()
        assert constraint.gains[""] == pytest.approx(layer.weight.max().item(), rel=1e-3)


def test_a_convolution_has_no_norm_before_a_forward_and_a_dense_layer_needs_none() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(1, 1, 3))
    constraint = Lipschitz(model, 0.1)
    constraint.step()
    assert torch.linalg.matrix_norm(model[0].weight, 2).item() == pytest.approx(0.1, rel=1e-4)
    assert not model[0]._forward_hooks
    assert (constraint.scales["1"], math.isnan(constraint.gains["1"])) == (1, True)
    model[1](torch.zeros(1, 1, 4, 4))
    constraint.step()
    assert constraint.scales["1"] < 1


@each_p
def test_the_norm_is_that_of_the_largest_input_seen_in_training_or_evaluation(p: float) -> None:
    conv = nn.Conv1d(1, 1, 5, padding=2, bias=False)
    constraint = Lipschitz(conv, math.inf, p=p, iterations=200)

    def norm(size: int) -> Any:
        return pytest.approx(operator_norms(conv, torch.zeros(1, 1, size), p=p).norms[""], rel=1e-5)

    conv(torch.zeros(2, 1, 3))
    constraint.step()
    assert constraint.gains[""] == norm(3)
    with constraint.paused():
        conv(torch.zeros(2, 1, 9))
    constraint.step()
    assert constraint.gains[""] == norm(3)
    conv.eval()(torch.zeros(2, 1, 7))
    conv(torch.zeros(2, 1, 4))
    constraint.step()
    assert constraint.gains[""] == norm(7) != norm(3)


@each_p
def test_promise_14_a_run_goes_on_to_the_same_bits_from_a_saved_state(p: float) -> None:
    data, model, again = batches(12), net(), net()
    constraint = Lipschitz(model, 0.5, p=p)
    optimizer = train(model, constraint, data[:6])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), constraint.state_dict()))
    train(model, constraint, data[6:], optimizer)

    other = torch.optim.SGD(again.parameters(), lr=0.02, momentum=0.9)
    resumed = Lipschitz(again, 0.5, p=p).attach(other)
    for one, state in zip((again, other, resumed), saved, strict=True):
        one.load_state_dict(state)
    train(again, resumed, data[6:], other)
    assert same_bits(again.state_dict(), model.state_dict())
    assert same_bits(resumed.state_dict(), constraint.state_dict())


def test_a_state_is_taken_up_in_the_tensors_that_a_captured_step_knows() -> None:
    layer = nn.Linear(4, 4)
    constraint = Lipschitz(layer, 0.1)
    constraint.step()
    (norm,) = constraint._norms.values()
    earlier, known = constraint.state_dict(), norm.vectors
    constraint.step()
    constraint.load_state_dict(earlier)
    assert norm.vectors is known
    assert same_bits(constraint.state_dict(), earlier)
    constraint.load_state_dict({})
    assert constraint.state_dict() == {}


@pytest.mark.parametrize(
    "state",
    [
        {"strange.vectors": torch.zeros(2, 4)},
        {"3.vectors": torch.full((2, 6, 8, 8), math.nan)},
        {"3.vectors": torch.ones(2, 6, 8, 8).long()},
        {"3.vectors": [1.0]},
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(state: Any) -> None:
    model = net()
    constraint = Lipschitz(model, 0.5)
    train(model, constraint, batches(2))
    before = constraint.state_dict()
    with pytest.raises(StateError):
        constraint.load_state_dict({**before, **state})
    with pytest.raises(StateError):
        constraint.load_state_dict(None)  # type: ignore[arg-type]
    assert same_bits(constraint.state_dict(), before)


@each_p
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_promise_07_a_weight_that_is_not_finite_has_no_norm_and_is_forgotten(p: float, value: float) -> None:
    layer = nn.Linear(3, 3)
    constraint = Lipschitz(layer, 0.5, p=p)
    good = layer.weight.detach().clone()
    constraint.step()
    layer.weight.data.copy_(good)[0, 0] = value
    constraint.step()
    assert layer.weight.isfinite().sum() == 8
    assert math.isnan(constraint.gains[""])
    layer.weight.data.copy_(good)
    for _ in range(50):
        constraint.step()
    assert operator_norms(layer, torch.zeros(1, 3), p=p).norms[""] <= 0.5001


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_matrices_of_one_row_or_column_and_of_any_magnitude(shape: tuple[int, int], magnitude: float) -> None:
    layer = nn.Linear(*shape, bias=False)
    layer.weight.data *= magnitude
    expected = torch.linalg.vector_norm(layer.weight.double()).item()
    constraint = Lipschitz(layer, math.inf)
    for _ in range(2):
        constraint.step()
        assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)


def test_a_step_inside_autocast_computes_in_full() -> None:
    models = [net(), net()]
    for model, autocast in zip(models, (True, False), strict=True):
        constraint = Lipschitz(model, 0.1)
        model.eval()(batches(1)[0])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            constraint.step()
    assert same_bits(models[0].state_dict(), models[1].state_dict())


def test_a_weight_of_another_shape_begins_anew() -> None:
    layer = nn.Linear(4, 3)
    constraint = Lipschitz(layer, 0.1)
    constraint.step()
    layer.weight = nn.Parameter(torch.randn(3, 2))
    constraint.step()
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(0.1, rel=1e-3)


@each_p
@pytest.mark.parametrize(
    ("layer", "shape"), [(Same(2, 3, 2), (2, 4, 4)), (Scaled(6, 5), (6,))], ids=lambda value: type(value).__name__
)
def test_promise_11_a_layer_with_a_forward_of_its_own_is_bounded_by_what_that_does(
    layer: Any, shape: Any, p: float
) -> None:
    layer, x = copy.deepcopy(layer), torch.randn(3, *shape)
    constraint, optimizer = Lipschitz(layer, 0.05, p=p, iterations=50), frozen_sgd(layer)
    constraint.attach(optimizer)
    for _ in range(3):
        layer(x).sum().backward()
        optimizer.step()
    assert operator_norms(layer, x, p=p).norms[""] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Squared(5, 5), "halving"),
        (Calling(), "cannot be run on its input alone"),
        (Routed(5, 5), "its output is not one tensor"),
    ],
)
def test_promise_11_a_layer_that_division_does_not_bound_is_left_out_with_a_warning(layer: Any, why: str) -> None:
    before, data = copy.deepcopy(layer.state_dict()), torch.randn(4, 5).expand(2, 4, 5)
    for model, left in ((nn.Sequential(layer, nn.Linear(5, 2)), ["1"]), (layer, [])):
        optimizer = frozen_sgd(model)
        constraint = Lipschitz(model, 0.01).attach(optimizer)
        with pytest.warns(MeasurementWarning, match=why):
            train(model, constraint, data, optimizer)
        assert same_bits(layer.state_dict(), before)
        assert list(constraint.gains) == left
        assert why in str(constraint)
        constraint.detach()


class TestCompiled:
    pytestmark = compiling

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_promise_12_a_compiled_model_shows_its_sizes_too(self, dynamic: bool) -> None:
        counters.clear()
        model, plain = net(), net()
        constraint, other = Lipschitz(model, 0.3), Lipschitz(plain, 0.3)
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
        train(compiled, constraint, batches(8), microbatches=2)
        train(plain, other, batches(8), microbatches=2)
        assert constraint.gains == pytest.approx(other.gains, rel=1e-4)
        assert counters["stats"]["unique_graphs"] == 1

    def test_promise_12_a_forward_of_its_own_is_not_tried_while_an_evaluation_is_compiled(self) -> None:
        torch._dynamo.reset()
        model = nn.Sequential(Same(2, 3, 2)).eval()
        plain = copy.deepcopy(model)
        constraint, other = Lipschitz(model, 0.05), Lipschitz(plain, 0.05)
        with torch.no_grad():
            torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1, 2, 4, 4))
            plain(torch.ones(1, 2, 4, 4))
        constraint.step()
        other.step()
        assert constraint.gains == other.gains
        assert constraint.scales["0"] < 1


def test_what_makes_no_sense_is_refused() -> None:
    layer: Any = nn.Linear(2, 2)
    for p in (3, 1.5, "2"):
        with pytest.raises(NormError, match="p must be 1, 2 or inf"):
            Lipschitz(layer, 1.0, p=p)
    with pytest.raises(MaxGainError, match="iterations must be a whole number"):
        Lipschitz(layer, 1.0, iterations=0)
    with pytest.raises(BoundError, match="bound must be a positive number"):
        Lipschitz(layer, -1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@each_p
def test_on_a_gpu_a_step_never_waits_and_can_be_captured(p: float) -> None:
    model = net().cuda()
    constraint = Lipschitz(model, 0.3, p=p)
    model(batches(1)[0].cuda())
    for _ in range(2):  # which also take the snapshots of steps 1 and 2
        constraint.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        constraint.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        constraint.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    for _ in range(100):
        graph.replay()
    norms = operator_norms(model, batches(1)[0], p=p).norms
    assert all(norm <= 0.3003 for norm in norms.values())
    assert constraint.gains == pytest.approx(norms, rel=1e-3)


def test_a_graph_is_captured_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, captured, replays = ["cuda:0"], [], []

    @contextmanager
    def device(chosen: torch.device) -> Any:
        before, current[0] = current[0], str(chosen)
        yield
        current[0] = before

    @contextmanager
    def graph(graph: Any, *, stream: Any, capture_error_mode: str) -> Any:
        captured.append((current[0], str(stream.device)))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    replaying._stream_of.cache_clear()
    replayed = Replayed[Tensor]()
    for _ in range(replaying.CALLS_BEFORE_CAPTURE + 3):
        replayed(torch.device("cuda", 1), "key", lambda: torch.zeros(()))
    replaying._stream_of.cache_clear()
    assert captured == [("cuda:1", "cuda:1")]
    assert len(replays) == 3
