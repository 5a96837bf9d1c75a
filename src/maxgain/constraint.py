"""The idea that all constraints share: estimate a layer's size, divide its weight by ``max(1, size / bound)``.

What differs between constraints is the estimate. When it is taken, for which layers, what a skipped step means and how
the state is kept are the same for all of them, and are here.
"""

from __future__ import annotations

import contextlib
import glob
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import torch_quirks
from .coverage import (
    Bound,
    LeftOut,
    Share,
    expect_usable,
    refuse_one_bound,
    resolve_bounds,
    share_of,
    torch_optimizer_in,
)
from .distributed import carried, local, own_part
from .errors import AttachError, MeasurementWarning, NotMeasuredError, StateError
from .functional import shrink_all_
from .layers import ITSELF, find_layers
from .observe import UNMEASURED, Hook, Missed, Observer
from .proof import Proofs, Slipping, expect_whole_weights

FIRST_LOOK = (2, 1)
"""Steps before the first look at what goes wrong slowly, and the wait that doubles from there on."""
MOST_STEPS_BETWEEN_LOOKS = 100


class Constraint(ABC):
    """Keeps the layers of a model within bounds, from one optimiser step to the next.

    A subclass says how large a layer is (``_estimate``) and, if that needs the layer's forwards, what to look at
    (``_make_observers``).
    """

    bound_name: ClassVar[str] = "bound"
    """What the user calls the bound."""
    option_names: ClassVar[tuple[str, ...]] = ()
    """The keyword arguments beside the bound and ``include`` that make this constraint again."""
    why_unknown: ClassVar[str] = ""
    """What to tell a user whose layers have no size yet in the first step."""
    _reads_weights = True
    """Whether an estimate reads the weights, which must then be whole, and not only what the forwards showed."""
    _releases = False
    """Whether steps bring layers down to other bounds than the user's: see ``_bounds_now``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        setattr(cls, cls.bound_name, property(fset=refuse_one_bound))

    @torch.inference_mode(mode=False)  # what is made within it could not be changed outside
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
        if self._reads_weights:
            expect_whole_weights(self._layers)
        self._names = [layer.name for layer in self._layers]
        self.bounds = resolve_bounds(bound, self._names, self.bound_name)
        """The bound of every constrained layer, by its dotted name. One that is changed holds from the next step on."""
        self._checked_bounds = dict(self.bounds)
        self._dtype = reduce(torch.promote_types, (layer.weight.dtype for layer in self._layers), torch.float32)
        self._sizes = torch.full((len(self._layers),), torch.nan, dtype=self._dtype, device=self._device)
        self._scales = torch.ones_like(self._sizes)
        self._is_paused = False
        self._optimizers: dict[Optimizer, RemovableHandle] = {}
        self._shares: dict[Optimizer | None, Share] = {}
        self._observers = self._make_observers()
        self._hooks: list[Hook] = []
        self._missed = Missed(self._layers, self.bounds, type(self).__name__)
        self._never_sized: set[str] = set()
        """The layers that no step has found a size of yet."""
        self._said_silent: set[str] = set()
        """The layers that the user was told are not measured."""
        tried = [layer for layer in self._layers if layer.own_forward]
        self._proofs = Proofs(tried, self._observers[0].instance if self._observers else None) if tried else None
        self._slipping: Slipping | None = None
        self._until_look, self._wait = FIRST_LOOK
        """After how many more steps the weights are looked at, and how many came before the last look."""
        self._left_out = LeftOut(model, self._layers, exclude, is_meant=include is not None)
        self._left_out.tell()
        self._watch()
        self._missed.follow()

    # What a constraint is made of.

    @abstractmethod
    def _estimate(self, share: Share) -> Tensor | list[Tensor] | None:
        """The size of each of the share's layers, finite, and negative if it is not known; None to leave a step out.

        One number per layer in a packed tensor, or a list of tensors that broadcast against the layers' weights.
        """

    def _make_observers(self) -> Sequence[Observer]:
        """What looks at the forwards of each layer; nothing if the weights alone say how large the layers are."""
        return ()

    def _bounds_now(self, share: Share, sizes: Tensor) -> Tensor:
        """The bounds that this step brings layers of these sizes down to, if they are not the user's."""
        raise NotImplementedError

    def _forget(self, share: Share | None, used_up: Tensor | None = None) -> None:
        """Throw away what was seen of the share's layers since the last step, or of all; but for sizes used up."""

    # What users call.

    def attach(self, optimizer: Optimizer) -> Self:
        """From now on ``optimizer.step()`` also projects the constrained weights that the optimiser holds.

        Several optimisers may be attached (a generator's and a discriminator's): each projects what it steps. Of a
        wrapper that holds a torch optimiser (Accelerate's, SAM) that one is attached, because it is the one that steps.
        Several constraints may share an optimiser; of a weight that two of them bound, each takes its own excess away.
        """
        optimizer = torch_optimizer_in(optimizer, self._layers)
        if optimizer in self._optimizers:
            raise AttachError(f"this {type(optimizer).__name__} is attached to this {type(self).__name__} already.")
        self._share(optimizer)
        if not self._optimizers:
            self._watch()
        torch_quirks.after_scaler_step(optimizer, self._drop)
        # A compiled step leaves this as it is: it counts on the host, and would be compiled again for each count.
        after_step = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._optimizers[optimizer] = optimizer.register_step_post_hook(after_step)
        self._missed.follow(optimizer, self._hooks)
        return self

    def detach(self) -> None:
        """Leave the model and its optimisers as they were before; the weights stay as they are."""
        for optimizer, handle in self._optimizers.items():
            handle.remove()
            torch_quirks.forget_scaler_step(optimizer, self._drop)
        self._optimizers.clear()
        self._missed.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget(None)

    def step(self) -> None:
        """Project every constrained layer now; for those who update weights without an attached optimiser."""
        self._missed.strangers = 0
        self._project(self._share(None), None)

    def discard(self) -> None:
        """Throw away what was measured since the last step; for those who decide to leave a step out."""
        self._forget(None)

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
        return self._by_name(self._sizes)

    @property
    def scales(self) -> dict[str, float]:
        """What the last step multiplied every layer's weight by: 1 where the layer was within its bound."""
        return self._by_name(self._scales)

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved for a run to go on to the same bits: a flat dictionary of tensors."""
        return {name: tensor.detach().clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state of a constraint of the same kind on the same layers; all of it, or nothing."""
        if not isinstance(state, Mapping):
            raise StateError(f"a state is a dictionary of tensors, as state_dict() makes it, not {state!r:.60}.")
        own = self._state()
        strange, missing = sorted(set(state) - set(own), key=str), sorted(set(own) - set(state))
        if strange or missing:
            said = f"it lacks {missing[0]!r}" if missing else f"it has {strange[0]!r}, which is not here"
            raise StateError(
                f"the state belongs to another {type(self).__name__}, of other layers or with other options: {said}."
            )
        for name, tensor in own.items():
            _expect_alike(name, state[name], tensor)
        self._load(state)

    @property
    def unconstrained(self) -> tuple[str, ...]:
        """The parameters that no bound applies to: biases, embeddings, the scales of layers that were left out."""
        weights = {id(layer.weight) for layer in self._layers}
        return tuple(name for name, parameter in self.model.named_parameters() if id(parameter) not in weights)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name or ITSELF}: {self.bound_name}={bound:g}" for name, bound in self.bounds.items())
        return f"{type(self).__name__}({rows}\n)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy watches the copied model and has the same state; it is attached to no optimiser.
        return _rebuild, (type(self), self.model, self._options(), self.state_dict())

    def _finish_copy(self) -> None:
        model, options, state = self.__dict__.pop("_unfinished")
        type(self).__init__(self, model, **options)
        self.load_state_dict(state)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for what is not there: a copy made before its model was whole is finished by its first use."""
            if "_unfinished" not in self.__dict__:
                where = ": each layer's is in constraint.bounds" if name == self.bound_name else ""
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{where}")
            self._finish_copy()
            return getattr(self, name)

    def _options(self) -> dict[str, Any]:
        """The keyword arguments that make this constraint again on a copy of the model."""
        return {
            self.bound_name: {glob.escape(name): bound for name, bound in self.bounds.items()},
            "include": [glob.escape(name) for name in self._names],
            **{name: carried(getattr(self, name)) for name in self.option_names},
        }

    # Watching.

    def _watch(self) -> None:
        if self._hooks:
            return
        notes = self._proofs.notes() if self._proofs else {}
        for layer, observer in zip(self._layers, self._observers, strict=False):  # without observers no layer is hooked
            if observer.needs_forwards:
                self._hooks.append(Hook(layer, observer, notes.get(layer.name), observer.instance))
        self._never_sized = set(self._names) if self.why_unknown else set()

    def _pause(self, paused: bool) -> None:
        self._is_paused = self._missed.paused = paused
        for observer in self._observers:
            observer.paused = paused

    # How a step goes.

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Its own class, its base class and torch's: only then may one step have called another.
        may_be_within = len([cls for cls in type(optimizer).__mro__ if "step" in vars(cls)]) > 2
        if not (may_be_within and torch_quirks.is_within_a_step(optimizer)):
            self._project(self._share(optimizer), torch_quirks.found_inf(optimizer))

    def _drop(self, optimizer: Optimizer) -> None:
        """After ``GradScaler.step``: whatever is still there belongs to a step that was skipped."""
        if not self._is_paused:
            self._forget(self._share(optimizer))

    @torch.inference_mode(mode=False)  # where no norm's derivative could be taken
    @torch.no_grad()
    def _project(self, share: Share, found_inf: Tensor | None) -> None:
        if self._is_paused or (sizes := self._estimate(share)) is None:
            return
        device, factors = share.bounds.device, None
        if self._sizes.device != device:  # the model was moved
            self._sizes, self._scales = self._sizes.to(device), self._scales.to(device)
        found_inf = None if found_inf is None else found_inf.to(device)
        if self._never_sized or (self._proofs and self._proofs.open):
            self._check_first(share, sizes)
        if isinstance(sizes, list):
            sizes, factors = self._divide_by_entry(share, sizes, found_inf)
        else:
            self._until_look -= 1
            bounds = self._bounds_now(share, sizes) if self._releases else share.bounds
            if share.fused is None:
                factors = self._divide_by_layer(share, sizes, bounds, found_inf)
            else:
                share.fused(sizes, bounds, self._sizes, self._scales, found_inf)
        if factors is not None:  # kept for the user in place, so that a captured step's replays are seen too
            known = sizes >= 0 if found_inf is None else (sizes >= 0) & (found_inf == 0)
            at = slice(None) if share.index is None else share.index
            self._sizes[at] = torch.where(known, sizes, self._sizes[at])
            self._scales[at] = factors.reciprocal()
        self._forget(share, used_up=sizes if factors is None else None)
        if self._until_look == 0:  # never where sizes are of entries, which come down with them
            self._until_look = self._wait = min(2 * self._wait, MOST_STEPS_BETWEEN_LOOKS)
            self._look(share)

    def _look(self, share: Share) -> None:
        """From time to time, and often at first: is any weight divided in vain?"""
        self._slipping = self._slipping or Slipping(self._layers)
        self._slipping.look(self._sizes, self._scales)

    def _divide_by_layer(self, share: Share, sizes: Tensor, bounds: Tensor, found_inf: Tensor | None) -> Tensor:
        """One size per layer, the usual case: all but the division is done for all at once. Returns the divisors."""
        factors = (sizes / bounds).clamp_min_(1.0)
        if found_inf is not None:
            factors = torch.where(found_inf > 0, torch.ones_like(factors), factors)
        # As they take effect: the largest for layers that share a weight, 1 for what is not divided.
        room = factors.new_ones(len(factors) + 1).scatter_reduce_(0, share.owners, factors, "amax")
        room[-1:] = 1.0
        factors = room[share.owners]
        by = [factor.to(w.device) for factor, w in zip(factors[share.divided_by], share.divided, strict=True)]
        shrink_all_([local(weight) for weight in share.divided] if share.is_sharded else share.divided, by)
        return factors

    def _divide_by_entry(self, share: Share, sizes: list[Tensor], found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sizes of units or of single weights: each entry of a weight is divided by its own factor.

        Returns the largest size of each layer, and the largest factor.
        """
        bounds = [self.bounds[layer.name] for layer in share.layers]
        factors = [(size / bound).clamp_min_(1.0) for size, bound in zip(sizes, bounds, strict=True)]
        if found_inf is not None:
            factors = [torch.where(found_inf.to(f.device) > 0, torch.ones_like(f), f) for f in factors]
        by = [reduce(torch.maximum, [factors[user] for user in users]) for users in share.users]
        parts = [own_part(factor, weight) for factor, weight in zip(by, share.divided, strict=True)]
        shrink_all_([local(weight) for weight in share.divided], parts)
        applied = {user: factor for users, factor in zip(share.users, by, strict=True) for user in users}
        ones = torch.ones((), dtype=self._dtype, device=self._device)
        largest = torch.stack([applied[i].amax().to(ones) if i in applied else ones for i in range(len(sizes))])
        return torch.stack([size.amax().to(ones) for size in sizes]), largest

    def _check_first(self, share: Share, sizes: Tensor | list[Tensor]) -> None:
        """In a layer's first step: is there a size, and may the weight be divided? Later nothing waits for a device."""
        blind = isinstance(sizes, list) or (sizes.is_cuda and torch_quirks.is_capturing(sizes.device))
        known = [True] * len(sizes) if blind else (sizes != UNMEASURED).tolist()  # type: ignore[union-attr]
        if self._proofs:
            self._proofs.settle(share, known, self._device)
        if blind or not self._never_sized:
            return
        trained = {layer.name: k for layer, k in zip(share.layers, known, strict=True) if layer.weight.requires_grad}
        silent = [name for name, k in trained.items() if not k and name in self._never_sized]
        if silent and len(silent) == len(trained) and len(self._never_sized) == len(self._names):
            raise NotMeasuredError(
                f"a step was taken, but none of the {len(silent)} layers was measured ({silent[0]!r}, ...). "
                f"{self.why_unknown}"
            )
        self._never_sized.difference_update(layer.name for layer in share.layers)
        if silent:
            self._said_silent.update(silent)
            warnings.warn(
                f"not measured by the first step, so not constrained in it: {', '.join(map(repr, silent))}. "
                f"{self.why_unknown} If the model uses the layer's weight without calling the layer, it cannot be "
                "measured: leave it out with exclude.",
                MeasurementWarning,
                stacklevel=2,
            )

    # What a step works on.

    @property
    def _device(self) -> torch.device:
        """Where sizes are kept: beside the first weight, or on the host while that is on the meta device."""
        weight = self._layers[0].weight
        return torch.device("cpu") if weight.is_meta else weight.device

    def _share(self, optimizer: Optimizer | None) -> Share:
        """What a step of this optimiser works on; of a step without one, everything.

        Made once, and again when a weight is replaced, moved, frozen, tied or cast, or a bound or an optimiser changes.
        """
        weights = [w for layer in self._layers if (w := layer.module._parameters.get(layer.kind.weight)) is not None]
        optimizers = dict.fromkeys([*self._optimizers, *([optimizer] if optimizer else [])])
        signature = (
            (addresses := [weight.data_ptr() for weight in weights]),
            len(set(addresses)),  # two weights may come to lie in the same memory, or no longer do
            [(id(weight), weight.requires_grad, weight.device, weight.dtype, weight.shape) for weight in weights],
            dict(self.bounds),
            [list(map(id, group["params"])) for one in optimizers for group in one.param_groups],
        )
        share = self._shares.get(optimizer)
        first = 0 if share and share.fused else 1  # where weights lie matters to a fused projection alone
        if share is None or share.signature[first:] != signature[first:]:
            expect_usable(optimizer, self.model, self._layers)
            if self.bounds != self._checked_bounds:
                resolve_bounds({glob.escape(str(n)): bound for n, bound in self.bounds.items()}, self._names, "bounds")
                self._checked_bounds = dict(self.bounds)
            if self._reads_weights:
                expect_whole_weights(self._layers)
            self._left_out.tell()
            others = [one for one in optimizers if one is not optimizer] if optimizer else []
            like = torch.empty((), dtype=self._dtype, device=self._device)
            share = share_of(optimizer, others, self._layers, self.bounds, signature=signature, like=like)
            self._shares[optimizer] = share
            if self._proofs:
                self._proofs.wake(share)
        return share

    # The state.

    def _state(self) -> dict[str, Tensor]:
        """The tensors themselves, by the names they are saved under."""
        return self._packed(size=self._sizes, scale=self._scales)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state whose names, shapes and values have been checked."""
        self._sizes.copy_(self._unpacked(state, "size"))
        self._scales.copy_(self._unpacked(state, "scale"))

    def _packed(self, **tensors: Tensor) -> dict[str, Tensor]:
        """One name per layer for each of some packed tensors."""
        return {f"{n}.{what}": tensor[i] for what, tensor in tensors.items() for i, n in enumerate(self._names)}

    def _unpacked(self, state: Mapping[str, Tensor], what: str) -> Tensor:
        return torch.stack([state[f"{name}.{what}"].to(self._device) for name in self._names])

    def _by_name(self, packed: Tensor) -> dict[str, float]:
        """To the host, in one transfer."""
        return dict(zip(self._names, packed.tolist(), strict=True))


def _rebuild(cls: type[Constraint], model: nn.Module, options: dict[str, Any], state: dict[str, Tensor]) -> Constraint:
    """A copy on a copied model; if that is not whole yet, because it holds the constraint itself, as soon as it is."""
    constraint = cls.__new__(cls)
    constraint.__dict__["_unfinished"] = (model, options, state)
    if "_modules" in vars(model):
        constraint._finish_copy()
    return constraint


def _expect_alike(name: str, found: Any, own: Tensor) -> None:
    """Refuse an entry of a state that cannot take the place of our own; only a size may be nan: not known yet."""
    if not isinstance(found, Tensor) or found.shape != own.shape:
        shape = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise StateError(f"the state's {name!r} has {shape}, where shape {tuple(own.shape)} belongs.")
    if found.is_floating_point() != own.is_floating_point() or found.is_complex():
        raise StateError(f"the state's {name!r} is {found.dtype}, where {own.dtype} belongs.")
    kept = found.to(own.dtype)  # in which it must be usable: the run may have had another
    usable = torch.isfinite(kept) | torch.isnan(found) if name.endswith(".size") else torch.isfinite(kept)
    if not bool(usable.all()):
        raise StateError(f"the state's {name!r} is not finite: the file is damaged, or the run had diverged.")
    if not found.is_floating_point() and bool((found < 0).any()):
        raise StateError(f"the state's {name!r} counts below zero: the file is damaged.")
