"""Steps that did not happen: how to hear of them.

``torch.amp.GradScaler`` leaves ``optimizer.step()`` out when a gradient overflowed, and offers no hook that would
say so. Measurements of that batch must not count in the next step, so ``GradScaler.step`` is wrapped, once, to tell
who asked. Fused optimisers are stepped all the same, and skip the update on the device: see ``found_inf``.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

# Weak on both sides: to be told of an optimiser's steps must keep neither it nor the listener's model alive.
_listeners: WeakKeyDictionary[Optimizer, list[WeakMethod[Callable[[Optimizer], None]]]] = WeakKeyDictionary()


def after_scaler_step(optimizer: Optimizer, method: Callable[[Optimizer], None]) -> None:
    """Calls a bound method with the optimiser after each ``GradScaler.step(optimizer)``, whether or not it stepped."""
    if not getattr(GradScaler.step, "tells_maxgain", False):
        GradScaler.step = _telling(GradScaler.step)  # type: ignore[method-assign]
    _listeners.setdefault(optimizer, []).append(WeakMethod(method))


def forget(optimizer: Optimizer, method: Callable[[Optimizer], None]) -> None:
    """Ends what ``after_scaler_step`` began."""
    _listeners[optimizer].remove(WeakMethod(method))


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Positive where a fused optimiser, inside ``GradScaler.step``, has been told to leave its weights alone."""
    return getattr(optimizer, "found_inf", None)


def _telling(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = step(scaler, optimizer, *args, **kwargs)
        for listener in list(_listeners.get(optimizer, ())):
            if (method := listener()) is not None:
                method(optimizer)
        return result

    wrapped.tells_maxgain = True  # type: ignore[attr-defined]
    return wrapped
