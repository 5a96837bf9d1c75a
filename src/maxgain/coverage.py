"""What a constraint covers: which bound each layer has, which weights an optimiser's step divides, what is left out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from . import kernels, torch_quirks
from .distributed import is_sharded
from .errors import AttachError, BoundError, MeasurementWarning, PatternError, UnsupportedLayerError
from .functional import check_bound
from .layers import FoundLayer, check_globs, defect, kind_of, matches, refusals

Bound = float | Mapping[str, float]
SIZEABLE = 0.1
"""The share of the entries of all trained matrices that must have no bound for a warning."""
LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)
"""What picks rows out of a matrix multiplies nothing by it."""


def resolve_bounds(bound: Bound, names: list[str], what: str) -> dict[str, float]:
    """The bound of every layer: one number for all, or the first glob of a mapping that matches the layer's name."""
    if not isinstance(bound, Mapping):
        return dict.fromkeys(names, check_bound(bound, what))
    for pattern, value in bound.items():
        check_bound(value, f"{what}[{pattern!r}]")
        if not any(matches(name, pattern) for name in names):
            known = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            raise PatternError(f"the pattern {pattern!r} of {what} matches no layer; the layers are {known}.")
    bounds: dict[str, float] = {}
    for name in names:
        matching = [float(value) for pattern, value in bound.items() if matches(name, pattern)]
        if not matching:
            raise BoundError(
                f"{what} says nothing about layer {name!r}: add '*': float('inf') as the last pattern "
                "to measure the other layers without constraining them, or leave them out with exclude."
            )
        bounds[name] = matching[0]
    return bounds


def refuse_one_bound(constraint: Any, bound: Any) -> None:
    """A bound that is set under the name that it was given by would change nothing: it is kept by layer."""
    raise BoundError(
        "bounds are kept by layer: set constraint.bounds['<name>'], or all of them with "
        f"constraint.bounds.update(dict.fromkeys(constraint.bounds, {bound!r:.40}))."
    )


# --- What one optimiser's step is about -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The layers whose measurements a step uses up, and the weights that it divides.

    Those are all layers but those whose weights only other optimisers hold. Divided are the weights that the stepping
    optimiser holds, each once, unless they are frozen or no bound on them can ever bind.
    """

    signature: tuple[Any, ...]
    """Of the weights and optimisers as they were when this was made: first the addresses of the weights."""
    positions: list[int]
    """Which of all layers these are."""
    index: Tensor | None
    """The same as a tensor; None if these are all layers."""
    layers: list[FoundLayer]
    bounds: Tensor
    """Of the layers, packed."""
    divided: list[nn.Parameter]
    users: list[list[int]]
    """For each divided weight, the layers that use it, by their place among these: most often one."""
    divided_by: Tensor
    """The first of them."""
    owners: Tensor
    """For each layer, the first layer with the same weight; one past the last for a weight that is not divided."""
    optimizer: Optimizer | None
    groups: list[Tensor]
    """For each of the optimiser's parameter groups, the layers (by their place among all) whose weights it holds."""
    is_sharded: bool
    """Whether ranks hold pieces of the weights."""
    fused: kernels.FusedProjection | None
    """The whole projection in one launch for each type of weight, where that can be done."""

    @property
    def divided_layers(self) -> list[FoundLayer]:
        """The layers that use the divided weights."""
        return [self.layers[place] for places in self.users for place in places]


