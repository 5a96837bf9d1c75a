"""Promises 1 to 7 and 9 to 11 of the design, each kept by tests that are named after it.

8 (skipped steps), 12 (compilation, copies, ...) and 13 (data-parallel replicas) have files of their own.
"""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, prune

from maxgain import MaxGain
from maxgain.errors import MeasurementWarning, NotMeasuredError, UnsupportedLayerError
from maxgain.functional import gain

INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )


def images(batches: int, size: int = 6) -> list[Tensor]:
    return list(torch.randn(batches, size, 3, 8, 8))


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that -0.0 is not 0.0 and nan is nan."""
    return tensor.detach().clone().view(INT_OF_SIZE[tensor.element_size()]) if tensor.is_floating_point() else tensor


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nested structures of tensors and numbers agree in every bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)


def norm(v: Tensor, p: float) -> float:
    """‖v‖_p in Python's own floats, scaled so that nothing over- or underflows."""
    values = [abs(float(entry)) for entry in v.detach().flatten().tolist()]
    largest = max(values)
    if largest == 0 or math.isinf(p):
        return largest
    return float(largest * math.fsum((value / largest) ** p for value in values) ** (1 / p))


def largest_gain(z: Tensor, x: Tensor, p: float = 2.0) -> float:
    """The largest ‖z‖/‖x‖ over the first dimension."""
    return max(norm(z_, p) / norm(x_, p) for z_, x_ in zip(z, x, strict=True))


def frozen_in_time(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimiser whose steps change nothing, so that what a step changes is the projection's doing."""
    return torch.optim.SGD(parameters, lr=0.0)


# 1. gamma=inf changes nothing, bit for bit, and a layer under its bound is not touched.


@pytest.mark.parametrize("make_optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
@pytest.mark.parametrize("measure", ["stale", "fresh"])
def test_promise_01_inf_gamma_changes_nothing_bit_for_bit(
    make_optimiser: Callable[[Any], torch.optim.Optimizer], measure: Any
) -> None:
    data = images(20)

    def train(constrained: bool) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = conv_net()
        optimiser = make_optimiser(model.parameters())
        if constrained:
            MaxGain(model, gamma=math.inf, measure=measure).attach(optimiser)
        for batch in data:
            optimiser.zero_grad()
            model(batch).square().mean().backward()
            optimiser.step()
        return model.state_dict(), optimiser.state_dict(), torch.get_rng_state()

    assert same_bits(train(constrained=True), train(constrained=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promise_01_a_layer_under_its_bound_keeps_its_bits(dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 64, bias=False, dtype=dtype)
    with torch.no_grad():
        tiny = torch.finfo(dtype).tiny
        layer.weight[0, :4] = torch.tensor([-0.0, tiny, tiny / 2, -tiny / 4], dtype=dtype)
    before = bits(layer.weight)
    constraint = MaxGain(layer, gamma=2.0)
    layer(torch.randn(8, 64, dtype=dtype))
    constraint.step()
    assert 0 < constraint.gains[""] < 2.0
    assert constraint.scales == {"": 1.0}
    assert torch.equal(bits(layer.weight), before)


def test_promise_01_only_the_layer_above_its_bound_changes() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    with torch.no_grad():
        model[1].weight.mul_(100)
    before = copy.deepcopy(model.state_dict())
    constraint = MaxGain(model, gamma=2.0)
    model(torch.randn(4, 5))
    constraint.step()
    changed = {name for name, tensor in model.state_dict().items() if not same_bits(tensor, before[name])}
    assert changed == {"1.weight"}


# 2. Gain is of the linear part.


def test_promise_02_bias_is_no_part_of_the_gain_and_is_not_rescaled() -> None:
    layer = nn.Linear(6, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.fill_(100.0)
    x = torch.randn(9, 6, dtype=torch.float64)
    expected = largest_gain(x @ layer.weight.T, x)
    constraint = MaxGain(layer, gamma=0.1)
    layer(x)
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-9)
    weight = layer.weight.clone()
    constraint.step()
    torch.testing.assert_close(layer.weight, weight * (0.1 / expected), rtol=1e-9, atol=0)
    assert (layer.bias == 100.0).all()


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect"])
def test_promise_02_a_convolution_is_measured_as_it_is_applied(padding_mode: str) -> None:
    options: dict[str, Any] = {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "padding_mode": padding_mode}
    layer = nn.Conv2d(4, 6, 3, **options, dtype=torch.float64)
    x = torch.randn(5, 4, 9, 7, dtype=torch.float64)
    without_bias = nn.Conv2d(4, 6, 3, **options, bias=False, dtype=torch.float64)
    without_bias.weight = layer.weight
    constraint = MaxGain(layer)
    layer(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(without_bias(x), x), rel=1e-9)


def test_promise_02_batch_norm_is_its_scale_over_the_running_deviation() -> None:
    layer = nn.BatchNorm2d(3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -3.0, 0.5]))
        layer.bias.fill_(7.0)
        layer.running_mean.fill_(-5.0)  # type: ignore[union-attr]
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64) + 2
    constraint = MaxGain(layer, gamma=0.7)
    layer(x)
    assert layer.running_var is not None
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    expected = largest_gain(x * scale.view(3, 1, 1), x)
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-9)
    constraint.step()
    torch.testing.assert_close(layer.weight, torch.tensor([1.0, -3.0, 0.5]).double() * (0.7 / expected))
    assert (layer.bias == 7.0).all()


