"""Which optimiser really updates the weights, and what to say when none that is attached does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .distributed import is_sharded
from .errors import MeasurementWarning
from .layers import FoundLayer
from .share import parameters_of

Observe = Callable[[Tensor, Tensor], None]
UPDATES_UNTIL_NOTICED = 4


def torch_optimizer_in(optimizer: Any, weights: set[int]) -> Any:
    """The optimiser inside a wrapper (Accelerate's, SAM, Lookahead, ...) that updates the same weights; or itself."""
    while True:
        held = parameters_of(optimizer) & weights if hasattr(optimizer, "param_groups") else set()
        parts = [*getattr(optimizer, "__dict__", {}).values(), getattr(optimizer, "optimizer", None)]
        inside = {id(part): part for part in parts if isinstance(part, Optimizer) and part is not optimizer}
        same = [part for part in inside.values() if (theirs := parameters_of(part) & weights) and theirs >= held]
        if len(same) != 1:
            return optimizer
        optimizer = same[0]


class Missed:
    """Notices that constrained weights are updated while no attached optimiser steps, and says so once."""

    def __init__(self, layers: Sequence[FoundLayer], what: str) -> None:
        self.layers = layers
        self.what = what
        self.paused = False
        self._count = 0
        self._version: int | None = None
        self._by = ""
        self._is_stepping = False
        self._is_sharded = False
        """Sharded weights are gathered anew for each forward, which changes them too."""
        self._handles: dict[Optimizer, list[RemovableHandle]] = {}

    def follow(self, optimizer: Optimizer) -> None:
        """An optimiser was attached."""
        if not self._handles:
            tell_of_steps(self._someone_stepped)
        self._is_sharded = any(is_sharded(layer.weight) for layer in self.layers)
        self._handles[optimizer] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def end(self) -> None:
        """None is attached any longer."""
        for handle in (handle for handles in self._handles.values() for handle in handles):
            handle.remove()
        self._handles.clear()

    def noticing(self, layer: FoundLayer, observe: Observe) -> Observe:
        """The observer of one layer, that also sees whether the layer's weight changes from forward to forward."""

        def observe_and_notice(x: Tensor, output: Tensor) -> None:
            if not torch.compiler.is_compiling() and self._is_expecting_steps and layer.module.training:
                self._saw_version(layer.weight)
            observe(x, output)

        return observe_and_notice

    @property
    def _is_expecting_steps(self) -> bool:
        off = self.paused or self._is_stepping or self._is_sharded
        return bool(self._handles) and not off and torch.is_grad_enabled()

    def _saw_version(self, weight: nn.Parameter) -> None:
        version = weight._version  # how often it was changed in place
        if self._version is not None and version != self._version:
            self._one_more()
        self._version = version

    def _someone_stepped(self, optimizer: Optimizer) -> None:
        """Any torch optimiser has stepped; if it updates constrained weights, one that is attached must step too."""
        if not self._handles or optimizer in self._handles or self._is_stepping or self.paused:
            return
        if parameters_of(optimizer) & {id(layer.weight) for layer in self.layers if layer.weight.requires_grad}:
            self._by = f" (a {type(optimizer).__name__} does)"
            self._one_more()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_stepping = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_stepping = False
        self._count = 0

    def _one_more(self) -> None:
        self._count += 1
        if self._count == UPDATES_UNTIL_NOTICED:
            warnings.warn(
                f"the constrained weights are being updated, but no optimiser that is attached to this {self.what} "
                f"steps, so nothing is projected. Attach the optimiser that updates them{self._by}, or call step() "
                "after each update.",
                MeasurementWarning,
                stacklevel=2,
            )


Listener = Callable[[Optimizer], None]
_listeners: list[WeakMethod[Listener]] = []


def tell_of_steps(listener: Listener) -> None:
    """Call a bound method with every torch optimiser that steps, for as long as its object lives."""
    if not _listeners:
        register_optimizer_step_post_hook(_tell)
    _listeners[:] = [one for one in _listeners if one() is not None]
    _listeners.append(WeakMethod(listener))


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for one in tuple(_listeners):
        if (listener := one()) is not None:
            listener(optimizer)
