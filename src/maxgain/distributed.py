"""Many devices: one collective per step, and weights that lie in shards."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import MaxGainError
from .layers import Layer

Group = Any | Literal[False] | None
"""A process group or a one-dimensional DeviceMesh whose ranks take the largest of their gains; None: the default
group, where there is one; False: no exchange."""


def resolve_group(group: Group) -> Any:
    """Return the process group of a device mesh, and anything else that names a group as it is."""
    if group is None or group is False:  # also where torch was built without distributed
        return group
    if hasattr(group, "get_group"):
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise MaxGainError(f"process_group must be a ProcessGroup, a DeviceMesh, None or False, not {group!r:.60}.")
    return group


def is_exchanged(group: Any) -> bool:
    """Whether other ranks take part."""
    if group is False or not (dist.is_available() and dist.is_initialized()):
        return False
    return group != dist.GroupMember.NON_GROUP_MEMBER and dist.get_world_size(group) > 1


def max_over_ranks(packed: Tensor, group: Any) -> Tensor:
    """Return the largest of all ranks' values, in the same tensor."""
    if is_exchanged(group):
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    return packed


def differing_ranks(layers: Collection[Layer], group: Any, device: torch.device) -> str:
    """One sentence about ranks that take each other's gains for their own; or nothing. A collective."""
    if not is_exchanged(group):
        return ""
    names = "\n".join(layer.name for layer in layers)
    weights = [layer.parameter for layer in layers if layer.parameter is not None]
    whole = [weight.detach() for weight in weights if not (is_sharded(weight) or is_flat_shard(weight))]
    total = sum((weight.double().sum().to(device) for weight in whole), start=0.0)
    total = torch.nan_to_num(torch.as_tensor(total, dtype=torch.float64, device=device))
    own = torch.stack([torch.full_like(total, zlib.crc32(names.encode())), total])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group)
    names_differ, weights_differ = (torch.stack(gathered) != own).any(0).tolist()
    if not names_differ and not weights_differ:
        return ""
    return (
        f"The ranks train different {'layers' if names_differ else 'weights'}, but take the largest of each other's "
        "gains. Pass process_group=, the ranks that train one model, or process_group=False."
    )


def is_sharded(tensor: Any) -> bool:
    """Whether ranks hold pieces of a tensor: a DTensor, as FSDP2 and tensor parallelism make them."""
    # Of its type: torch.compile answers False for the tensor itself.
    return getattr(type(tensor), "full_tensor", None) is not None


def is_flat_shard(weight: Any) -> bool:
    """Whether a weight is a piece of FullyShardedDataParallel's flat parameter (``use_orig_params=True``)."""
    return getattr(weight, "_fsdp_flattened", False) is True


def local(weight: Any) -> Tensor:
    """Return the part of a weight that this rank holds."""
    return weight.to_local() if is_sharded(weight) else weight  # type: ignore[no-any-return]


def local_rows(weight: Any, dim: int, part: tuple[int, int] | None) -> Tensor:
    """Return what this rank holds of a weight, or of a block of it along a dimension, (first, count)."""
    if part is None:
        return local(weight)
    (first, count), offset = part, 0
    if is_sharded(weight):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        weight, offset = local(weight), offsets[dim]
    start, end = (min(max(0, place - offset), weight.shape[dim]) for place in (first, first + count))
    return weight.narrow(dim, start, end - start)  # type: ignore[no-any-return]


def full(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered if it is sharded; then every rank must call this."""
    sharded: Any = tensor.detach()
    if not is_sharded(tensor):
        return sharded  # type: ignore[no-any-return]
    # Shards offloaded to the host are gathered where the ranks can exchange them.
    return sharded.to(sharded.device_mesh.device_type).full_tensor().to(tensor.device)  # type: ignore[no-any-return]


@contextlib.contextmanager
def gathered_parameters(module: nn.Module, instead: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Gather a module's sharded parameters, and replace some of its own, so that it can be run by itself."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            other = (instead or {}).get(name) if part is module else None
            if other is not None or is_sharded(parameter):
                swapped.append((part._parameters, name, parameter))
                part._parameters[name] = full(parameter) if other is None else other  # type: ignore[arg-type, assignment]
    try:
        yield
    finally:
        for parameters, name, parameter in swapped:
            parameters[name] = parameter