# 3. What an instance is.


def test_promise_03_tokens_are_instances_of_a_dense_layer_unless_samples_are_asked_for() -> None:
    layer = nn.Linear(4, 6, bias=False, dtype=torch.float64)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    z = layer(x)
    for instance, expected in (
        ("auto", largest_gain(z.flatten(0, 1), x.flatten(0, 1))),
        ("sample", largest_gain(z, x)),
    ):
        constraint = MaxGain(layer, instance=instance)  # type: ignore[arg-type]
        layer(x)
        assert constraint.gains[""] == pytest.approx(expected, rel=1e-12)
        constraint.detach()


def test_promise_03_samples_are_instances_of_a_convolution() -> None:
    layer = nn.Conv1d(2, 3, 3, bias=False, dtype=torch.float64)
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    constraint = MaxGain(layer)
    z = layer(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(z, x), rel=1e-12)


def test_promise_03_an_input_without_a_batch_is_one_instance() -> None:
    model = nn.ModuleList([nn.Linear(4, 2, bias=False).double(), nn.Conv2d(1, 2, 3, bias=False).double()])
    inputs = [torch.randn(4).double(), torch.randn(1, 5, 5).double()]
    for instance in ("auto", "sample"):
        constraint = MaxGain(model, instance=instance)  # type: ignore[arg-type]
        for name, layer, x in zip(("0", "1"), model, inputs, strict=True):
            assert largest_gain(layer(x)[None], x[None]) == pytest.approx(constraint.gains[name], rel=1e-12)
        constraint.detach()


# 4. Any p, any magnitude.

MAGNITUDES = {  # what squares or fourth powers would spoil in the dtype itself, or even in float32
    torch.float16: [300.0, 1e-6],
    torch.bfloat16: [1.0, 1e-25, 1e10, 1e30],
    torch.float32: [1.0, 1e-25, 1e10, 1e30],
    torch.float64: [1.0, 1e-25, 1e10, 1e-200, 1e150],
}


@pytest.mark.parametrize(
    ("dtype", "magnitude"), [(dtype, magnitude) for dtype, row in MAGNITUDES.items() for magnitude in row]
)
@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 4, math.inf])
def test_promise_04_any_p_and_any_magnitude(dtype: torch.dtype, magnitude: float, p: float) -> None:
    layer = nn.Linear(40, 30, bias=False, dtype=dtype)
    x = (torch.randn(5, 40, dtype=torch.float64) * magnitude).to(dtype)
    constraint = MaxGain(layer, p=p)
    z = layer(x)
    assert z.isfinite().all(), "the layer itself must not overflow for this to test anything"
    accuracy = 1e-12 if dtype == torch.float64 else 2e-6
    assert constraint.gains[""] == pytest.approx(largest_gain(z, x, p), rel=accuracy)


