"""What the frameworks' callbacks have in common: a constraint that lives as long as a training does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

from torch import nn

from ..coverage import Bound, parameters_of
from ..distributed import Group
from ..errors import AttachError
from ..functional import check_bound
from ..gain import MaxGain, Measure, Strength
from ..layers import Instance
from ..monitor import curves


class Options(TypedDict, total=False):
    """The arguments of ``MaxGain`` beside the model and the bound, so that editors know them here too."""

    p: float
    instance: Instance
    measure: Measure
    strength: Strength
    every: int
    include: str | Iterable[str] | None
    exclude: str | Iterable[str]
    process_group: Group


class ConstrainingCallback:
    """Makes a ``MaxGain`` of the model in training, and attaches it to the optimisers that hold its weights.

    It takes the arguments of ``MaxGain`` but the model.
    """

    constraint: MaxGain | None
    """The constraint of the newest training; None before the first."""

    def __init__(self, gamma: Bound = 2.0, **options: Unpack[Options]) -> None:
        try:  # a misspelt argument is known at once
            inspect.signature(MaxGain).bind(None, gamma, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}() {error}; see help(MaxGain), whose arguments it takes.") from None
        for bound in gamma.values() if isinstance(gamma, Mapping) else [gamma]:
            check_bound(bound)
        self.gamma = _plain(gamma)
        self.options = {name: _plain(value) for name, value in options.items()}
        self.constraint = None

    def begin(self, model: nn.Module, optimizers: Iterable[Any]) -> MaxGain:
        """Constrains the model from here on."""
        self.end()
        constraint = MaxGain(model, self.gamma, **self.options)
        free = set(constraint.unconstrained)
        weights = {id(parameter) for name, parameter in model.named_parameters() if name not in free}
        found = list(optimizers)
        if not found:
            raise AttachError("there is no optimiser to constrain the steps of.")
        # Of several optimisers some may have nothing to do with the constrained weights; not all of them, though.
        holding = [one for one in found if hasattr(one, "param_groups") and weights & parameters_of(one)]
        for optimizer in holding or found[:1]:
            constraint.attach(optimizer)
        self.constraint = constraint
        return constraint

    def end(self) -> None:
        """Leaves the model as it is now, without a constraint; ``constraint.gains`` can still be read."""
        if self.constraint is not None:
            self.constraint.detach()

    def logged(self) -> dict[str, float]:
        """What a logger is told: the newest gains, and what bounded layers were multiplied by."""
        return curves(self.constraint, self.constraint.gains) if self.constraint is not None else {}


def _plain(value: Any) -> Any:
    """The value in a form that can be used more than once and that JSON can hold; numpy's numbers become Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
