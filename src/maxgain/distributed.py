"""What data-parallel training needs: one collective a step, and scaling of weights that lie in shards."""

import torch.distributed as dist
from torch import Tensor


def all_reduce_max_(packed: Tensor, group: dist.ProcessGroup | None) -> None:
    """Every rank gets the largest of all ranks' values; a group of None is the default one where there is one."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)


def local(weight: Tensor) -> Tensor:
    """The part of a weight that this rank holds; the weight itself unless it is sharded."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()
