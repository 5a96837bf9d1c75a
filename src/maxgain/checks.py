"""Everything that is said: at once, and by pure checks of one snapshot at steps 1, 2, 4, 8, … of each optimizer.

A snapshot is copied from the device without waiting and looked at in a later step. Each finding is said once per layer,
all findings of a look in one warning, which points at the user's line.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map_only

from . import _torch
from .distributed import full, gathered_parameters, is_sharded, local
from .errors import MeasurementWarning
from .experts import is_packed
from .layers import Layer, first_input, look_up, matches, named_modules, uncovered
from .text import by_reason, listed

if TYPE_CHECKING:
    from .constraint import Constraint
    from .plan import StepPlan

SIZEABLE = 0.1
"""The share of the trained weights, in layers of unknown types, from which on it is said."""
LONG = 63
"""Steps before the look that first says how often weights are cut hard, by more than 10 %: that at step 64."""
TOO_OFTEN, NEARLY_ALWAYS = 0.25, 0.9
"""The share of steps that cut hard, from which on gamma is called too small: on average over the layers, and of one."""
FRAMEWORKS = ("maxgain", "torch", "accelerate", "lightning", "pytorch_lightning", "transformers")
"""Packages whose lines a warning does not point at."""
TOLERANCE = 0.02
"""By which fraction of ``Wx`` half the weight may miss half of it: quantisation in training does."""


# --- Why a layer is not bounded ---------------------------------------------------------------------------------------

_AGAIN = "Call detach() and make the constraint again"
COMPUTED, UNHELD, ADDED, NOT_CALLED = "computed weight", "no attached optimizer holds it", "added later", ""
REMEDIES = {
    ADDED: f"{_AGAIN} to bound it.",
    "no longer in the model": f"{_AGAIN}, on the model as it is.",
    COMPUTED: f"Pruning or a parametrisation computes it now. {_AGAIN}.",
    "frozen": "Call requires_grad_() to train it.",
    "not attached": "Call attach(optimizer).",
    "hook lost": "Call detach(), then attach(optimizer) again.",
    "eval mode": "Call model.train(), or pass exclude=….",
    UNHELD: "Attach the one that does, add it to yours with add_param_group(), or freeze it.",
    NOT_CALLED: "Call the model with gradients before each step. A weight that is used directly (layer.forward(x), "
    "functional_call, DataParallel) is not measured.",
}
"""Each reason, as the constraint's table notes it, and what to do."""


def reasons_not_bounded(constraint: Constraint) -> dict[Layer, str]:
    """Say of each layer why it is not bounded, as far as the host knows; nothing if it is."""
    modules = {module for _, module in named_modules(constraint.model)}
    held = set[int]().union(*map(_torch.parameters_of, constraint._attached))
    hooks = {hook.layer: hook for hook in constraint._hooks}
    measures, found = constraint.measures_training, {}
    for layer in constraint._slots:
        module, weight = layer.module, layer.parameter
        reasons = {
            "no longer in the model": module not in modules,
            "not attached": constraint._updates is None,
            COMPUTED: weight is None,
            "frozen": weight is not None and not weight.requires_grad,
            "hook lost": measures and hooks.get(layer) not in module._forward_hooks.values(),
            "eval mode": measures and not module.training,
            UNHELD: None not in constraint._attached and id(weight) not in held,
        }
        found[layer] = next((reason for reason, holds in reasons.items() if holds), NOT_CALLED)
    return found


# --- Pure checks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a look at one step knows of one layer."""

    name: str
    reason: str = NOT_CALLED  # why nothing bounds it, as far as the host knows
    is_bounded: bool = True
    fallback: str = ""  # why no kernel measures it on a GPU
    size: float = 0.0  # the gain that the step found; -1: none, -0.5: none that is finite
    gradient: float = 0.0  # whether the weight's gradient is not zero
    measured: float = 0.0  # steps so far in which the layer was measured,
    cut_hard: float = 0.0  # and in which its weight was scaled by less than 0.9
    dropped: float = 0.0  # instances so far whose gain was not finite


