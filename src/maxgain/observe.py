"""Forward hooks that turn what goes through a layer into gains, inside the forward pass.

Norms are taken at once, so no activation is kept alive, and nothing that changes one in place later can spoil them.
What happens in every batch, for every layer, is ``Hook.__call__`` and the ``RunningMaximum`` that it calls.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from . import kernels, torch_quirks
from .coverage import parameters_of
from .distributed import is_sharded, whole, whole_weights
from .errors import MaxGainError, MeasurementWarning, UnsupportedLayerError
from .functional import channelwise_gains, gain_of_plain_norms, instance_gains, lost_beside, record
from .layers import FoundLayer, Instance, defect, refusal
from .rounding import unrounded

UNMEASURED = -1.0
"""What a maximum holds if nothing was recorded: below every gain, so it exceeds no bound."""
LATE = (
    "a forward hook was put before the constraint's since, and may change its output (run one batch that is not "
    "compiled, which puts them in order)"
)
REPLICA = "nn.DataParallel runs copies of it on several devices at once; use DistributedDataParallel, or one device"
UPDATES_UNTIL_NOTICED = 4
"""How often weights may change without a step of an attached optimiser before it is said."""


def layer_gains(layer: FoundLayer, x: Tensor, output: Tensor | None, p: float, instance: Instance) -> Tensor:
    """The gain of each instance that went through a layer."""
    if layer.kind.form == "batch_norm" and layer.kind.diagonal is not None:
        scales = layer.kind.diagonal(layer.module, torch.promote_types(layer.weight.dtype, torch.float32))
        if (gains := channelwise_gains(x.detach(), scales, p)) is not None:
            return gains
    dims = layer.instance_dims(x, instance)
    output = output.detach() if isinstance(output, Tensor) else output  # a registered layer's may be anything
    x, z = layer.kind.linear_part(layer.module, x.detach(), output)
    x, z = x.detach(), z.detach()
    bias = None
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # looking is free here
        bias = layer.module._parameters.get("bias") if layer.kind.form == "affine" and not layer.own_forward else None
    if bias is None or output is None or is_sharded(bias):
        return instance_gains(z, x, p, dims)
    # Of a Wx that is next to nothing beside the bias, mostly rounding is left.
    lost = lost_beside(bias.detach(), math.prod(z.shape[z.dim() - dims :]), p, output.dtype)
    gains = gain_of_plain_norms(z, x, p, tuple(range(-dims, 0)), lost)
    return gains if gains is not None else instance_gains(unrounded(layer, x, z, p, dims, lost), x, p, dims)


# --- Hooks ------------------------------------------------------------------------------------------------------------


class Watcher(Protocol):
    """Is told what goes through a layer."""

    def see(self, layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        """After each forward of the layer."""


class Observer(Watcher, Protocol):
    """Looks at what goes through one layer, for a constraint."""

    paused: bool
    needs_forwards: bool
    """Whether there is anything to look at; a dense layer's norm, say, needs its weight alone."""
    instance: Instance
    """What it takes for one x."""


