"""Watching gains: written for TensorBoard and its like, with an alarm when a layer grows out of its history.

Nothing here knows those programs: a writer is whatever has one of their methods.
"""

from __future__ import annotations

import inspect
import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .constraint import Constraint
from .errors import MaxGainError, MeasurementWarning
from .functional import check_callable, check_count, check_positive
from .layers import ITSELF

Send = Callable[[dict[str, float], int], None]

ENOUGH = 10
"""How many gains a layer must have shown before one of them can be called unusual."""


@dataclass(frozen=True)
class Alarm:
    """A layer whose gain has grown out of its history."""

    layer: str
    """Its dotted name."""
    gain: float
    """The gain that it shows now."""
    usual: float
    """The median of those that it showed before."""
    step: int
    """When."""

    def __str__(self) -> str:
        # A layer may begin at zero, of which nothing is a multiple.
        compared = (
            f"{self.gain / self.usual:.1f} times its usual {self.usual:.4g}" if self.usual else "and was usually 0"
        )
        return (
            f"step {self.step}: the gain of layer {self.layer or ITSELF!r} is {self.gain:.4g}, {compared}. "
            "Look at its input and its learning rate, or give it a bound."
        )


def warn(alarm: Alarm) -> None:
    """What happens at an alarm unless something else is asked for: a warning."""
    warnings.warn(str(alarm), MeasurementWarning, stacklevel=4)


class Monitor:
    """Writes the gains of a constraint's layers somewhere, and sounds an alarm when one grows out of its history.

    Made for ``MaxGain(model, gamma=float("inf"))``, which measures and changes nothing; any constraint will do. Logging
    waits for the device, so that the gains can be read: ``every`` makes that rare. Where many ranks train, the gains
    are the same on all of them, and one monitor is enough.

    Args:
        constraint: whose gains are watched.
        writer: where they go. A TensorBoard ``SummaryWriter``, a Weights & Biases run, the module ``wandb`` or
            ``trackio``, a logger of Lightning or MLflow, or a function that takes a dictionary of numbers and the step.
            None writes nothing and only looks for alarms.
        every: log at steps that are multiples of this.
        factor: an alarm is a gain over this many times the layer's median. Infinity never sounds one.
        window: how many of a layer's logged gains make up its history. A gain that doubles within half of it is
            noticed; one that takes longer becomes usual on the way.
        on_alarm: what to call with an ``Alarm``; by default it becomes a warning. It may raise to stop the training.

    Examples:
        >>> from torch import nn, optim, randn
        >>> from maxgain import MaxGain
        >>> model = nn.Linear(4, 2)
        >>> optimizer = optim.SGD(model.parameters(), lr=0.1)
        >>> constraint = MaxGain(model, gamma=float("inf")).attach(optimizer)
        >>> monitor = Monitor(constraint, lambda numbers, step: print(step, list(numbers)))
        >>> for step in range(2):
        ...     model(randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     monitor.log(step)
        0 ['gain/(itself)']
        1 ['gain/(itself)']
    """

    def __init__(
        self,
        constraint: Constraint,
        writer: Any = None,
        *,
        every: int = 1,
        factor: float = 2.0,
        window: int = 100,
        on_alarm: Callable[[Alarm], None] = warn,
    ) -> None:
        if not hasattr(constraint, "bounds"):
            raise MaxGainError(f"a constraint, such as MaxGain, can be watched, and not {type(constraint).__name__}.")
        self.constraint = constraint
        self.every = check_count("every", every)
        self.factor = check_positive("factor", factor, above=1)  # gains always vary a little
        self.window = check_count("window", window, least=ENOUGH)  # fewer are no history
        self.on_alarm = check_callable("on_alarm", on_alarm)
        self._send = sender(writer)
        self._histories: dict[str, deque[float]] = {}
        self._alarmed: set[str] = set()

    def log(self, step: int) -> None:
        """Writes the newest gains, and what bounded layers were multiplied by. To be called after each step.

        A layer that has sounded an alarm sounds the next one only after it was within its history again.

        Args:
            step: the number of the training step that was just taken.
        """
        if check_count("step", step, least=0) % self.every:
            return
        gains = self.constraint.gains
        self._send(curves(self.constraint, gains), step)
        for name, gain in measured(gains).items():
            self._look(name, gain, step)

    def _look(self, name: str, gain: float, step: int) -> None:
        history = self._histories.setdefault(name, deque(maxlen=self.window))
        expected = usual(history)
        history.append(gain)
        if gain <= self.factor * expected:
            self._alarmed.discard(name)
        elif name not in self._alarmed:
            self._alarmed.add(name)
            self.on_alarm(Alarm(name, gain, expected, step))


def curves(constraint: Constraint, gains: Mapping[str, float]) -> dict[str, float]:
    """One number per curve: the gain of every layer that has one, and what a bounded layer was multiplied by."""
    known = measured(gains)
    bounded = [name for name in known if math.isfinite(constraint.bounds[name])]
    scales = constraint.scales if bounded else {}
    numbers = {f"gain/{name or ITSELF}": gain for name, gain in known.items()}
    return numbers | {f"scale/{name or ITSELF}": scales[name] for name in bounded}


def measured(gains: Mapping[str, float]) -> dict[str, float]:
    """The gains of the layers that have one."""
    return {name: gain for name, gain in gains.items() if math.isfinite(gain)}


def usual(history: Sequence[float]) -> float:
    """What a layer's gain usually is: the median of its history, or infinity while that is too short to tell.

    Examples:
        >>> usual([1.0, 1.1, 0.9, 1.0, 5.0, 1.0, 1.1, 0.9, 1.0, 1.0])
        1.0
        >>> usual([1.0, 5.0])
        inf
    """
    return statistics.median(history) if len(history) >= ENOUGH else math.inf


def sender(writer: Any) -> Send:
    """How numbers get to a writer: by the first of the methods that it has.

    Args:
        writer: any of those that ``Monitor`` takes.
    """
    if writer is None:
        return lambda numbers, step: None
    if hasattr(writer, "add_scalar"):  # TensorBoard

        def send(numbers: dict[str, float], step: int) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        return send
    for method in ("log_metrics", "log"):  # Lightning's loggers and MLflow; Weights & Biases and trackio
        log = getattr(writer, method, None)
        if log is not None and _takes_numbers(log):
            return lambda numbers, step: log(numbers, step=step)
    if callable(writer):
        return writer  # type: ignore[no-any-return]
    raise MaxGainError(
        f"nothing can be written to {type(writer).__name__}: give a TensorBoard SummaryWriter, a Weights & Biases run, "
        "trackio, a Lightning logger, or a function of a dictionary and the step."
    )


def _takes_numbers(log: Callable[..., Any]) -> bool:
    """Whether it can be called as those programs' are; Python's own loggers have a ``log`` too, which cannot."""
    try:
        inspect.signature(log).bind({}, step=0)
    except TypeError:
        return False
    except ValueError:  # it does not tell
        return True
    return True
