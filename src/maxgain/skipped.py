"""Steps that did not happen: how to hear of them.

``torch.amp.GradScaler`` leaves ``optimizer.step()`` out when a gradient overflowed, and offers no hook that would
say so. Measurements of that batch must not count in the next step, so ``GradScaler.step`` is wrapped, once, to tell
who asked. Fused optimisers are stepped all the same, and skip the update on the device: see ``found_inf``.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

_listeners: WeakKeyDictionary[Optimizer, dict[object, Callable[[], None]]] = WeakKeyDictionary()


def after_scaler_step(optimizer: Optimizer, who: object, callback: Callable[[], None]) -> None:
    """Calls back after each ``GradScaler.step(optimizer)``, whether or not it stepped."""
    if not hasattr(GradScaler.step, "__wrapped__"):
        GradScaler.step = _telling(GradScaler.step)  # type: ignore[method-assign]
    _listeners.setdefault(optimizer, {})[who] = callback


def forget(optimizer: Optimizer, who: object) -> None:
    """Ends what ``after_scaler_step`` began."""
    _listeners.get(optimizer, {}).pop(who, None)


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Positive where a fused optimiser, inside ``GradScaler.step``, has been told to leave its weights alone."""
    return getattr(optimizer, "found_inf", None)


def _telling(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = step(scaler, optimizer, *args, **kwargs)
        for callback in list(_listeners.get(optimizer, {}).values()):
            callback()
        return result

    return wrapped
