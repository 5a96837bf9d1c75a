"""MaxGain: the size of a layer is the largest gain that the training batch showed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from . import torch_quirks
from .constraint import FIRST_LOOK, Constraint
from .coverage import Bound, Share, parameters_of
from .distributed import Group, Sharing, check_group
from .errors import AttachError, MaxGainError, MeasurementWarning
from .fresh import FreshMaximum
from .functional import check_choice, check_count, check_p
from .later import Asked
from .layers import Instance
from .observe import UNMEASURED, RunningMaximum, Tally
from .rounding import Rounding

Measure = Literal["stale", "fresh"]
Strength = Literal["full", "rate"]
STEPS_BETWEEN_LOOKS = 100
"""How often an accelerator is asked for its counts of dropped measurements."""


class MaxGain(Constraint):
    """Constrains the largest gain ``‖Wx‖_p / ‖x‖_p`` of each layer, as measured on the training batches, to γ.

    Gouk, Pfahringer, Frank and Cree, *MaxGain: Regularisation of Neural Networks by Constraining Activation
    Magnitudes*, 2018. After each optimiser step ``W ← W / max(1, γ̂ / γ)``, γ̂ being the largest gain over the
    instances of the batches since the last step.

    A measured gain is a lower bound of the layer's operator norm, not a Lipschitz constant.

    ``gains`` and ``scales`` say what the last step found and did. ``bounds`` has every layer's γ by its dotted name;
    one that is changed holds from the next step on.

    Args:
        model: whose layers are constrained: dense layers, convolutions, batch norm, and what was registered.
        gamma: a bound for all layers, or a mapping of globs over dotted names to bounds, of which the first that
            matches decides; ``inf`` measures without constraining.
        p: the norm, from 1 to ``inf``.
        instance: what one x is. ``'auto'``: a row of the last dimension for dense layers, so that every token of a
            sequence is one, and a whole sample for convolutions and batch norm. ``'sample'``: a whole sample always.
        measure: ``'stale'`` takes the gains of the forward that gave the gradient, as the paper does: it reads every
            input and output once more. ``'fresh'`` keeps the inputs and applies the updated weight to them, so that
            after the step the bound holds exactly on the batch; it costs a second forward through every layer and the
            memory of its inputs. LBFGS and its like evaluate many points within a step and want it: ``'stale'`` counts
            the points that they gave up too, and may divide by far more than is needed.
        strength: ``'full'`` takes an excess over γ away at once, as the paper does. ``'rate'`` takes a part of it: it
            divides by ``max(1, γ̂ / γ)`` to the power of the optimiser's learning rate over the largest that it has
            had. So projections weaken as updates do, and weights do not shrink where the learning rate is low;
            gains may exceed γ by a few per cent more. Without an attached optimiser there is no rate, and it is
            ``'full'``. See docs/ratchet.md.
        every: measure and project in every k-th step only, which is cheaper; between them gains may exceed γ.
        include: globs over dotted names: only these layers. None takes all but the scales of layer, group and RMS
            norms.
        exclude: globs over dotted names: not these layers.
        process_group: whose ranks share their maxima; None is the default group, where one is initialised, and False
            means: do not share.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> constraint = MaxGain(model, gamma=0.5).attach(optimizer)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(constraint.gains)
        ['0', '2']
    """

    bound_name = "gamma"
    option_names = ("p", "instance", "measure", "strength", "every", "process_group")
    why_unknown = "Train in training mode, and use paused() around a step that has no forward."

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        model: nn.Module,
        gamma: Bound = 2.0,
        *,
        p: float = 2.0,
        instance: Instance = "auto",
        measure: Measure = "stale",
        strength: Strength = "full",
        every: int = 1,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        process_group: Group = None,
    ) -> None:
        self.p = check_p(p)
        self.instance: Instance = check_choice("instance", instance, get_args(Instance))
        self.measure: Measure = check_choice("measure", measure, get_args(Measure))
        self.strength: Strength = check_choice("strength", strength, get_args(Strength))
        self.every = check_count("every", every)
        self.process_group = None if process_group is None else check_group(process_group)
        self._sharing = Sharing()
        self._reads_weights = measure == "fresh"
        self._releases = strength == "rate"
        self._steps = 0
        self._dropped_seen = 0
        self._asked: Asked | None = None
        self._rounding: Rounding | None = None
        super().__init__(model, gamma, include=include, exclude=exclude)
        self._resting = [0] * len(self._layers)
        """How many steps each layer will not be measured for; zeros unless ``every`` is more than 1."""
        self._rates, self._peaks = torch.zeros_like(self._sizes), torch.zeros_like(self._sizes)
        """The learning rate of every layer's weight, and the largest that it has had, where they are followed."""

    @property
    def gains(self) -> dict[str, float]:
        """The newest maximum of every layer: of the forwards since the last step, or of that step; nan before any."""
        maxima, dropped = self._tally.over_devices(self._device)
        self._warn_of_dropped(dropped.tolist())
        at_step, since = self._by_name(self._sizes), self._by_name(maxima)
        return {name: at_step[name] if since[name] == UNMEASURED else since[name] for name in at_step}

    @property
    def dropped(self) -> dict[str, int]:
        """How many instances of each layer had a gain that was not finite, and were left out."""
        return dict(zip(self._names, self._tally.over_devices(self._device)[1].tolist(), strict=True))

    def detach(self) -> None:
        """Leave the model and its optimisers as they were before; the weights stay as they are."""
        super().detach()
        self._rounding = None
        self._until_look, self._wait = FIRST_LOOK

    def _make_observers(self) -> list[RunningMaximum]:
        self._tally = Tally(len(self._layers), self._dtype, self.p, self.instance)
        kind = FreshMaximum if self.measure == "fresh" else RunningMaximum
        self._maxima = [kind(layer, i, self._tally) for i, layer in enumerate(self._layers)]
        self._fresh = [maximum for maximum in self._maxima if isinstance(maximum, FreshMaximum)]
        """All of them, or none."""
        return self._maxima

    # How a step goes.

    def _estimate(self, share: Share) -> Tensor | None:
        if not self._hooks:
            raise AttachError("this MaxGain is detached and measures nothing: attach it again, or make a new one.")
        if self.strength == "rate":
            self._follow_rate(share)
        if self.every > 1 and self._rests(share):
            return None
        if self._fresh:
            for position in share.positions:
                self._fresh[position].replay()
        device = share.bounds.device
        if len(self._tally.by_device) > 1:
            for maximum in self._maxima:
                maximum.follow()
            self._tally.gather(device, {maximum.entries.maxima.device for maximum in self._maxima})
        maxima, dropped = self._tally.over_devices(device)
        if dropped.device.type != "cpu" or int(dropped.sum()) > self._dropped_seen:
            self._look_at(dropped)
        maxima = self._sharing.largest(maxima, self.process_group, self._names)
        return maxima if share.index is None else maxima[share.index]

    def _forget(self, share: Share | None, used_up: Tensor | None = None) -> None:
        self._tally.forget(share.index if share else None, used_up)
        if self._fresh:
            for position in share.positions if share else range(len(self._fresh)):
                self._fresh[position].let_go()

    def _look(self, share: Share) -> None:
        self._tell_what_went_silent(share)
        if self.measure == "stale" and not torch_quirks.is_capturing(self._device):
            self._rounding = self._rounding or Rounding(self._hooks)
            self._rounding.look()
        super()._look(share)

    def _tell_what_went_silent(self, share: Share) -> None:
        """Warn of layers that are trained on and measured no longer; the host knows, and no device is asked."""
        held = parameters_of(share.optimizer) if share.optimizer else {id(layer.weight) for layer in share.layers}
        modules = set(self.model.modules())
        watched = {hook.layer.name for hook in self._hooks if hook in hook.layer.module._forward_hooks.values()}
        silent: dict[str, str] = {}
        for layer in share.layers:
            signs = {
                "replaced": layer.module not in modules,
                "its hooks were removed": layer.name not in watched,
                "in evaluation mode": not layer.module.training,
            }
            is_trained = layer.weight.requires_grad and id(layer.weight) in held
            if any(signs.values()) and is_trained and layer.name not in self._said_silent:
                silent[layer.name] = next(why for why, is_so in signs.items() if is_so)
        if silent:
            self._said_silent.update(silent)
            warnings.warn(
                "these layers are trained but measured no longer, so nothing holds them to their bounds: "
                f"{', '.join(f'{name!r} ({why})' for name, why in silent.items())}. Call model.train() before training "
                "goes on; if a layer was replaced or lost its hooks, make the constraint again, on the model as it is.",
                MeasurementWarning,
                stacklevel=2,
            )

    def _look_at(self, dropped: Tensor) -> None:
        """Warn of measurements that were dropped, without ever waiting for an accelerator."""
        if dropped.device.type == "cpu":
            self._warn_of_dropped(dropped.tolist())
        elif not torch_quirks.is_capturing(dropped.device):
            if self._steps % STEPS_BETWEEN_LOOKS == 0:
                if self._asked is not None:
                    self._warn_of_dropped(self._asked.read())
                self._asked = Asked(dropped)
            self._steps += 1

    def _warn_of_dropped(self, dropped: list[int]) -> None:
        total = sum(dropped)
        if len(str(total)) > len(str(self._dropped_seen)) or (total and not self._dropped_seen):  # 1, 10, 100, ...
            self._dropped_seen = total
            warnings.warn(
                f"{total} instances so far had a gain that is not finite, most of them in layer "
                f"{self._names[dropped.index(max(dropped))]!r}; they were left out. "
                "Look for inf or nan in its input, or for weights that diverge.",
                MeasurementWarning,
                stacklevel=2,
            )

    # every: steps that rest.

    def _rests(self, share: Share) -> bool:
        """Whether this step is left out; layers are measured only for those that are not."""
        if torch_quirks.is_capturing(self._device):
            raise MaxGainError("every > 1 counts steps on the host, which a CUDA graph leaves out: use every=1 there.")
        skipped = torch_quirks.found_inf(share.optimizer) if share.optimizer else None
        if skipped is not None and bool(skipped > 0):  # nothing was updated, so this is no step to count
            self._forget(share)
            return True
        # Layer by layer, because the steps of another optimiser may count for some of these too.
        resting = [self._resting[position] for position in share.positions]
        for position, steps in zip(share.positions, resting, strict=True):
            self._resting[position] = (steps or self.every) - 1
            self._maxima[position].paused = self._resting[position] > 0
        return min(resting) > 0

    def _pause(self, paused: bool) -> None:
        super()._pause(paused)
        for observer, resting in zip(self._maxima, self._resting, strict=True):
            observer.paused = paused or resting > 0

    # strength: how much of an excess a step takes away.

    def _follow_rate(self, share: Share) -> None:
        """Look up the learning rates that the optimiser's parameter groups have now; no accelerator is waited for."""
        if self._rates.device != self._device:  # the model was moved
            self._rates, self._peaks = self._rates.to(self._device), self._peaks.to(self._device)
        # Looked up each time: loading a state of the optimiser gives it other groups.
        groups = share.optimizer.param_groups if share.optimizer else []
        for group, positions in zip(groups, share.groups, strict=True):
            if not isinstance(rate := group.get("lr"), Tensor | Real):
                raise MaxGainError(
                    f"strength='rate' follows the learning rate 'lr' of parameter groups, which is {rate!r:.40} in "
                    f"this {type(share.optimizer).__name__}: use strength='full' with it."
                )
            self._rates[positions] = rate.to(self._rates) if isinstance(rate, Tensor) else float(rate)
        torch.maximum(self._peaks, self._rates, out=self._peaks)

    def _bounds_now(self, share: Share, sizes: Tensor) -> Tensor:
        """For a strength s: ``γ̂ (γ / γ̂)^s`` where γ̂ exceeds γ, so that a step divides by ``(γ̂ / γ)^s``."""
        strength = torch.where(self._peaks > 0, self._rates / self._peaks, 1.0)
        if share.index is not None:
            strength = strength[share.index]
        released = sizes * (share.bounds / sizes) ** strength
        return torch.where((sizes > share.bounds) & (strength < 1), released, share.bounds)

    # The state.

    def _state(self) -> dict[str, Tensor]:
        maxima, dropped = self._tally.over_devices(self._device)
        packed = self._packed(maximum=maxima, dropped=dropped)
        if self.every > 1:
            packed |= self._packed(resting=torch.tensor(self._resting, device="cpu"))
        if self.strength == "rate":
            packed |= self._packed(peak=self._peaks)
        if self.measure == "stale":  # whether a layer is measured without its bias, and when that is looked at next
            marks = self._rounding.marks(self._names) if self._rounding else [0] * len(self._names)
            packed |= self._packed(rounding=torch.tensor(marks, device="cpu"))
            packed |= {"looks": torch.tensor([self._until_look, self._wait], device="cpu")}
        return super()._state() | packed

    def _load(self, state: Mapping[str, Tensor]) -> None:
        super()._load(state)
        self._tally.load(self._device, self._unpacked(state, "maximum"), self._unpacked(state, "dropped"))
        self._dropped_seen = sum(self.dropped.values())
        if self.measure == "stale":
            self._until_look, self._wait = state["looks"].tolist()
            if self._hooks:
                self._rounding = self._rounding or Rounding(self._hooks)
                self._rounding.load(self._by_name(self._unpacked(state, "rounding")))
        if self.every > 1:
            self._resting = self._unpacked(state, "resting").tolist()
            self._pause(self._is_paused)
        if self.strength == "rate":
            self._peaks.copy_(self._unpacked(state, "peak"))
            self._rates.copy_(self._peaks)  # in full, until an optimiser says what its rate is