def test_promise_04_a_zero_input_has_no_gain() -> None:
    layer = nn.Linear(3, 3)
    constraint = MaxGain(layer)
    layer(torch.zeros(2, 3))
    assert constraint.gains == {"": 0.0}
    assert constraint.dropped == {"": 0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_promise_04_a_half_precision_weight_is_divided_in_single_precision(dtype: torch.dtype) -> None:
    layer = nn.Linear(40, 30, bias=False, dtype=dtype)
    before = layer.weight.detach().double()
    constraint = MaxGain(layer, gamma=0.1)
    layer(torch.randn(5, 40, dtype=dtype))
    gain = constraint.gains[""]
    constraint.step()
    assert torch.equal(layer.weight, (before / (gain / 0.1)).to(dtype))


# 5. Norms are taken inside the forward pass.


def test_promise_05_an_inplace_relu_that_follows_spoils_nothing() -> None:
    class Net(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.conv, self.norm, self.dense = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 3)
            self.inplace = inplace

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(F.relu(self.conv(x), inplace=self.inplace)), inplace=self.inplace)
            return F.relu(self.dense(x.flatten(1)), inplace=self.inplace)

    gains = []
    for inplace in (False, True):
        model = Net(inplace)
        constraint = MaxGain(model)
        torch.manual_seed(4)
        model(torch.randn(4, 3, 8, 8)).sum().backward()
        gains.append(constraint.gains)
    assert gains[0] == gains[1]


def test_promise_05_hooks_that_change_the_output_come_after_the_measurement() -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.register_forward_hook(lambda module, args, output: output * 1000)
    x = torch.randn(4, 3)
    constraint = MaxGain(layer)
    out = layer(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(out / 1000, x), rel=1e-5)


def test_promise_05_nor_does_a_hook_that_was_put_before_ours_later() -> None:
    layer, x = nn.Linear(6, 5), torch.randn(8, 6)
    constraints = [MaxGain(layer), MaxGain(layer, p=1.0)]
    layer.register_forward_hook(lambda module, args, output: 10 * output, prepend=True)
    for _ in range(2):
        output = layer(x)
        torch.testing.assert_close(output, 10 * nn.functional.linear(x, layer.weight, layer.bias))
        for constraint in constraints:
            explicit = gain(x @ layer.weight.T, x, constraint.p).max().item()
            assert constraint.gains[""] == pytest.approx(explicit, rel=1e-5)
            constraint.discard()


def test_promise_05_nor_does_a_hook_of_a_module_that_took_the_layers_place_and_its_hooks() -> None:
    old, new, x = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False), torch.randn(8, 6)
    constraint = MaxGain(old)
    new.weight = old.weight
    new.register_forward_hook(lambda module, args, output: 10 * output)
    for hook in old._forward_hooks.values():  # as torch's quantisation does
        new.register_forward_hook(hook, with_kwargs=True)
    new(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(x @ old.weight.T, x), rel=1e-5)


def test_promise_05_no_activation_is_kept_alive() -> None:
    model = conv_net()
    MaxGain(model)
    storages: list[StorageWeakRef] = []
    for layer in model:
        layer.register_forward_hook(
            lambda module, args, output: storages.extend(StorageWeakRef(t.untyped_storage()) for t in (*args, output))
        )
    with torch.no_grad():  # so that autograd keeps nothing either
        model(torch.randn(4, 3, 8, 8))
    gc.collect()
    assert len(storages) == 2 * len(model)
    assert all(storage.expired() for storage in storages)


def test_promise_05_nothing_more_is_saved_for_the_backward_pass() -> None:
    def saved(constrained: bool) -> list[torch.Size]:
        model = conv_net()
        shapes: list[torch.Size] = []
        if constrained:
            MaxGain(model)

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(4, 3, 8, 8))
        return shapes

    assert saved(constrained=True) == saved(constrained=False) != []


# 6. Training-mode forwards since the last step, all of them, and no others.


