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
from ..torch_quirks import Kept, base_of, hint, is_fused, kept_by, merge_before_code_is_made, users_of
from .together import LAYERS, measure_together

READ, KEPT = 128 << 20, 24 << 20
"""Layers wait for one launch until it has so many bytes to read, which takes much longer than launching; or until so
many wait in memory that nobody else keeps."""
SUMMED, LONGEST_SUMMED = 1 << 20, 1024
"""Rows are summed on the way if they have so many bytes, and are not too long for the compiler to keep a whole one."""
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
    kept = kept_by(graph)
    for node in measurements:
        if node.kwargs["instance_dims"] == [1] and node.kwargs["form"] == ["affine"] and node.kwargs["p"] in (1.0, 2.0):
            _add_up(graph, node)
    for group in list(_groups(measurements, kept)):
        if len(group) > 1:
            _merge(graph, group)


def _add_up(graph: Graph, node: Node) -> None:
    """Give a measurement the sums of powers of its rows, where the compiler has them at hand."""
    given: dict[str, Any] = dict(node.kwargs)
    (x,), (z,), (bias,) = given["x"], given["z"], given["vector"]
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default

    def call(function: Any, *arguments: Any) -> Node:
        made = graph.call_function(function, arguments)
        values = [one.meta["val"] if isinstance(one, Node) else one for one in arguments]
        with values[0].fake_mode:
            made.meta["val"] = function(*values)
        return made

    def sums(rows: Node) -> list[Node]:
        power = call(aten.abs.default, rows) if given["p"] == 1 else call(aten.mul.Tensor, rows, rows)
        return [call(aten.sum.dim_IntList, power, [-1])]

    with graph.inserting_before(node):
        if _is_worth_it(x) and is_fused(base_of(x)):
            given["x_sums"] = sums(call(convert, x, torch.float32))
        if _is_worth_it(z) and any(is_fused(user) for user in users_of(base_of(z))):
            wide = call(convert, z, torch.float32)
            if bias is not None:
                rounded = call(convert, call(convert, bias, z.meta["val"].dtype), torch.float32)
                wide = call(aten.sub.Tensor, wide, rounded)
            given["z_sums"] = sums(wide)
    node.kwargs = given


def _is_worth_it(rows: Node) -> bool:
    return bool(_size(rows) >= SUMMED and rows.meta["val"].shape[-1] <= LONGEST_SUMMED)


def _groups(measurements: list[Node], kept: Kept) -> Iterator[list[Node]]:
    """Those that can be made at the time of the last of them."""
    open_groups: list[list[Node]] = []
    for node in measurements:
        group = next((group for group in open_groups if _follows(node, group[-1])), None)
        if group is None:
            open_groups.append(group := [])
        group.append(node)
        if len(group) == LAYERS or sum(map(_read, group)) >= READ or _waiting(group, kept) >= KEPT:
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


def _read(node: Node) -> int:
    """How many bytes a measurement reads."""
    read: list[Any] = [one for name in ("x", "z") if node.kwargs[f"{name}_sums"] == [None] for one in node.kwargs[name]]  # type: ignore[union-attr]
    return sum(_size(one) for one in read if one is not None)


def _waiting(group: list[Node], kept: Kept) -> int:
    """How many bytes are in memory only because measurements wait for each other."""
    waiting: set[Any] = {one for node in group for name in ("x", "z") for one in node.kwargs[name]}  # type: ignore[union-attr]
    return sum(_size(one) for one in waiting if one is not None and not kept(one))


def _size(node: Node) -> int:
    value = node.meta["val"]
    return hint(value.numel()) * int(value.element_size())
