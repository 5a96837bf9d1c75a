"""Layers whose bias is so much larger than ``Wx`` that their output less the bias is mostly rounding.

``Wx`` is taken as a layer's output without its bias, which costs nothing. The output is rounded, though: in bfloat16 an
entry of 1000 is known to within 2, whatever was added to the bias. Where that matters, ``Wx`` is computed again without
the bias. On a CPU every forward is looked at. On an accelerator that would be waiting, so it is done from time to time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import torch_quirks
from .distributed import is_sharded, whole_weights
from .functional import gain
from .later import Asked
from .layers import FoundLayer

if TYPE_CHECKING:
    from .observe import Hook, Watcher

TOO_MUCH = 0.25
"""How large the rounding of an output may be next to ``Wx``: it then changes a gain by half a per cent."""


class Rounding:
    """Finds such layers among those that are watched, and has them measured without their biases."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = {hook.layer.name: hook for hook in hooks if _adds_a_bias(hook.layer)}
        self.without_bias = set[str]()
        """The layers that are measured without their biases."""
        self._shares: dict[str, Tensor] = {}
        self._asked: tuple[list[str], Asked] | None = None

    def look(self) -> None:
        """Look at the next forwards, and judge what the last ones showed of an accelerator, which is not waited for."""
        ready, self._asked = self._asked, None
        if self._shares:
            first, *_ = self._shares.values()
            shares = torch.stack([share.to(first.device) for share in self._shares.values()])
            self._asked = list(self._shares), Asked(shares)
            self._shares = {}
        for name, share in zip(ready[0], ready[1].read(), strict=True) if ready else ():
            self._judge(name, share)
        for name in self._hooks.keys() - self.without_bias:
            self._hooks[name].note = partial(self._note, name)

    def marks(self, names: Iterable[str]) -> list[int]:
        """Of each layer: 2 if it is measured without its bias, 1 if its next forward is looked at; for a state."""
        noting = {name for name, hook in self._hooks.items() if hook.note is not None}
        return [2 if name in self.without_bias else int(name in noting) for name in names]

    def load(self, marks: Mapping[str, float]) -> None:
        """Take up what ``marks`` told."""
        for name in self._hooks.keys() - self.without_bias:
            self._hooks[name].note = partial(self._note, name) if marks[name] == 1 else None
            if marks[name] == 2:
                self._judge(name, math.inf)

    def _judge(self, name: str, share: float) -> None:
        if share > TOO_MUCH and name not in self.without_bias:
            self.without_bias.add(name)
            hook = self._hooks[name]
            hook.note = None
            hook.watcher = _WithoutBias(hook.watcher)

    def _note(self, name: str, x: Any, output: Any, others: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if type(x) is not Tensor or torch_quirks.is_capturing(x.device):
            return  # this forward is not one to learn from; the next may be
        hook = self._hooks[name]
        if type(output) is not Tensor or not hook.layer.module.training or not x.numel():
            return
        hook.note = None
        share = rounding_share(hook.layer, x, output)
        if share.device.type == "cpu":
            self._judge(name, share.item())
        else:
            self._shares[name] = share


@torch.no_grad()
def rounding_share(layer: FoundLayer, x: Tensor, output: Tensor) -> Tensor:
    """How large the rounding of a layer's output may be next to ``Wx``, in the instance with the largest gain."""
    dims = layer.instance_dims(x)
    x, z = layer.kind.linear_part(layer.module, x.detach(), output.detach())
    largest = gain(z, x, instance_dims=dims).flatten().argmax()
    # take() and not an index, which would wait for the device to know where that is.
    both, linear = (torch.linalg.vector_norm(v.float(), dim=tuple(range(-dims, 0))).take(largest) for v in (output, z))
    share: Tensor = torch.finfo(output.dtype).eps / 2 * both / linear
    return share


@torch.no_grad()
def unrounded(layer: FoundLayer, x: Tensor, z: Tensor, p: float, dims: int, lost: float) -> Tensor:
    """``Wx`` of a layer, which is run once more without its bias if some instance's z is as small as ``lost``."""
    over = tuple(range(-dims, 0))
    z_norm = torch.linalg.vector_norm(z, ord=p, dim=over, dtype=torch.float64)
    largest = torch.linalg.vector_norm(x, ord=math.inf, dim=over)  # another norm's powers may underflow
    if bool(((z_norm <= lost) & (largest > 0)).any()):
        with _bias_of_zero(layer):
            z = layer.module.forward(x, **layer.kind.forward_arguments(layer.module, x, z.shape))
    return z


def _bias_of_zero(layer: FoundLayer) -> AbstractContextManager[None]:
    bias: Tensor = layer.module._parameters["bias"]  # type: ignore[assignment]
    return whole_weights(layer.module, {"bias": torch.zeros_like(bias)})


def _adds_a_bias(layer: FoundLayer) -> bool:
    return layer.kind.form == "affine" and not layer.own_forward and layer.module._parameters.get("bias") is not None


@dataclass
class _WithoutBias:
    """Shows a watcher what a layer would return if it had no bias; the layer is run once more for that."""

    watcher: Watcher

    @torch.no_grad()
    def see(self, layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        """After each forward of the layer."""
        bias = layer.module._parameters.get("bias")
        if bias is None or is_sharded(bias) or not layer.module.training:
            self.watcher.see(layer, x, output)
            return
        with _bias_of_zero(layer):
            output = layer.module.forward(x, **layer.kind.forward_arguments(layer.module, x, output.shape))
            self.watcher.see(layer, x, output)
