"""Forward hooks that turn what goes through a layer into gains, inside the forward pass.

Norms are taken at once, so no activation is kept alive, and nothing that changes one in place later can spoil them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import kernels, torch_quirks
from .distributed import is_sharded, whole, whole_weights
from .errors import MaxGainError, UnsupportedLayerError
from .functional import gain
from .layers import FoundLayer, Instance, instance_dims, refusal

UNMEASURED = -1.0
"""What a maximum holds if nothing was recorded: below every gain, so it exceeds no bound."""
MOST_KEPT = 64
"""How many inputs of a layer are kept for fresh gains; more are measured at once, with the weight as it is then."""


def layer_gains(layer: FoundLayer, x: Tensor, output: Tensor | None, p: float, instance: Instance) -> Tensor:
    """The gain of each instance that went through a layer."""
    dims = instance_dims(layer.kind, layer.module, x, instance)
    x, z = layer.kind.linear_part(layer.module, x.detach(), None if output is None else output.detach())
    return gain(z, x, p, instance_dims=dims)


@dataclass(frozen=True)
class Watch:
    """A hook in its place."""

    module: nn.Module
    handle: RemovableHandle

    def remove(self) -> None:
        """Take the hook away again."""
        self.handle.remove()
        torch_quirks.hide_hooks_from_compiler(self.module)


def watch(
    layer: FoundLayer, observe: Callable[[Tensor, Tensor], None], note: Callable[..., None] | None = None
) -> Watch:
    """Call ``observe(input, output)`` whenever the layer runs, before any hook that may change the output."""
    torch_quirks.show_hooks_to_compiler(layer.module)
    hook = torch_quirks.ForwardHook(layer.module, _named(layer, observe), note)
    return Watch(layer.module, layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))


def _named(layer: FoundLayer, observe: Callable[[Tensor, Tensor], None]) -> Callable[[Any, Any], None]:
    """The observer, made to leave transforms alone and to name the layer where something does not fit."""

    def observe_or_say(x: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if (reason := _misfit(layer, x, output)) is not None:
                raise UnsupportedLayerError(refusal(layer, "measured", reason))
            observe(x, output)
        elif not torch_quirks.is_simulated(x):
            try:
                observe(_plain(x), _plain(output))
            except MaxGainError:
                raise
            except Exception as error:  # what a layer is given and returns is up to its model
                reason = _misfit(layer, x, output)
                if reason is None and not layer.own_forward:
                    raise
                reason = reason or f"its type has a forward of its own, and {type(error).__name__}: {error}"
                raise UnsupportedLayerError(refusal(layer, "measured", reason)) from error

    return observe_or_say


def _plain(value: Any) -> Any:
    """The rows of a jagged tensor, in one dense tensor; anything else as it is."""
    return value.values() if isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged else value


def _misfit(layer: FoundLayer, x: Any, output: Any) -> str | None:
    """What there is in a call of a layer that does not fit its row; None if nothing is seen."""
    kind, module = layer.kind, layer.module
    if not isinstance(x, Tensor):
        return f"its input is not a tensor but {'missing' if x is None else type(x).__name__}"
    if kind.needs_output and not isinstance(output, Tensor):
        return f"it returns {type(output).__name__}, and which part of that is Wx is not known"
    if x.is_nested or x.layout != torch.strided:
        return f"its input is {'nested' if x.is_nested else 'sparse'}, which has no norm of one instance"
    if not kind.needs_output:
        return None
    dims, bias = kind.instance_dims(module, x), getattr(module, "bias", None)
    shapes = f"its input has shape {tuple(x.shape)} and its output {tuple(output.shape)}"
    if x.dim() < dims or x.shape[: x.dim() - dims] != output.shape[: output.dim() - dims]:
        return f"{shapes}, which do not have the same instances of {dims} dimensions"
    if bias is not None and output.shape[output.dim() - dims] != bias.numel():
        return f"{shapes}, in which the {bias.numel()} entries of its bias do not lie along dimension {-dims}"
    return None


class Tally:
    """The largest gain of every layer since the last step, and how many gains were dropped so far.

    Packed: one tensor of each with an entry per layer, so that a step takes as many operations for a hundred layers as
    for one. A model may lie on several devices; each has its own pair of tensors, in which only its layers' entries
    are used.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count = count
        self.dtype = dtype
        self._by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``(maxima, dropped)`` of that device."""
        if device not in self._by_device:
            maxima = torch.full((self.count,), UNMEASURED, dtype=self.dtype, device=device)
            dropped = torch.zeros(self.count, dtype=torch.int64, device=device)
            self._by_device[device] = torch_quirks.at_fixed_address(maxima), torch_quirks.at_fixed_address(dropped)
        return self._by_device[device]

    def maxima(self, device: torch.device) -> Tensor:
        """Over all devices, on that one; the tensor itself if there is no other."""
        here, *others = [self.on(device)[0]] + [m for d, (m, _) in self._by_device.items() if d != device]
        for other in others:
            here = torch.maximum(here, other.to(device))
        return here

    def dropped(self, device: torch.device) -> Tensor:
        """Over all devices, on that one."""
        here, *others = [self.on(device)[1]] + [n for d, (_, n) in self._by_device.items() if d != device]
        for other in others:
            here = here + other.to(device)
        return here

    def forget(self, layers: Tensor | None) -> None:
        """Start anew after a step: all layers, or those that an index names."""
        for maxima, _ in self._by_device.values():
            if layers is None:
                maxima.fill_(UNMEASURED)
            else:
                maxima.index_fill_(0, layers.to(maxima.device), UNMEASURED)

    def load(self, device: torch.device, maxima: Tensor, dropped: Tensor) -> None:
        """Take up what was saved."""
        self._by_device = {device: self.on(device)}
        self.on(device)[0].copy_(maxima)
        self.on(device)[1].copy_(dropped)


class Kept:
    """An input of a layer, the shape of its output, and what was kept before it.

    A chain and not a list, because torch.compile would compile anew for each length of a list.
    """

    def __init__(self, x: Tensor, shape: torch.Size, before: Kept | None) -> None:
        self.x = x
        self.shape = shape
        self.before = before


class RunningMaximum:
    """Keeps the largest gain of one layer over its training-mode forwards, in its entry of a tally.

    Gains that are not finite are dropped and counted. With ``keep_inputs`` the inputs are kept instead, to take gains
    with weights that do not exist yet.
    """

    needs_forwards = True

    def __init__(
        self, layer: FoundLayer, index: int, tally: Tally, p: float, instance: Instance, *, keep_inputs: bool = False
    ) -> None:
        self.layer = layer
        self.index = index
        self.tally = tally
        self.p = p
        self.instance: Instance = instance
        self.paused = False
        self.keep_inputs = keep_inputs
        self.kept: Kept | None = None
        self.kept_count = 0
        weight = layer.weight
        self._follow(torch.device("cpu") if weight.is_meta else weight.device)

    def __call__(self, x: Tensor, output: Tensor) -> None:
        """Take what went through the layer into account."""
        if self.paused or not self.layer.module.training or torch_quirks.is_exporting():
            return
        if self.keep_inputs:
            self._keep(x, output)
        elif x.numel():
            if is_sharded(x) or is_sharded(output):
                with torch.no_grad(), whole_weights(self.layer.module):
                    self._record(whole(x), whole(output) if self.layer.kind.needs_output else None)
            else:
                self._record(x, output)

    def _keep(self, x: Tensor, output: Tensor) -> None:
        compiling = torch.compiler.is_compiling()
        if compiling and not torch.is_grad_enabled():
            return  # nobody could let go of it here
        # A copy, because whoever owns the input may overwrite it before the step.
        self.kept = Kept(x.detach().clone(), output.shape, before=self.kept)
        if not compiling:
            self.kept_count += 1
            if self.kept_count > MOST_KEPT:
                self.replay()

    def _record(self, x: Tensor, output: Tensor | None) -> None:
        """Take the gains of a forward into the maximum; on a GPU by one kernel, where there is one for the layer."""
        if self.maxima.device != x.device:
            self._follow(x.device)
        compiling = torch.compiler.is_compiling()
        if x.is_cuda and self.layer.kind.form is not None:
            part, dims = self._part(x, output), instance_dims(self.layer.kind, self.layer.module, x, self.instance)
            measure = kernels.measure_compiled if compiling else kernels.measure
            measure(self.maxima, self.dropped, self.index, part, dims, self.p)
            return
        with torch.no_grad():
            gains = layer_gains(self.layer, x, output, self.p, self.instance)
            if compiling:
                torch.ops.maxgain.record(self.maxima, self.dropped, self.index, gains)
            else:
                kernels.record(self.maxima, self.dropped, self.index, gains)

    def _part(self, x: Tensor, output: Tensor | None) -> kernels.Part:
        """The layer's linear part as the fused kernel takes it."""
        kind, module = self.layer.kind, self.layer.module
        dims = kind.instance_dims(module, x)
        if kind.form == "batch_norm":
            assert isinstance(module, nn.modules.batchnorm._BatchNorm)
            scale, variance = module._parameters["weight"], module._buffers["running_var"]
            return kernels.Part("batch_norm", x, None, scale, variance, module.eps, dims)
        bias = module._parameters["bias"] if "bias" in module._parameters else getattr(module, "bias", None)
        return kernels.Part("affine", x, output, bias, None, 0.0, dims)

    @torch.no_grad()
    def replay(self) -> None:
        """Record the kept inputs' gains under the weights as they are now, and let go of them."""
        kept = self.kept
        with whole_weights(self.layer.module):
            while kept is not None:
                if kept.x.numel():
                    with torch.autocast(kept.x.device.type, enabled=False):
                        x = whole(kept.x).to(self.layer.weight.dtype)
                        self._record(x, self._forward(x, kept.shape) if self.layer.kind.needs_output else None)
                kept = kept.before
        self.let_go()

    def let_go(self) -> None:
        """Forget the inputs that were kept."""
        self.kept, self.kept_count = None, 0

    def _forward(self, x: Tensor, shape: torch.Size) -> Tensor:
        try:
            output: Tensor = self.layer.module.forward(x, **self.layer.kind.forward_arguments(shape))
        except TypeError as error:
            reason = "its forward takes more than its input, which measure='fresh' does not keep"
            raise UnsupportedLayerError(refusal(self.layer, "measured afresh", reason)) from error
        return output

    def _follow(self, device: torch.device) -> None:
        """Record where the activations are."""
        self.maxima, self.dropped = self.tally.on(device)