def share_of(
    optimizer: Optimizer | None,
    others: Iterable[Optimizer],
    layers: Sequence[FoundLayer],
    bounds: Mapping[str, float],
    *,
    signature: tuple[Any, ...],
    like: Tensor,
) -> Share:
    """What a step of an optimiser is about, next to the others; without one, everything. Tensors are as ``like``."""
    packed = partial(torch.tensor, dtype=torch.int64, device=like.device)
    weights = [layer.weight for layer in layers]
    held = {id(weight) for weight in weights} if optimizer is None else parameters_of(optimizer)
    left_to_others = set[int]().union(*map(parameters_of, others)) - held
    positions = [i for i, weight in enumerate(weights) if id(weight) not in left_to_others]
    own = [layers[i] for i in positions]

    # Known by its memory, in which two parameters may lie; or by its identity, if it is in pieces or not there yet.
    addresses = [0 if is_sharded(layer.weight) or layer.weight.is_meta else layer.weight.data_ptr() for layer in own]
    by_weight: dict[int, list[int]] = {}
    for place, (layer, address) in enumerate(zip(own, addresses, strict=True)):
        by_weight.setdefault(address or id(layer.weight), []).append(place)
    for first, *rest in by_weight.values():
        layout = own[first].weight.shape, own[first].weight.stride()
        if twisted := [own[i] for i in rest if (own[i].weight.shape, own[i].weight.stride()) != layout]:
            reason = f"its weight is that of {own[first].name!r} in another layout, and would be divided twice"
            raise UnsupportedLayerError(refusals([(one.name, one.module, reason) for one in twisted], "constrained"))
    blocks = [
        (address, place) for place, address in enumerate(addresses) if address and own[place].weight.is_contiguous()
    ]
    for (start, one), (later, other) in pairwise(sorted(blocks)):
        if start < later < start + own[one].weight.nbytes:
            reason = f"its weight overlaps with that of {own[one].name!r}, and would be divided twice"
            raise UnsupportedLayerError(refusals([(own[other].name, own[other].module, reason)], "constrained"))
    users = [
        places
        for places in by_weight.values()
        if any(id(own[place].weight) in held and own[place].weight.requires_grad for place in places)
        and any(bounds[own[place].name] != float("inf") for place in places)
    ]
    owners = [len(own)] * len(own)
    for first, *rest in users:
        for place in (first, *rest):
            owners[place] = first

    firsts = [first for first, *_ in users]
    divided = [own[first].weight for first in firsts]
    own_bounds = torch.tensor([bounds[layer.name] for layer in own], dtype=like.dtype, device=like.device)
    is_all, is_shared = len(own) == len(layers), any(len(places) > 1 for places in users)
    can_fuse = like.is_cuda and is_all and not is_shared and kernels.can_fuse(divided, own_bounds)
    groups = []
    for group in optimizer.param_groups if optimizer else ():
        of_group = {id(parameter) for parameter in group["params"]}
        groups.append(packed([i for i, weight in enumerate(weights) if id(weight) in of_group]))
    return Share(
        signature=signature,
        positions=positions,
        index=None if is_all else packed(positions),
        layers=own,
        bounds=own_bounds,
        divided=divided,
        users=users,
        divided_by=packed(firsts),
        owners=packed(owners),
        optimizer=optimizer,
        groups=groups,
        is_sharded=any(map(is_sharded, divided)),
        fused=kernels.FusedProjection(divided, firsts, len(own)) if can_fuse else None,
    )


