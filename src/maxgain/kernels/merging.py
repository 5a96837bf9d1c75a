"""The operator that torch.compile sees: one measurement per layer, several of which become one.

Written out, the changes of one packed tensor by many layers would become a chain of copies of it. The operator is
defined by the dispatcher's own means, because ``torch.library.custom_op`` adds some 100 µs of Python to every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .._torch import Memory, memory_of, register_post_grad_pass
from . import planning
from .measuring import as_lists, record_layers
from .planning import NUMBERS, Layer

SEPARATE_BIAS = ("cuda",)
"""Where compiled code adds the bias of a convolution in other kernels than those of the convolution."""
JOINED = ("activations", "vectors", "layers", "eps")
"""Arguments that are lists, of all layers."""
_library = torch.library.Library("maxgain", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "record(Tensor(a!) maxima, Tensor(b!) dropped, Tensor resting, Tensor[] activations, Tensor[] vectors, "
    "int[] layers, float[] eps, float p) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


def _simulated(*arguments: Any) -> None:
    """What torch.compile calls to learn of the result, of which there is none."""
    register_post_grad_pass(merge, __file__, planning.__file__)


_library.impl("record", _simulated, "Meta")  # type: ignore[no-untyped-call]


def define_operator(record: Callable[..., None], is_idle: Callable[[Tensor, Sequence[int]], bool]) -> None:
    """Make ``maxgain::record`` of a function that measures one layer, and of one that says whether slots rest."""
    implementation = partial(record_layers, record=record, is_idle=is_idle)
    for backend in ("CPU", "CUDA", "MPS", "XPU"):
        _library.impl("record", implementation, backend)  # type: ignore[no-untyped-call]


def record_compiled(
    maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, x: Tensor, z: Tensor | None, vector: Tensor | None,
    variance: Tensor | None, eps: float, channel_dims: int, dims: int, p: float,
) -> None:  # fmt: skip
    """Call the operator for one layer, with the arguments of ``maxgain.gain.record``."""
    activations, vectors, numbers = as_lists(slot, x, z, vector, variance, channel_dims, dims)
    torch.ops.maxgain.record(maxima, dropped, resting, activations, vectors, numbers, [eps], p)


def merge(graph: Graph) -> None:
    """Have a graph, in which nothing is changed in place, measure layers together that it measures one by one."""
    if measurements := [node for node in graph.nodes if _measures(node)]:
        kept = _kept(graph)
        for node in measurements:
            _leave_out_bias(graph, node, kept)
        for group in list(_groups(graph)):
            if len(group) > 1:
                _merge(graph, group)


def _leave_out_bias(graph: Graph, node: Node, kept: set[Memory]) -> None:
    """Have a convolution measured before its bias is added, where the code will do that by itself.

    With the bias its output would be written to memory for us alone; without, it has to be.
    """
    read = _activations(node)
    z: Any = read[-1]
    if len(read) == 1 or z.target is not torch.ops.aten.convolution.default or memory_of(z) in kept:
        return
    x, weight, bias, *rest = z.args
    value = z.meta["val"]
    if bias is None or value.device.type not in SEPARATE_BIAS:
        return
    shape = [-1, *[1] * (value.dim() - 2)]
    with graph.inserting_before(z):
        plain = graph.call_function(z.target, (x, weight, None, *rest))
        along = graph.call_function(torch.ops.aten.view.default, (bias, shape))
        added = graph.call_function(torch.ops.aten.add.Tensor, (plain, along))
    plain.meta["val"], along.meta["val"], added.meta["val"] = value.clone(), bias.meta["val"].view(shape), value
    readers = [user for user in z.users if _measures(user) and _activations(user)[1:] == [z]]  # of all constraints
    z.replace_all_uses_with(added)
    graph.erase_node(z)
    for reader in readers:
        layer = _layer(reader)._replace(vector=-1)
        changed: Any = {"activations": [_activations(reader)[0], plain], "vectors": [], "layers": [*layer[:NUMBERS]]}
        reader.kwargs = {**reader.kwargs, **changed}


def _kept(graph: Graph) -> set[Memory]:
    """What is in use when the graph is done, for the backward say."""
    return {memory_of(one) for node in graph.nodes if node.op == "output" for one in node.all_input_nodes}


def _groups(graph: Graph) -> Iterator[list[Node]]:
    """The measurements that can be made at the time of the last of them.

    What waits for them stays in memory, but never more than is yet to be kept there, for the backward say. So no more
    is in use than at the end of the graph.
    """
    kept = _kept(graph)
    given = {memory_of(node) for node in graph.nodes if node.op == "placeholder"}
    lasting, to_come = kept | given, kept - given
    open_groups: list[list[Node]] = []
    for node in graph.nodes:
        to_come.discard(memory_of(node))
        if not _measures(node):
            continue
        available = sum(memory.bytes for memory in to_come)
        while _waiting(open_groups, lasting) > available:
            yield open_groups.pop(0)
        group = next((group for group in open_groups if _follows(node, group[-1])), [])
        if not group:
            open_groups.append(group)
        group.append(node)
    yield from open_groups


def _measures(node: Node) -> bool:
    """Whether a layer is measured here."""
    return bool(
        node.op == "call_function"
        and getattr(node.target, "__name__", None) == "auto_functionalized_v2"
        and node.args
        and node.args[0] is torch.ops.maxgain.record.default
    )


def _activations(node: Node) -> list[Node]:
    """The tensors that a measurement reads: its layer's input, and its output if there is one."""
    return [*node.kwargs["activations"]]  # type: ignore[misc]


def _layer(node: Node) -> Layer:
    """The one layer of a measurement that was not merged."""
    return Layer(*node.kwargs["layers"])  # type: ignore[misc]


def _follows(node: Node, other: Node) -> bool:
    """Whether a measurement raises the maxima that another one has raised, and nobody else looks at these between."""
    own = {name: value for name, value in node.kwargs.items() if name not in (*JOINED, "_all_bases")}
    changed: Any = node.kwargs["_all_bases"]
    return (
        own == {name: other.kwargs[name] for name in own}
        and all(one.target is operator.getitem and one.args[0] is other and len(one.users) == 1 for one in changed)
        and len(other.users) == len(changed)
    )


def _merge(graph: Graph, group: list[Node]) -> None:
    """Measure where the last of a group does."""
    last = group[-1]
    activations: dict[Any, int] = {}
    vectors: dict[Any, int] = {}
    layers: list[int] = []
    eps: list[Any] = []
    given: Any
    for node in group:
        layer, given = _layer(node), (node.kwargs["activations"], node.kwargs["vectors"])
        at = []
        for one, places in zip(layer.tensors(*given), (activations, activations, vectors, vectors), strict=True):
            at.append(-1 if one is None else places.setdefault(one, len(places)))
        layers += [layer.slot, *at, layer.channel_dims, layer.dims]
        eps += node.kwargs["eps"]  # type: ignore[arg-type]
    joined = dict(zip(JOINED, ([*activations], [*vectors], layers, eps), strict=True))
    with graph.inserting_before(last):
        merged = graph.call_function(last.target, last.args, {**group[0].kwargs, **joined})  # type: ignore[arg-type]
    merged.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(merged)
    for node in reversed(group):
        for changed in list(node.users):
            graph.erase_node(changed)
        graph.erase_node(node)


def _waiting(groups: list[list[Node]], lasting: set[Memory]) -> int:
    """How many bytes are in memory only because measurements wait for each other."""
    read = {memory_of(one) for group in groups for node in group for one in _activations(node)}
    return sum(memory.bytes for memory in read - lasting)