Finding = tuple[str, str, Any]
"""A text with a place for layers' names; a layer; by what it is known to be said, so that it is not said again."""


def check_not_bounded(rows: list[Row]) -> Iterator[Finding]:
    """Weights that are trained and not bounded, whatever the reason: above all, a gradient without a gain."""
    for row in rows:
        is_free = row.is_bounded and row.reason == UNHELD
        if row.reason in (ADDED, COMPUTED) or (row.gradient and (row.size == -1 or is_free)):
            why = row.reason or "no training forward since the last step"
            what = "Trained but not bounded" if row.is_bounded else "Not measured"
            yield f"{what}: {{}} ({why}). {REMEDIES[row.reason]}", row.name, (row.reason, row.name)


def check_not_finite(rows: list[Row]) -> Iterator[Finding]:
    """Instances whose gain is not finite."""
    for row in rows:
        if row.dropped:
            said = "Left out: gains of {} that are not finite. Check the data and the learning rate."
            yield said, row.name, ("not finite", row.name)


def check_gamma(rows: list[Row]) -> Iterator[Finding]:
    """Weights that are cut hard in step after step."""
    shares = {row.name: row.cut_hard / row.measured for row in rows if row.is_bounded and row.measured >= LONG}
    often = [name for name, share in shares.items() if share > NEARLY_ALWAYS]
    if not often and shares and sum(shares.values()) > TOO_OFTEN * len(shares):
        often = [max(shares, key=lambda name: shares[name])]
    for name in often:
        text = (
            "gamma is probably too small: many steps cut {} by more than 10 %. Try twice as large a gamma, and choose "
            "it by validation accuracy. If that does not help, dividing the weight does not divide Wx."
        )
        yield text, name, ("gamma", name)


def check_fallback(rows: list[Row]) -> Iterator[Finding]:
    """Layers on a GPU that torch's own operations measure."""
    for row in rows:
        if row.fallback:
            text = f"Measured by torch's own, slower operations: {{}} ({row.fallback})."
            yield text, row.name, (row.fallback, row.name)


CHECKS: tuple[Callable[[list[Row]], Iterator[Finding]], ...] = (
    check_not_bounded, check_not_finite, check_gamma, check_fallback,
)  # fmt: skip


# --- When they look ---------------------------------------------------------------------------------------------------


Snapshot = tuple[list[tuple[Any, ...]], Tensor, Any]
"""What the host knows of each row; a column of numbers for each of the first rows; the event of their arrival."""


@dataclass(eq=False)
class Checks:
    """The looks at one optimizer's steps."""

    said: set[Any] = field(default_factory=set)
    pending: Snapshot | None = None  # on its way

    def look(self, new: Snapshot | None) -> None:
        """Check the snapshot that has arrived, and begin to wait for a new one, unless that is here already."""
        for snapshot in (self.pending, new):
            if snapshot is not None:
                known, numbers, arrival = self.pending = snapshot
                if arrival is None or (snapshot is not new and arrival.query()):
                    self.pending, columns = None, numbers.T.tolist()
                    self.say([Row(*of, *column) for of, column in zip_longest(known, columns, fillvalue=())])

    def say(self, rows: list[Row]) -> None:
        """Warn of what was not said yet of these layers, all in one warning."""
        new: dict[str, list[str]] = {}
        for text, layer, key in (finding for check in CHECKS for finding in check(rows)):
            if key not in self.said:
                self.said.add(key)
                new.setdefault(text, []).append(layer)
        warn(" ".join(text.replace("{}", listed(names), 1) for text, names in new.items()))


