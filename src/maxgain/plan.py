"""What a step works on: which weights it may divide, and whose measurements it uses up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _torch, kernels
from .distributed import is_sharded, local_rows
from .errors import UnsupportedLayerError
from .layers import Layer

if TYPE_CHECKING:
    from .constraint import Constraint


@dataclass(eq=False)
class StepPlan:
    """What a step of one optimizer works on; made again when a weight, a bound or an optimizer changes."""

    slots: set[int]  # the layers whose measurements the step uses up: those that no other attached optimizer holds
    own: Tensor  # the same as a tensor
    weights: list[Tensor]  # what the step may divide: trained, bounded, and this rank's part of them
    at: Tensor  # the slot of each of them, that of the first of its layers
    tied: list[Tensor]  # the slots of layers that have one weight in common
    fused: kernels.FusedProjection | None  # the projection in one launch, where a GPU can do that
    origins: list[tuple[Any, str, Any, tuple[bool, int] | None]]
    """What the plan was made of: module, name and parameter; whether that is trained, and its address."""


def expect_no_overlap(layers: Iterable[Layer]) -> None:
    """Refuse weights that overlap in memory without being the same."""
    blocks = []
    for layer in layers:
        weight = layer.parameter
        # None that is computed, sharded, empty, on the meta device or made of other tensors has an address.
        if weight is not None and not is_sharded(weight) and (start := layer.weight.data_ptr()):
            blocks.append((start, start + (weight.nbytes if layer.part is None else 1), layer))
    blocks.sort(key=lambda block: block[:2])
    for (start, end, one), (next_start, _, other) in pairwise(blocks):
        (mine, theirs) = ((weight.shape, weight.stride()) for weight in (one.weight, other.weight))
        if next_start < end and (next_start > start or mine != theirs):
            raise UnsupportedLayerError(
                f"the weight of layer {other.name!r} overlaps in memory with that of {one.name!r} in another layout: "
                f"both cannot be divided. Pass exclude={other.name!r}."
            )


def make_plan(constraint: Constraint, optimizer: Optimizer | None) -> StepPlan:
    """Collect what a step of this optimizer may divide, and whose measurements it uses up."""
    held = None if optimizer is None else _torch.parameters_of(optimizer)
    others = [_torch.parameters_of(other) for other in constraint._attached if other not in (None, optimizer)]
    of_others = set[int]() if held is None else set[int]().union(*others) - held
    slots, trained, origins = set[int](), set[int](), []
    groups: dict[Any, tuple[Tensor, list[int]]] = {}
    for layer, slot in constraint._slots.items():
        weight = layer.parameter
        if id(weight) in of_others:
            continue
        slots.add(slot)
        known = None if weight is None or is_sharded(weight) else (weight.requires_grad, weight.data_ptr())
        origins.append((layer.module, layer.kind.weight, weight, known))
        if weight is not None and not weight.is_meta:
            part = local_rows(weight.detach(), layer.kind.output_dim, layer.part)
            key = part.data_ptr() or (id(weight), layer.part)  # a rank may hold nothing of it
            groups.setdefault(key, (part, []))[1].append(slot)
            if weight.requires_grad and (held is None or id(weight) in held):
                trained.add(slot)
    bounded = {slot for slot, is_bounded in enumerate(constraint._is_bounded) if is_bounded}
    divided = [(part, of) for part, of in groups.values() if not trained.isdisjoint(of) and not bounded.isdisjoint(of)]
    parts, at = [part for part, _ in divided], [of[0] for _, of in divided]
    count, device = len(constraint._bounds), constraint._bounds.device
    tied = [torch.tensor(of, device=device) for _, of in groups.values() if len(of) > 1]
    is_simple = constraint.divides and slots == {*constraint._slots.values()} and not tied
    can_fuse = is_simple and device.type == "cuda" and kernels.can_fuse(parts, constraint._bounds)
    fused = kernels.FusedProjection(parts, at, count, device) if can_fuse else None
    own, places = (torch.tensor(some, dtype=torch.int64, device=device) for some in (sorted(slots), at))
    return StepPlan(slots, own, parts, places, tied, fused, origins)


def device_of(layers: Iterable[Layer]) -> torch.device:
    """Where sizes are kept: beside the first weight, or on the host while that is on the meta device or computed."""
    weight = next((layer.parameter for layer in layers if layer.parameter is not None), None)
    return torch.device("cpu") if weight is None or weight.is_meta else weight.device
