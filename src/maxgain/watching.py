"""Watch a training run: write the gains of its layers to a logger, and raise an alarm when a layer goes wrong.

How it works: ``watch`` measures with a ``MaxGain`` whose bound is infinite. ``Watch.log`` ends a step: it copies all
numbers from the device without waiting, sends them to a writer, and has ``Alarms`` judge them.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .alarms import Alarm, Alarms
from .checks import Row, begin_copy, reasons_not_bounded, warn
from .constraint import Constraint
from .distributed import max_over_ranks
from .errors import MaxGainError
from .gain import MaxGain
from .layers import check_every
from .text import ITSELF

Log = Literal["worst", "all"]
Send = Callable[[dict[str, float], int], Any]


@dataclass(eq=False, repr=False)
class Watch:
    """What ``watch`` returns: call ``log(step)`` once after each optimizer step."""

    constraint: Constraint
    is_own: bool
    """Whether ``watch`` made the constraint."""
    every: int
    send: Send
    curves: Log
    alarms: Alarms
    on_alarm: Callable[[Alarm], Any]
    numbers: dict[str, float] = field(default_factory=dict)
    """What was logged last."""
    _calls: int = 0
    _seen: dict[str, float] = field(default_factory=dict)
    """How often each layer was measured until the last logged step."""
    _pending: tuple[int, Tensor, Any] | None = None

    def __post_init__(self) -> None:
        # What the constraint dropped before is no alarm.
        self._dropped_before = self.constraint._buffer.dropped.clone()

    def log(self, step: int) -> None:
        """End a step: every k-th time, write its gains and raise alarms.

        On a GPU the numbers are copied without waiting, and handled by the call after they have arrived, normally the
        next. Where several ranks train one model, all of them call this.
        """
        step = operator.index(step)
        if self.is_own and self.constraint._updates is None:
            warn("This watch is closed, so nothing is measured or written. Make another with watch(model).")
            return
        if self.is_own:
            self.constraint.step()
        elif not self._calls and not self.constraint._attached:
            name = type(self.constraint).__name__
            warn(f"This {name} is attached to no optimizer, so it has no gains to log. Call attach(optimizer).")
        if self.mask is not None and self._ignores_mask():
            raise MaxGainError(
                f"no layer took the mask of shape {tuple(self.mask.shape)}: compiled forwards take none, or no dense "
                "layer's input has this shape and one more dimension. Set mask to None."
            )
        is_due = self._calls % self.every == 0
        self._calls += 1
        if is_due or (self._pending is not None and self._pending[2].query()):
            self.flush()
        if is_due:
            self._pending = step, *self._snapshot()
            if self._pending[2] is None:
                self.flush()

    def flush(self) -> None:
        """Handle numbers that the device has not sent yet."""
        if self._pending is None:
            return
        (step, rows, arrival), self._pending = self._pending, None
        if arrival is not None:
            arrival.synchronize()
        known, scales, measured, dropped = (self.constraint._by_name(row) for row in rows)
        seen, self._seen = self._seen, {name: measured[name] + dropped[name] for name in known}
        gains = {name: gain for name, gain in known.items() if self._seen[name] > seen.get(name, 0)}
        if self.is_own and self.constraint._hooks and len(gains) < len(known):
            self._name_unmeasured(gains)
        if not gains:
            return
        self.numbers = curves(gains, scales if any(self.constraint._is_bounded) else {}, self.curves)
        self.send(self.numbers, step)
        if alarm := self.alarms.judge(step, gains, dropped):
            self.on_alarm(alarm)

    def close(self) -> None:
        """Take the measurement out of the model, and handle the last numbers."""
        if self.is_own:
            self.constraint.detach()
        self.flush()

    @property
    def mask(self) -> Tensor | None:
        """Which tokens count, such as a batch's attention mask; set it before each forward. 0 leaves a token out.

        It holds for dense layers whose input has the mask's shape and one more dimension, and until it is set again.
        """
        return getattr(self.constraint, "mask", None)

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        if not isinstance(self.constraint, MaxGain):
            raise MaxGainError(f"a mask leaves out tokens, which {type(self.constraint).__name__} does not measure.")
        self.constraint.mask = mask

    def _ignores_mask(self) -> bool:
        """Whether a step was measured and none of its forwards took the mask."""
        constraint: Any = self.constraint
        steps = [attached.steps - 1 for attached in constraint._attached.values()]
        return not constraint.mask_uses and any(step % constraint.every == 0 for step in steps)

    def _name_unmeasured(self, gains: Mapping[str, float]) -> None:
        """Warn once of the layers that had no gain; one that was merely not called is silent, unless all were."""
        rows = [
            Row(layer.name, reason, is_bounded=False, size=-1, gradient=1)
            for layer, reason in reasons_not_bounded(self.constraint).items()
            if layer.name not in gains and (reason not in ("", "frozen") or not gains)
        ]
        self.constraint._attached[None].checks.say(rows)

    def __repr__(self) -> str:
        return f"<Watch of {self.constraint!r}, every={self.every}>"

    def _snapshot(self) -> tuple[Tensor, Any]:
        """Begin to copy what a step found."""
        constraint = self.constraint
        dropped = constraint._buffer.dropped
        dropped = (dropped - self._dropped_before.to(dropped.device)).to(constraint._gains.dtype)
        dropped = max_over_ranks(dropped, constraint.process_group)
        measured = constraint._counts[0].to(dropped)
        return begin_copy(torch.stack([constraint._gains, constraint._scales, measured, dropped]))


def watch(
    model: nn.Module | Constraint,
    *,
    every: int = 8,
    to: Any = None,
    log: Log = "worst",
    jump: float = 2.0,
    growth: float = 5.0,
    warmup: int = 200,
    on_alarm: Callable[[Alarm], Any] | None = None,
    **options: Any,
) -> Watch:
    """Measure how much every layer amplifies its input, without changing a bit of the training.

    Call ``log(step)`` on what this returns, once after each optimizer step. Only that call ends a step, so it is the
    same for eager, compiled and captured ones, and under accumulation the largest gain of all batches counts.

    A gain is ``‖Wx‖ / ‖x‖``, the largest over a step's instances: tokens for a dense layer, samples for a convolution
    or batch norm (``instance='sample'``: samples everywhere). Padded tokens count unless ``mask`` is set.

    Args:
        model: The model, or a constraint that bounds it already, whose gains are then written.
        every: Measure, write and judge every k-th step.
        to: Where numbers go: a TensorBoard ``SummaryWriter``, a Weights & Biases run, ``trackio``, ``mlflow``, a logger
            of Lightning, a path of JSON lines, or a function of a dictionary and the step. None only looks for alarms.
        log: ``'worst'`` writes ``gain/worst``, ``gain/median`` and, under its own name, the gain of the worst layer;
            ``'all'`` writes every layer's. A bound adds ``scale/...``: the smallest factor, or every layer's.
        jump: An alarm is a gain above this many times the median of the layer's recent gains.
        growth: An alarm is a recent median above this many times the first one after the warm-up.
        warmup: For how many steps only gains that are not finite are an alarm.
        on_alarm: Called with the ``Alarm`` of a step, at most one; it may raise to stop the run. None warns.
        **options: Further arguments of ``MaxGain``: ``p``, ``instance``, ``parts``, ``include``, ``exclude``,
            ``process_group``.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> watching = watch(model, to=lambda numbers, step: print(step, list(numbers)))
        >>> for step in range(9):
        ...     model(torch.ones(16, 4)).sum().backward()  # and optimizer.step()
        ...     watching.log(step)
        0 ['gain/worst', 'gain/median', 'gain/0']
        8 ['gain/worst', 'gain/median', 'gain/0']
    """
    for name, value, is_valid, what in (
        ("log", log, log in ("worst", "all"), "'worst' or 'all'"),
        ("jump", jump, isinstance(jump, int | float) and jump > 1, "a number above 1 (inf: never an alarm)"),
        ("growth", growth, isinstance(growth, int | float) and growth > 1, "a number above 1 (inf: never an alarm)"),
        ("warmup", warmup, isinstance(warmup, int | float) and warmup >= 0, "a number of steps"),
        ("on_alarm", on_alarm, on_alarm is None or takes(on_alarm, None), "a function of an Alarm"),
    ):
        if not is_valid:
            raise MaxGainError(f"{name} must be {what}, not {value!r:.40}.")
    check_every(every)
    if "gamma" in options:
        raise MaxGainError(
            "watch() bounds nothing: pass it MaxGain(model, gamma).attach(optimizer) in place of the model."
        )
    is_own = not isinstance(model, Constraint)
    if options and not is_own:
        raise MaxGainError(f"this {type(model).__name__} is made already: pass {', '.join(options)} to it.")
    constraint = model if isinstance(model, Constraint) else MaxGain(model, math.inf, every=every, **options)
    alarms = Alarms(jump, growth, warmup / every)
    return Watch(constraint, is_own, every, sender(to), log, alarms, on_alarm or (lambda alarm: warn(str(alarm))))


def curves(gains: Mapping[str, float], scales: Mapping[str, float], log: Log) -> dict[str, float]:
    """Name the numbers to write; a gain that is not finite is the worst.

    Examples:
        >>> curves({"a": 1.0, "b": 3.0, "c": 2.0}, {}, "worst")
        {'gain/worst': 3.0, 'gain/median': 2.0, 'gain/b': 3.0}
    """
    finite = [gain for gain in gains.values() if not math.isnan(gain)]
    worst = max(gains, key=lambda name: math.inf if math.isnan(gains[name]) else gains[name])
    numbers = {"gain/worst": gains[worst], "gain/median": statistics.median(finite or [math.nan])}
    numbers |= {f"gain/{name or ITSELF}": gains[name] for name in (gains if log == "all" else [worst])}
    if scales and log == "all":
        return numbers | {f"scale/{name or ITSELF}": scales[name] for name in gains}
    return numbers | ({"scale/smallest": min(scales.values())} if scales else {})


def sender(to: Any) -> Send:
    """Return the function that hands numbers and their step to a writer, known by the methods that it has."""
    if to is None:
        return lambda numbers, step: None
    if isinstance(to, str | PathLike):
        Path(to).open("a").close()  # a path that cannot be written to is known at once
        return partial(_append, Path(to))
    if hasattr(to, "add_scalar"):  # TensorBoard
        return lambda numbers, step: [to.add_scalar(name, number, step) for name, number in numbers.items()]
    if hasattr(to, "define_metric"):  # Weights & Biases drops what belongs to an earlier step than its own
        for names in ("gain/*", "scale/*"):
            to.define_metric(names, step_metric="watched_step")
        return lambda numbers, step: to.log({**numbers, "watched_step": step})
    log: Any
    for log in (getattr(to, "log_metrics", None), getattr(to, "log", None)):
        if takes(log, {}, step=0):  # Python's own loggers have a log, too, which takes no numbers
            return lambda numbers, step: log(numbers, step=step)  # Lightning, MLflow; trackio, Accelerate
    if takes(to, {}, 0):
        return to  # type: ignore[no-any-return]
    raise MaxGainError(
        f"nothing can be written to {to!r:.80}: pass a TensorBoard SummaryWriter, a Weights & Biases run, "
        "trackio, a Lightning logger, a path, or a function of a dictionary and the step."
    )


def takes(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether something can be called with these; what has no signature is taken at its word."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return callable(function)
    return True


def _append(path: Path, numbers: Mapping[str, float], step: int) -> None:
    finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **finite}) + "\n")
