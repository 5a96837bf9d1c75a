"""Limit how much each layer of a network may amplify its input, measured on the data it is trained on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import errors as errors
    from . import functional as functional
    from .attention import split_attention as split_attention
    from .choosing import choose_gamma as choose_gamma
    from .gain import MaxGain as MaxGain
    from .layers import register_layer as register_layer
    from .lipschitz import Lipschitz as Lipschitz
    from .lipschitz import operator_norms as operator_norms
    from .measure import measure_gains as measure_gains
    from .watching import watch as watch

_HOMES = {
    "Lipschitz": ".lipschitz",
    "MaxGain": ".gain",
    "choose_gamma": ".choosing",
    "measure_gains": ".measure",
    "operator_norms": ".lipschitz",
    "register_layer": ".layers",
    "split_attention": ".attention",
    "watch": ".watching",
}
_MODULES = ("errors", "functional")
__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and the command line starts without it."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return __all__