@pytest.mark.parametrize("measure", ["stale", "fresh"])
def test_promise_06_evaluation_between_steps_changes_nothing(measure: Any) -> None:
    data = images(6)
    others = torch.randn(100, 3, 8, 8)  # so many that the largest gain is among them

    def train(evaluate: bool) -> Any:
        torch.manual_seed(1)
        model = conv_net()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        constraint = MaxGain(model, gamma=0.3, measure=measure).attach(optimiser)
        history = []
        for batch in data:
            optimiser.zero_grad()
            model(batch).square().mean().backward()
            if evaluate:
                model.eval()
                model(others)
                model.train()
            optimiser.step()
            history.append(constraint.gains)
        return model.state_dict(), history

    assert same_bits(train(evaluate=True), train(evaluate=False))


@pytest.mark.parametrize("measure", ["stale", "fresh"])
def test_promise_06_the_maximum_runs_over_all_microbatches_since_the_last_step(measure: Any) -> None:
    layer = nn.Linear(6, 4, bias=False)
    weight = layer.weight.detach().clone()
    optimiser = frozen_in_time(layer.parameters())
    constraint = MaxGain(layer, gamma=math.inf, measure=measure).attach(optimiser)
    batches = torch.randn(2, 3, 5, 6)  # two steps of three microbatches
    windows = [max(largest_gain(x @ weight.T, x) for x in step) for step in batches]
    assert windows[0] != windows[1]
    for step, expected in zip(batches, windows, strict=True):
        for x in step:
            layer(x).sum().backward()
        optimiser.step()
        assert constraint.gains[""] == pytest.approx(expected, rel=1e-6)


# 7. Non-finite values never reach a weight.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_promise_07_instances_that_are_not_finite_are_dropped_counted_and_warned_about(value: float, p: float) -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(8, 6)
    x[2, 3] = x[5, 0] = value
    good = [row for row in range(8) if row not in (2, 5)]
    expected = largest_gain(x[good] @ layer.weight.T, x[good], p)
    before = layer.weight.detach().clone()
    constraint = MaxGain(layer, gamma=0.1, p=p)
    layer(x)
    with pytest.warns(MeasurementWarning, match="2 instances so far had a gain that is not finite"):
        constraint.step()
    assert constraint.dropped == {"": 2}
    assert constraint.gains[""] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(layer.weight, before * (0.1 / expected))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_promise_07_a_batch_without_a_finite_instance_changes_no_weight(value: float) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    before = [bits(parameter) for parameter in model.parameters()]
    constraint = MaxGain(model, gamma=0.01)
    model(torch.full((2, 2, 4, 4), value))
    with pytest.warns(MeasurementWarning):
        constraint.step()
    assert all(map(torch.equal, before, map(bits, model.parameters())))
    assert constraint.dropped == {"0": 2, "1": 2, "3": 2}


def test_promise_07_what_was_warned_about_once_is_not_warned_about_again() -> None:
    layer = nn.Linear(2, 2)
    constraint = MaxGain(layer)
    layer(torch.tensor([[math.nan, 1.0], [1.0, 1.0]]))
    with pytest.warns(MeasurementWarning):
        constraint.step()
    layer(torch.ones(2, 2))
    constraint.step()
    assert constraint.gains[""] > 0
    layer(torch.tensor([[math.inf, 1.0]] * 9))
    with pytest.warns(MeasurementWarning, match="10 instances"):
        constraint.gains


# 9. A weight is scaled once, by the largest of its gains.


def test_promise_09_a_head_tied_to_an_embedding_is_scaled_once() -> None:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 6)
            self.middle = nn.Linear(6, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.middle(self.embed(tokens)))
            return out

    model = Gpt()
    before = model.embed.weight.detach().clone()
    optimiser = frozen_in_time(model.parameters())
    constraint = MaxGain(model, gamma={"head": 0.5, "middle": math.inf}).attach(optimiser)
    model(torch.randint(10, (3, 7))).sum().backward()
    gain = constraint.gains["head"]
    optimiser.step()
    assert gain > 0.5
    torch.testing.assert_close(model.embed.weight, before * (0.5 / gain))
    assert model.head.weight is model.embed.weight


