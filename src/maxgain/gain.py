"""MaxGain: after each optimizer step, ``W ← W / max(1, gain / γ)``, with the largest gain of the step's batches.

How a step goes: every training forward of a layer raises one maximum (``_Hook``, ``record``). After
``optimizer.step()`` the weights whose maximum exceeds γ are divided (``project_``), and the maxima begin anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import _torch, kernels
from .checks import try_forward
from .constraint import NOT_FINITE, UNMEASURED, Constraint, buffers
from .distributed import Group, full, gathered_parameters, is_flat_shard, is_sharded
from .errors import MaxGainError
from .functional import check_p, gain, norm, project_, without_bias
from .layers import Bound, Globs, Layer, check_every, check_instance, first_input

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
        self.p, self.instance, self.every = check_p(p), check_instance(instance), check_every(every)
        self._mask: Tensor | None = None
        self.mask_uses = 0
        """How many forwards of layers took the mask."""
        super().__init__(model, gamma, parts=parts, include=include, exclude=exclude, process_group=process_group)
        self._buffer.p = self.p

    @property
    def mask(self) -> Tensor | None:
        """Which tokens count, such as an attention mask: set it before a forward; 0 leaves a token out.

        Compiled forwards do not see it.
        """
        return self._mask

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        if not (mask is None or isinstance(mask, Tensor)):
            raise MaxGainError(f"mask must be a tensor or None, not {type(mask).__name__}.")
        if self.instance != "auto":
            raise MaxGainError("a mask leaves out tokens, which are instances only with instance='auto'.")
        self._mask, self.mask_uses = mask, 0

    @property
    def dropped(self) -> dict[str, int]:
        """How many instances of each layer had a gain that is not finite, and were left out."""
        return {name: int(count) for name, count in self._by_name(self._buffer.dropped).items()}

    def _make_hooks(self) -> list[Any]:
        return [_Hook(layer, self) for layer in self._slots]


class _Hook(_torch.ForwardHook):
    """Records the gain of one layer's training forwards."""

    __slots__ = ("buffer", "constraint", "dims", "is_whole", "layer", "slot", "untried", "weight")

    def __init__(self, layer: Layer, constraint: MaxGain) -> None:
        self.layer, self.constraint, self.buffer = layer, constraint, constraint._buffer
        self.slot = constraint._slots[layer]
        # By the number of the input's dimensions, of which torch allows 64.
        self.dims = tuple(layer.instance_dims(dim, constraint.instance) for dim in range(65))
        self.untried = layer.own_forward
        self.look_up()
        self.register(layer.module)

    def look_up(self) -> None:
        """Learn which parameter is the module's own; functional_call puts another in its place for a while."""
        self.weight = self.layer.parameter
        self.is_whole = not (is_sharded(self.weight) or is_flat_shard(self.weight))  # else ranks put it together

    @_torch.skip_standalone_compile
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        """Torch calls this after the layer's forward. What it returns takes the place of the output: None leaves it."""
        if not (module.training and torch.is_grad_enabled()):
            return None
        x: Any = args[0] if args else first_input(args, kwargs)
        if torch.compiler.is_compiling():
            return self.measure_compiled(module, x, output)
        if self.slot in self.buffer.idle and not self.buffer.is_captured:
            return None
        is_own = not self.is_whole or module._parameters.get(self.layer.kind.weight) is self.weight
        if not is_own or _torch.is_simulated(x):
            return None
        with _torch.without_modes() if _torch.count_modes() else contextlib.nullcontext(), torch.no_grad():
            try:
                if self.untried and not self.buffer.is_captured and not try_forward(self, args, kwargs):
                    return None
                is_plain = type(x) is type(output) is Tensor and not x.is_nested and x.layout == torch.strided
                if is_plain and x.device == output.device and self.constraint._mask is None:
                    record(*self.arguments(module, x, output))
                else:
                    self.measure(module, x, output)
            except (MaxGainError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # what a layer is given and returns is up to its model
                said = str(error).strip().partition("\n")[0]
                self.constraint._skip(self.layer, f"its call cannot be measured ({type(error).__name__}: {said})")
        return None

    def measure(self, module: nn.Module, x: Any, output: Any) -> None:
        """Record a forward of any kind: jagged, sparse, sharded, on several devices, with a mask."""
        if x.is_nested:
            x, output = (one.values() if one.layout == torch.jagged else torch.cat(one.unbind()) for one in (x, output))
        if x.layout != torch.strided:
            x = x.to_dense()
        if isinstance(output, Tensor) and x.device != output.device:  # its input was fetched from another
            x = x.to(output.device)
        mask = self.constraint.mask
        if mask is not None and self.layer.kind.dims == 1 and mask.shape == x.shape[:-1]:
            x = x.masked_fill(mask.to(x.device).unsqueeze(-1) == 0, 0)  # an input of zero has no gain
            self.constraint.mask_uses += 1
        if is_sharded(x) or is_sharded(output):
            with gathered_parameters(module):
                record(*self.arguments(module, full(x), full(output)))
        else:
            record(*self.arguments(module, x, output))

    def measure_compiled(self, module: nn.Module, x: Any, output: Any) -> Tensor | None:
        """Record a forward that torch.compile reads; what is not measured here is found by its gradient."""
        kind, is_tensor = self.layer.kind, isinstance(output, Tensor)
        if _torch.is_compiling_no_training() or not (is_tensor or kind.form == "other"):
            return None
        if self.is_whole and module._parameters.get(kind.weight) is not self.weight:
            return None  # put there by functional_call
        is_sequence = kind.dims == 1 and x.dim() > 2 and not x.is_nested
        onward = _torch.alias_output(output) if is_sequence and is_tensor and output.requires_grad else None
        if x.is_nested:
            x, output = x.values(), output.values()
        if is_sharded(x) or is_sharded(output):
            x, output = full(x), full(output)
        if kind.form == "affine":
            if x.dtype == torch.float32 and output.dtype in (torch.bfloat16, torch.float16):
                x = x.to(output.dtype)  # as autocast gave it to the layer: x itself need not be written to memory
            if is_sequence and self.dims[x.dim()] == 1:
                x, output = x.flatten(0, -2), output.flatten(0, -2)  # as the product takes them: once in memory
        with torch.no_grad():  # no detach(): the compiler would not see that a cast of x is the layer's own
            kernels.record_compiled(*self.arguments(module, x, output))
        return onward

    def arguments(self, module: Any, x: Tensor, z: Any) -> tuple[Any, ...]:
        """What ``record`` takes for a forward of this layer that returned z."""
        layer, kind, buffer = self.layer, self.layer.kind, self.buffer
        dims = channel_dims = self.dims[x.dim()]
        vector = variance = None
        eps = 0.0
        if kind.form == "batch_norm":
            z, vector, variance, eps = None, module.weight, module.running_var, float(module.eps)
        elif kind.form == "affine":
            vector, channel_dims = getattr(module, "bias", None), kind.dims or 1
            if vector is not None and not self.is_whole and is_sharded(vector):
                vector = full(vector)
            if layer.part is not None:
                z = z.narrow(-channel_dims, *layer.part)
                vector = None if vector is None else vector.narrow(0, *layer.part)
        else:
            x, z = layer.linear_part(x.detach(), z.detach() if isinstance(z, Tensor) else z)
            x, z = x.detach(), z.detach()
        return (
            buffer.maxima, buffer.dropped, buffer.resting, self.slot, x, z, vector, variance, eps, channel_dims, dims,
            buffer.p,
        )  # fmt: skip


def record(
    maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, x: Tensor, z: Tensor | None, vector: Tensor | None,
    variance: Tensor | None, eps: float, channel_dims: int, dims: int, p: float,
) -> None:  # fmt: skip
    """Raise ``maxima[slot]`` to the largest finite gain of a forward; count those that are not finite.

    ``Wx`` is z less the bias ``vector``; of batch norm, which has no z, it is x times ``vector / sqrt(variance + ε)``.
    """
    if not x.numel():  # an expert without tokens
        return
    if x.is_cuda:
        reason = kernels.measure(maxima, dropped, resting, slot, x, z, vector, variance, eps, channel_dims, dims, p)
        if not reason:
            return
        if (buffer := buffers.get(maxima.data_ptr())) is not None:
            buffer.fallbacks[slot] = reason
    is_cpu = maxima.device.type == "cpu"  # where reading a value is free
    if is_cpu and resting[slot]:
        return
    if z is not None:
        gains = gain(without_bias(z, vector, channel_dims), x, p, dims)
    else:
        assert vector is not None
        assert variance is not None
        wide = torch.promote_types(vector.dtype, torch.float32)
        scale = vector.to(wide) * torch.rsqrt(variance.to(wide) + eps)
        if dims == 1:
            gains = gain(x * scale, x, p)
        else:  # from the norms of the channels: x is read once and not copied
            norms, unit = norm(x, p, dims - 1), scale.abs().amax().clamp_min(torch.finfo(wide).tiny)
            gains = gain(norms * (scale / unit), norms, p) * unit  # the scale begins at zero in residual branches
    gains = gains.to(maxima.device, maxima.dtype).flatten()
    if is_cpu and math.isfinite((largest := gains.amax()).item()):  # then all of them are
        maxima[slot].clamp_(min=largest)
        return
    finite, is_measured = torch.isfinite(gains), resting[slot] == 0
    largest = torch.where(finite, gains, NOT_FINITE).amax()
    maxima[slot].clamp_(min=torch.where(is_measured, largest, UNMEASURED))
    dropped[slot].add_((~finite & is_measured).sum())


def is_idle(maxima: Tensor, slots: Iterable[int]) -> bool:
    """Whether nothing is measured of these slots, as far as the host knows; a captured forward asks the device."""
    buffer = buffers.get(maxima.data_ptr())
    return buffer is not None and buffer.idle.issuperset(slots) and not buffer.is_captured


kernels.define_operator(record, is_idle)
