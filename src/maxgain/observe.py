"""Forward hooks that turn what goes through a layer into gains, inside the forward pass.

Norms are taken at once, so no activation is kept alive and nothing that later changes one in place can spoil them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .functional import finite, gain
from .layers import FoundLayer, Instance, instance_dims

UNMEASURED = -1.0
"""What a maximum holds when nothing was recorded: below every gain, so that no bound is exceeded by it."""


def layer_gains(layer: FoundLayer, x: Tensor, output: Tensor | None, p: float, instance: Instance) -> Tensor:
    """The gain of each instance that went through a layer."""
    dims = instance_dims(layer.kind, layer.module, x, instance)
    x, z = layer.kind.linear_part(layer.module, x.detach(), None if output is None else output.detach())
    return gain(z, x, p, instance_dims=dims)


class Hook:
    """A forward hook that does not travel: a copied or pickled model is a plain module, without our types in it."""

    def __init__(self, observe: Callable[[Tensor, Tensor], None]) -> None:
        self.observe = observe

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Torch calls this after the layer's forward."""
        x = args[0] if args else next(iter(kwargs.values()))
        self.observe(x, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of the standard library that takes anything and returns None, so that it can stand in for a hook.
        return getattr, (contextlib.nullcontext(), "__exit__")


def watch(layer: FoundLayer, observe: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
    """Calls ``observe(input, output)`` whenever the layer runs, before any hook that may change the output."""
    return layer.module.register_forward_hook(Hook(observe), with_kwargs=True, prepend=True)


class RunningMaximum:
    """The largest gain of one layer over its training-mode forwards, kept where the layer's activations are.

    Gains that are not finite are dropped and counted. With ``keep_inputs`` the inputs are kept instead, for gains
    that are to be taken with weights that do not exist yet.
    """

    def __init__(self, layer: FoundLayer, p: float, instance: Instance, *, keep_inputs: bool = False) -> None:
        weight = layer.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.layer = layer
        self.p = p
        self.instance: Instance = instance
        self.maximum = torch.full((), UNMEASURED, dtype=wide, device=weight.device)
        self.dropped = torch.zeros((), dtype=torch.int64, device=weight.device)
        self.paused = False
        self.inputs: list[Tensor] | None = [] if keep_inputs else None

    @torch.no_grad()
    def __call__(self, x: Tensor, output: Tensor) -> None:
        """Takes what went through the layer into account."""
        if self.paused or not self.layer.module.training or torch.compiler.is_exporting():
            return
        if self.inputs is not None:
            self.inputs.append(x.detach())
        elif x.numel():
            self.record(layer_gains(self.layer, x, output, self.p, self.instance))

    def record(self, gains: Tensor) -> None:
        """Takes the gains of a forward into the maximum, in place and without waiting for the device."""
        if self.maximum.device != gains.device:
            self.to(gains.device)
        self.maximum.copy_(torch.maximum(self.maximum, finite(gains).amax()))
        self.dropped.add_((~torch.isfinite(gains)).sum())

    @torch.no_grad()
    def replay(self) -> None:
        """Records the kept inputs' gains under the weights as they are now."""
        module = self.layer.module
        for x in self.inputs or ():
            if not x.numel():
                continue
            with torch.autocast(x.device.type, enabled=False):
                x = x.to(torch.promote_types(x.dtype, self.layer.weight.dtype))
                output = module.forward(x) if self.layer.kind.needs_output else None
                self.record(layer_gains(self.layer, x, output, self.p, self.instance))

    def to(self, device: torch.device) -> None:
        """Follows a model that was moved."""
        self.maximum, self.dropped = self.maximum.to(device), self.dropped.to(device)


def forget(observers: Sequence[RunningMaximum]) -> None:
    """Starts anew after a step."""
    maxima = [observer.maximum for observer in observers]
    torch._foreach_zero_(maxima)
    torch._foreach_add_(maxima, UNMEASURED)
    for observer in observers:
        if observer.inputs is not None:
            observer.inputs.clear()
