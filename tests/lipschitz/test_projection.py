"""Lipschitz, the constraint on operator norms: what it divides by, keeps, refuses and leaves alone."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from explicit import same_bits
from maxgain import Lipschitz, operator_norms
from maxgain.errors import (
    BoundError,
    MaxGainError,
    MeasurementWarning,
    NormError,
    NotMeasuredError,
    StateError,
    UnsupportedLayerError,
)

PS = [1, 2, math.inf]
each_p = pytest.mark.parametrize("p", PS)


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


def batches(count: int, size: int = 8) -> Tensor:
    return torch.randn(count, 6, 2, size, size, generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, constraint: Lipschitz, data: Tensor, optimiser: Any = None, lr: float = 0.02) -> Any:
    optimiser = optimiser or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if optimiser not in constraint._optimizers:
        constraint.attach(optimiser)
    for x in data:
        optimiser.zero_grad()
        (model(x) - 3).square().mean().backward()
        optimiser.step()
    return optimiser


@each_p
def test_the_bound_holds_after_training(p):
    model = net()
    constraint = Lipschitz(model, {"1": 0.8, "7": 0.2, "*": 0.5}, p=p)
    free = net()
    train(free, Lipschitz(free, math.inf, p=p), batches(100))
    train(model, constraint, batches(100))
    x = batches(1)[0]
    without, norms = operator_norms(free, x, p=p).norms, operator_norms(model, x, p=p).norms
    assert all(without[name] > bound * 1.1 for name, bound in constraint.bounds.items()), "or it had nothing to do"
    slack = 0.01 if p == 2 else 1e-5
    assert all(norms[name] <= bound * (1 + slack) for name, bound in constraint.bounds.items())
    for _ in range(200):  # with weights that stand still the iteration converges
        constraint.step()
    norms = operator_norms(model, x, p=p).norms
    assert all(norms[name] <= bound * 1.0001 for name, bound in constraint.bounds.items())


@each_p
def test_a_step_divides_each_weight_by_its_norm_over_the_bound(p):
    model = net()
    before = copy.deepcopy(model)
    constraint = Lipschitz(model, 0.1, p=p, iterations=300)
    model.eval()
    x = batches(1)[0]
    model(x)
    constraint.step()
    expected = operator_norms(before, x, p=p).norms
    assert constraint.gains == pytest.approx(expected, rel=1e-4)
    for name in constraint.bounds:
        scaled = before.get_submodule(name).weight / (expected[name] / 0.1)
        torch.testing.assert_close(model.get_submodule(name).weight, scaled, rtol=1e-4, atol=1e-6)
        assert torch.equal(model.get_submodule(name).bias, before.get_submodule(name).bias)


@each_p
def test_a_bound_of_inf_changes_nothing_bit_for_bit(p):
    model, plain = net(), net()
    constraint = Lipschitz(model, math.inf, p=p)
    optimiser = train(model, constraint, batches(5))
    state = torch.get_rng_state()
    other = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    net()  # begins the random numbers again
    for x in batches(5):
        other.zero_grad()
        (plain(x) - 3).square().mean().backward()
        other.step()
    assert same_bits(model.state_dict(), plain.state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(optimiser.state) == len(other.state)
    assert all(gain > 0 for gain in constraint.gains.values())
    assert set(constraint.scales.values()) == {1.0}


def test_the_iteration_follows_when_another_direction_becomes_the_largest():
    layer = nn.Linear(4, 4, bias=False)
    constraint = Lipschitz(layer, math.inf)
    for step in range(40):
        layer.weight.data = torch.diag(torch.tensor([2.0 - step / 40, 1.0 + step / 40, 0.1, 0.2]))
        constraint.step()
        assert constraint.gains[""] == pytest.approx(layer.weight.max().item(), rel=1e-3)


def test_dense_layers_need_no_forward_and_convolutions_do():
    dense = nn.Linear(3, 3)
    Lipschitz(dense, 0.1).step()
    assert torch.linalg.matrix_norm(dense.weight, 2).item() == pytest.approx(0.1, rel=1e-4)
    assert not dense._forward_hooks
    conv = nn.Conv2d(1, 1, 3)
    constraint = Lipschitz(conv, 0.1)
    with pytest.raises(NotMeasuredError, match=r"none of the 1 layers was measured.*depends on its input size"):
        constraint.step()
    conv(torch.zeros(1, 1, 4, 4))
    constraint.step()
    assert constraint.scales[""] < 1
    constraint = Lipschitz(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 3)), 0.1)
    with pytest.warns(MeasurementWarning, match="not measured by the first step, so not constrained in it: '1'"):
        constraint.step()
    assert constraint.scales["0"] < 1
    assert constraint.scales["1"] == 1
    assert math.isnan(constraint.gains["1"])
    constraint.step()  # said once


@each_p
def test_the_norm_is_that_of_the_largest_input_seen_in_training_or_evaluation(p):
    conv = nn.Conv1d(1, 1, 5, padding=2, bias=False)
    constraint = Lipschitz(conv, math.inf, p=p, iterations=200)

    def norm(size: int) -> float:
        return operator_norms(conv, torch.zeros(1, 1, size), p=p).norms[""]

    conv(torch.zeros(2, 1, 3))
    constraint.step()
    assert constraint.gains[""] == pytest.approx(norm(3), rel=1e-5)
    with constraint.paused():
        conv(torch.zeros(2, 1, 9))
    constraint.step()
    assert constraint.gains[""] == pytest.approx(norm(3), rel=1e-5)
    conv.eval()(torch.zeros(2, 1, 7))
    conv(torch.zeros(2, 1, 4))
    constraint.step()
    assert constraint.gains[""] == pytest.approx(norm(7), rel=1e-5)
    assert norm(7) > norm(3)


@each_p
def test_a_run_goes_on_to_the_same_bits_from_a_saved_state(p):
    data = batches(12)
    model = net()
    constraint = Lipschitz(model, 0.5, p=p)
    optimiser = train(model, constraint, data[:6])
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict(), constraint.state_dict()))
    train(model, constraint, data[6:], optimiser)

    again = net()
    resumed = Lipschitz(again, 0.5, p=p)
    other = torch.optim.SGD(again.parameters(), lr=0.02, momentum=0.9)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(again, resumed, data[6:], other)
    assert same_bits(again.state_dict(), model.state_dict())
    assert same_bits(resumed.state_dict(), constraint.state_dict())


def test_a_state_can_be_loaded_before_and_after_anything_is_known():
    model = net()
    constraint = Lipschitz(model, 0.5)
    nothing = constraint.state_dict()
    train(model, constraint, batches(2))
    constraint.load_state_dict(nothing)
    assert constraint.state_dict().keys() == nothing.keys()
    assert all(math.isnan(gain) for gain in constraint.gains.values())
    with pytest.raises(StateError, match="another Lipschitz"):
        constraint.load_state_dict({"strange.size": torch.zeros(())})


WRONG = {
    "vectors of another input size": ("0.vectors", lambda good: good[..., :-1]),
    "one vector": ("0.vectors", lambda good: good[:1]),
    "vectors of whole numbers": ("3.vectors", lambda good: good.long()),
    "vectors of a wider layer": ("3.vectors", lambda good: torch.cat([good, good], 1)),
    "vectors that are not finite": ("3.vectors", lambda good: good * torch.nan),
    "vectors that are no tensor": ("3.vectors", lambda good: good.tolist()),
    "sizes of other channels": ("0.input_and_output", lambda good: good + 1),
    "sizes of other dimensions": ("0.input_and_output", lambda good: good[:, :2]),
    "sizes of nothing": ("0.input_and_output", lambda good: 0 * good),
    "sizes that are not whole": ("0.input_and_output", lambda good: good.float()),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_whose_vectors_or_sizes_do_not_fit_is_refused_and_changes_nothing(what):
    model = net()
    constraint = Lipschitz(model, 0.5)
    train(model, constraint, batches(2))
    name, spoilt = WRONG[what]
    good = constraint.state_dict()
    with pytest.raises(StateError, match=name):
        constraint.load_state_dict(good | {name: spoilt(good[name])})
    assert same_bits(constraint.state_dict(), good)
    constraint.load_state_dict(good)
    train(model, constraint, batches(1), torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_state_without_its_vectors_is_refused():
    model = net()
    constraint = Lipschitz(model, 0.5)
    train(model, constraint, batches(2))
    state = constraint.state_dict()
    del state["3.vectors"]
    with pytest.raises(StateError, match=r"lacks '3\.vectors'"):
        constraint.load_state_dict(state)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_a_copy_goes_on_with_the_copied_model(how):
    model = net()
    constraint = Lipschitz(model, 0.5, iterations=2)
    train(model, constraint, batches(3))
    twin, other = how((model, constraint))
    assert other.iterations == 2
    assert same_bits(other.state_dict(), constraint.state_dict())
    for one in (constraint, other):
        one.detach()
    for m, c in ((model, constraint), (twin, other)):
        train(m, c, batches(3), torch.optim.SGD(m.parameters(), lr=0.1))
    assert same_bits(twin.state_dict(), model.state_dict())


@each_p
def test_a_shared_weight_is_divided_once_by_the_largest_of_its_norms(p):
    first, second = nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Conv1d(1, 1, 3, padding=1, stride=2, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    before = first.weight.detach().clone()
    constraint = Lipschitz(model, 0.01, p=p)
    model(torch.zeros(1, 1, 9))
    constraint.step()
    largest = max(constraint.gains.values())
    torch.testing.assert_close(first.weight, before * (0.01 / largest))
    assert len(set(constraint.scales.values())) == 1


def test_frozen_weights_are_left_alone_but_measured():
    model = net()
    model[3].weight.requires_grad_(False)
    before = model[3].weight.clone()
    constraint = Lipschitz(model, 0.1)
    train(model, constraint, batches(2))
    assert torch.equal(model[3].weight, before)
    assert constraint.gains["3"] > 0.1
    assert constraint.scales["3"] == 1


def test_detached_it_leaves_nothing_behind_and_can_be_attached_again():
    model = net()
    constraint = Lipschitz(model, 0.1)
    optimiser = train(model, constraint, batches(1))
    constraint.detach()
    assert not any(module._forward_hooks for module in model.modules())
    train(model, constraint, batches(1), optimiser)
    assert any(scale < 1 for scale in constraint.scales.values())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_as_if_it_never_was(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    constraint = Lipschitz(model, 0.3).attach(optimiser)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflow in (False, True):
        before = copy.deepcopy((model.state_dict(), constraint.state_dict()))
        optimiser.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * (math.inf if overflow else 1)).backward()
        scaler.step(optimiser)
        scaler.update()
        if overflow:
            assert same_bits(model.state_dict(), before[0])
            for name in ("0.size", "1.size", "0.vectors", "1.vectors"):
                assert torch.equal(constraint.state_dict()[name], before[1][name])
        else:
            assert not same_bits(model.state_dict(), before[0])


@each_p
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_made_worse_and_forgotten_when_they_are_gone(p, value):
    layer = nn.Linear(3, 3)
    constraint = Lipschitz(layer, 0.5, p=p)
    good = layer.weight.detach().clone()
    constraint.step()
    with torch.no_grad():
        layer.weight.copy_(good)
        layer.weight[0, 0] = value
    constraint.step()
    assert layer.weight.isfinite().sum() == 8
    with torch.no_grad():
        layer.weight.copy_(good)
    for _ in range(50):
        constraint.step()
    assert operator_norms(layer, torch.zeros(1, 3), p=p).norms[""] <= 0.5001


@each_p
def test_a_weight_of_zeros_has_norm_0(p):
    layer = nn.Linear(3, 1)
    nn.init.zeros_(layer.weight)
    constraint = Lipschitz(layer, 0.5, p=p)
    constraint.step()
    assert constraint.gains == {"": 0.0}
    assert not layer.weight.any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_matrices_of_one_row_or_column(shape):
    layer = nn.Linear(*shape, bias=False)
    expected = torch.linalg.vector_norm(layer.weight).item()
    constraint = Lipschitz(layer, math.inf)
    constraint.step()
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)
    constraint.step()
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_of_weight(dtype):
    model = net().to(dtype)
    constraint = Lipschitz(model, 0.5)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, constraint, batches(5).to(dtype), optimiser)
    assert {p.dtype for p in model.parameters()} == {dtype}
    for _ in range(50):
        constraint.step()
    norms = operator_norms(model, batches(1)[0].to(dtype)).norms
    assert all(norm <= 0.5 * (1.01 if dtype == torch.bfloat16 else 1.0001) for norm in norms.values())


def test_a_step_inside_autocast_computes_in_full():
    model, plain = net(), net()
    for m, autocast in ((model, True), (plain, False)):
        constraint = Lipschitz(m, 0.1)
        m.eval()(batches(1)[0])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            constraint.step()
    assert same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_shows_its_sizes_too(dynamic):
    torch._dynamo.reset()
    counters.clear()
    model, plain = net(), net()
    constraint, other = Lipschitz(model, 0.3), Lipschitz(plain, 0.3)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    constraint.attach(optimiser)
    for x in batches(4):
        optimiser.zero_grad()
        (compiled(x) - 3).square().mean().backward()
        optimiser.step()
    train(plain, other, batches(4))
    assert constraint.gains == pytest.approx(other.gains, rel=1e-4)
    assert counters["stats"]["unique_graphs"] <= 2, "one before the sizes are known, one after"


def test_what_makes_no_sense_is_refused():
    with pytest.raises(NormError, match="p must be 1, 2 or inf"):
        Lipschitz(nn.Linear(2, 2), 1.0, p=3)
    with pytest.raises(MaxGainError, match=r"iterations must be a whole number from 1 to .*, not 0"):
        Lipschitz(nn.Linear(2, 2), 1.0, iterations=0)
    with pytest.raises(BoundError, match="bound must be a positive number"):
        Lipschitz(nn.Linear(2, 2), -1.0)
    with pytest.raises(UnsupportedLayerError):
        Lipschitz(nn.LSTM(2, 2), 1.0)


def test_all_ranks_divide_by_the_largest_norm_of_any(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(1, 1, 3))
    before = model[1].weight.detach().clone()
    calls = []

    def from_another_rank(sharing: object, packed: Tensor, group: object, names: list[str]) -> Tensor:
        calls.append(group)
        return torch.maximum(packed, torch.tensor([0.0, 5.0]))

    monkeypatch.setattr("maxgain.distributed.Sharing.largest", from_another_rank)
    Lipschitz(model, 2.0).step()  # the convolution has not run here, but there
    assert calls == [None]
    torch.testing.assert_close(model[1].weight, before / 2.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@each_p
def test_on_a_gpu_a_step_never_waits_and_can_be_captured(p):
    model = net().cuda()
    constraint = Lipschitz(model, 0.3, p=p)
    model(batches(1)[0].cuda())
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


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_weights_whose_squares_are_beyond_float32_are_held_to_their_bound_too(magnitude):
    layer = nn.Linear(6, 5)
    with torch.no_grad():
        layer.weight.mul_(magnitude)
    bound = 0.1 * torch.linalg.matrix_norm(layer.weight.double(), 2).item()
    constraint = Lipschitz(layer, bound)
    for _ in range(3):
        constraint.step()
    assert torch.linalg.matrix_norm(layer.weight.double(), 2).item() == pytest.approx(bound, rel=1e-2)