def test_promise_09_a_module_that_runs_twice_is_scaled_once_by_its_larger_gain() -> None:
    layer = nn.Linear(5, 5, bias=False)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    before = layer.weight.detach().clone()
    optimiser = frozen_in_time(model.parameters())
    constraint = MaxGain(model, gamma=0.1).attach(optimiser)
    x = torch.randn(6, 5)
    first, second = x @ before.T, torch.tanh(x @ before.T) @ before.T
    expected = max(largest_gain(first, x), largest_gain(second, torch.tanh(first)))
    model(x).sum().backward()
    optimiser.step()
    assert list(constraint.gains) == ["0"]
    torch.testing.assert_close(layer.weight, before * (0.1 / expected))


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.4), (0.4, 0.1), (math.inf, 0.1), (0.1, math.inf)])
def test_promise_09_two_layers_that_share_a_weight_scale_it_once_by_the_larger_excess(
    first: float, second: float
) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    constraint = MaxGain(model, gamma={"0": first, "2": second})
    model(torch.randn(7, 5))
    gains = constraint.gains
    constraint.step()
    factor = max(gains["0"] / first, gains["2"] / second)
    assert factor > 1
    torch.testing.assert_close(model[0].weight, before / factor)
    assert constraint.scales == pytest.approx({"0": 1 / factor, "2": 1 / factor})


# 10. Whose step projects what.


def test_promise_09_two_parameters_in_the_same_memory_are_divided_once() -> None:
    memory = torch.randn(6, 6)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    for layer in model:
        layer.weight = nn.Parameter(memory)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, 0.5).attach(optimiser)
    before = memory.clone()
    model(torch.randn(8, 6)).sum().backward()
    largest = max(constraint.gains.values())
    optimiser.step()
    torch.testing.assert_close(memory, before * 0.5 / largest)


@pytest.mark.parametrize("sizes", [(6, 5), (6, 6)])
def test_promise_09_a_weight_that_is_tied_by_its_transpose_is_refused_by_name(sizes: tuple[int, int]) -> None:
    encoder, decoder = nn.Linear(*sizes, bias=False), nn.Linear(*reversed(sizes), bias=False)
    decoder.weight = nn.Parameter(encoder.weight.T)
    model = nn.Sequential(encoder, decoder)
    with pytest.raises(
        UnsupportedLayerError, match=r"^layer '1' \(Linear\) .* its weight is that of '0' in another layout"
    ):
        MaxGain(model, 0.5).attach(torch.optim.SGD(model.parameters(), lr=0.0))
    MaxGain(model, 0.5, exclude="1").attach(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("make_optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_promise_10_optimiser_state_is_not_touched(make_optimiser: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = conv_net()
    optimiser = make_optimiser(model.parameters())
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append(copy.deepcopy((optimiser.state_dict(), [parameter.detach() for parameter in model.parameters()])))

    optimiser.register_step_post_hook(look)  # hooks run in the order of their registration: before the projection ...
    MaxGain(model, gamma=0.1).attach(optimiser)
    optimiser.register_step_post_hook(look)  # ... and after it
    for batch in images(3):
        model(batch).square().mean().backward()
        optimiser.step()
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert same_bits(before[0], after[0])
        assert not same_bits(before[1], after[1])


def test_promise_10_each_of_two_optimisers_projects_what_it_steps() -> None:
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    gan = nn.ModuleDict({"generator": generator, "judge": judge})
    ours = torch.optim.SGD(generator.parameters(), lr=0.1)
    theirs = torch.optim.Adam(judge.parameters(), lr=0.1)
    constraint = MaxGain(gan, gamma=0.02).attach(ours).attach(theirs)
    noise = torch.randn(5, 4)

    judge(generator(noise)).mean().backward()
    before = copy.deepcopy(gan.state_dict())
    theirs.step()
    assert same_bits(generator.state_dict(), {k[10:]: v for k, v in before.items() if k.startswith("generator")})
    scales = constraint.scales
    assert all((scale < 1) == name.startswith("judge") for name, scale in scales.items())

    judged = judge.state_dict()["0.weight"].clone()
    ours.step()  # the generator's gains of the same forward are still there
    assert all(scale < 1 for scale in constraint.scales.values())
    assert torch.equal(judge.state_dict()["0.weight"], judged)


def test_promise_10_the_judges_window_lasts_from_one_of_its_own_steps_to_the_next() -> None:
    generator, judge = nn.Linear(4, 6), nn.Linear(6, 1, bias=False)
    ours, theirs = frozen_in_time(generator.parameters()), frozen_in_time(judge.parameters())
    constraint = MaxGain(nn.ModuleDict({"g": generator, "j": judge}), gamma=math.inf).attach(ours).attach(theirs)
    row = judge.weight.detach()
    judge(row).sum().backward()  # its largest possible gain, in the generator's phase
    generator(torch.randn(2, 4)).sum().backward()
    ours.step()
    judge(torch.randn(3, 6)).sum().backward()
    theirs.step()
    assert constraint.gains["j"] == pytest.approx(norm(row, 2), rel=1e-6)


def test_promise_10_frozen_weights_and_those_of_no_optimiser_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    optimiser = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    before = copy.deepcopy(model.state_dict())
    constraint = MaxGain(model, gamma=0.01).attach(optimiser)
    model(torch.randn(3, 4)).sum().backward()
    optimiser.step()
    assert same_bits(model.state_dict()["0.weight"], before["0.weight"])
    assert same_bits(model.state_dict()["1.weight"], before["1.weight"])
    assert [constraint.scales[name] < 1 for name in ("0", "1", "2")] == [False, False, True]
    assert all(gain > 0.01 for gain in constraint.gains.values()), "they are measured all the same"


# 11. What cannot be measured is refused by name.


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this is to move to torchao
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})[0]


