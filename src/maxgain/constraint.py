"""What all constraints have in common: layers with bounds, optimizers whose steps they follow, and the plan of a step.

A subclass says how large each layer is (``_estimate``); the base divides the weights that exceed their bounds.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import _torch, kernels
from .checks import Checks, Facts, Updates, bounded_twice, by_reason, unsuited, warn, without_bound
from .distributed import Group, is_sharded, local_rows, max_over_ranks, resolve_group
from .errors import AttachError, UnsupportedLayerError
from .functional import project_
from .layers import ITSELF, Bound, Globs, Layer, as_globs, expect_some, find_layers, resolve_bounds
from .text import text_table

UNMEASURED = -1.0
"""A size that is not known: below every bound, so it changes nothing."""
NOT_FINITE = -0.5
"""A size that was measured, but of which no instance was finite."""
HARD = 0.9
"""A step that scales a weight by less than this cuts it hard; training moves a weight far less in a step."""


@dataclass(eq=False)
class StepPlan:
    """What a step of one optimizer works on; made again when a weight, a bound or an optimizer changes."""

    signature: tuple[Any, ...]
    slots: list[int]
    """Whose measurements the step uses up: those of weights that no other attached optimizer holds."""
    index: Tensor | None
    """The same as a tensor; None for all slots."""
    weights: list[Tensor]
    """What the step may divide: trained, bounded, and this rank's part of them."""
    layers: list[Layer]
    """For each weight, the first layer that uses it."""
    places: Tensor
    """For each weight, where its slot is among ``slots``."""
    bounds: Tensor
    """The bound of each slot."""
    fused: kernels.FusedProjection | None
    """The projection in one launch, where a GPU can do that."""
    resting: int = 0
    """For how many more steps nothing is measured."""


@dataclass(eq=False)
class Attached:
    """An optimizer whose steps are followed."""

    handle: RemovableHandle
    steps: int = 0
    plan: StepPlan | None = None
    groups: list[int] = field(default_factory=list)
    """How many parameters each group of the optimizer held when the plan was made."""
    checks: Checks = field(default_factory=Checks)


