"""What all constraints have in common: layers with bounds, the optimizers whose steps they follow, the plan of a step.

A subclass says how large each weight is (``_estimate``); after a step the base divides those that exceed their bounds.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from . import _torch, checks
from .distributed import Group, differing_ranks, max_over_ranks, resolve_group
from .errors import AttachError
from .functional import project_
from .layers import Bound, Globs, Layer, as_globs, find_layers, resolve_bounds
from .plan import StepPlan, device_of, expect_no_overlap, make_plan
from .text import ITSELF, by_reason, text_table

UNMEASURED = -1.0
"""A size that is not known: below every bound, so it changes nothing."""
NOT_FINITE = -0.5
"""A size that was measured, but of which no instance was finite."""
HARD = 0.9
"""A step that scales a weight by less than this cuts it hard; training moves a weight far less in a step."""


@dataclass(eq=False)
class Attached:
    """An optimizer whose steps are followed."""

    handle: RemovableHandle | None = None
    steps: int = 0
    held: int = 0  # the sum of the identities of the parameters that the optimizer held when the plan was made
    plan: StepPlan | None = None
    captured: list[StepPlan] = field(default_factory=list)
    """Plans whose tensors a CUDA graph reads at every replay."""
    checks: checks.Checks = field(default_factory=checks.Checks)


class Buffer:
    """What hooks write, with an entry for each layer; one object, because compiled code checks each that it reads."""

    __slots__ = ("__weakref__", "dropped", "fallbacks", "idle", "maxima", "p", "resting")

    def __init__(self, like: Tensor) -> None:
        self.p = 2.0
        self.maxima = torch.full_like(like, UNMEASURED)
        """The largest gain since the last step."""
        self.dropped = torch.zeros_like(like, dtype=torch.int64)
        """How many gains were not finite, ever."""
        self.resting = torch.zeros_like(like, dtype=torch.int32)
        """For how many more steps nothing is measured."""
        self.idle: set[int] = set()
        """The slots that rest, as far as the host knows: captured steps count on the device."""
        self.fallbacks: dict[int, str] = {}
        """Why no kernel measured a slot on a GPU."""
        self.move_to(like.device)

    @property
    def is_captured(self) -> bool:
        """Whether work is being recorded into a CUDA graph: then forwards ask the device, and the host may not."""
        return self.maxima.is_cuda and torch.cuda.is_current_stream_capturing()

    def move_to(self, device: torch.device) -> None:
        """Follow a model to another device."""
        self.maxima, self.dropped, self.resting = (
            _torch.at_fixed_address(tensor.to(device)) for tensor in (self.maxima, self.dropped, self.resting)
        )
        buffers[self.maxima.data_ptr()] = self


buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
"""By the address of their maxima, for ``record``: compiled code passes tensors."""


class Constraint:
    """Keeps the layers of a model within bounds, from one optimizer step to the next."""

    bound_name = "bound"
    """What the user calls the bound."""
    measures_training = False
    """Whether a size comes from training forwards, so that a layer in eval mode has none."""
    divides = True
    """Whether a weight is divided as a whole."""
    every = 1
    """Estimate and project in every k-th step."""

    @torch.inference_mode(mode=False)  # tensors made within it could not be changed outside
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        bound: Bound,
        *,
        parts: Mapping[str, Any] | None = None,
        include: Globs | None = None,
        exclude: Globs = (),
        process_group: Group = None,
    ) -> None:
        found = find_layers(model, include, exclude, parts=parts)
        self.model = model
        self.process_group = resolve_group(process_group)
        self.skipped = found.skipped
        """The layers that have no bound although they hold weights, and why."""
        self._newly_skipped: dict[str, str] = {}
        self._exclude, self._explicit = as_globs(exclude), include is not None
        expect_no_overlap(found.layers)
        self._slots = {layer: slot for slot, layer in enumerate(found.layers)}
        """Every layer and its place in all that is packed."""
        self._left_out: list[int] = []
        """The places of layers that were left out since."""
        self._is_bounded: list[bool] = []
        self._paused = False
        self._attached: dict[Optimizer | None, Attached] = {}
        self._hooks: list[Any] = []
        self._updates: _torch.Updates | None = None
        device, count = device_of(found.layers), len(found.layers)
        is_double = any(layer.parameter.dtype == torch.float64 for layer in found.layers)
        dtype = torch.float64 if is_double else torch.float32
        self._gains = torch.full((count,), torch.nan, dtype=dtype, device=device)
        self._scales, self._bounds = torch.ones_like(self._gains), torch.ones_like(self._gains)
        self._buffer = Buffer(self._gains)
        self._counts = torch.zeros(3, count, dtype=torch.int32, device=device)
        """By slot: steps in which it was measured, divided, and cut hard."""
        self.bound = bound
        self._register()
        if not self._explicit:
            checks.warn(checks.without_bound(self))
        checks.warn(checks.bounded_twice(self))

    # --- What users call

    @property
    def bound(self) -> Bound:
        """The bound: one number, or a mapping of globs over layer names. Setting it holds from the next step on."""
        return MappingProxyType(self._bound) if isinstance(self._bound, dict) else self._bound  # set it, not an entry

    @bound.setter
    def bound(self, bound: Bound) -> None:
        bounds = resolve_bounds(bound, [layer.name for layer in self._slots], self.bound_name, self.skipped)
        self._bound: Bound = dict(bound) if isinstance(bound, Mapping) else float(bound)
        values = [float("inf")] * len(self._bounds)
        for slot, value in zip(self._slots.values(), bounds, strict=True):
            values[slot] = value
        packed = torch.tensor(values, dtype=self._bounds.dtype, device=self._bounds.device)
        self._bounds.copy_(packed)  # in place: a captured step sees it too
        is_bounded = [value < float("inf") for value in values]
        if is_bounded != self._is_bounded:  # other weights are divided from now on
            self._is_bounded = is_bounded
            self._forget_plans()

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
        return torch.stack([gains[slot] for slot in self._slots.values()])

    def attach(self, optimizer: Any) -> Self:
        """From now on ``optimizer.step()`` also projects the weights that the optimizer holds.

        Several optimizers may be attached: each projects what it steps. Of a wrapper (Accelerate's, SAM) the torch
        optimizer inside is attached.
        """
        optimizer = _torch.inner_optimizer(optimizer, {id(layer.parameter) for layer in self._slots})
        if optimizer in self._attached:
            raise AttachError(f"this {type(optimizer).__name__} is attached to this {type(self).__name__} already.")
        models = [self.model] if isinstance(self.model, nn.Module) else self.model
        if not _torch.parameters_of(optimizer) & {id(p) for model in models for p in model.parameters()}:
            raise AttachError(
                f"this {type(optimizer).__name__} holds no parameter of the model. Make it from model.parameters(), "
                "and after load_state_dict(assign=True) or fully_shard(), which replace them."
            )
        self._register()
        # Not compiled: it counts on the host, and would be compiled again for each count.
        after_step = torch.compiler.disable(self._step)  # type: ignore[no-untyped-call]
        self._attached[optimizer] = Attached(optimizer.register_step_post_hook(after_step))
        self._forget_plans()
        plan = self._plan(optimizer)  # now, as none can be made while a step is captured
        if self.every > 1:
            self._rest(self._attached[optimizer], plan)  # its first step measures, in mid-cycle too
        if self._hooks and isinstance(optimizer, LBFGS):
            checks.warn(
                "LBFGS evaluates many points in a step, and the largest gain of all of them counts: weights may be "
                "divided far below gamma. Use another optimizer."
            )
        return self

    def detach(self) -> None:
        """Leave the model and its optimizers as they were before; the weights stay as they are."""
        for removable in (*(attached.handle for attached in self._attached.values()), *self._hooks, self._updates):
            if removable is not None:
                removable.remove()
        self._attached, self._hooks, self._updates = {}, [], None
        self._buffer.maxima.fill_(UNMEASURED)

    def step(self) -> None:
        """Project every constrained weight now, for updates without an attached optimizer."""
        self._attached.setdefault(None, Attached())
        self._step(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure and project nothing within this context."""
        buffer, was_paused, self._paused = self._buffer, self._paused, True
        resting, idle = buffer.resting.clone(), buffer.idle
        buffer.resting.fill_(2**30)  # on the device, so that captured forwards rest too
        buffer.idle = {*self._slots.values()}
        try:
            yield
        finally:
            self._paused, buffer.idle = was_paused, idle
            buffer.resting.copy_(resting)

    def __reduce__(self) -> tuple[Any, ...]:
        # It does not travel: in a copied or saved model that keeps its constraint, None is in its place.
        return type(None), ()

    def __str__(self) -> str:
        """A table of every layer: bound, gain, scale, share of steps in which it was divided, and why not."""
        columns = [self._by_name(packed) for packed in (self._bounds, self._gains, self._scales, *self._counts)]
        rows = []
        for layer, note in checks.reasons_not_bounded(self).items():
            bound, gain, scale, measured, divided, _ = (column[layer.name] for column in columns)
            share = f"{divided / measured:.0%}" if measured else ""
            rows.append([layer.name or ITSELF, f"{bound:g}", f"{gain:.4g}", f"{scale:.4g}", share, note])
        rows += [[name or ITSELF, "", "", "", "", why] for name, why in self.skipped.items()]
        return text_table(["layer", self.bound_name, "gain", "scale", "divided", "note"], rows, title=repr(self))

    def __repr__(self) -> str:
        count = f"{len(self._slots)} layer{'s' if len(self._slots) != 1 else ''}"
        return f"<{type(self).__name__} of {count}, {self.bound_name}={self._bound!r}>"

    # --- What a subclass fills in

    def _make_hooks(self) -> list[Any]:
        """Register hooks on the layers."""
        return []

    def _estimate(self, plan: StepPlan) -> Tensor:
        """Where no training forwards are measured: return the size of every slot, finite or ``NOT_FINITE``.

        ``UNMEASURED`` are those that are not known, or not the plan's.
        """
        sizes = list(torch.full_like(self._gains, UNMEASURED).unbind())
        for layer, slot in self._slots.items():
            if slot in plan.slots:
                sizes[slot] = self._size(layer).to(sizes[slot])
        return torch.stack(sizes)

    def _size(self, layer: Layer) -> Tensor:
        """Return the size of one layer."""
        raise NotImplementedError

    def _shrink(self, plan: StepPlan, bounds: Tensor) -> Tensor:
        """Where ``divides`` is False: bound the plan's weights otherwise, and return the smallest factor of each."""
        raise NotImplementedError

    # --- How a step goes

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _step(self, optimizer: Optimizer | None, *_: Any) -> None:
        """Project after a step of an optimizer, which calls this; None: for ``step()``."""
        if self._paused:
            return
        attached = self._attached[optimizer]
        is_captured = self._gains.is_cuda and torch.cuda.is_current_stream_capturing()
        number, rest = divmod(attached.steps, self.every)
        attached.steps += 1
        if rest and not is_captured:
            self._rest(attached, attached.plan or self._plan(optimizer))
            return
        # At steps 1, 2, 4, 8, … of those that measure; within a captured one nothing may be asked of the device.
        is_checked = not number & (number + 1) and not is_captured
        if is_checked:
            checks.try_compiled_forwards(self)
        plan = self._plan(optimizer)
        if is_captured:
            attached.captured.append(plan)
        if self._newly_skipped:
            skipped, self._newly_skipped = self._newly_skipped, {}
            checks.warn(f"Left out from now on: {by_reason(skipped)}. Pass exclude=… to silence this.")
        maxima = self._buffer.maxima
        if not self.measures_training:
            sizes = self._estimate(plan)
        elif plan.fused is not None:  # which uses them up
            sizes = maxima
        else:
            sizes = torch.full_like(maxima, UNMEASURED).index_copy_(0, plan.own, maxima[plan.own])
            maxima.index_fill_(0, plan.own, UNMEASURED)
        if dist.is_available() and dist.is_initialized():
            if not number and not is_captured:  # before ranks that hold other layers wait for each other
                checks.warn(differing_ranks(self._slots, self.process_group, sizes.device))
            for slot in self._left_out:
                sizes[slot].fill_(torch.inf)  # other ranks, which may still measure it, do not divide it either
            sizes = max_over_ranks(sizes, self.process_group)
            sizes.masked_fill_(sizes == torch.inf, UNMEASURED)
        bounds = self._bounds.clone() if plan.tied else self._bounds
        for users in plan.tied:  # each of them counts, under the smallest of their bounds
            sizes[users], bounds[users] = sizes[users].amax(), bounds[users].amin()
        if is_checked or (attached.checks.pending is not None and not is_captured):
            attached.checks.look(checks.take_snapshot(self, optimizer, plan, sizes) if is_checked else None)
        if plan.fused is not None:  # it uses the sizes up
            every = self.every if is_captured and self.every > 1 else 0
            plan.fused(sizes, bounds, self._gains, self._scales, self._counts, self._buffer.resting, every)
        else:
            bounds = bounds[plan.at]
            scales = project_(plan.weights, sizes[plan.at], bounds) if self.divides else self._shrink(plan, bounds)
            # What users see is kept in place, so that the replays of a captured step show too.
            is_measured = sizes >= 0
            self._gains.copy_(torch.where(sizes == NOT_FINITE, torch.nan, torch.where(is_measured, sizes, self._gains)))
            scales = torch.ones_like(self._scales).index_copy_(0, plan.at, scales)
            for users in plan.tied:
                scales[users] = scales[users].amin()
            self._scales.index_copy_(0, plan.own, scales[plan.own])
            self._counts += torch.stack([is_measured, scales < 1, scales < HARD])
        if self.every > 1 and not (is_captured and plan.fused is not None):  # which counts, too
            self._rest(attached, plan)

    def _plan(self, optimizer: Optimizer | None) -> StepPlan:
        """Return what a step of this optimizer works on; without one, everything. Made again when that changes."""
        attached = self._attached[optimizer]
        held = 0
        for group in [] if optimizer is None else optimizer.param_groups:
            held += sum(map(id, group["params"]))
        if attached.held != held:  # the plans of other optimizers depend on it too
            attached.held = held
            self._forget_plans()
        if attached.plan is not None:
            for module, name, weight, known in attached.plan.origins:
                if module._parameters.get(name) is not weight:
                    break
                if known is not None and known != (weight.requires_grad, weight.data_ptr()):
                    break
            else:
                return attached.plan
        if self._slots:
            self._move_to(device_of(self._slots))
        for hook in self._hooks:
            hook.look_up()
        attached.plan = make_plan(self, optimizer)
        return attached.plan

    def _rest(self, attached: Attached, plan: StepPlan) -> None:
        """With ``every``: have the forwards before the optimizer's next step measured, or not."""
        buffer = self._buffer
        if buffer.is_captured:  # each replay counts
            buffer.resting[plan.own] = torch.threshold(buffer.resting[plan.own] - 1, -1, self.every - 1)
            return
        steps = -attached.steps % self.every  # until one that measures
        if not (buffer.idle.issuperset(plan.slots) if steps else buffer.idle.isdisjoint(plan.slots)):
            buffer.resting.index_fill_(0, plan.own, steps)
            buffer.idle = buffer.idle | plan.slots if steps else buffer.idle - plan.slots

    def _register(self) -> None:
        """Register hooks, where there are none."""
        if self._updates is None:
            self._updates = _torch.Updates(self, lambda constraint: checks.warn(checks.not_attached(constraint)))
        if not self._hooks:
            self._hooks = self._make_hooks()

    def _forget_plans(self) -> None:
        for attached in self._attached.values():
            attached.plan = None

    def _move_to(self, device: torch.device) -> None:
        """Follow a model that was moved to another device."""
        if self._gains.device != device:
            for name in ("_gains", "_scales", "_counts", "_bounds"):
                setattr(self, name, getattr(self, name).to(device))
            self._buffer.move_to(device)

    def _skip(self, layer: Layer, reason: str) -> None:
        """Leave a layer out from now on; the next step says so, of all such layers in one warning."""
        self.skipped[layer.name] = self._newly_skipped[layer.name] = reason
        for hook in [hook for hook in self._hooks if hook.layer is layer]:
            hook.remove()
            self._hooks.remove(hook)
        self._left_out.append(self._slots.pop(layer))
        self._forget_plans()

    def _by_name(self, packed: Tensor) -> dict[str, float]:
        values = packed.tolist()
        return {layer.name: values[slot] for layer, slot in self._slots.items()}
