"""Forward hooks that turn what goes through a layer into gains, inside the forward pass.

Norms are taken at once, so no activation is kept alive and nothing that later changes one in place can spoil them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        x = args[0] if args else kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()))
        self.observe(x, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of the standard library that takes anything and returns None, so that it can stand in for a hook.
        return getattr, (contextlib.nullcontext(), "__exit__")


@dataclass(frozen=True)
class Watch:
    """A hook in its place."""

    module: nn.Module
    handle: RemovableHandle

    def remove(self) -> None:
        """Takes the hook away again."""
        self.handle.remove()
        if not any(isinstance(hook, Hook) for hook in self.module._forward_hooks.values()):
            self.module.__dict__["_parameters"] = dict(self.module._parameters)


def watch(layer: FoundLayer, observe: Callable[[Tensor, Tensor], None]) -> Watch:
    """Calls ``observe(input, output)`` whenever the layer runs, before any hook that may change the output.

    ``torch.compile`` does not look whether there are hooks before it runs what it compiled without them, be it for this
    model or for another one of the same architecture. It does look at the type of the dictionary of parameters, so that
    is made another one, which behaves the same.
    """
    layer.module.__dict__["_parameters"] = OrderedDict(layer.module._parameters)
    return Watch(layer.module, layer.module.register_forward_hook(Hook(observe), with_kwargs=True, prepend=True))


class Kept:
    """An input of a layer, the shape of its output, and what was kept before it.

    A chain and not a list, because torch.compile would compile anew for each length of a list.
    """

    def __init__(self, x: Tensor, shape: torch.Size, before: Kept | None) -> None:
        self.x = x
        self.shape = shape
        self.before = before


class RunningMaximum:
    """The largest gain of one layer over its training-mode forwards, kept where the layer's activations are.

    Gains that are not finite are dropped and counted. With ``keep_inputs`` the inputs are kept instead, for gains
    that are to be taken with weights that do not exist yet.
    """

    def __init__(self, layer: FoundLayer, p: float, instance: Instance, *, keep_inputs: bool = False) -> None:
        self.layer = layer
        self.p = p
        self.instance: Instance = instance
        self.maximum = _fixed(layer.scalar(UNMEASURED))
        self.dropped = _fixed(torch.zeros((), dtype=torch.int64, device=self.maximum.device))
        self.paused = False
        self.keep_inputs = keep_inputs
        self.kept: Kept | None = None

    def __call__(self, x: Tensor, output: Tensor) -> None:
        """Takes what went through the layer into account."""
        # The flag and not is_exporting(), which torch.compile takes to be true before torch 2.13.
        if self.paused or not self.layer.module.training or torch.compiler._is_exporting_flag:
            return
        with torch.no_grad():
            if self.keep_inputs:
                # A copy, because whoever owns the input may overwrite it before the step.
                self.kept = Kept(x.clone(), output.shape, before=self.kept)
            elif x.numel():
                self.record(layer_gains(self.layer, x, output, self.p, self.instance))

    def record(self, gains: Tensor) -> None:
        """Takes the gains of a forward into the maximum, in place and without waiting for the device."""
        if self.maximum.device != gains.device:
            self.to(gains.device)
        usable = finite(gains)
        self.maximum.clamp_(min=usable.amax())
        self.dropped.add_((usable != gains).sum())

    @torch.no_grad()
    def replay(self) -> None:
        """Records the kept inputs' gains under the weights as they are now."""
        kept = self.kept
        while kept is not None:
            if kept.x.numel():
                with torch.autocast(kept.x.device.type, enabled=False):
                    x = kept.x.to(self.layer.weight.dtype)
                    output = self._forward(x, kept.shape) if self.layer.kind.needs_output else None
                    self.record(layer_gains(self.layer, x, output, self.p, self.instance))
            kept = kept.before

    def _forward(self, x: Tensor, shape: torch.Size) -> Tensor:
        module = self.layer.module
        # A transposed convolution has several possible output sizes, and was told which of them to take.
        size = {"output_size": list(shape)} if isinstance(module, nn.modules.conv._ConvTransposeNd) else {}
        output: Tensor = module.forward(x, **size)
        return output

    def to(self, device: torch.device) -> None:
        """Follows a model that was moved."""
        self.maximum, self.dropped = _fixed(self.maximum.to(device)), _fixed(self.dropped.to(device))


def _fixed(tensor: Tensor) -> Tensor:
    """Says that the tensor stays where it is, so that CUDA graphs need no copy of it.

    As ``torch._dynamo.mark_static_address`` does, but without the seconds that importing it takes.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def forget(observers: Sequence[RunningMaximum]) -> None:
    """Starts anew after a step."""
    maxima = [observer.maximum for observer in observers]
    torch._foreach_zero_(maxima)
    torch._foreach_add_(maxima, UNMEASURED)
    for observer in observers:
        observer.kept = None