def parameters_of(optimizer: Optimizer) -> set[int]:
    """The identities of the parameters that an optimiser holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


_HOOKS = "_optimizer_step_post_hooks"
"""What an optimiser whose steps can be followed has."""


def torch_optimizer_in(optimizer: Any, layers: Sequence[FoundLayer]) -> Optimizer:
    """The torch optimiser that updates the weights: itself, or the one in a wrapper (Accelerate's, SAM, Lookahead)."""
    weights = {id(layer.weight) for layer in layers}
    while not type(optimizer).__module__.startswith("torch.optim."):  # those wrap nothing
        held = parameters_of(optimizer) if hasattr(optimizer, "param_groups") else set()
        # One whose own steps can be followed may take parts of them elsewhere: ZeroRedundancyOptimizer, on other ranks.
        if not hasattr(optimizer, _HOOKS):
            held &= weights
        inside = [(part, parameters_of(part)) for part in torch_quirks.optimizers_in(optimizer)]
        same = [part for part, theirs in inside if theirs & weights and theirs >= held]
        if len(same) != 1:
            break
        optimizer = same[0]
    if not isinstance(optimizer, Optimizer):
        raise AttachError(
            f"attach() takes a torch.optim.Optimizer or a wrapper that holds one, not {type(optimizer).__name__}; "
            "with anything else call step() yourself after each update."
        )
    if not hasattr(optimizer, _HOOKS):
        raise AttachError(
            f"this {type(optimizer).__name__} was made without torch.optim.Optimizer's __init__, so nothing can follow "
            "its steps: call super().__init__(params, defaults) in its own, or call step() yourself after each update."
        )
    return optimizer


def expect_usable(optimizer: Optimizer | None, model: nn.Module, layers: Sequence[FoundLayer]) -> None:
    """Refuse an optimiser without any of the weights, and layers that have changed since they were found."""
    if optimizer is not None and not parameters_of(optimizer) & {id(layer.weight) for layer in layers}:
        raise AttachError(
            f"this {type(optimizer).__name__} holds none of the {len(layers)} constrained weights "
            f"({layers[0].name!r}, ...): make it from the parameters of the constrained model, "
            "after load_state_dict(assign=True) if that is used."
        )
    modules = set(model.modules())
    refused = [
        (layer.name, layer.module, f"since the constraint was made it has changed: {reason}")
        for layer in layers
        if (
            reason := defect(layer.module, layer.kind, rescale=True)
            or (None if layer.module in modules else "it is no part of the model")
        )
    ]
    if refused:
        raise UnsupportedLayerError(
            f"{refusals(refused, 'constrained')} Or make the constraint after the change, on the model as it is."
        )


# --- What is left out -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LeftOut:
    """Says which trained weights have no bound although nobody asked for that."""

    model: nn.Module
    layers: Sequence[FoundLayer]
    exclude: str | Iterable[str] | None
    is_meant: bool
    """Whether the layers were chosen by name, and all others left out on purpose."""
    known: set[str] | None = None
    """The matrices without a bound that were there before."""

    def tell(self) -> None:
        """Warn if they are many, and later if many were added to them."""
        if self.is_meant:
            return
        covered = {id(layer.weight) for layer in self.layers}
        trained = [p for p in self.model.parameters() if p.requires_grad and not is_lazy(p) and p.dim() >= 2]
        matrices, left_out, share = dict[int, tuple[str, nn.Parameter]](), dict[str, int](), 0.0
        if not covered.issuperset(map(id, trained)):
            matrices = {id(p): (name, p) for name, p in _matrices(self.model, check_globs(self.exclude))}
            new = [(name, p) for one, (name, p) in matrices.items() if one not in covered]
            left_out = {name: p.numel() for name, p in new if name not in (self.known or ())}
            share = sum(left_out.values()) / max(1, sum(p.numel() for _, p in matrices.values()))
        if share >= SIZEABLE:
            largest = sorted(left_out, key=lambda name: -left_out[name])
            names = ", ".join(map(repr, largest[:8])) + (f" and {len(largest) - 8} more" if len(largest) > 8 else "")
            is_packed = any(p.dim() == 3 for name, p in matrices.values() if name in left_out)
            hint = " split_experts() takes the packed experts of transformers' models apart." if is_packed else ""
            why, remedy = "belong to modules of a type that is not known", "register_layer() teaches a type"
            if self.known is not None:
                why = "were added to the model, or unfrozen, since the constraint was made"
                remedy = "Make the constraint again, on the model as it is"
            warnings.warn(
                f"{share:.0%} of the weights in this model's matrices have no bound, because they {why}: {names}."
                f"{hint} {remedy}; exclude says that it is meant.",
                MeasurementWarning,
                stacklevel=4,
            )
        adapters = [layer.name for layer in self.layers if {"lora_A", "lora_B"} & set(layer.name.split("."))]
        if adapters and self.known is None:
            warnings.warn(
                f"LoRA: {adapters[0]!r} and {len(adapters) - 1} more are bounded each on its own. What a layer and its "
                "adapter amplify together, W + BA, is not: merge the adapter to bound that.",
                MeasurementWarning,
                stacklevel=4,
            )
        self.known = {*(self.known or ()), *left_out}


def _matrices(model: nn.Module, excluded: tuple[str, ...]) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters of two dimensions and more that multiply something."""
    for path, module in model.named_modules():
        steps = [step for step in path.split(".") if step and step != "_orig_mod"]
        kind = kind_of(module)
        if isinstance(module, LOOK_UPS) or (kind is not None and not kind.by_default):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            around = [".".join([*steps, own][: i + 1]) for i in range(len(steps) + 1)]
            meant = any(matches(name, glob) for name in around for glob in excluded)
            if parameter.requires_grad and not is_lazy(parameter) and parameter.dim() >= 2 and not meant:
                yield around[-1], parameter
