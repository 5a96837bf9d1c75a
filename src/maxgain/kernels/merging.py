"""The operators that torch.compile sees: one measurement per layer, several of which become one.

Written out, the changes of one packed tensor by many layers would become a chain of copies of it. The operators are
defined by the dispatcher's own means, because ``torch.library.custom_op`` adds some 100 µs of Python to every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import torch
from torch.fx import Graph, Node

from .._torch import Memory, memory_of, register_post_grad_pass
from . import multi_layer
from .multi_layer import Layer, record_layers, serialize

SEPARATE_BIAS = ("cuda",)
"""Where compiled code adds the bias of a convolution in other kernels than those of the convolution."""
TENSORS = ("x", "z", "vector", "variance")
"""Of a layer; the first two are activations."""
_library = torch.library.Library("maxgain", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "record(Tensor(a!) maxima, Tensor(b!) dropped, Tensor resting, int slot, Tensor x, Tensor? z, Tensor? vector, "
    "Tensor? variance, float eps, int channel_dims, int dims, float p) -> ()",
    tags=(torch.Tag.flexible_layout,),
)
_library.define(  # type: ignore[no-untyped-call]
    "record_layers(Tensor(a!) maxima, Tensor(b!) dropped, Tensor resting, Tensor[] activations, Tensor[] vectors, "
    "str layers, str call_site, float p) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


def _simulated(*arguments: Any) -> None:
    """What torch.compile calls to learn of the result, of which there is none."""
    register_post_grad_pass(merge, __file__, multi_layer.__file__)


def define_operator(record: Callable[..., None]) -> None:
    """Make ``maxgain::record`` of a function."""
    for backend in ("CPU", "CUDA", "MPS", "XPU"):
        _library.impl("record", record, backend)  # type: ignore[no-untyped-call]


for _backend in ("CPU", "CUDA", "MPS", "XPU"):
    _library.impl("record_layers", record_layers, _backend)  # type: ignore[no-untyped-call]
_library.impl("record", _simulated, "Meta")  # type: ignore[no-untyped-call]
_library.impl("record_layers", lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]


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
    z: Any = node.kwargs["z"]
    if z is None or z.target is not torch.ops.aten.convolution.default or memory_of(z) in kept:
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
    readers = [user for user in z.users if _measures(user) and user.kwargs["z"] is z]  # one for each constraint
    z.replace_all_uses_with(added)
    graph.erase_node(z)
    for reader in readers:
        reader.kwargs = {**reader.kwargs, "z": plain, "vector": None}


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


def _follows(node: Node, other: Node) -> bool:
    """Whether a measurement raises the maxima that another one has raised, and nobody else looks at these between."""
    own = {name: value for name, value in node.kwargs.items() if name not in (*Layer._fields, "_all_bases")}
    changed: Any = node.kwargs["_all_bases"]
    return (
        own == {name: other.kwargs[name] for name in own}
        and all(one.target is operator.getitem and one.args[0] is other and len(one.users) == 1 for one in changed)
        and len(other.users) == len(changed)
    )


def _merge(graph: Graph, group: list[Node]) -> None:
    first, last = group[0], group[-1]
    activations: dict[Any, int] = {}
    vectors: dict[Any, int] = {}
    layers = []
    for node in group:
        fixed: dict[str, Any] = {name: node.kwargs[name] for name in Layer._fields}
        for name, places in zip(TENSORS, (activations, activations, vectors, vectors), strict=True):
            if fixed[name] is not None:
                fixed[name] = places.setdefault(fixed[name], len(places))
        layers.append(Layer(**fixed))
    kwargs = {name: value for name, value in first.kwargs.items() if name not in Layer._fields}
    with graph.inserting_before(last):
        merged = graph.call_function(
            last.target,  # type: ignore[arg-type]
            (torch.ops.maxgain.record_layers.default,),
            {
                **kwargs,
                "activations": [*activations],
                "vectors": [*vectors],
                "layers": serialize(layers),
                # By a name that is never given again: equal code, made another time, may lay out memory otherwise.
                "call_site": uuid4().hex if all(map(_is_fixed, (*activations, *vectors))) else "",
            },
        )
    merged.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(merged)
    for node in reversed(group):
        for changed in list(node.users):
            graph.erase_node(changed)
        graph.erase_node(node)


def _is_fixed(node: Node) -> bool:
    """Whether a tensor has the same shape and layout in every call."""
    value = node.meta["val"]
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _waiting(groups: list[list[Node]], lasting: set[Memory]) -> int:
    """How many bytes are in memory only because measurements wait for each other."""
    given: list[Any] = [node.kwargs[name] for group in groups for node in group for name in ("x", "z")]
    read = {memory_of(one) for one in given if one is not None}
    return sum(memory.bytes for memory in read - lasting)