class Hook(torch_quirks.ForwardHook):
    """Shows a watcher whatever goes through a layer, until it is removed.

    It is called before any hook that may change the output, and names the layer where something does not fit.
    What it reads in compiled code is checked in every call: see ``torch_quirks.ForwardHook``.
    """

    __slots__ = ("_handle", "first", "instance", "layer", "look", "note", "watcher")

    def __init__(
        self,
        layer: FoundLayer,
        watcher: Watcher,
        note: Callable[..., None] | None = None,
        instance: Instance = "auto",
    ) -> None:
        self.layer = layer
        self.watcher = watcher
        self.instance = instance
        """What the watcher takes for one x."""
        self.note = note
        """Told of each call that is not compiled: input, output, and all that was given besides."""
        self.look: Callable[[], None] | None = None
        """Called in each forward that is not compiled."""
        self.first = next(iter(inspect.signature(layer.module.forward).parameters), "input")
        """What the layer's forward calls its input."""
        torch_quirks.show_hooks_to_compiler(layer.module)
        self._handle = layer.module.register_forward_hook(self, with_kwargs=True)
        if len(layer.module._forward_hooks) > 1:
            torch_quirks.put_first(layer.module._forward_hooks, self._handle.id)

    def remove(self) -> None:
        """Take the hook away again."""
        self._handle.remove()
        torch_quirks.hide_hooks_from_compiler(self.layer.module)

    @torch_quirks.only_as_a_part
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Tensor | None:
        """Torch calls this after the layer's forward, with keyword arguments and output, or with the output alone.

        What it returns takes the place of the output: None leaves it.
        """
        kwargs = rest[0] if len(rest) > 1 else {}
        x: Any = args[0] if args else kwargs.get(self.first)
        output = rest[-1]
        is_late = False  # whether another hook came first, and may have changed the output
        for hook in module._forward_hooks.values():
            if hook is self or (is_late := not isinstance(hook, torch_quirks.ForwardHook)):
                break
        if torch.compiler.is_compiling():
            if torch_quirks.is_exporting() or torch_quirks.is_transformed():
                return None
            if (reason := LATE if is_late else _misfit(self.layer, x, output)) is not None:
                raise UnsupportedLayerError(refusal(self.layer, "measured", reason))
            keeps = module.training and type(output) is Tensor and output.requires_grad
            is_sequence = x.dim() > 2 and self.layer.instance_dims(x) == 1
            onward = torch_quirks.set_apart(output) if keeps and is_sequence else None
            self.watcher.see(self.layer, x, output)
            return onward
        if torch_quirks.is_simulated(x):
            return None
        if torch_quirks.count_modes():
            with torch_quirks.without_modes():
                self(module, args, *rest)
            return None
        if self.note is not None:
            self.note(
                x, output, args[1:], {name: value for name, value in kwargs.items() if args or name != self.first}
            )
        if module.training and "_is_replica" in vars(module):
            raise UnsupportedLayerError(refusal(self.layer, "measured", REPLICA))
        if is_late:
            output = self._come_first(module, args, kwargs)
        if self.look is not None:
            self.look()
        if type(x) is not Tensor or type(output) is not Tensor:
            x, output = self._rows(x), self._rows(output)
        elif x.device != output.device:  # a forward may fetch its input, as Accelerate's do in models on several GPUs
            x = x.to(output.device)
        try:
            self.watcher.see(self.layer, x, output)
        except (MaxGainError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # what a layer is given and returns is up to its model
            reason = _misfit(self.layer, x, output) or defect(module, self.layer.kind, rescale=False)
            if reason is None and not self.layer.own_forward and self.layer.kind.output_is_part:
                raise
            whose = (
                "its type has a forward" if self.layer.kind.output_is_part else "it was registered with a linear_part"
            )
            reason = reason or f"{whose} of its own, and {type(error).__name__}: {error}"
            raise UnsupportedLayerError(refusal(self.layer, "measured", reason)) from error
        return None

    @torch.no_grad()
    def _come_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook was put before this one since, and may have changed the output: from now on it comes later."""
        hooks = module._forward_hooks
        # Not by the handle: torch copies hooks under other names when it puts a module in the place of another.
        torch_quirks.put_first(hooks, next(name for name, hook in hooks.items() if hook is self))
        with torch_quirks.undisturbed(module, self.layer.weight.device):
            return module.forward(*args, **kwargs)

    def _rows(self, value: Any) -> Any:
        """The rows of a jagged tensor, in one dense tensor; anything else as it is."""
        if not (isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged):
            return value
        if self.instance == "sample":
            reason = (
                "its samples are of different lengths, and instance='sample' wants each as a whole ('auto' does not)"
            )
            raise UnsupportedLayerError(refusal(self.layer, "measured", reason))
        return value.values()


def _misfit(layer: FoundLayer, x: Any, output: Any) -> str | None:
    """What there is in a call of a layer that does not fit its row; None if nothing is seen."""
    kind = layer.kind
    if not isinstance(x, Tensor):
        return f"its input is not a tensor but {'missing' if x is None else type(x).__name__}"
    is_part = kind.needs_output and kind.output_is_part
    if is_part and not isinstance(output, Tensor):
        return f"it returns {type(output).__name__}, and which part of that is Wx is not known"
    if x.is_nested or x.layout != torch.strided:
        return f"its input is {'nested' if x.is_nested else 'sparse'}, which has no norm of one instance"
    if kind.form == "batch_norm" and x.shape[1:2] != layer.weight.shape:
        return f"its input has shape {tuple(x.shape)}, and its {len(layer.weight)} scales do not lie along dimension 1"
    if not is_part:
        return None
    dims, bias = layer.instance_dims(x), getattr(layer.module, "bias", None)
    shapes = f"its input has shape {tuple(x.shape)} and its output {tuple(output.shape)}"
    if x.dim() < dims or x.shape[: x.dim() - dims] != output.shape[: output.dim() - dims]:
        return f"{shapes}, which do not have the same instances of {dims} dimensions"
    if bias is not None and output.shape[output.dim() - dims] != bias.numel():
        return f"{shapes}, in which the {bias.numel()} entries of its bias do not lie along dimension {-dims}"
    return None


# --- Maxima -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entries:
    """A tally's tensors on one device, and what gains they are of.

    All that the layers' maxima share is in this one object: torch.compile checks that each still has the same.
    """

    maxima: Tensor
    dropped: Tensor
    p: float
    instance: Instance
    """What is taken for one x."""


@dataclass
class Tally:
    """The largest gain of every layer since the last step, and how many gains were dropped so far.

    Packed: one tensor of each with an entry per layer, so that a step takes as many operations for a hundred layers as
    for one. A model may lie on several devices; each has its own tensors, in which only its layers' entries are used.
    """

    count: int
    dtype: torch.dtype
    p: float
    instance: Instance
    by_device: dict[torch.device, Entries] = field(default_factory=dict)

    def on(self, device: torch.device) -> Entries:
        """Those of that device, to be changed in place."""
        if device not in self.by_device:
            maxima = torch.full((self.count,), UNMEASURED, dtype=self.dtype, device=device)
            dropped = torch.zeros(self.count, dtype=torch.int64, device=device)
            if device.type == "cuda":
                maxima, dropped = torch_quirks.at_fixed_address(maxima), torch_quirks.at_fixed_address(dropped)
            self.by_device[device] = Entries(maxima, dropped, self.p, self.instance)
        return self.by_device[device]

    def over_devices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``(maxima, dropped)`` of all devices, on that one; its own tensors if there is no other."""
        maxima, dropped = self.on(device).maxima, self.on(device).dropped
        for other, more in self.by_device.items():
            if other != device:
                maxima = torch.maximum(maxima, more.maxima.to(device))
                dropped = dropped + more.dropped.to(device)
        return maxima, dropped

    def gather(self, device: torch.device, used: set[torch.device]) -> None:
        """After a model was moved: bring what lies on unused devices to this one, once, and not again in every step."""
        own = self.on(device)
        for other in self.by_device.keys() - used - {device}:
            more = self.by_device.pop(other)
            own.maxima.copy_(torch.maximum(own.maxima, more.maxima.to(device)))
            own.dropped.add_(more.dropped.to(device))

    def forget(self, layers: Tensor | None, used_up: Tensor | None = None) -> None:
        """Start again after a step: all layers, or those that an index names; but for maxima that are used up."""
        for entries in self.by_device.values():
            if entries.maxima is used_up:
                continue
            if layers is None:
                entries.maxima.fill_(UNMEASURED)
            else:
                entries.maxima.index_fill_(0, layers.to(entries.maxima.device), UNMEASURED)

    def load(self, device: torch.device, maxima: Tensor, dropped: Tensor) -> None:
        """Take up what was saved, in the same tensors: observers of every device know theirs."""
        own = self.on(device)
        self.forget(None)
        for entries in self.by_device.values():
            entries.dropped.zero_()
        own.maxima.copy_(maxima)
        own.dropped.copy_(dropped)


class RunningMaximum:
    """Keeps the largest gain of one layer over its training-mode forwards, in its entry of a tally.

    Gains that are not finite are dropped and counted.
    """

    __slots__ = ("entries", "index", "instance", "layer", "paused", "tally")
    needs_forwards = True

    def __init__(self, layer: FoundLayer, index: int, tally: Tally) -> None:
        self.layer = layer
        self.index = index
        self.tally = tally
        self.instance = tally.instance
        self.paused = False
        weight = layer.weight
        self.entries = tally.on(torch.device("cpu") if weight.is_meta else weight.device)

    def see(self, layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        """Take what went through the layer into account."""
        if self.paused or not layer.module.training:
            return
        if (type(x) is not Tensor or type(output) is not Tensor) and (is_sharded(x) or is_sharded(output)):
            with torch.no_grad(), whole_weights(layer.module):
                self._record(layer, whole(x), whole(output) if layer.kind.needs_output else None)
        else:
            self._record(layer, x, output)

    def follow(self) -> None:
        """Record beside the weight, where that was moved to an accelerator and the layer has not been trained since."""
        device = self.layer.weight.device
        # Those of the host may be offloaded.
        if device.type not in ("cpu", "meta") and self.entries.maxima.device != device:
            self.entries = self.tally.on(device)

    def _record(self, layer: FoundLayer, x: Tensor, output: Tensor | None) -> None:
        """Raise the maximum to the largest gain of a forward; on a GPU by one kernel, where there is one for the layer.

        torch.compile sees one operation of ours in either case.
        """
        if not x.numel():
            return
        if self.entries.maxima.device != x.device:  # record where the activations are
            self.entries = self.tally.on(x.device)
        entries, compiling = self.entries, torch.compiler.is_compiling()
        if x.is_cuda and layer.kind.form is not None:
            part = _part(layer, x, output, compiling=compiling)
            measure = kernels.measure_compiled if compiling else kernels.measure
            dims = layer.instance_dims(x, entries.instance)
            measure(entries.maxima, entries.dropped, self.index, part, dims, entries.p)
            return
        with torch.no_grad():
            gains = layer_gains(layer, x, output, entries.p, entries.instance)
            if compiling:
                torch.ops.maxgain.record(entries.maxima, entries.dropped, self.index, gains)
            else:
                record(entries.maxima, entries.dropped, self.index, gains)


def _part(layer: FoundLayer, x: Tensor, output: Tensor | None, *, compiling: bool) -> kernels.Part:
    """The layer's linear part as the fused kernel takes it."""
    module: Any = layer.module
    dims = layer.instance_dims(x)
    # The dictionaries are the fastest way to what a module holds, but compiled code would check them besides.
    own = {} if compiling else module._parameters
    if layer.kind.form == "batch_norm":
        weight = module.weight if compiling else own["weight"]
        variance = module.running_var if compiling else module._buffers["running_var"]
        if x.shape[1] != len(weight):
            raise ValueError("the kernel would read beyond the end of the scales")  # the hook says it in its words
        # A kernel that was compiled for a whole number would take no other.
        return kernels.Part("batch_norm", x, None, weight, variance, float(module.eps), dims)
    bias = own["bias"] if "bias" in own else getattr(module, "bias", None)
    return kernels.Part("affine", x, output, bias, None, 0.0, dims)


# --- Updates ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Missed:
    """Notices that constrained weights are updated while no attached optimiser steps, and says so once.

    Each forward of one layer looks whether its weight has changed since the last one. Any torch optimiser that steps is
    heard of besides: a compiled forward does not look, and the message can say who it is.
    """

    layers: Sequence[FoundLayer]
    bounds: Mapping[str, float]
    what: str
    paused: bool = False
    attached: dict[Optimizer, RemovableHandle] = field(default_factory=dict)
    is_stepping: bool = False
    has_stepped: bool = False
    count: int = 0
    """How often weights have changed since an attached optimiser stepped."""
    strangers: int = 0
    """How often an optimiser that is not attached has updated weights that no attached one holds."""
    _seen: tuple[int, str] | None = None
    """What the weight that is looked at was like in the last forward."""
    _by: str = ""

    def follow(self, optimizer: Optimizer | None = None, hooks: Sequence[Hook] = ()) -> None:
        """Optimisers that step are heard of, and one that was attached is followed.

        The hooks are those of the layers, if the constraint looks at forwards.
        """
        if not _hearing:
            _hearing.append(register_optimizer_step_post_hook(_tell))
        _following[self] = None
        if optimizer is None:
            return
        if not self.attached:
            # Sharded weights are gathered again for each forward, which changes them too.
            trained = [h for h in hooks if h.layer.weight.requires_grad and not is_sharded(h.layer.weight)]
            for hook in trained[:1]:
                hook.look = partial(self._look, hook.layer)
        self.attached[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def end(self) -> None:
        """Stop following: no optimiser is attached any more."""
        for handle in self.attached.values():
            handle.remove()
        self.attached.clear()
        _following.pop(self, None)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_stepping = True  # which may take many updates, as LBFGS does

    def _look(self, layer: FoundLayer) -> None:
        if not (layer.module.training and torch.is_grad_enabled()):
            return
        weight, total = layer.weight, ""
        if not (self.has_stepped or (weight.is_cuda and torch_quirks.is_capturing(weight.device))):
            # Who writes to weight.data is not counted. Until the first step a device may be waited for.
            total = str(weight.detach().sum().item())
        seen = weight._version, total  # how often it was changed in place
        if seen != self._seen and not (self.paused or self.is_stepping):
            if self._seen is not None:
                self._one_more()
            self._seen = seen

    def heard_of(self, optimizer: Optimizer) -> None:
        """An optimiser that is not attached has stepped; does it update constrained weights?"""
        if self.is_stepping or self.paused:
            return
        held = parameters_of(optimizer)
        # As they are now: a model may have been changed since, and then trained without this constraint.
        weights = [(layer.name, layer.module._parameters.get(layer.kind.weight)) for layer in self.layers]
        updated = {name: id(one) for name, one in weights if one is not None and one.requires_grad and id(one) in held}
        if not updated:  # most often: it is the optimiser of another model, perhaps in another thread
            return
        followed: set[int] = set().union(*map(parameters_of, self.attached))
        if left := [name for name, weight in updated.items() if weight not in followed]:
            self._a_stranger_steps(optimizer, [name for name in left if self.bounds[name] != float("inf")])
        else:
            self._by = f" ({type(optimizer).__name__} does)"
            self._one_more()

    def _a_stranger_steps(self, optimizer: Optimizer, bounded: list[str]) -> None:
        self.strangers += bool(bounded)
        if bounded and self.strangers == UPDATES_UNTIL_NOTICED:
            names = ", ".join(map(repr, bounded))
            remedy = "attach it too, or leave them out with exclude"
            if not self.attached:
                remedy = "call attach(optimizer), or step() after each update"
            warnings.warn(
                f"nothing holds these layers to their bounds: {names}. They are updated by an optimiser "
                f"({type(optimizer).__name__}) that is not attached to this {self.what}: {remedy}.",
                MeasurementWarning,
                stacklevel=2,
            )

    def _one_more(self) -> None:
        self.count += 1
        if self.count == UPDATES_UNTIL_NOTICED:
            warnings.warn(
                f"the constrained weights are being updated, but no optimiser that is attached to this {self.what} "
                f"steps, so nothing is projected. Attach the optimiser that updates them{self._by}, or call step() "
                "after each update.",
                MeasurementWarning,
                stacklevel=2,
            )


_following: WeakKeyDictionary[Missed, None] = WeakKeyDictionary()
_hearing: list[RemovableHandle] = []
"""The one hook for the steps of all optimisers there are."""


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Torch calls this after a step of any optimiser."""
    for following in _following.keyrefs():  # a list at once: another thread may attach meanwhile
        if (missed := following()) is None:
            continue
        if optimizer in missed.attached:
            missed.is_stepping, missed.has_stepped, missed.count = False, True, 0
        else:
            missed.heard_of(optimizer)
