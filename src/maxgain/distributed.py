"""What data-parallel training needs: one collective per step, and scaling of weights that lie in shards."""

from typing import Literal

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | Literal[False] | None
"""Whose ranks share their maxima: None is the default group, where there is one; False means: do not share."""


def largest_of_ranks(packed: Tensor, group: Group) -> Tensor:
    """The largest of all ranks' values, on every rank; the tensor itself where nobody is there to share with."""
    if group is False or not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return packed
    packed = packed.clone()
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    return packed


def local(weight: Tensor) -> Tensor:
    """The part of a weight that this rank holds; the weight itself unless it is sharded."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()
