"""The idea that all constraints share: estimate a layer's size, divide its weight by ``max(1, size / bound)``.

What differs between constraints is the estimate. When it is taken, of which layers, what a skipped step means and
how the state is kept are the same for all of them, and are here.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import torch_quirks as skipped
from .distributed import local
from .errors import AttachError, BoundError, PatternError, StateError
from .functional import check_bound, divisors, is_binding, shrink_all_
from .layers import FoundLayer, find_layers, matches

Bound = float | Mapping[str, float]


class Constraint(ABC):
    """Keeps the layers of a model within bounds, from one optimiser step to the next."""

    bound_name = "bound"
    """What the user calls the bound, for messages."""

    def __init__(
        self,
        model: nn.Module,
        bound: Bound,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
    ) -> None:
        self.model = model
        self._layers = find_layers(model, include, exclude)
        self.bounds = resolve_bounds(bound, [layer.name for layer in self._layers], self.bound_name)
        """The bound of every constrained layer, by its dotted name."""
        self._sizes = {layer.name: layer.scalar(math.nan) for layer in self._layers}
        self._scales = {layer.name: layer.scalar(1.0) for layer in self._layers}
        self._optimizers: dict[Optimizer, RemovableHandle] = {}
        self._is_paused = False
        self._watch()

    # What a constraint is made of.

    @abstractmethod
    def _estimate(self, layers: list[FoundLayer]) -> list[Tensor]:
        """The size of each layer: a finite tensor that broadcasts against its weight, negative if not known."""

    def _watch(self) -> None:
        """Begins to look at the model's forwards; a constraint on the weights alone needs none."""

    def _unwatch(self) -> None:
        """Ends what ``_watch`` began."""

    def _forget(self, layers: list[FoundLayer]) -> None:
        """Throws away what was seen of these layers' forwards since the last step."""

    # What users call.

    def attach(self, optimizer: Optimizer) -> Self:
        """From now on ``optimizer.step()`` also projects the constrained weights that the optimiser holds.

        Several optimisers may be attached (a generator's and a discriminator's): each projects what it steps.
        """
        if not isinstance(optimizer, Optimizer):
            raise AttachError(
                f"attach() takes a torch.optim.Optimizer, not {type(optimizer).__name__}; "
                "with anything else call step() yourself after each update."
            )
        if optimizer in self._optimizers:
            raise AttachError(f"this {type(optimizer).__name__} is attached to this {type(self).__name__} already.")
        self._held_by(optimizer)
        if not self._optimizers:
            self._watch()
        skipped.after_scaler_step(optimizer, self._drop)
        self._optimizers[optimizer] = optimizer.register_step_post_hook(self._after_step)
        return self

    def detach(self) -> None:
        """Leaves the model and its optimisers as they were before; the weights stay as they are."""
        for optimizer, handle in self._optimizers.items():
            handle.remove()
            skipped.forget(optimizer, self._drop)
        self._optimizers.clear()
        self._unwatch()

    def step(self) -> None:
        """Projects every constrained layer now; for those who update weights without an attached optimiser."""
        self._project(self._layers, {id(layer.weight) for layer in self._layers})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context forwards are not measured and steps do not project."""
        before = self._is_paused
        self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    @property
    def gains(self) -> dict[str, float]:
        """The newest size of every layer, as it was before the projection; nan where there is none yet."""
        return self._read(self._sizes)

    @property
    def scales(self) -> dict[str, float]:
        """What the last step multiplied every layer's weight by: 1 where the layer was within its bound."""
        return self._read(self._scales)

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved for a run to go on to the same bits: a flat dictionary of tensors."""
        return {name: tensor.detach().clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a state of a constraint of the same kind on the same layers."""
        own = self._state()
        strange, missing = sorted(set(state) - set(own)), sorted(set(own) - set(state))
        if strange or missing:
            said = f"it lacks {missing[0]!r}" if missing else f"it has {strange[0]!r}, which is not here"
            raise StateError(f"the state belongs to another {type(self).__name__}: {said}.")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    @property
    def unconstrained(self) -> tuple[str, ...]:
        """The parameters that no bound applies to: biases, embeddings, the scales of layers that were left out."""
        weights = {id(layer.weight) for layer in self._layers}
        return tuple(name for name, parameter in self.model.named_parameters() if id(parameter) not in weights)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name or '(itself)'}: {self.bound_name}={bound:g}" for name, bound in self.bounds.items())
        return f"{type(self).__name__}({rows}\n)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy watches the copied model and has the same state; it is attached to no optimiser.
        return _rebuild, (type(self), self.model, self._options(), self.state_dict())

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """The keyword arguments that make this constraint again on a copy of the model."""

    # How a step goes.

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = self._held_by(optimizer)
        self._project(self._covered_by(optimizer), held, skipped.found_inf(optimizer))

    def _drop(self, optimizer: Optimizer) -> None:
        """After ``GradScaler.step``: whatever is still there belongs to a step that was skipped."""
        if not self._is_paused:
            self._forget(self._covered_by(optimizer))

    def _held_by(self, optimizer: Optimizer) -> set[int]:
        """The identities of the constrained weights that an optimiser holds."""
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        held = theirs & {id(layer.weight) for layer in self._layers}
        if not held:
            raise AttachError(
                f"this {type(optimizer).__name__} holds none of the {len(self._layers)} constrained weights "
                f"({self._layers[0].name!r}, ...): make it from the parameters of the constrained model, "
                "after load_state_dict(assign=True) if that is used."
            )
        return held

    def _covered_by(self, optimizer: Optimizer) -> list[FoundLayer]:
        """The layers that a step of this optimiser ends a window for: all but those that another one holds."""
        others = {id(p) for o in self._optimizers if o is not optimizer for g in o.param_groups for p in g["params"]}
        others -= {id(p) for g in optimizer.param_groups for p in g["params"]}
        return [layer for layer in self._layers if id(layer.weight) not in others]

    @torch.no_grad()
    def _project(self, layers: list[FoundLayer], held: set[int], found_inf: Tensor | None = None) -> None:
        if self._is_paused:
            return
        weights = [layer.weight for layer in layers]
        self._follow(layers, weights)
        sizes = self._estimate(layers)
        factors = divisors(sizes, [self.bounds[layer.name] for layer in layers])
        if found_inf is not None:
            factors = [torch.where(found_inf.to(f.device) > 0, torch.ones_like(f), f) for f in factors]
        self._divide(layers, weights, factors, held)
        self._publish(layers, sizes, factors, found_inf)
        self._forget(layers)

    def _follow(self, layers: list[FoundLayer], weights: list[nn.Parameter]) -> None:
        """Keeps what is kept beside the weights of a model that was moved to another device."""
        for layer, weight in zip(layers, weights, strict=True):
            if self._sizes[layer.name].device != weight.device:
                for kept in (self._sizes, self._scales):
                    kept[layer.name] = kept[layer.name].to(weight.device)

    def _divide(
        self, layers: list[FoundLayer], weights: list[nn.Parameter], factors: list[Tensor], held: set[int]
    ) -> None:
        """Divides each weight once, by the largest factor of the layers that use it; ``factors`` tells them all."""
        users: dict[int, list[int]] = {}
        for i, weight in enumerate(weights):
            users.setdefault(id(weight), []).append(i)
        divided: list[Tensor] = []
        by: list[Tensor] = []
        for identity, indices in users.items():
            weight = weights[indices[0]]
            if (
                identity in held
                and weight.requires_grad
                and any(is_binding(self.bounds[layers[i].name]) for i in indices)
            ):
                factor = reduce(torch.maximum, on_device(weight.device, [factors[i] for i in indices]))
                divided.append(local(weight))
                by.append(factor)
            else:
                factor = torch.ones_like(factors[indices[0]])
            for i in indices:
                factors[i] = factor
        shrink_all_(divided, by)

    def _publish(
        self, layers: list[FoundLayer], sizes: list[Tensor], factors: list[Tensor], found_inf: Tensor | None
    ) -> None:
        """Keeps sizes and scales for the user: in place, so that a captured step's replays are seen too."""
        kept = [self._sizes[layer.name] for layer in layers]
        newest = torch.stack(together(largest(size) for size in sizes))
        known = newest >= 0
        if found_inf is not None:
            known &= found_inf.to(newest.device) == 0
        torch._foreach_copy_(kept, list(torch.where(known, newest, torch.stack(together(kept))).unbind()))
        scales = torch._foreach_reciprocal([largest(factor) for factor in factors])
        torch._foreach_copy_([self._scales[layer.name] for layer in layers], list(scales))

    def _pause(self, paused: bool) -> None:
        self._is_paused = paused

    def _state(self) -> dict[str, Tensor]:
        """The tensors themselves, by the names they are saved under."""
        state = {f"{name}.size": tensor for name, tensor in self._sizes.items()}
        return state | {f"{name}.scale": tensor for name, tensor in self._scales.items()}

    @staticmethod
    def _read(tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """To the host, in one transfer."""
        values = torch.stack([tensor.to(torch.float64) for tensor in together(tensors.values())]).tolist()
        return dict(zip(tensors, values, strict=True))


def resolve_bounds(bound: Bound, names: list[str], what: str) -> dict[str, float]:
    """The bound of every layer: one number for all, or the first glob of a mapping that matches the layer's name."""
    if not isinstance(bound, Mapping):
        return dict.fromkeys(names, check_bound(bound, what))
    for glob, value in bound.items():
        check_bound(value, f"{what}[{glob!r}]")
        if not any(matches(name, glob) for name in names):
            known = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            raise PatternError(f"the pattern {glob!r} of {what} matches no layer; the layers are {known}.")
    bounds: dict[str, float] = {}
    for name in names:
        matching = [float(value) for glob, value in bound.items() if matches(name, glob)]
        if not matching:
            raise BoundError(
                f"{what} says nothing about layer {name!r}: add '*': float('inf') as the last pattern "
                "to measure the other layers without constraining them, or leave them out with exclude."
            )
        bounds[name] = matching[0]
    return bounds


def largest(size: Tensor) -> Tensor:
    """The largest entry; most sizes have one only, and need no launch for it."""
    return size.amax() if size.dim() else size


def together(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors on one device; a model may lie on several."""
    tensors = list(tensors)
    return on_device(tensors[0].device, tensors)


def on_device(device: torch.device, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors there, without a call for those that are there already."""
    return [tensor if tensor.device == device else tensor.to(device) for tensor in tensors]


def _rebuild(cls: type[Constraint], model: nn.Module, options: dict[str, Any], state: dict[str, Tensor]) -> Constraint:
    constraint = cls(model, **options)
    constraint.load_state_dict(state)
    return constraint
