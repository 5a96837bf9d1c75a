"""MaxGain: after each optimizer step, ``W ← W / max(1, gain / γ)``, with the largest gain of the step's batches.

How a step goes: every training forward of a layer raises one maximum (``_Hook``, ``record``). After
``optimizer.step()`` the weights whose maximum exceeds γ are divided (``project_``), and the maxima begin anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import _torch, kernels
from .checks import homogeneity_error, made_up_input
from .constraint import NOT_FINITE, UNMEASURED, Constraint, StepPlan
from .distributed import Group, full, gathered_parameters, is_flat_shard, is_sharded
from .errors import MaxGainError, NormError
from .functional import gain, project_, scaled_channels_gain, without_bias
from .layers import Bound, Globs, Layer

__all__ = ["MaxGain", "gain", "project_", "record"]


class MaxGain(Constraint):
    """Keeps the largest gain ``‖Wx‖_p / ‖x‖_p`` of each layer, measured on the training batches, at γ.

    Gouk, Pfahringer, Frank and Cree, *MaxGain: Regularisation of Neural Networks by Constraining Activation
    Magnitudes*, 2018. A measured gain is a lower bound of the layer's operator norm, not a Lipschitz constant.

    A forward counts if the layer is in training mode, gradients are enabled and it uses the module's own parameter.
    Under accumulation the maximum runs over all batches since the last step. There is nothing to save: a constraint
    has no state between steps.

    Args:
        model: The module whose layers are bounded, or several (the parts of a pipeline): dense layers, convolutions,
            batch norm, and what ``register_layer`` added.
        gamma: The bound of all layers, or a mapping of globs over layer names to bounds, of which the first that
            matches decides. ``inf`` measures without a bound, and changes no bit of the training.
        p: The norm, from 1 to ``inf``.
        instance: What counts as one input x. ``'auto'``: a row of the last dimension for dense layers, so that every
            token is one, and a sample for convolutions and batch norm. ``'sample'``: always a sample.
        every: Measure and project in every k-th step only, which is cheaper. Between them gains may exceed γ.
        parts: Globs over layer names to the names of equal blocks of their outputs, which are measured and bounded
            separately: ``{"*.qkv": ("q", "k", "v")}``.
        include: Globs over layer names: only these layers. None takes all but the scales of layer, group and RMS norms.
        exclude: Globs over layer names: not these layers.
        process_group: The ranks that train one model, a process group or a device mesh. None: the default group, where
            there is one. False: no exchange.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> constraint = MaxGain(model, gamma=0.5).attach(optimizer)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(constraint.gains)
        ['0', '2']
    """

    bound_name = "gamma"
    measures_training = True
    gamma = Constraint.bound

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        gamma: Bound = 2.0,
        *,
        p: float = 2.0,
        instance: Literal["auto", "sample"] = "auto",
        every: int = 1,
        parts: Mapping[str, Iterable[str]] | None = None,
        include: Globs | None = None,
        exclude: Globs = (),
        process_group: Group = None,
    ) -> None:
        self.p, self.instance, self.every = check_p(p), instance, every
        if instance not in ("auto", "sample"):
            raise MaxGainError(f"instance must be 'auto' or 'sample', not {instance!r:.40}.")
        if not isinstance(every, int) or every < 1:
            raise MaxGainError(f"every must be a whole number from 1 on, not {every!r:.40}.")
        self.mask: Tensor | None = None
        """Which tokens count, such as an attention mask: set it before a forward; 0 leaves a token out. Compiled
        forwards do not see it."""
        self.mask_uses = 0
        """How many forwards of layers took a mask."""
        self._buffer: Buffer | None = None
        super().__init__(model, gamma, parts=parts, include=include, exclude=exclude, process_group=process_group)

    @property
    def dropped(self) -> dict[str, int]:
        """How many instances of each layer had a gain that is not finite, and were left out."""
        assert self._buffer is not None
        return {name: int(count) for name, count in self._by_name(self._buffer.dropped).items()}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure and project nothing within this context."""
        assert self._buffer is not None
        before = self._buffer.resting.clone()
        self._buffer.resting.fill_(2**30)  # on the device, so that compiled and captured forwards rest too
        try:
            with super().paused():
                yield
        finally:
            self._buffer.resting.copy_(before)

    def _register(self) -> None:
        if self._buffer is None:
            self._buffer = Buffer(self._gains, self.p)
        super()._register()
        if not self._hooks:
            self._hooks = [_Hook(layer, slot, self) for layer, slot in zip(self._layers, self._slots, strict=True)]

    def _step(self, optimizer: Optimizer | None) -> None:
        steps = self._attached[optimizer].steps
        if not steps & (steps + 1):  # at the steps that are checked: compiled code tries no forward
            self._try_forwards()
        super()._step(optimizer)

    @torch.no_grad()
    def _try_forwards(self) -> None:
        """Try the layers with forwards of their own that no batch was tried on, on numbers that are made up."""
        for hook in [hook for hook in self._hooks if hook.untried]:
            if _torch.is_capturing(hook.buffer.maxima.device) or (x := made_up_input(hook.layer)) is None:
                continue
            with contextlib.suppress(Exception):  # it may take more than an input
                if reason := homogeneity_error(hook.layer, (x,), {}):
                    self._skip(hook.layer, reason)
                hook.untried = reason == ""

    def _estimate(self, plan: StepPlan) -> Tensor:
        assert self._buffer is not None
        maxima = self._buffer.maxima
        return maxima if plan.index is None else maxima[plan.index]

    def _forget(self, plan: StepPlan, sizes: Tensor) -> None:
        assert self._buffer is not None
        buffer, at = self._buffer, slice(None) if plan.index is None else plan.index
        if plan.fused is None or sizes is not buffer.maxima:  # else the launch has done so
            buffer.maxima[at] = UNMEASURED
        if self.every > 1:
            if _torch.is_capturing(buffer.resting.device):
                resting = buffer.resting[at]
                buffer.resting[at] = torch.where(resting == 0, self.every, resting) - 1
            else:
                plan.resting = (plan.resting or self.every) - 1
                buffer.resting[at] = plan.resting
                for hook in [hook for hook in self._hooks if plan.index is None or hook.slot in plan.slots]:
                    hook.idle = plan.resting > 0

    def _move_to(self, device: torch.device) -> None:
        super()._move_to(device)
        if self._buffer is not None:
            self._buffer.move_to(device)

    def _dropped(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer.dropped


class Buffer:
    """What hooks write, with an entry for each weight; one object, because compiled code checks each that it reads."""

    __slots__ = ("dropped", "maxima", "p", "resting")

    def __init__(self, like: Tensor, p: float) -> None:
        self.p = p
        self.maxima = torch.full_like(like, UNMEASURED)
        """The largest gain since the last step."""
        self.dropped = torch.zeros_like(like, dtype=torch.int64)
        """How many gains were not finite, ever."""
        self.resting = torch.zeros_like(like, dtype=torch.int32)
        """For how many more steps nothing is measured."""
        self.fix_addresses()

    def move_to(self, device: torch.device) -> None:
        """Follow a model to another device."""
        if self.maxima.device != device:
            self.maxima, self.dropped = self.maxima.to(device), self.dropped.to(device)
            self.resting = self.resting.to(device)
            self.fix_addresses()

    def fix_addresses(self) -> None:
        """Spare compiled CUDA graphs a copy."""
        for tensor in (self.maxima, self.dropped, self.resting) if self.maxima.is_cuda else ():
            _torch.at_fixed_address(tensor)


class _Hook(_torch.ForwardHook):
    """Records the gain of one layer's training forwards."""

    __slots__ = ("buffer", "constraint", "handle", "idle", "instance", "layer", "slot", "untried", "weight")

    def __init__(self, layer: Layer, slot: int, constraint: MaxGain) -> None:
        assert constraint._buffer is not None
        self.layer, self.slot, self.constraint = layer, slot, constraint
        self.buffer, self.instance = constraint._buffer, constraint.instance
        self.weight = layer.parameter
        self.untried, self.idle = layer.own_forward, False
        _torch.invalidate_compiled_code(layer.module)
        self.handle = layer.module.register_forward_hook(self, with_kwargs=True)
        _torch.put_first(layer.module._forward_hooks, self.handle.id)

    def remove(self) -> None:
        """Take the hook away again."""
        self.handle.remove()
        _torch.restore_compiled_code(self.layer.module)

    @_torch.skip_standalone_compile
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        """Torch calls this after the layer's forward. What it returns takes the place of the output: None leaves it."""
        if not (module.training and torch.is_grad_enabled()):
            return None
        x: Any = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if torch.compiler.is_compiling():
            return self.measure_compiled(module, x, output)
        if self.idle and not _torch.is_capturing(self.buffer.maxima.device):
            return None  # a captured forward asks the device instead
        if _torch.is_simulated(x) or not self.is_own(module._parameters.get(self.layer.kind.weight)):
            return None
        with _torch.without_modes() if _torch.count_modes() else contextlib.nullcontext(), torch.no_grad():
            try:
                if self.untried and not _torch.is_capturing(self.buffer.maxima.device):
                    if reason := homogeneity_error(self.layer, args, kwargs):
                        self.constraint._skip(self.layer, reason)
                        return None
                    self.untried = reason == ""  # zero shows nothing: try the next batch
                self.measure(module, x, output)
            except (MaxGainError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # what a layer is given and returns is up to its model
                said = str(error).strip().partition("\n")[0]
                self.constraint._skip(self.layer, f"its call cannot be measured ({type(error).__name__}: {said})")
        return None

    def is_own(self, weight: Any) -> bool:
        """Whether a forward used the module's own parameter, and not one put there by functional_call for a while."""
        return weight is self.weight or is_sharded(self.weight) or is_flat_shard(self.weight)

    def measure(self, module: nn.Module, x: Any, output: Any) -> None:
        """Record a forward that is not compiled."""
        if x.is_nested:
            x, output = x.values(), output.values()
        if x.layout != torch.strided:
            x = x.to_dense()
        if isinstance(output, Tensor) and x.device != output.device:  # its input was fetched from another
            x = x.to(output.device)
        if not x.numel():
            return
        mask = self.constraint.mask
        if mask is not None and self.layer.kind.dims == 1 and mask.shape == x.shape[:-1]:
            x = x.masked_fill(mask.unsqueeze(-1) == 0, 0)  # an input of zero has no gain
            self.constraint.mask_uses += 1
        if is_sharded(x) or is_sharded(output):
            with gathered_parameters(module):
                record(*self.arguments(module, full(x), full(output)))
        else:
            record(*self.arguments(module, x, output))

    def measure_compiled(self, module: nn.Module, x: Any, output: Any) -> Tensor | None:
        """Record a forward that torch.compile reads; what is not measured here is found by its gradient."""
        is_tensor = isinstance(output, Tensor)  # what a registered layer returns is up to its linear_part
        if _torch.is_exporting() or _torch.is_compiling_transform():
            return None
        if not is_tensor and self.layer.kind.form != "other":
            return None
        if type(module._parameters.get(self.layer.kind.weight)) is Tensor and not is_flat_shard(self.weight):
            return None  # put there by functional_call
        is_sequence = x.dim() > 2 and self.layer.kind.dims == 1
        onward = _torch.alias_output(output) if is_sequence and is_tensor and output.requires_grad else None
        if is_sharded(x) or is_sharded(output):
            x, output = full(x), full(output)
        torch.ops.maxgain.record(*self.arguments(module, x, output))
        return onward

    def arguments(self, module: Any, x: Tensor, output: Tensor) -> tuple[Any, ...]:
        """What ``record`` takes for a forward of this layer."""
        layer, kind, buffer = self.layer, self.layer.kind, self.buffer
        dims, is_compiling = layer.instance_dims(x, self.instance), torch.compiler.is_compiling()
        place = (buffer.maxima, buffer.dropped, buffer.resting, self.slot)
        if kind.form == "other":
            with torch.no_grad():
                x, z = layer.linear_part(x.detach(), output.detach() if isinstance(output, Tensor) else output)
            return *place, "affine", x.detach(), z.detach(), None, None, 0.0, dims, dims, buffer.p
        is_norm = kind.form == "batch_norm"
        vector = module.weight if is_norm else getattr(module, "bias", None)
        if is_compiling:  # otherwise gradients are off
            x, output = x.detach(), output.detach()
            vector = None if vector is None else vector.detach()
        if is_norm:
            return *place, kind.form, x, None, vector, module.running_var, float(module.eps), dims, dims, buffer.p
        if layer.part is not None:
            output = output.narrow(-(kind.dims or 1), *layer.part)
            vector = None if vector is None else vector.narrow(0, *layer.part)
        if is_compiling and x.dtype == torch.float32 and output.dtype in (torch.bfloat16, torch.float16):
            x = x.to(output.dtype)  # as autocast gave it to the layer: x itself need not be written to memory
        return *place, kind.form, x, output, vector, None, 0.0, kind.dims, dims, buffer.p


def record(
    maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, form: str, x: Tensor, z: Tensor | None,
    vector: Tensor | None, variance: Tensor | None, eps: float, channel_dims: int, dims: int, p: float,
) -> None:  # fmt: skip
    """Raise ``maxima[slot]`` to the largest finite gain of a forward; count those that are not finite.

    ``form`` 'affine': ``Wx`` is z less the bias ``vector``. 'batch_norm': x times ``vector / sqrt(variance + ε)``.
    """
    if x.is_cuda and kernels.measure(
        maxima, dropped, resting, slot, kernels.Part(form, x, z, vector, variance, eps, channel_dims), dims, p
    ):
        return
    is_cpu = maxima.device.type == "cpu"  # where reading a value is free
    if is_cpu and resting[slot]:
        return
    if form == "affine":
        assert z is not None
        gains = gain(without_bias(z, vector, channel_dims), x, p, dims)
    else:
        assert vector is not None
        assert variance is not None
        wide = torch.promote_types(vector.dtype, torch.float32)
        gains = scaled_channels_gain(x, vector.to(wide) * torch.rsqrt(variance.to(wide) + eps), p)
    gains = gains.to(maxima.device, maxima.dtype).flatten()
    if is_cpu and math.isfinite((largest := gains.amax()).item()):  # then all of them are
        maxima[slot].clamp_(min=largest)
        return
    finite = torch.isfinite(gains)
    largest, lost = torch.where(finite, gains, NOT_FINITE).amax(), (~finite).sum()
    if not is_cpu:
        is_measured = resting[slot] == 0
        largest, lost = torch.where(is_measured, largest, UNMEASURED), torch.where(is_measured, lost, 0)
    maxima[slot].clamp_(min=largest)
    dropped[slot].add_(lost)


kernels.define_operator(record)


def check_p(p: Any) -> float:
    """Return p if it names a norm."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not p >= 1:
        raise NormError(f"p must be a number from 1 to inf, not {p!r:.40}: below 1 it does not define a norm.")
    return float(p)