def take_snapshot(constraint: Constraint, optimizer: Optimizer | None, plan: StepPlan, sizes: Tensor) -> Snapshot:
    """Begin to copy all numbers of a step that the checks want, without waiting for them."""
    gradients, known = torch.zeros_like(sizes), list[tuple[Any, ...]]()
    reasons, fallbacks = reasons_not_bounded(constraint), constraint._buffer.fallbacks
    for layer, slot in constraint._slots.items():
        if slot in plan.slots:
            known.append((layer.name, reasons[layer], constraint._is_bounded[slot], fallbacks.get(slot, "")))
            weight = layer.parameter
            if weight is not None and weight.grad is not None and weight.requires_grad and local(weight.grad).numel():
                gradients[slot] = local(weight.grad).detach().any()
    measured, _, cut_hard = constraint._counts * constraint.divides  # entries and units are cut as hard as needed
    rows = (sizes, gradients, measured, cut_hard, constraint._buffer.dropped)
    numbers = torch.stack([row.to(sizes.dtype) for row in rows])[:, plan.own]
    return known + [(name, ADDED) for name in added(constraint, optimizer)], *begin_copy(numbers)


def begin_copy(numbers: Tensor) -> tuple[Tensor, Any]:
    """Copy numbers to the host without waiting; the event says when they have arrived, None that they are here."""
    if not numbers.is_cuda:
        return numbers.cpu(), None
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    arrival: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrival.record()
    return copy, arrival


def added(constraint: Constraint, optimizer: Optimizer | None) -> list[str]:
    """The layers that came after the constraint, if the optimizer holds them or they have a gradient all the same."""
    if constraint._explicit or optimizer is None:
        return []
    known, held = {layer.module for layer in constraint._slots}, _torch.parameters_of(optimizer)
    skipped = tuple(f"{name.split('[')[0]}." for name in constraint.skipped)  # of blocks, too, and what lies within
    return [
        name
        for name, module in named_modules(constraint.model)
        if module not in known and not f"{name}.".startswith(skipped) and not matches(name, *constraint._exclude)
        and (kind := look_up(module)[0]) is not None and kind.by_default
        and (weight := module._parameters.get(kind.weight)) is not None and weight.requires_grad
        and (id(weight) in held or weight.grad is not None)
    ]  # fmt: skip


# --- What is said at once ---------------------------------------------------------------------------------------------


def without_bound(constraint: Constraint) -> str:
    """One sentence about the weights without a bound: their share, their names, what to do; or nothing."""
    share, unknown = uncovered(constraint.model, constraint._slots, constraint.skipped, constraint._exclude)
    reasons = dict(constraint.skipped)
    if unknown and share >= SIZEABLE:
        packed = tuple(f"{name}.".lstrip(".") for name, module in named_modules(constraint.model) if is_packed(module))
        split, register = "call maxgain.experts.split_experts(model) first", "register_layer() teaches a type"
        for name in unknown:
            reasons[name] = f"of unknown types: {split if name.startswith(packed) else register}"
    if not reasons:
        return ""
    how_much = f"{share:.0%} of the" if share >= 0.005 else "Some"
    return f"{how_much} weights have no bound: {by_reason(reasons)}. Pass exclude=… to silence this."


def bounded_twice(constraint: Constraint) -> str:
    """One sentence about layers that another constraint bounds by their gains already; or nothing."""
    hooks = [hook for layer in constraint._slots for hook in layer.module._forward_hooks.values()]
    owners: list[Any] = [getattr(hook, "constraint", None) for hook in hooks]
    alike = [one for one in owners if one is not constraint and type(one) is type(constraint) and any(one._is_bounded)]
    if not alike or not any(constraint._is_bounded):
        return ""
    return (
        f"Another {type(alike[0]).__name__} ({alike[0].bound_name}={alike[0]._bound!r}) bounds these layers already, "
        "and both act. Call detach() on it before you make this one; if you have lost it, make the model again."
    )


