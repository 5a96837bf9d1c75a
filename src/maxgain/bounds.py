"""Which bound each layer has, and what a saved state must be like to be taken up."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import BoundError, PatternError, StateError
from .functional import check_bound
from .layers import matches

Bound = float | Mapping[str, float]


def resolve_bounds(bound: Bound, names: list[str], what: str) -> dict[str, float]:
    """The bound of every layer: one number for all, or the first glob of a mapping that matches the layer's name."""
    if not isinstance(bound, Mapping):
        return dict.fromkeys(names, check_bound(bound, what))
    for pattern, value in bound.items():
        check_bound(value, f"{what}[{pattern!r}]")
        if not any(matches(name, pattern) for name in names):
            known = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            raise PatternError(f"the pattern {pattern!r} of {what} matches no layer; the layers are {known}.")
    bounds: dict[str, float] = {}
    for name in names:
        matching = [float(value) for pattern, value in bound.items() if matches(name, pattern)]
        if not matching:
            raise BoundError(
                f"{what} says nothing about layer {name!r}: add '*': float('inf') as the last pattern "
                "to measure the other layers without constraining them, or leave them out with exclude."
            )
        bounds[name] = matching[0]
    return bounds


def expect_alike(name: str, found: Any, own: Tensor) -> None:
    """Refuse an entry of a state that cannot take the place of our own; only a size may be nan: not known yet."""
    if not isinstance(found, Tensor) or found.shape != own.shape:
        shape = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise StateError(f"the state's {name!r} has {shape}, where shape {tuple(own.shape)} belongs.")
    if found.is_floating_point() != own.is_floating_point() or found.is_complex():
        raise StateError(f"the state's {name!r} is {found.dtype}, where {own.dtype} belongs.")
    usable = torch.isfinite(found) | torch.isnan(found) if name.endswith(".size") else torch.isfinite(found)
    if not bool(usable.all()):
        raise StateError(f"the state's {name!r} is not finite: the file is damaged, or the run had diverged.")