def int8_linear() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


def legacy(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still in many models
            return wrap(nn.Linear(4, 4))

    return make


INSIDE, COMPUTED = "inside one fused operation", "is not a parameter but computed from others"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "attention": (lambda: nn.MultiheadAttention(4, 2), "MultiheadAttention", INSIDE),
    "lstm": (lambda: nn.LSTM(4, 4), "LSTM", INSIDE),
    "gru": (lambda: nn.GRU(4, 4), "GRU", INSIDE),
    "rnn": (lambda: nn.RNN(4, 4), "RNN", INSIDE),
    "lstm cell": (lambda: nn.LSTMCell(4, 4), "LSTMCell", INSIDE),
    "gru cell": (lambda: nn.GRUCell(4, 4), "GRUCell", INSIDE),
    "rnn cell": (lambda: nn.RNNCell(4, 4), "RNNCell", INSIDE),
    "bilinear": (lambda: nn.Bilinear(4, 4, 4), "Bilinear", "linear in each of two inputs"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "ParametrizedLinear", COMPUTED),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), "ParametrizedConv2d", COMPUTED),
    "legacy weight norm": (legacy(nn.utils.weight_norm), "Linear", COMPUTED),
    "legacy spectral norm": (legacy(nn.utils.spectral_norm), "Linear", COMPUTED),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), "Linear", COMPUTED),
    "lazy": (lambda: nn.LazyLinear(4), "LazyLinear", "run one first"),
    "quantised": (quantised, "Linear", "its weight is quantised"),
    "int8": (int8_linear, "Linear", "its weight is quantised"),
    "batch norm without scale": (lambda: nn.BatchNorm1d(4, affine=False), "BatchNorm1d", "no weight to scale"),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        "BatchNorm1d",
        "no running variance",
    ),
}


@pytest.mark.parametrize(("make", "type_name", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_promise_11_what_cannot_be_measured_is_refused_by_name_and_the_remedy_helps(
    make: Callable[[], nn.Module], type_name: str, reason: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"core": make(), "core2": nn.Linear(4, 4)}))
    with pytest.raises(UnsupportedLayerError) as refusal:
        MaxGain(model)
    message = str(refusal.value)
    assert f"layer '1.core' ({type_name}) cannot be constrained" in message
    assert reason in message
    assert "Leave it out with exclude='1.core'" in message
    assert list(MaxGain(model, exclude="1.core").bounds) == ["0", "1.core2"], "and nothing else is left out"


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4), lambda: nn.Linear(4, 4, dtype=torch.complex64)])
def test_promise_11_a_model_that_is_such_a_layer_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedLayerError, match="the model itself"):
        MaxGain(make())


