"""What the frameworks' callbacks have in common: a constraint and a watch that live as long as a training does."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..alarms import Alarm
from ..gain import MaxGain
from ..layers import Bound
from ..watching import Watch, watch


class GainCallback:
    """Bounds and watches the gains of a model in training: takes the arguments of ``MaxGain`` and those of ``watch``.

    Args:
        gamma: The bound of ``MaxGain``; ``inf`` only watches.
        every: Measure, project, write to ``to`` and raise alarms every k-th step. None: the first step of eight
            with ``gamma=inf``, and every step with a bound.
        **options: ``to``, ``log``, ``jump``, ``growth``, ``warmup`` and ``on_alarm`` of ``watch``; ``p``, ``instance``,
            ``parts``, ``include``, ``exclude`` and ``process_group`` of ``MaxGain``.
    """

    constraint: MaxGain | None = None
    """The constraint of the newest training; its gains can be read afterwards, too."""
    watching: Watch | None = None
    """The watch over it."""

    def __init__(self, gamma: Bound = math.inf, *, every: int | None = None, **options: Any) -> None:
        self.gamma, self.every = gamma, every if every is not None else 8 if gamma == math.inf else 1
        known = inspect.signature(watch).parameters
        self._watch = {name: value for name, value in options.items() if name in known}
        self._measure = {name: value for name, value in options.items() if name not in known}
        inspect.signature(MaxGain).bind(None, **self._measure)  # a misspelt argument is refused at once

    def begin(self, model: nn.Module, optimizers: Iterable[Any], *, is_writing: bool) -> None:
        """Measure and bound the model from here on; one rank writes."""
        self.end()
        self.constraint = MaxGain(model, self.gamma, every=self.every, **self._measure)
        for optimizer in optimizers:
            self.constraint.attach(optimizer)
        self.watching = watch(self.constraint, every=self.every, **self._watch | ({} if is_writing else {"to": None}))
        self._on_alarm, self.watching.on_alarm = self.watching.on_alarm, self._hear

    def numbers(self) -> dict[str, float]:
        """What a framework's own loggers are given: the newest numbers."""
        if self.watching is None:
            return {}
        self.watching.flush()
        return self.watching.numbers

    def _hear(self, alarm: Alarm) -> None:
        """Pass an alarm on. One that raises ends the training, and transformers has no event for that."""
        try:
            self._on_alarm(alarm)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Leave a plain model behind."""
        if self.watching is not None:
            self.watching.constraint.detach()
            self.watching.close()
