"""Judge the gains of a run's layers: which are not finite, jump, or have grown."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .text import ITSELF, listed

RECENT, ENOUGH = 20, 10
"""How many of a layer's logged gains are its recent ones, and how many of them a comparison needs."""


@dataclass(frozen=True)
class Alarm:
    """What went wrong in a step: the worst layer, and the names of the others."""

    step: int
    kind: Literal["not finite", "jump", "growth"]
    layer: str
    gain: float
    """Its gain; for growth, the median of its recent gains."""
    before: float
    """What the gain is compared with: the median of its recent gains (jump), or of its first ones (growth)."""
    others: tuple[str, ...] = ()

    @property
    def times(self) -> float:
        """How many times the gain is what it was before; infinite where it is not finite."""
        return self.gain / self.before if self.kind != "not finite" and self.before > 0 else math.inf

    def __str__(self) -> str:
        name, numbers = repr(self.layer or ITSELF), f"{self.before:.4g} to {self.gain:.4g} ({self.times:.1f} times)"
        said = {
            "not finite": f"layer {name} has inputs or outputs that are not finite",
            "jump": f"the gain of layer {name} jumped from {numbers}",
            "growth": f"the gain of layer {name} has grown from {numbers} since the warm-up",
        }[self.kind]
        return f"step {self.step}: {said}{f'; also {listed(list(self.others))}' if self.others else ''}."


@dataclass
class Past:
    """What a layer showed so far."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    first: float | None = None
    dropped: float = 0
    is_dropping: bool = False


@dataclass
class Alarms:
    """Judges the gains of every logged step.

    Not finite: instances were dropped since the last logged step. Jump: a gain exceeds ``jump`` times the median of the
    layer's recent gains. Growth: that median exceeds ``growth`` times what it was after the warm-up. A layer is named
    once for each: again only after it was finite, after a new recent past, after growing by the same factor again.
    """

    jump: float
    growth: float
    warmup: float
    """For how many logged steps only what is not finite is an alarm."""
    pasts: dict[str, Past] = field(default_factory=dict)

    def judge(self, step: int, gains: Mapping[str, float], dropped: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step, if there is one."""
        found = [self._compare(step, name, gain, dropped[name]) for name, gain in gains.items()]
        self.warmup -= 1
        alarms = sorted((alarm for alarm in found if alarm), key=lambda alarm: -alarm.times)
        return replace(alarms[0], others=tuple(alarm.layer for alarm in alarms[1:])) if alarms else None

    def _compare(self, step: int, layer: str, gain: float, dropped: float) -> Alarm | None:
        """Compare a layer with its past, and add its gain to that."""
        past = self.pasts.setdefault(layer, Past())
        was_dropping, past.is_dropping, past.dropped = past.is_dropping, dropped > past.dropped, dropped
        if past.is_dropping and not was_dropping:
            return Alarm(step, "not finite", layer, gain, math.nan)
        if self.warmup > 0 or not math.isfinite(gain):
            return None
        recent = statistics.median(past.recent) if len(past.recent) >= ENOUGH else None
        past.recent.append(gain)
        if recent is None:
            return None
        first = past.first = recent if past.first is None else past.first
        if gain > self.jump * recent:
            past.recent.clear()
            return Alarm(step, "jump", layer, gain, recent)
        if recent > self.growth * first:
            past.first = recent
            return Alarm(step, "growth", layer, recent, first)
        return None