def test_promise_11_a_layer_that_recorded_nothing_by_the_first_step_is_named() -> None:
    class HalfUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = HalfUsed()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    MaxGain(model).attach(optimiser)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.warns(MeasurementWarning, match="not measured by the first step.*: 'unused'"):
        optimiser.step()
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()  # said once


def test_promise_11_a_model_in_evaluation_mode_is_not_left_unconstrained_in_silence() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    MaxGain(model).attach(optimiser)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(NotMeasuredError, match=r"none of the 3 layers was measured.*training mode") as error:
            optimiser.step()
        assert "compile" not in str(error.value), "a model may be compiled first"
    model.train()
    model[1].eval()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.warns(MeasurementWarning, match="not measured by the first step.*: '1'"):
        optimiser.step()


@pytest.mark.parametrize("how", ["forgotten", "replaced"])
def test_promise_11_a_layer_that_is_measured_no_longer_is_named_once(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    MaxGain(model).attach(optimiser)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(2, 3)).sum().backward()
            optimiser.step()

    train(5)
    if how == "forgotten":  # after an evaluation
        model.eval()
    else:  # as those who convert models do, who keep the parameters
        model[1], old = nn.Linear(3, 3), model[1]
        model[1].weight, model[1].bias = old.weight, old.bias
    said = "'0' .in evaluation mode., '1' .in evaluation mode." if how == "forgotten" else ": '1' .replaced."
    with pytest.warns(MeasurementWarning, match=f"measured no longer.*{said}") as warned:
        train(120)
    assert len(warned) == 1


def test_promise_11_what_is_evaluated_or_frozen_or_another_optimisers_is_not_named() -> None:
    model = nn.ModuleDict({"trunk": nn.Linear(3, 3), "frozen": nn.Linear(3, 3), "judge": nn.Linear(3, 1)})
    ours = torch.optim.SGD([*model["trunk"].parameters(), *model["frozen"].parameters()], lr=0.01)
    theirs = torch.optim.SGD(model["judge"].parameters(), lr=0.01)
    MaxGain(model).attach(ours).attach(theirs)
    for step in range(20):
        model.train()
        model["judge"](model["frozen"](model["trunk"](torch.randn(2, 3)))).sum().backward()
        theirs.step()
        model["judge"].eval()
        if step == 5:
            model["frozen"].eval().requires_grad_(False)
        ours.step()
        model.eval()
        model["trunk"](torch.randn(2, 3))


def test_promise_11_a_frozen_layer_need_not_be_measured() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].requires_grad_(False).eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model).attach(optimiser)
    model(torch.ones(2, 3)).sum().backward()
    optimiser.step()
    assert math.isnan(constraint.gains["1"])


def test_promise_11_parameters_without_a_bound_are_listed() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert MaxGain(model).unconstrained == ("0.weight", "1.weight", "1.bias", "2.bias")


def test_promise_07_an_accelerator_is_asked_for_its_counts_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of an accelerator, walked on the CPU: a look tells what the look before it asked for."""
    model = nn.Linear(3, 2)
    constraint = MaxGain(model)
    monkeypatch.setattr("maxgain.gain.STEPS_BETWEEN_LOOKS", 2)

    def look() -> None:
        # The counts lie on the host, but the constraint takes it for an accelerator.
        counts = constraint._tally.on(torch.device("cpu"))[1].clone()
        elsewhere = SimpleNamespace(device=torch.device("meta"), to=lambda device, non_blocking: counts)
        constraint._look_at(elsewhere)  # type: ignore[arg-type]

    look()
    model(torch.full((4, 3), math.inf))
    look()
    look()  # asks
    look()
    with pytest.warns(MeasurementWarning, match="4 instances so far"):
        look()