class Constraint:
    """Keeps the layers of a model within bounds, from one optimizer step to the next."""

    bound_name = "bound"
    """What the user calls the bound."""
    measures_training = False
    """Whether a size comes from training forwards, so that a layer in eval mode has none."""

    @torch.inference_mode(mode=False)  # tensors made within it could not be changed outside
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        bound: Bound,
        *,
        parts: Mapping[str, Iterable[str]] | None = None,
        include: Globs | None = None,
        exclude: Globs = (),
        process_group: Group = None,
    ) -> None:
        found = find_layers(model, include, exclude, parts=parts)
        expect_some(found, model)
        self.model = model
        self.process_group = resolve_group(process_group)
        self.skipped = found.skipped
        """The layers that have no bound although they hold weights, and why."""
        self._unsaid: dict[str, str] = {}
        self._exclude = as_globs(exclude)
        self._explicit = include is not None
        self._layers = found.layers
        self._slots = _slots(found.layers)
        self._names = [layer.name for layer in found.layers]
        self._version = 0
        self._paused = False
        self._attached: dict[Optimizer | None, Attached] = {}
        self._hooks: list[Any] = []
        self._updates: Updates | None = None
        count = 1 + max(self._slots)
        device = _device(found.layers)
        dtype = torch.promote_types(max((layer.weight.dtype for layer in found.layers), key=_bits), torch.float32)
        self._gains = torch.full((count,), torch.nan, dtype=dtype, device=device)
        self._scales = torch.ones_like(self._gains)
        self._counts = torch.zeros(3, count, dtype=torch.int32, device=device)
        """By slot: steps in which it was measured, divided, and cut hard."""
        self._bounds = torch.ones_like(self._gains)
        self.bound = bound
        self._register()
        if not self._explicit:
            warn(without_bound(self))
        warn(bounded_twice(self))

    # What users call.

    @property
    def bound(self) -> Bound:
        """The bound: one number, or a mapping of globs over layer names. Setting it holds from the next step on."""
        return MappingProxyType(self._bound) if isinstance(self._bound, dict) else self._bound  # set it, not an entry

    @bound.setter
    def bound(self, bound: Bound) -> None:
        bounds = resolve_bounds(bound, self._names, self.bound_name, self.skipped)
        self._bound: Bound = dict(bound) if isinstance(bound, Mapping) else float(bound)
        smallest = [float("inf")] * len(self._bounds)
        for slot, value in zip(self._slots, bounds, strict=True):
            smallest[slot] = min(smallest[slot], value)
        is_bounded = [value < float("inf") for value in smallest]
        self._bounds.copy_(torch.tensor(smallest, dtype=self._bounds.dtype, device=self._bounds.device))
        if getattr(self, "_is_bounded", None) != is_bounded:
            self._version += 1  # other weights are divided from now on
        self._is_bounded = is_bounded
        for attached in self._attached.values():  # in place, so that a captured step sees it too
            if (plan := attached.plan) is not None:
                plan.bounds.copy_(self._bounds if plan.index is None else self._bounds[plan.index])

    @property
    def gains(self) -> dict[str, float]:
        """The newest gain that a step found in every layer, before dividing; nan where there is none that is finite."""
        return self._by_name(self._gains)

    @property
    def scales(self) -> dict[str, float]:
        """What the last step multiplied every layer's weight by: 1 within the bound."""
        return self._by_name(self._scales)

    @property
    def last_gains(self) -> Tensor:
        """The gains as a tensor on the device, in the order of the layers, which waits for nothing."""
        gains = self._gains.unbind()
        return torch.stack([gains[slot] for slot in self._slots])

    def attach(self, optimizer: Any) -> Self:
        """From now on ``optimizer.step()`` also projects the weights that the optimizer holds.

        Several optimizers may be attached: each projects what it steps. Of a wrapper (Accelerate's, SAM) the torch
        optimizer inside is attached.
        """
        weights = {id(layer.parameter) for layer in self._layers}
        optimizer = _torch.inner_optimizer(optimizer, weights)
        if optimizer in self._attached:
            raise AttachError(f"this {type(optimizer).__name__} is attached to this {type(self).__name__} already.")
        models = [self.model] if isinstance(self.model, nn.Module) else self.model
        if not _torch.parameters_of(optimizer) & {id(p) for model in models for p in model.parameters()}:
            raise AttachError(
                f"this {type(optimizer).__name__} holds no parameter of the model. Make it from model.parameters(), "
                "after parameters are replaced (load_state_dict(assign=True), fully_shard)."
            )
        self._register()
        # Not compiled: it counts on the host, and would be compiled again for each count.
        after_step = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._attached[optimizer] = Attached(optimizer.register_step_post_hook(after_step))
        self._version += 1
        self._plan(optimizer)
        if self._hooks:
            warn(unsuited(optimizer))
        return self

    def detach(self) -> None:
        """Leave the model and its optimizers as they were before; the weights stay as they are."""
        for attached in self._attached.values():
            attached.handle.remove()
        self._attached.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._updates is not None:
            self._updates.remove()
            self._updates = None

    def step(self) -> None:
        """Project every constrained weight now, for updates without an attached optimizer."""
        if None not in self._attached:
            self._attached[None] = Attached(RemovableHandle(OrderedDict()))
        self._step(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure and project nothing within this context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __reduce__(self) -> tuple[Any, ...]:
        # It does not travel: in a copied or saved model that keeps its constraint, None is in its place.
        return type(None), ()

    def __str__(self) -> str:
        """A table of every layer: bound, gain, scale, share of steps in which it was divided, and why not."""
        gains, scales = self._by_name(self._gains), self._by_name(self._scales)
        bounds = self._by_name(self._bounds)
        measured, held, _ = (self._by_name(row) for row in self._counts)
        rows = []
        for layer in self._layers:
            name = layer.name
            share = f"{held[name] / measured[name]:.0%}" if measured[name] else ""
            why = Facts.of(layer, self).why_not
            rows.append([name or ITSELF, f"{bounds[name]:g}", f"{gains[name]:.4g}", f"{scales[name]:.4g}", share, why])
        rows += [[name or ITSELF, "", "", "", "", why] for name, why in self.skipped.items()]
        return text_table(["layer", self.bound_name, "gain", "scale", "divided", "note"], rows, title=repr(self))

    def __repr__(self) -> str:
        count = f"{len(self._layers)} layer{'s' if len(self._layers) != 1 else ''}"
        return f"<{type(self).__name__} of {count}, {self.bound_name}={self._bound!r}>"

    # What a subclass fills in.

    def _estimate(self, plan: StepPlan) -> Tensor:
        """Return the size of each of the plan's slots: finite, or ``UNMEASURED`` or ``NOT_FINITE``."""
        raise NotImplementedError

    def _register(self) -> None:
        """Register hooks, where there are none."""
        if self._updates is None:
            self._updates = Updates(self)

    def _forget(self, plan: StepPlan, sizes: Tensor) -> None:
        """Begin to measure the plan's slots anew."""

    def _dropped(self) -> Tensor:
        """How many instances of each slot were not finite."""
        return torch.zeros_like(self._gains)

    # How a step goes.

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step(optimizer)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _step(self, optimizer: Optimizer | None) -> None:
        if self._paused:
            return
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, {}
            warn(f"Left out from now on: {by_reason(unsaid)}. Pass exclude=… to silence this.")
        attached, plan = self._attached[optimizer], self._plan(optimizer)
        attached.steps += 1
        sizes = max_over_ranks(self._estimate(plan), self.process_group)
        attached.checks.at_step(self, optimizer, attached, sizes)  # before a fused projection uses the sizes up
        self._project(plan, sizes)
        self._forget(plan, sizes)

    def _project(self, plan: StepPlan, sizes: Tensor) -> None:
        """Divide the plan's weights by what their sizes exceed the bounds by."""
        if plan.fused is not None:
            plan.fused(sizes, plan.bounds, self._gains, self._scales, self._counts)
        else:
            self._keep(plan, sizes, project_(plan.weights, sizes[plan.places], plan.bounds[plan.places]))

    def _keep(self, plan: StepPlan, sizes: Tensor, scales: Tensor) -> None:
        """Keep what users see, in place, so that the replays of a captured step show too."""
        at = slice(None) if plan.index is None else plan.index
        all_scales = torch.ones_like(sizes)
        all_scales[plan.places] = scales.to(sizes.dtype)
        found = torch.where(sizes >= 0, sizes, torch.where(sizes == NOT_FINITE, torch.nan, self._gains[at]))
        self._gains[at] = found
        self._scales[at] = all_scales
        self._counts[:, at] += torch.stack([sizes >= 0, all_scales < 1, all_scales < HARD]).int()

    def _plan(self, optimizer: Optimizer | None) -> StepPlan:
        """Return what a step of this optimizer works on; without one, everything. Made again when that changes."""
        attached = self._attached[optimizer]
        plan = attached.plan
        groups = [] if optimizer is None else [len(group["params"]) for group in optimizer.param_groups]
        if attached.groups != groups:  # the plans of other optimizers depend on it too
            attached.groups = groups
            self._version += 1
        if plan is not None and plan.signature == self._signature(plan):
            return plan
        if self._layers:
            self._move_to(_device(self._layers))
        resting = 0 if plan is None else plan.resting
        attached.plan = plan = _make_plan(self, optimizer)
        plan.resting = resting
        plan.signature = self._signature(plan)
        for hook in self._hooks:
            hook.weight = hook.layer.parameter
        return plan

    def _signature(self, plan: StepPlan) -> tuple[Any, ...]:
        """All that a plan depends on; where weights lie matters to a fused projection alone."""
        own = [self._layers[i].parameter for i in self._layers_of(plan)]
        where = [weight is not None and weight.data_ptr() for weight in own] if plan.fused else []
        return (
            self._version,
            [(id(weight), weight is not None and weight.requires_grad) for weight in own],
            where or [str(getattr(weight, "device", "")) for weight in own[:1]],
        )

    def _layers_of(self, plan: StepPlan) -> Iterable[int]:
        if plan.index is None:
            return range(len(self._layers))
        own = set(plan.slots)
        return [i for i, slot in enumerate(self._slots) if slot in own]

    def _move_to(self, device: torch.device) -> None:
        """Follow a model that was moved to another device."""
        if self._gains.device != device:
            for name in ("_gains", "_scales", "_counts", "_bounds"):
                setattr(self, name, getattr(self, name).to(device))

    def _skip(self, layer: Layer, reason: str) -> None:
        """Leave a layer out from now on; the next step says so, of all layers in one warning."""
        self.skipped[layer.name] = self._unsaid[layer.name] = reason
        for hook in [hook for hook in self._hooks if hook.layer is layer]:
            hook.remove()
            self._hooks.remove(hook)
        place = self._layers.index(layer)
        del self._layers[place], self._slots[place], self._names[place]
        self._version += 1

    def _by_name(self, packed: Tensor) -> dict[str, float]:
        values = packed.tolist()
        return {name: values[slot] for name, slot in zip(self._names, self._slots, strict=True)}


def _slots(layers: Sequence[Layer]) -> list[int]:
    """Number the weights: layers that share one have the same number. Overlapping memory is refused."""
    slots: dict[Any, int] = {}
    first: dict[int, Layer] = {}
    blocks: list[tuple[int, int, Layer]] = []
    numbers = []
    for layer in layers:
        weight = layer.parameter
        key: Any = (id(weight), layer.part)
        if not is_sharded(weight) and not weight.is_meta and weight.numel():
            rows = layer.rows_of(weight.detach())
            key = rows.data_ptr()
            if key not in slots and layer.part is None:
                blocks.append((key, key + rows.nbytes, layer))
        numbers.append(slots.setdefault(key, len(slots)))
        other = first.setdefault(numbers[-1], layer)
        if (other.weight.shape, other.weight.stride()) != (layer.weight.shape, layer.weight.stride()):
            raise UnsupportedLayerError(_overlap(layer, other))
    blocks.sort(key=lambda block: block[0])
    for (_, end, one), (start, _, other) in pairwise(blocks):
        if start < end:
            raise UnsupportedLayerError(_overlap(other, one))
    return numbers


def _overlap(layer: Layer, other: Layer) -> str:
    return (
        f"the weight of layer {layer.name!r} overlaps in memory with that of {other.name!r} in another layout, so both "
        f"cannot be divided. Pass exclude={layer.name!r}."
    )


def _make_plan(constraint: Constraint, optimizer: Optimizer | None) -> StepPlan:
    layers, slots = constraint._layers, constraint._slots
    held = None if optimizer is None else _torch.parameters_of(optimizer)
    others: set[int] = set()
    if held is not None:
        others = set[int]().union(
            *(_torch.parameters_of(o) for o in constraint._attached if o not in (None, optimizer))
        )
        others -= held
    own = [i for i, layer in enumerate(layers) if id(layer.parameter) not in others]
    chosen = sorted({slots[i] for i in own})
    weights: dict[Any, tuple[Tensor, Layer, int]] = {}
    for i in own:
        weight = layers[i].parameter
        if weight is None or not weight.requires_grad or not constraint._is_bounded[slots[i]] or weight.is_meta:
            continue
        if held is None or id(weight) in held:
            part = local_rows(weight.detach(), int(layers[i].is_transposed), layers[i].part)
            weights.setdefault(part.data_ptr() or id(weight), (part, layers[i], chosen.index(slots[i])))
    device, bounds = constraint._bounds.device, constraint._bounds
    is_all = len(chosen) == len(bounds)
    index = None if is_all else torch.tensor(chosen, dtype=torch.int64, device=device)
    parts, users = [part for part, _, _ in weights.values()], [layer for _, layer, _ in weights.values()]
    places = [place for _, _, place in weights.values()]
    bounds = bounds.clone() if index is None else bounds[index]
    can_fuse = is_all and len(set(places)) == len(places) and kernels.can_fuse(parts, bounds)
    fused = kernels.FusedProjection(parts, places, len(chosen)) if can_fuse else None
    at = torch.tensor(places, dtype=torch.int64, device=device)
    return StepPlan((), chosen, index, parts, users, at, bounds, fused)


def _device(layers: Sequence[Layer]) -> torch.device:
    """Where sizes are kept: beside the first weight, or on the host while that is on the meta device."""
    weight = next(layer.parameter for layer in layers if layer.parameter is not None)
    return torch.device("cpu") if weight.is_meta else weight.device


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits
