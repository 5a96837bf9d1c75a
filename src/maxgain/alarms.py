"""Judge the gains of a run's layers: which are not finite, jump, or have grown."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .checks import listed
from .layers import ITSELF

Kind = Literal["not finite", "jump", "growth"]
RECENT = 20
"""How many of a layer's logged gains make up its recent past."""
ENOUGH = 10
"""How many of them are needed before anything is compared with it."""


@dataclass(frozen=True)
class Alarm:
    """What went wrong in a step: the worst layer, and the names of the others."""

    step: int
    kind: Kind
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
        also = f"; also {listed(list(self.others))}" if self.others else ""
        return f"step {self.step}: {said}{also}."


@dataclass
class Past:
    """What a layer showed so far."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    first: float | None = None
    dropped: int = 0
    is_dropping: bool = False


class Alarms:
    """Judges the gains of every logged step.

    Not finite: instances were dropped since the last logged step. Jump: a gain exceeds ``jump`` times the median of the
    layer's recent gains. Growth: that median exceeds ``growth`` times what it was after the warm-up. A layer is named
    once for each: again only after it was finite, after a new recent past, after growing by the same factor again.
    """

    def __init__(self, jump: float, growth: float, warmup: int) -> None:
        self.jump, self.growth, self.warmup = jump, growth, warmup
        self.pasts: dict[str, Past] = {}

    def look(self, step: int, gains: Mapping[str, float], dropped: Mapping[str, int]) -> Alarm | None:
        """Return the alarm of a step, if there is one. Only what is not finite is one during the warm-up."""
        found = []
        for layer, gain in gains.items():
            past = self.pasts.setdefault(layer, Past())
            was_dropping, past.is_dropping = past.is_dropping, dropped[layer] > past.dropped
            past.dropped = dropped[layer]
            if past.is_dropping and not was_dropping:
                found.append(Alarm(step, "not finite", layer, gain, math.nan))
            elif self.warmup <= 0 and math.isfinite(gain) and (alarm := self._compare(step, layer, gain, past)):
                found.append(alarm)
        self.warmup -= 1
        found.sort(key=lambda alarm: -alarm.times)
        return replace(found[0], others=tuple(alarm.layer for alarm in found[1:])) if found else None

    def _compare(self, step: int, layer: str, gain: float, past: Past) -> Alarm | None:
        """Compare a gain with the layer's past, and add it to that."""
        recent = statistics.median(past.recent) if len(past.recent) >= ENOUGH else None
        past.recent.append(gain)
        if recent is None:
            return None
        if past.first is None:
            past.first = recent
        if gain > self.jump * recent:
            past.recent.clear()
            return Alarm(step, "jump", layer, gain, recent)
        if recent > self.growth * past.first:
            before, past.first = past.first, recent
            return Alarm(step, "growth", layer, recent, before)
        return None
