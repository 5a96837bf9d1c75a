"""Limit how much each layer of a network may amplify its input, measured on the data it is trained on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import errors as errors
    from . import functional as functional
    from .attention import split_attention as split_attention
    from .experts import split_experts as split_experts
    from .gain import MaxGain as MaxGain
    from .layers import register_layer as register_layer
    from .lipschitz.norms import operator_norms as operator_norms
    from .lipschitz.projection import Lipschitz as Lipschitz
    from .lipschitz.slope import sampled_slope as sampled_slope
    from .measure import measure_gains as measure_gains
    from .weights import MaxNorm as MaxNorm
    from .weights import WeightClip as WeightClip

_HOMES = {
    "Lipschitz": ".lipschitz.projection",
    "MaxGain": ".gain",
    "MaxNorm": ".weights",
    "WeightClip": ".weights",
    "measure_gains": ".measure",
    "operator_norms": ".lipschitz.norms",
    "register_layer": ".layers",
    "sampled_slope": ".lipschitz.slope",
    "split_attention": ".attention",
    "split_experts": ".experts",
}
_ROOMS = ("errors", "functional")
__all__ = [*_HOMES, *_ROOMS, "__version__"]


def __getattr__(name: str) -> Any:
    """The names above, when they are asked for: torch, which they need, takes seconds to import.

    So the command line is there before torch is, and has an answer for somebody who presses Ctrl-C meanwhile.
    """
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return __all__
