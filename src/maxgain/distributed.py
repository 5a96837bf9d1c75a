"""What training on many devices needs: one collective per step, and weights that lie in shards."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import torch_quirks
from .errors import MaxGainError, StateError

Group = dist.ProcessGroup | Literal[False] | None
"""Whose ranks share their maxima: None is the default group, where there is one; False means: do not share."""


class InThisProcess:
    """A process group on its way into a copy of a constraint: there it is the same one, and in no file at all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> dist.ProcessGroup:
        return self.group

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a constraint with a process group of its own cannot be pickled, because no other process has that group: "
            "save the state_dict() of model and constraint, or make the constraint without process_group."
        )


def check_group(group: Any) -> Group:
    """Return the process group if it is one, or False, or what torch gives to ranks outside of a group."""
    if isinstance(group, InThisProcess):
        return group.group
    outside = dist.is_available() and isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
    if not (group is False or outside or isinstance(group, dist.ProcessGroup)):
        raise MaxGainError(
            f"process_group must be a torch.distributed.ProcessGroup, None or False, not {group!r:.60}; "
            "of a device mesh it is mesh.get_group()."
        )
    return group  # type: ignore[no-any-return]


@dataclass(eq=False)
class Sharing:
    """How the ranks of a group come to the same sizes: each has the largest that any of them has seen."""

    is_compared: bool = False
    """Whether the ranks are known to constrain the same layers."""

    def largest(self, packed: Tensor, group: Group, names: Sequence[str]) -> Tensor:
        """The largest of all ranks' values for these layers; the tensor itself where nobody is there to share with."""
        if group is False or not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
            return packed
        if not (self.is_compared or torch_quirks.is_capturing(packed.device)):
            _expect_same_layers(names, group, packed.device)
            self.is_compared = True
        packed = packed.clone()
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
        return packed


def _expect_same_layers(names: Sequence[str], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Refuse ranks that constrain other layers: each would take the other's maxima for those of its own layers."""
    # On the device of the maxima: all_gather_object would take the current one, which need not be this rank's own.
    own = torch.tensor([len(names), zlib.crc32("\n".join(names).encode())], device=device)
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, own, group)
    for rank, (count, checksum) in enumerate(torch.stack(of_ranks).tolist()):
        if [count, checksum] != own.tolist():
            raise MaxGainError(
                f"rank {rank} of the process group constrains other layers ({count} of them) than rank "
                f"{dist.get_rank(group)} ({len(names)}, from {names[0]!r} on), so their gains cannot be shared: name "
                "the ranks that train the same model with process_group, or do not share with process_group=False."
            )


def carried(option: Any) -> Any:
    """An argument of a constraint in the form in which it gets into a copy."""
    return InThisProcess(option) if isinstance(option, dist.ProcessGroup) else option


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor's ranks hold pieces of it: a DTensor, as FSDP2 and tensor parallelism make them."""
    # Of its type, because torch.compile says no of the tensor; and torch 2.11 compiles no hasattr of a type.
    return getattr(type(tensor), "full_tensor", None) is not None


def is_flat_shard(weight: Tensor) -> bool:
    """Whether a weight is a piece of FullyShardedDataParallel's flat parameter, which is whole in a forward only.

    It marks them so with ``use_orig_params=True``. Seen on torch 2.11 to 2.13. Guarded by
    tests/promises/test_sharded.py.
    """
    return getattr(weight, "_fsdp_flattened", False) is True


def local(weight: Tensor) -> Tensor:
    """The part of a weight that this rank holds; the weight itself unless it is sharded."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from all ranks if it is sharded; every rank must ask for it."""
    if not is_sharded(tensor):
        return tensor.detach()
    sharded: Any = tensor.detach()
    # Shards that were offloaded to the host are gathered where the ranks can talk to each other.
    full: Tensor = sharded.to(sharded.device_mesh.device_type).full_tensor()
    return full.to(tensor.device)


def own_part(values: Tensor, weight: Tensor) -> Tensor:
    """Of values that broadcast against a whole weight, those for the part that this rank holds."""
    if not is_sharded(weight):
        return values
    sharded: Any = weight
    # Of a weight that tensor parallelism has cut, FSDP2 cuts the pieces, and marks its placement by a split_factor.
    # Seen on torch 2.13. Guarded by tests/promises/test_sharded.py.
    in_turn = sorted(enumerate(sharded.placements), key=lambda cut: hasattr(cut[1], "split_factor"))
    for axis, placement in in_turn:
        if hasattr(placement, "dim") and values.shape[placement.dim] > 1:  # others are whole on every rank
            pieces = values.chunk(sharded.device_mesh.size(axis), placement.dim)
            at = sharded.device_mesh.get_local_rank(axis)
            values = pieces[at] if at < len(pieces) else values.narrow(placement.dim, 0, 0)
    return values


@contextlib.contextmanager
def whole_weights(module: nn.Module, instead: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """The module with all of its sharded parameters gathered, and some of its own replaced, so that it can be run."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            other = (instead or {}).get(name) if part is module else None
            if other is not None or is_sharded(parameter):
                swapped.append((part._parameters, name, parameter))
                part._parameters[name] = other if other is not None else whole(parameter)  # type: ignore[assignment, arg-type]
    try:
        yield
    finally:
        for parameters, name, parameter in swapped:
            parameters[name] = parameter
