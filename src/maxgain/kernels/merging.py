"""How torch.compile sees measuring: as one operator per layer, several of which become one.

Rows of large dense layers are summed by code that torch.compile makes, as it can add them up where it has them at hand:
in the kernels of layer norms and activations, say. The operator then reads the sums alone.

Written out, the changes of one packed tensor by many layers would become a chain of copies of it. The operators are
defined by the dispatcher's own means, because ``torch.library.custom_op`` adds some 100 µs of Python to every call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..functional import record
from ..torch_quirks import Kept, hint, kept_by, merge_before_code_is_made
from .together import LAYERS, measure_together

BYTES = 24 << 20
"""Layers wait for one launch until it has so much to read, as reading takes longer than launching then. So much memory
compiled code may keep for longer than it would. And so large is a dense layer whose rows are summed on the way."""
LISTS = ("indices", "form", "x", "z", "vector", "variance", "eps", "channel_dims", "instance_dims", "x_sums", "z_sums")

_library = torch.library.Library("maxgain", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "record(Tensor(a!) maxima, Tensor(b!) dropped, int index, Tensor gains) -> ()"
)
_library.define(  # type: ignore[no-untyped-call]
    "measure(Tensor(a!) maxima, Tensor(b!) dropped, int[] indices, str[] form, Tensor[] x, Tensor?[] z, "
    "Tensor?[] vector, Tensor?[] variance, float[] eps, int[] channel_dims, int[] instance_dims, "
    "Tensor?[] x_sums, Tensor?[] z_sums, float p) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


def _simulated(*arguments: Any) -> None:
    """What torch.compile calls to learn of the result, of which there is none."""
    merge_before_code_is_made(merge, __file__)


for _backend in ("CPU", "CUDA", "MPS", "XPU"):
    _library.impl("record", record, _backend)  # type: ignore[no-untyped-call]
    _library.impl("measure", measure_together, _backend)  # type: ignore[no-untyped-call]
_library.impl("record", lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]
_library.impl("measure", _simulated, "Meta")  # type: ignore[no-untyped-call]


def merge(graph: Graph) -> None:
    """Have a graph, in which nothing is changed in place, measure layers together that it measures one by one."""
    measurements = [node for node in graph.nodes if _measures(node)]
    if not measurements:
        return
    for node in measurements:
        if _bytes(node) >= BYTES and node.kwargs["instance_dims"] == [1] and node.kwargs["p"] in (1.0, 2.0):
            _add_up(graph, node)
    for group in list(_groups(measurements, kept_by(graph))):
        if len(group) > 1:
            _merge(graph, group)


def _add_up(graph: Graph, node: Node) -> None:
    """Give a measurement the sums of powers of its rows."""
    given: dict[str, Any] = dict(node.kwargs)
    (form,), (x,), (z,), (bias,) = (given[name] for name in ("form", "x", "z", "vector"))
    if form != "affine":
        return
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default

    def call(function: Any, *arguments: Any) -> Node:
        made = graph.call_function(function, arguments)
        values = [one.meta["val"] if isinstance(one, Node) else one for one in arguments]
        with values[0].fake_mode:
            made.meta["val"] = function(*values)
        return made

    def sums(rows: Node) -> Node:
        power = call(aten.abs.default, rows) if given["p"] == 1 else call(aten.mul.Tensor, rows, rows)
        return call(aten.sum.dim_IntList, power, [-1])

    with graph.inserting_before(node):
        wide = call(convert, z, torch.float32)
        if bias is not None:
            rounded = call(convert, call(convert, bias, z.meta["val"].dtype), torch.float32)
            wide = call(aten.sub.Tensor, wide, rounded)
        x_sums, z_sums = sums(call(convert, x, torch.float32)), sums(wide)
    node.kwargs = given | {"x_sums": [x_sums], "z_sums": [z_sums]}


def _groups(measurements: list[Node], kept: Kept) -> Iterator[list[Node]]:
    """Those that can be made at the time of the last of them."""
    open_groups: list[list[Node]] = []
    for node in measurements:
        group = next((group for group in open_groups if _follows(node, group[-1])), None)
        if group is None:
            open_groups.append(group := [])
        group.append(node)
        if len(group) == LAYERS or sum(_bytes(one, kept) for one in group) >= BYTES:
            open_groups.remove(group)
            yield group
    yield from open_groups


def _measures(node: Node) -> bool:
    return bool(
        node.op == "call_function"
        and getattr(node.target, "__name__", None) == "auto_functionalized_v2"
        and node.args
        and node.args[0] is torch.ops.maxgain.measure.default
    )


def _follows(node: Node, other: Node) -> bool:
    """Whether a measurement raises the maxima that another one has raised, and nobody else looks at these between."""
    own = {name: value for name, value in node.kwargs.items() if name not in (*LISTS, "_all_bases")}
    changed: Any = node.kwargs["_all_bases"]
    return (
        own == {name: other.kwargs[name] for name in own}
        and all(one.target is operator.getitem and one.args[0] is other and len(one.users) == 1 for one in changed)
        and len(other.users) == len(changed)
    )


def _merge(graph: Graph, group: list[Node]) -> None:
    first, last = group[0], group[-1]
    kwargs = dict(first.kwargs)
    for name in LISTS:
        kwargs[name] = [one for node in group for one in node.kwargs[name]]  # type: ignore[union-attr]
    with graph.inserting_before(last):
        merged = graph.call_function(last.target, first.args, kwargs)  # type: ignore[arg-type]
    merged.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(merged)
    for node in reversed(group):
        for changed in list(node.users):
            graph.erase_node(changed)
        graph.erase_node(node)


def _bytes(node: Node, kept: Kept = lambda one: False) -> int:
    """What a measurement reads; or, if that is added up, what it keeps in memory and nobody else does."""
    read: list[Any] = [one for one in (*node.kwargs["x"], *node.kwargs["z"]) if one is not None]  # type: ignore[misc]
    if node.kwargs["x_sums"] != [None]:
        read = [one for one in read if not kept(one)]
    return sum(hint(one.meta["val"].numel()) * one.meta["val"].element_size() for one in read)
