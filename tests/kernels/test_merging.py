"""Compiled code measures several layers by one operator, and finds what it would find by one for each."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table

from kernel_runs import Part
from maxgain._torch import memory_of
from maxgain.gain import record
from maxgain.kernels import merging, record_compiled
from maxgain.kernels.planning import NUMBERS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]
Step = Callable[[Callable[..., None], Tensor, Tensor, list[Tensor]], Any]
RESTING = torch.zeros(100, dtype=torch.int32)
OURS = torch.ops.maxgain.record.default


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with config.patch(post_grad_custom_post_pass=None):
        yield


def measure(maxima: Tensor, dropped: Tensor, index: int, part: Part, dims: int, p: float) -> None:
    record(maxima, dropped, RESTING, index, *part, dims, p)


def measure_compiled(maxima: Tensor, dropped: Tensor, index: int, part: Part, dims: int, p: float) -> None:
    record_compiled(maxima, dropped, RESTING, index, *part, dims, p)


class Merging:
    """Merges as Inductor has it done, on the graphs that it would, and runs these without making code of them."""

    def __init__(self, look: Callable[[torch.fx.Graph], None] = merging.merge) -> None:
        self.operators: list[list[int]] = []
        self.graphs = 0
        self.look = look
        self.backend = aot_autograd(
            fw_compiler=self.compile,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    def compile(self, module: torch.fx.GraphModule, _: Any) -> Any:
        from torch._inductor.fx_passes.post_grad import remove_noop_ops

        remove_noop_ops(module.graph)  # as Inductor does before
        self.look(module.graph)
        module.recompile()
        self.graphs += 1
        for node in module.graph.nodes:
            if node.args and node.args[0] is OURS:
                self.operators.append([*node.kwargs["layers"][::NUMBERS]])
        return make_boxed_func(module.forward)


def affine(x: Tensor, z: Tensor) -> tuple[Part, int, float]:
    return Part(x, z, None, None, 0.0, 3), 3, 2.0


def run(step: Callable[..., Any], how: Callable[..., None], images: list[Tensor]) -> list[list[float]]:
    maxima, dropped = torch.full((50,), -1.0), torch.zeros(50, dtype=torch.int64)
    result = step(how, maxima, dropped, [image.clone() for image in images])
    return [maxima.tolist(), dropped.tolist(), *([value.tolist() for value in result or ()])]


def operators(step: Step, images: list[Tensor], merging: Merging | None = None, **options: Any) -> list[list[int]]:
    """Which layers each operator of the compiled code measures; it finds what the code that is not compiled finds."""
    expected, merging = run(step, measure, images), merging or Merging()
    found = run(torch.compile(step, fullgraph=True, backend=merging.backend, **options), measure_compiled, images)
    for some, others in zip(found, expected, strict=True):
        assert torch.tensor(some).flatten().tolist() == pytest.approx(
            torch.tensor(others).flatten().tolist(), rel=1e-5, abs=1e-8
        )
    return merging.operators


def some_images(count: int = 6, side: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, side, side, generator=generator) for _ in range(count)]


def one_after_another(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> None:
    for index in range(len(images) - 1):
        measure(maxima, dropped, index, *affine(images[index], images[index + 1]))


def test_layers_that_are_measured_one_after_another_share_an_operator():
    assert operators(one_after_another, some_images()) == [[0, 1, 2, 3, 4]]


def test_what_is_changed_in_place_after_a_measurement_is_measured_as_it_was():
    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> list[Tensor]:
        one, two, three, *_ = images
        measure(maxima, dropped, 0, *affine(one, two))
        two.relu_()
        measure(maxima, dropped, 1, *affine(two, three))
        two.mul_(100)
        one.zero_()
        return [two + one]

    assert operators(step, some_images()) == [[0, 1]]


def test_a_maximum_that_is_read_between_is_that_of_the_layers_before():
    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> list[Tensor]:
        one, two, three, four, *_ = images
        measure(maxima, dropped, 0, *affine(one, two))
        measure(maxima, dropped, 1, *affine(two, three))
        between = maxima + 1
        measure(maxima, dropped, 0, *affine(two, one))
        measure(maxima, dropped, 1, *affine(three, four))
        return [between]

    assert operators(step, some_images()) == [[0, 1], [0, 1]]


def test_two_constraints_keep_their_maxima_apart():
    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> list[Tensor]:
        others, also_dropped = maxima - 5, dropped + 3
        for index in range(3):
            measure(maxima, dropped, index, *affine(images[index], images[index + 1]))
            measure(others, also_dropped, index, *affine(images[index + 1], images[index]))
        return [others, also_dropped]

    assert operators(step, some_images()) == [[0, 1, 2], [0, 1, 2]]


def test_another_norm_is_not_measured_by_the_same_operator():
    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> None:
        one, two, *_ = images
        part, dims, _ = affine(one, two)
        for index, p in enumerate((2.0, 2.0, 1.0)):
            measure(maxima, dropped, index, part, dims, p)

    assert operators(step, some_images()) == [[0, 1], [2]]


def test_batches_of_other_sizes_need_no_compilation():
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    step = torch.compile(one_after_another, fullgraph=True, dynamic=True, backend=backend)
    for size in (5, 6, 9, 40):
        images = [image[:1].expand(size, 3, 4, 4).clone() for image in some_images(3)]
        assert run(step, measure_compiled, images) == run(one_after_another, measure, images)
    assert len(compiled) == 1
    assert operators(one_after_another, some_images(), dynamic=True) == [[0, 1, 2, 3, 4]]


def test_a_batch_norm_whose_epsilon_was_changed_is_measured_with_the_new_one():
    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor], eps: float) -> None:
        for index, x in enumerate(images):
            scale, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
            measure(maxima, dropped, index, Part(x, None, scale, variance, eps, 3), 3, 2.0)

    compiled = torch.compile(step, fullgraph=True, backend=Merging().backend)
    for eps in (1e-5, 0.1, 0.5, 2.0):
        found = run(partial(compiled, eps=eps), measure_compiled, some_images())
        assert found[0] == pytest.approx(run(partial(step, eps=eps), measure, some_images())[0], rel=1e-5)


def test_sizes_that_are_known_only_when_the_code_runs_do_not_matter():
    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> list[Tensor]:
        one_after_another(measure, maxima, dropped, images)
        return [images[0][images[0] > 0] + 1]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert operators(step, some_images()) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("leaves_out_bias", [False, True])
def test_gradients_are_what_they_are_without(leaves_out_bias, monkeypatch):
    if leaves_out_bias:
        monkeypatch.setattr(merging, "SEPARATE_BIAS", ("cpu",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 8, 8)

    def forward(maxima: Tensor, dropped: Tensor) -> Tensor:
        one = model[0](x)
        measure_compiled(maxima, dropped, 0, Part(x, one, model[0].bias.detach(), None, 0.0, 3), 3, 2.0)
        two = model[1](one)
        three = model[2](two)
        measure_compiled(maxima, dropped, 1, Part(two, three, model[2].bias.detach(), None, 0.0, 3), 3, 2.0)
        return model[3](three).square().sum()

    def gradients(forward: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        maxima, dropped = torch.full((2,), -1.0), torch.zeros(2, dtype=torch.int64)
        forward(maxima, dropped).backward()
        return [maxima, *(parameter.grad.clone() for parameter in model.parameters())]

    for one, other in zip(
        gradients(forward), gradients(torch.compile(forward, fullgraph=True, backend=Merging().backend)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("convolution", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("is_returned", [False, True])
def test_a_convolution_is_measured_before_its_bias_is_added_if_nobody_else_wants_it_afterwards(
    convolution, is_returned, monkeypatch
):
    monkeypatch.setattr(merging, "SEPARATE_BIAS", ("cpu",))
    torch.manual_seed(0)
    layer = convolution(3, 5, 3)

    def step(measure: Callable[..., None], maxima: Tensor, dropped: Tensor, images: list[Tensor]) -> list[Tensor]:
        for index, x in enumerate(images):
            z = layer(x)
            part = Part(x.detach(), z.detach(), layer.bias.detach(), None, 0.0, 3)
            for position in (2 * index, 2 * index + 1):  # as two constraints would
                measure(maxima, dropped, position, part, 3, 2.0)
        return [z if is_returned else z.relu()]

    def noted(graph: torch.fx.Graph) -> None:
        merging.merge(graph)
        read.extend(
            graph_input.target is torch.ops.aten.convolution.default
            for node in graph.nodes
            if node.args[:1] == (OURS,)
            for graph_input in node.kwargs["activations"]
            if graph_input.op != "placeholder"
        )
        biases.extend(
            node.args[2] is not None for node in graph.nodes if node.target is torch.ops.aten.convolution.default
        )

    biases: list[bool] = []
    read: list[bool] = []
    assert [index for some in operators(step, some_images(3), Merging(noted)) for index in some] == [*range(6)]
    assert all(read)
    assert biases == [False, False, is_returned]


@pytest.mark.slow
def test_inductor_merges_and_leaves_a_function_of_somebody_else_in_its_place():
    seen: list[Any] = []
    expected = run(one_after_another, measure, some_images())
    with config.patch(force_disable_caches=True):
        for is_taken in (False, True):
            torch.compiler.reset()
            with config.patch(post_grad_custom_post_pass=seen.append if is_taken else None):
                found = run(torch.compile(one_after_another, fullgraph=True), measure_compiled, some_images())
                assert found[0] == pytest.approx(expected[0], rel=1e-5)
                assert (config.post_grad_custom_post_pass == seen.append) is is_taken
    assert seen


def peak(graph: torch.fx.Graph) -> int:
    """The most bytes in use, if all is let go of after its last use but for what the graph is given or returns."""
    nodes = list(graph.nodes)
    given = {memory_of(node) for node in nodes if node.op == "placeholder"}
    last = {memory_of(one): position for position, node in enumerate(nodes) for one in node.all_input_nodes}
    in_use, most = set(), 0
    for position, node in enumerate(nodes):
        in_use.add(memory_of(node))
        most = max(most, sum(memory.bytes for memory in in_use))
        in_use -= {memory for memory in in_use - given if last.get(memory, -1) <= position}
    return most


@pytest.mark.parametrize(
    ("channels", "batchnorm", "constraints"),
    [([3, 32, 32, 16, 16, 8, 8], False, 1), ([3, 32, 32, 16, 16, 8, 8], True, 1), ([8] * 25, False, 3)],
)
def test_waiting_for_other_layers_takes_no_memory(channels, batchnorm, constraints):
    """Without batch norm the backward needs no output of a convolution: it must not wait where memory is full."""
    torch.manual_seed(0)
    layers = []
    for one, other in pairwise(channels):
        norm = nn.BatchNorm2d(other) if batchnorm else nn.Identity()
        layers += [nn.Conv2d(one, other, 3, 1 if one == other else 2, 1), norm, nn.ReLU()]
    peaks = []

    def noted(graph: torch.fx.Graph) -> None:
        before = peak(graph)
        merging.merge(graph)
        peaks.append((before, peak(graph)))

    def step(x: Tensor, tallies: list[tuple[Tensor, Tensor]]) -> Tensor:
        for index, layer in enumerate(layers):
            y = layer(x)
            if isinstance(layer, nn.Conv2d):
                measure_compiled(*tallies[index // 3 % constraints], index, *affine(x, y))
            x = y
        return x.sum()

    count = len(layers)
    tallies = [(torch.full((count,), -1.0), torch.zeros(count, dtype=torch.int64)) for _ in range(constraints)]
    compiled = torch.compile(step, fullgraph=True, backend=Merging(noted).backend)
    compiled(torch.randn(4, channels[0], 64, 64), tallies).backward()
    assert (sum(maxima for maxima, _ in tallies)[::3] > 1 - constraints).all()
    assert peaks
    assert all(after <= before for before, after in peaks)
