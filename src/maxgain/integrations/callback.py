"""What the frameworks' callbacks have in common: a constraint and a watch that live as long as a training does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..gain import MaxGain
from ..layers import Bound
from ..watching import Watch, watch

_WATCH = {"to", "log", "jump", "growth", "warmup", "on_alarm"}


class GainCallback:
    """Bounds and watches the gains of a model in training: takes the arguments of ``MaxGain`` and those of ``watch``.

    Args:
        gamma: The bound of ``MaxGain``; ``float("inf")`` only watches.
        every: Measure, project, write to ``to`` and look for alarms every k-th step.
        **options: ``to``, ``log``, ``jump``, ``growth``, ``warmup`` and ``on_alarm`` of ``watch``; ``p``, ``instance``,
            ``parts``, ``include``, ``exclude`` and ``process_group`` of ``MaxGain``.
    """

    constraint: MaxGain | None = None
    """The constraint of the newest training; its gains can be read afterwards, too."""
    watching: Watch | None = None
    """The watch over it."""

    def __init__(self, gamma: Bound, *, every: int = 1, **options: Any) -> None:
        self.gamma, self.every = gamma, every
        self._watch = {name: value for name, value in options.items() if name in _WATCH}
        self._measure = {name: value for name, value in options.items() if name not in _WATCH}
        try:  # a misspelt argument is known at once
            inspect.signature(MaxGain).bind(None, gamma, every=every, **self._measure)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}() {error}; see help(MaxGain) and help(watch).") from None

    def begin(self, model: nn.Module, optimizers: Iterable[Any], *, is_writing: bool) -> None:
        """Measure and bound the model from here on; one rank writes."""
        self.end()
        self.constraint = MaxGain(model, self.gamma, every=self.every, **self._measure)
        for optimizer in optimizers:
            self.constraint.attach(optimizer)
        options = self._watch if is_writing else self._watch | {"to": None}
        self.watching = watch(self.constraint, every=self.every, **options)

    def step(self, step: int) -> None:
        """Look at a step that is over."""
        if self.watching is not None:
            self.watching.log(step)

    def numbers(self) -> dict[str, float]:
        """What a framework's own loggers are given: the newest numbers."""
        if self.watching is None:
            return {}
        self.watching.flush()
        return self.watching.numbers

    def end(self) -> None:
        """Leave a plain model behind."""
        if self.watching is not None:
            self.watching.flush()
        if self.constraint is not None:
            self.constraint.detach()
