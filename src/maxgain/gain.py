"""MaxGain: the size of a layer is the largest gain that the training batch showed."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .constraint import Bound, Constraint, together
from .distributed import all_reduce_max_
from .errors import MaxGainError, MeasurementWarning, NotMeasuredError
from .functional import check_p
from .layers import FoundLayer, Instance
from .observe import UNMEASURED, RunningMaximum, Watch, forget, watch

Measure = Literal["stale", "fresh"]
STEPS_BETWEEN_LOOKS = 100
"""How often an accelerator is asked for its counts of dropped measurements."""


class MaxGain(Constraint):
    """Constrains the largest gain ``‖Wx‖_p / ‖x‖_p`` of each layer, as measured on the training batches, to γ.

    Gouk, Pfahringer, Frank and Cree, *MaxGain: Regularisation of Neural Networks by Constraining Activation
    Magnitudes*, 2018. After each optimiser step ``W ← W / max(1, γ̂ / γ)``, γ̂ being the largest gain over the
    instances of the batches since the last step.

    ``gamma``: a bound for all layers, or a mapping of globs over dotted names to bounds, of which the first that
    matches holds; ``inf`` measures without constraining.
    ``p``: the norm, from 1 to ``inf``.
    ``instance``: what one x is. ``'auto'``: a row of the last dimension for dense layers (so every token of a
    sequence is one), a whole sample for convolutions and batch norm. ``'sample'``: a whole sample for every layer.
    ``measure``: ``'stale'`` takes the gains of the forward that gave the gradient, as the paper does: it reads every
    input and output once more. ``'fresh'`` keeps the inputs and applies the updated weight to them, so that after the
    step the bound holds exactly on the batch; it costs a second forward through every layer and the memory of its
    inputs.
    ``include``, ``exclude``: globs over dotted names.
    ``process_group``: whose ranks share their maxima; None is the default group, where one is initialised.

    A measured gain is a lower bound of the layer's operator norm, not a Lipschitz constant.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> constraint = MaxGain(model, gamma=0.5).attach(optimizer)
    >>> model(torch.randn(16, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> list(constraint.gains)
    ['0', '2']
    """

    bound_name = "gamma"

    def __init__(
        self,
        model: nn.Module,
        gamma: Bound = 2.0,
        *,
        p: float = 2.0,
        instance: Instance = "auto",
        measure: Measure = "stale",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.p = check_p(p)
        self.instance: Instance = _one_of("instance", instance, get_args(Instance))
        self.measure: Measure = _one_of("measure", measure, get_args(Measure))
        self.process_group = process_group
        self._observers: dict[str, RunningMaximum] = {}
        self._handles: list[Watch] = []
        self._unproven: set[str] = set()
        self._steps = 0
        self._dropped_seen = 0
        self._asked: Tensor | None = None
        super().__init__(model, gamma, include=include, exclude=exclude)

    @property
    def gains(self) -> dict[str, float]:
        """The newest maximum of every layer: of the forwards since the last step, or of that step; nan before any."""
        self._warn_of_dropped(self.dropped)
        at_step = self._read(self._sizes)
        since = self._read({name: observer.maximum for name, observer in self._observers.items()})
        return {name: at_step[name] if since[name] == UNMEASURED else since[name] for name in at_step}

    @property
    def dropped(self) -> dict[str, int]:
        """How many instances of each layer had a gain that was not finite, and were left out."""
        counts = self._read({name: observer.dropped for name, observer in self._observers.items()})
        return {name: int(count) for name, count in counts.items()}

    def _watch(self) -> None:
        if self._handles:
            return
        for layer in self._layers:
            if layer.name not in self._observers:
                keep = self.measure == "fresh"
                self._observers[layer.name] = RunningMaximum(layer, self.p, self.instance, keep_inputs=keep)
            self._handles.append(watch(layer, self._observers[layer.name]))
        self._unproven = {layer.name for layer in self._layers}

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget(self._layers)

    def _pause(self, paused: bool) -> None:
        super()._pause(paused)
        for observer in self._observers.values():
            observer.paused = paused

    def _estimate(self, layers: list[FoundLayer]) -> list[Tensor]:
        observers = [self._observers[layer.name] for layer in layers]
        for observer in observers:
            observer.replay()
        maxima = torch.stack(together(observer.maximum for observer in observers))
        all_reduce_max_(maxima, self.process_group)
        self._look(layers, maxima)
        return list(maxima.unbind())

    def _forget(self, layers: list[FoundLayer]) -> None:
        forget([self._observers[layer.name] for layer in layers])

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a state of a constraint of the same kind on the same layers."""
        super().load_state_dict(state)
        self._dropped_seen = sum(self.dropped.values())

    def _state(self) -> dict[str, Tensor]:
        state = super()._state()
        for name, observer in self._observers.items():
            state |= {f"{name}.maximum": observer.maximum, f"{name}.dropped": observer.dropped}
        return state

    def _options(self) -> dict[str, Any]:
        return {
            "gamma": {glob.escape(name): bound for name, bound in self.bounds.items()},
            "p": self.p,
            "instance": self.instance,
            "measure": self.measure,
            "include": [glob.escape(layer.name) for layer in self._layers],
            "process_group": self.process_group,
        }

    # What the user must be told.

    def _look(self, layers: list[FoundLayer], maxima: Tensor) -> None:
        """Looks for trouble; an accelerator is waited for in the first step alone."""
        if maxima.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        unproven = [layer.name in self._unproven for layer in layers]
        if any(unproven):
            self._check_measured(layers, maxima)
        if maxima.device.type == "cpu":
            self._warn_of_dropped(self.dropped)
        elif self._steps % STEPS_BETWEEN_LOOKS == 0:
            # What the last look asked for has long arrived, so that nobody waits for it.
            if self._asked is not None:
                self._warn_of_dropped(dict(zip(self._observers, self._asked.tolist(), strict=True)))
            counts = torch.stack(together(observer.dropped for observer in self._observers.values()))
            self._asked = counts.to("cpu", non_blocking=True)
        self._steps += 1

    def _check_measured(self, layers: list[FoundLayer], maxima: Tensor) -> None:
        measured = dict(zip((layer.name for layer in layers), maxima.tolist(), strict=True))
        trained = [layer.name for layer in layers if layer.weight.requires_grad]
        silent = [name for name in trained if measured[name] == UNMEASURED and name in self._unproven]
        why = (
            "Make the constraint before a compiled model's first call, train in training mode, and use "
            "paused() around a step that has no forward."
        )
        if silent and silent == trained:
            raise NotMeasuredError(f"a step was taken, but none of the {len(silent)} layers was measured. {why}")
        self._unproven -= measured.keys()
        if not silent:
            return
        warnings.warn(
            f"not measured by the first step, so not constrained in it: {', '.join(map(repr, silent))}. {why}",
            MeasurementWarning,
            stacklevel=2,
        )

    def _warn_of_dropped(self, dropped: Mapping[str, int]) -> None:
        total = sum(dropped.values())
        if total > self._dropped_seen:
            self._dropped_seen = total
            worst = max(dropped, key=lambda name: dropped[name])
            warnings.warn(
                f"{total} instances so far had a gain that is not finite, most of them in layer {worst!r}; "
                "they were left out. Look for inf or nan in its input, or for weights that diverge.",
                MeasurementWarning,
                stacklevel=2,
            )


def _one_of(what: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise MaxGainError(f"{what} must be {' or '.join(map(repr, choices))}, not {value!r}.")
    return value
