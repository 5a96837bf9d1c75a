"""What is put on a network before its step is timed, one row each: ours, its rivals, and a naive version of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maxgain import Lipschitz, MaxGain

from ..regularisers import reparametrising

Put = Callable[[nn.Module, Optimizer], None]


def _maxgain(model: nn.Module, optimiser: Optimizer, **options: Any) -> None:
    MaxGain(model, 2.0, **options).attach(optimiser)


def _lipschitz(model: nn.Module, optimiser: Optimizer) -> None:
    Lipschitz(model, 2.0).attach(optimiser)


class NaiveMaxGain:
    """The method as one would first write it: hooks that keep activations, and a loop over layers at the step."""

    def __init__(self, model: nn.Module, optimiser: Optimizer) -> None:
        self.seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.register_forward_hook(self._keep)
        optimiser.register_step_post_hook(self._project)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear | nn.Conv2d)
        z = output.detach()
        if module.bias is not None:
            z = z - module.bias.detach().view(-1, *[1] * (_dims(module) - 1))
        self.seen[module] = args[0].detach(), z

    @torch.no_grad()
    def _project(self, *_: Any) -> None:
        for module, (x, z) in self.seen.items():
            assert isinstance(module, nn.Linear | nn.Conv2d)
            dims = _dims(module)
            gains = z.float().flatten(-dims).norm(dim=-1) / x.float().flatten(-dims).norm(dim=-1)
            module.weight /= (gains.amax() / 2.0).clamp(min=1.0)
        self.seen.clear()


def _dims(module: nn.Linear | nn.Conv2d) -> int:
    return 1 if isinstance(module, nn.Linear) else 3


def _naive(model: nn.Module, optimiser: Optimizer) -> None:
    NaiveMaxGain(model, optimiser)


VARIANTS: dict[str, Put] = {
    "MaxGain": _maxgain,
    "MaxGain, every=4": partial(_maxgain, every=4),
    "MaxGain, fresh": partial(_maxgain, measure="fresh"),
    "Lipschitz, p = 2": _lipschitz,
    "naive hook": _naive,
}
REPARAMETRISED = {"torch spectral_norm": reparametrising(nn.utils.parametrizations.spectral_norm)}
"""These change the model before the optimiser is made."""

WITHOUT = "without"
CAPTURABLE = ("MaxGain",)
"""The variants that are timed in a captured step, which the host does not take part in."""


def _has_torchlip() -> bool:
    return find_spec("deel") is not None and find_spec("deel.torchlip") is not None


def _torchlip(model: nn.Module) -> None:
    from deel import torchlip  # type: ignore[import-not-found]

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, torchlip.SpectralLinear(child.in_features, child.out_features))
            elif type(child) is nn.Conv2d and child.padding in ((1, 1), "same") and child.stride == (1, 1):
                shape = (child.in_channels, child.out_channels, child.kernel_size)
                setattr(parent, name, torchlip.SpectralConv2d(*shape, padding=1))


if _has_torchlip():
    REPARAMETRISED["deel-torchlip"] = _torchlip