def not_attached(constraint: Constraint) -> str:
    """One sentence about updates by an optimizer that is not attached; or nothing."""
    optimizers = [one for one in constraint._attached if one is not None]
    if any(isinstance(one, LBFGS) for one in optimizers) or not any(constraint._is_bounded):
        return ""  # a step of LBFGS updates many times
    names = " and ".join(type(one).__name__ for one in optimizers)
    which = f"attached to {names}, which does not step" if names else "attached to none"
    return (
        f"An optimizer updates the weights, but this {type(constraint).__name__} is {which}: nothing is bounded. "
        "Call attach(optimizer), or step() after each update."
    )


def warn(message: str) -> None:
    """Warn at the user's line: the first frame outside of this package, torch and the frameworks."""
    if not message:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, MeasurementWarning, stacklevel=level)


# --- Forwards of their own --------------------------------------------------------------------------------------------


def homogeneity_error(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Say why dividing a layer's weight does not divide its ``Wx``; None if it does, '' if ``Wx`` is zero.

    Runs the layer's forward on copies of this call with half its weight, and with another bias.
    """
    module, name = layer.module, layer.kind.weight
    weight, bias = module._parameters[name], module._parameters.get("bias")
    if layer.kind.diagonal is not None or weight is None:  # an activation may follow, which hides Wx
        return None
    x = first_input(args, kwargs)
    width = getattr(module, "in_features", getattr(module, "in_channels", None))
    if width is not None and x.dim() > 0 and x.shape[-min(layer.kind.dims or 1, x.dim())] != width:
        return "its first argument is not what it multiplies"

    def part(scale: float, shift: float) -> Any:
        instead = {name: full(weight) * scale}
        if bias is not None:
            instead["bias"] = torch.full_like(full(bias), shift)
        given, named = tree_map_only(Tensor, torch.clone, (args, kwargs))  # a forward may change its input in place,
        attributes = {**vars(module)}  # and keep a loss
        try:
            with _torch.preserve_rng_and_buffers(module, x.device), gathered_parameters(module, instead):
                out = module.forward(*given, **named)
                is_usable = isinstance(out, Tensor) or layer.kind.form == "other"
                return layer.kind.linear_part(module, x, out)[1].double() if is_usable else None
        finally:
            vars(module).clear()
            vars(module).update(attributes)

    if (whole := part(1.0, 0.0)) is None:
        return "its output is not one tensor"
    size = torch.linalg.vector_norm(whole)
    if not size > 0:
        return ""
    if torch.linalg.vector_norm(2 * part(0.5, 0.0) - whole) > TOLERANCE * size:
        return "halving its weight does not halve its output"
    if bias is not None and torch.linalg.vector_norm(part(1.0, float(whole.abs().mean())) - whole) > TOLERANCE * size:
        return "its output less its bias is not Wx"
    return None


@torch.no_grad()
def try_forward(hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Try the own forward of a hook's layer on a call, and leave the layer out if dividing its weight is wrong."""
    reason = homogeneity_error(hook.layer, args, kwargs)
    hook.untried = reason == ""  # zero shows nothing: try the next batch
    if reason:
        hook.constraint._skip(hook.layer, reason)
    return not reason


def try_compiled_forwards(constraint: Constraint) -> None:
    """Try the layers whose own forwards only compiled code has run, on two instances that are made up."""
    for hook in [hook for hook in constraint._hooks if hook.untried]:
        layer, module, weight = hook.layer, hook.layer.module, hook.layer.parameter
        width = getattr(module, "in_features", getattr(module, "in_channels", None))
        if width is None or layer.kind.form != "affine" or is_sharded(weight):
            continue
        kernel = zip(getattr(module, "kernel_size", ()), getattr(module, "dilation", ()), strict=True)
        shape = (2, width, *(4 + 2 * size * dilation for size, dilation in kernel))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
        with contextlib.suppress(Exception):  # it may take more than an input
            try_forward(hook, (x.to(weight.device, weight.dtype),), {})
