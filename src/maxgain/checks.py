"""Everything that is said after construction: pure checks of one snapshot, at steps 1, 2, 4, 8, … of each optimizer.

A snapshot is copied from the device without waiting and looked at in a later step. Each finding is said once per layer,
all findings of a look in one warning, which points at the user's line.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from . import _torch, kernels
from .distributed import differing_ranks, full, gathered_parameters, is_sharded, local
from .errors import MeasurementWarning
from .layers import ITSELF, Layer, find_layers, matches, named_modules, uncovered

if TYPE_CHECKING:
    from .constraint import Attached, Constraint

SIZEABLE = 0.1
"""The share of the trained weights, in layers of unknown types, from which on it is said."""
LONG = 64
"""Steps before anything is said of how often weights are cut by more than 10 %."""
TOO_OFTEN = 0.25
"""The share of steps that cut so hard, on average over the layers, from which on gamma is called too small."""
TOLERANCE = 0.02
"""By which fraction of ``Wx`` half the weight may miss half of it: quantisation in training does."""
UPDATES_UNTIL_SAID = 4
"""How often weights may change without a step of an attached optimizer."""


# --- One snapshot and what is found in it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What the host knows of a layer without asking a device."""

    is_trained: bool
    is_held: bool
    """Whether an attached optimizer holds its weight."""
    is_training: bool
    is_hooked: bool
    is_in_model: bool
    is_computed: bool
    has_gradient: bool
    fallback: str
    """Why no kernel measures it on a GPU."""

    @classmethod
    def of(cls, layer: Layer, constraint: Constraint) -> Facts:
        """Look them up."""
        weight = layer.parameter
        held = [_torch.parameters_of(one) for one in constraint._attached if one is not None]
        hooks = [hook for hook in constraint._hooks if hook.layer is layer]
        buffer: Any = getattr(constraint, "_buffer", None)
        places = [(buffer.maxima.data_ptr(), hook.slot) for hook in hooks] if buffer is not None else []
        return cls(
            is_trained=weight is not None and weight.requires_grad,
            is_held=None in constraint._attached or any(id(weight) in one for one in held),
            is_training=layer.module.training or not constraint.measures_training,
            is_hooked=any(hook in layer.module._forward_hooks.values() for hook in hooks)
            or not (hooks or constraint.measures_training),
            is_in_model=any(module is layer.module for _, module in named_modules(constraint.model)),
            is_computed=weight is None,
            has_gradient=weight is not None and weight.grad is not None,
            fallback=next((kernels.fallbacks[at] for at in places if at in kernels.fallbacks), ""),
        )

    @property
    def why_not(self) -> str:
        """Why the layer is not bounded; nothing if it is."""
        reasons = {
            "no longer in the model": not self.is_in_model,
            "its weight is computed": self.is_computed,
            "frozen": not self.is_trained,
            "detached": not self.is_hooked,
            "eval mode": not self.is_training,
            "no attached optimizer holds it": not self.is_held,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Row:
    """One layer in a snapshot."""

    name: str
    place: int
    """Of its numbers, among those of all weights."""
    facts: Facts
    is_bounded: bool
    size: float = 0.0
    """The gain that the step found; -1 if none, -0.5 if none was finite."""
    gradient: float = 0.0
    """1 if the weight's gradient is not zero."""
    measured: float = 0.0
    """Steps so far in which the layer was measured,"""
    cut_hard: float = 0.0
    """and in which its weight was scaled by less than 0.9."""
    dropped: float = 0.0
    """Instances so far whose gain was not finite."""


@dataclass(frozen=True)
class Snapshot:
    """All that a look needs, of one step of one optimizer."""

    rows: list[Row]
    added: list[str]
    """Layers that the optimizer trains and that were not there when the constraint was made."""
    is_measured: bool
    """Whether this step measured: with ``every`` most do not."""


@dataclass(frozen=True)
class Finding:
    """Something to say of a layer; what has the same text is said together."""

    text: str
    """A sentence with a place for the layers' names."""
    layer: str
    once: str = ""
    """A name for what is said once, whatever the layer."""


_REMEDIES = {
    "no longer in the model": "Make the constraint again, on the model as it is.",
    "detached": "Make the constraint again, on the model as it is.",
    "eval mode": "Call model.train(), or pass exclude=….",
    "": "No training forward called them since the last step: their weights are used directly (functional_call, "
    "DataParallel), under no_grad, or step() ran twice.",
}


def check_not_finite(snapshot: Snapshot) -> Iterator[Finding]:
    """Instances whose gain is not finite."""
    for row in snapshot.rows:
        if row.dropped:
            text = "Layers {} showed gains that are not finite, which were left out. Look for inf or nan in the input."
            yield Finding(text, row.name)


def check_gradient_without_gain(snapshot: Snapshot) -> Iterator[Finding]:
    """Weights that are trained and not measured, whatever the reason."""
    for row in snapshot.rows if snapshot.is_measured else ():
        if row.size == -1 and row.gradient and row.facts.is_trained:
            why = row.facts.why_not if row.facts.why_not in _REMEDIES else ""
            said = f" ({why})" if why else ""
            text = f"Layers {{}} have a gradient but are not measured{said}, so nothing bounds them. {_REMEDIES[why]}"
            yield Finding(text, row.name)


def check_computed(snapshot: Snapshot) -> Iterator[Finding]:
    """Weights that were parameters and are computed now."""
    for row in snapshot.rows:
        if row.facts.is_computed:
            text = "Layers {} compute their weights now (by pruning, or a parametrisation). Make the constraint again."
            yield Finding(text, row.name)


def check_held(snapshot: Snapshot) -> Iterator[Finding]:
    """Weights that no attached optimizer holds."""
    for row in snapshot.rows:
        if row.is_bounded and row.facts.is_trained and row.facts.has_gradient and not row.facts.is_held:
            text = (
                "Layers {} have a gradient, but no attached optimizer holds their weights. Attach the one that does, "
                "or add them to yours with add_param_group()."
            )
            yield Finding(text, row.name)


def check_too_small(snapshot: Snapshot) -> Iterator[Finding]:
    """Weights that are cut hard in step after step."""
    shares = {row.name: row.cut_hard / row.measured for row in snapshot.rows if row.is_bounded and row.measured >= LONG}
    mean = sum(shares.values()) / max(1, len(shares))
    if mean > TOO_OFTEN:
        text = f"gamma is probably too small: {mean:.0%} of the steps cut a weight by more than 10 %, most of all {{}}."
        yield Finding(text, max(shares, key=lambda name: shares[name]), once="gamma")
        return
    for name in [name for name, share in shares.items() if share > 0.9]:
        text = (
            "Layers {} were cut by more than 10 % in nearly every step: gamma is too small for them, or dividing their "
            "weights does not divide Wx."
        )
        yield Finding(text, name)


def check_added(snapshot: Snapshot) -> Iterator[Finding]:
    """Layers that came later."""
    for name in snapshot.added:
        yield Finding("Layers {} were added since the constraint was made. Make it again to bound them.", name)


def check_fallback(snapshot: Snapshot) -> Iterator[Finding]:
    """Layers on a GPU that torch's own operations measure."""
    for row in snapshot.rows:
        if row.facts.fallback:
            why = row.facts.fallback.replace("{", "{{").replace("}", "}}")
            yield Finding(f"Layers {{}} are measured by torch's own operations, which are slower: {why}.", row.name)


CHECKS: tuple[Callable[[Snapshot], Iterator[Finding]], ...] = (
    check_not_finite,
    check_gradient_without_gain,
    check_computed,
    check_held,
    check_too_small,
    check_added,
    check_fallback,
)


# --- When -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Checks:
    """The looks at one optimizer's steps."""

    said: set[Any] = field(default_factory=set)
    pending: tuple[Snapshot, Tensor, Any] | None = None
    """A snapshot on its way: what the host knew, the numbers, and the event that tells when they are there."""

    def at_step(self, constraint: Constraint, optimizer: Optimizer | None, attached: Attached, sizes: Tensor) -> None:
        """Take a snapshot at steps 1, 2, 4, …, and look at it as soon as it is there."""
        if _torch.is_capturing(sizes.device):  # where nothing may be asked of the device
            return
        if self.pending is not None and self.pending[2].query():
            self.look()
        if attached.steps & (attached.steps - 1) or not sizes.numel():
            return
        if attached.steps == 1:
            warn(differing(constraint, sizes.device))
        self.pending = take_snapshot(constraint, optimizer, attached, sizes)
        if self.pending[2] is None:
            self.look()

    def look(self) -> None:
        """Check the snapshot that has arrived, and warn of what was not said yet."""
        assert self.pending is not None
        (snapshot, numbers, _), self.pending = self.pending, None
        values = numbers.T.tolist()
        rows = [Row(row.name, row.place, row.facts, row.is_bounded, *values[row.place]) for row in snapshot.rows]
        snapshot = Snapshot(rows, snapshot.added, snapshot.is_measured)
        self.report(finding for check in CHECKS for finding in check(snapshot))

    def report(self, findings: Iterable[Finding]) -> None:
        """Warn of what was not said yet, all in one warning."""
        new: dict[str, list[str]] = {}
        for finding in findings:
            if (key := finding.once or (finding.text, finding.layer)) not in self.said:
                self.said.add(key)
                new.setdefault(finding.text, []).append(finding.layer)
        warn(" ".join(text.format(listed(names)) for text, names in new.items()))


def take_snapshot(
    constraint: Constraint, optimizer: Optimizer | None, attached: Attached, sizes: Tensor
) -> tuple[Snapshot, Tensor, Any]:
    """Start to copy all numbers that the checks want, without waiting for them."""
    plan = attached.plan
    assert plan is not None
    at = slice(None) if plan.index is None else plan.index
    own = [(constraint._layers[i], constraint._slots[i]) for i in constraint._layers_of(plan)]
    weights = {slot: layer.parameter for layer, slot in own}
    gradients = torch.stack([_has_gradient(weights[slot], sizes) for slot in plan.slots])
    measured, _, cut_hard = constraint._counts[:, at]
    columns = [sizes, gradients, measured, cut_hard, constraint._dropped()[at]]
    numbers = torch.stack([column.to(sizes.dtype) for column in columns])
    rows = [
        Row(layer.name, plan.slots.index(slot), Facts.of(layer, constraint), constraint._is_bounded[slot])
        for layer, slot in own
    ]
    snapshot = Snapshot(rows, _added(constraint, optimizer), plan.resting == 0)
    if not numbers.is_cuda:
        return snapshot, numbers.cpu(), None
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return snapshot, copy, event


def _has_gradient(weight: Any, like: Tensor) -> Tensor:
    """1 on the device if a weight has a gradient that is not zero."""
    if weight is None or weight.grad is None or not weight.requires_grad or not local(weight.grad).numel():
        return torch.zeros_like(like[0])
    return local(weight.grad).detach().abs().amax().ne(0).to(like.device, like.dtype)


def _added(constraint: Constraint, optimizer: Optimizer | None) -> list[str]:
    if constraint._explicit or optimizer is None:
        return []
    known, held = {id(layer.module) for layer in constraint._layers}, _torch.parameters_of(optimizer)
    skipped = {name.split("[")[0] for name in constraint.skipped}  # parts too
    return [
        layer.name
        for layer in find_layers(constraint.model).layers
        if id(layer.module) not in known and id(layer.parameter) in held and layer.parameter.requires_grad
        and layer.name not in skipped
        and not any(matches(layer.name, glob) for glob in constraint._exclude)
    ]  # fmt: skip


class Updates:
    """Notices that a constrained weight changes from backward to backward while no attached optimizer steps.

    It is a hook on the gradient of one weight, because compiled forwards call no Python.
    """

    def __init__(self, constraint: Constraint) -> None:
        # Weakly: torch holds the hooks of a weight where the garbage collector does not look.
        self.constraint, self.count, self.steps, self.version = weakref.ref(constraint), 0, -1, -1
        trained = [layer.parameter for layer in constraint._layers if layer.parameter.requires_grad]
        usable = trained and trained[0].is_leaf and not is_sharded(trained[0])
        self.handle: Any = trained[0].register_post_accumulate_grad_hook(self) if usable else None

    def __call__(self, weight: Tensor) -> None:
        """Torch calls this after each backward."""
        constraint = self.constraint()
        if constraint is None:
            return
        steps, version = sum(attached.steps for attached in constraint._attached.values()), weight._version
        is_within = any(isinstance(one, LBFGS) for one in constraint._attached)  # a step updates many times
        is_update = self.steps == steps and self.version != version and not constraint._paused and not is_within
        self.count = self.count + is_update if self.steps == steps else 0
        self.steps, self.version = steps, version
        if self.count == UPDATES_UNTIL_SAID and is_update and any(constraint._is_bounded):
            names = [type(one).__name__ for one in constraint._attached if one is not None]
            which = f"attached to {' and '.join(names)}, which does not step" if names else "attached to none"
            warn(
                f"An optimizer updates the weights, but this {type(constraint).__name__} is {which}: nothing is "
                "bounded. Call attach(optimizer), or step() after each update."
            )

    def remove(self) -> None:
        """Take the hook away again."""
        if self.handle is not None:
            self.handle.remove()


# --- What is said at once ---------------------------------------------------------------------------------------------


def without_bound(constraint: Constraint) -> str:
    """One sentence about the weights without a bound: their share, their names, what to do; or nothing."""
    share, unknown = uncovered(constraint.model, constraint._layers, constraint.skipped, constraint._exclude)
    reasons = dict(constraint.skipped)
    if unknown and share >= SIZEABLE:
        is_packed = any("expert" in name for name in unknown)
        remedy = "call maxgain.experts.split_experts(model) first" if is_packed else "register_layer() teaches a type"
        reasons |= dict.fromkeys(unknown, f"of unknown types: {remedy}")
    if not reasons:
        return ""
    how_much = f"{share:.0%} of the" if share >= 0.005 else "Some"
    return f"{how_much} weights have no bound: {by_reason(reasons)}. Pass exclude=… to silence this."


def by_reason(reasons: Mapping[str, str]) -> str:
    """Layers and why they are left out; those with the same reason together."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{listed(some)} ({why})" for why, some in names.items())


def bounded_twice(constraint: Constraint) -> str:
    """One sentence about layers that another constraint bounds by their gains already; or nothing."""
    hooks = [hook for layer in constraint._layers for hook in layer.module._forward_hooks.values()]
    owners: list[Any] = [getattr(hook, "constraint", None) for hook in hooks if isinstance(hook, _torch.ForwardHook)]
    other = next((one for one in owners if one not in (None, constraint) and any(one._is_bounded)), None)
    if other is None or type(other) is not type(constraint) or not any(constraint._is_bounded):
        return ""
    return (
        f"Another {type(other).__name__} ({other.bound_name}={other._bound!r}) bounds these layers already, and both "
        "act. Call detach() on it before you make this one; if you have lost it, make the model again."
    )


def differing(constraint: Constraint, device: torch.device) -> str:
    """One sentence about ranks that take each other's gains for their own; or nothing. A collective."""
    weights = [layer.parameter for layer in constraint._layers if layer.parameter is not None]
    why = differing_ranks(constraint._names, weights, constraint.process_group, device)
    remedy = "Pass process_group=, the ranks that train one model, or process_group=False."
    return f"{why}, but take the largest of each other's gains. {remedy}" if why else ""


def unsuited(optimizer: Optimizer) -> str:
    """One sentence about an optimizer whose steps do not suit measuring; or nothing."""
    if not isinstance(optimizer, LBFGS):
        return ""
    return (
        "LBFGS evaluates many points in a step, and the largest gain of all of them counts: weights may be divided far "
        "below gamma. Use another optimizer."
    )


def made_up_input(layer: Layer) -> Tensor | None:
    """Two instances for a layer whose own forward was compiled before it could be tried; None if that is not known."""
    module: Any = layer.module
    width = getattr(module, "in_features", getattr(module, "in_channels", None))
    if width is None or layer.kind.form != "affine" or is_sharded(layer.parameter):
        return None
    kernel = zip(getattr(module, "kernel_size", ()), getattr(module, "dilation", ()), strict=True)
    shape = (2, width, *(4 + 2 * size * dilation for size, dilation in kernel))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return x.to(layer.parameter.device, layer.parameter.dtype)


def homogeneity_error(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Say why dividing a layer's weight does not divide its ``Wx``; None if it does, '' if ``Wx`` is zero.

    Runs the layer's forward on this input with half its weight, and with another bias.
    """
    module, name = layer.module, layer.kind.weight
    weight, bias = module._parameters[name], module._parameters.get("bias")
    if layer.kind.diagonal is not None or weight is None:  # an activation may follow, which hides Wx
        return None
    x = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))

    def part(scale: float, shift: float) -> Tensor:
        instead = {name: full(weight) * scale}
        if bias is not None:
            instead["bias"] = torch.full_like(full(bias), shift)
        with _torch.preserve_rng_and_buffers(module, x.device), gathered_parameters(module, instead):
            return layer.kind.linear_part(module, x, module.forward(*args, **kwargs))[1].double()

    whole = part(1.0, 0.0)
    size = torch.linalg.vector_norm(whole)
    if not size > 0:
        return ""
    if torch.linalg.vector_norm(2 * part(0.5, 0.0) - whole) > TOLERANCE * size:
        return "halving its weight does not halve its output"
    if bias is not None and torch.linalg.vector_norm(part(1.0, float(whole.abs().mean())) - whole) > TOLERANCE * size:
        return "its output less its bias is not Wx"
    return None


def warn(message: str) -> None:
    """Warn at the user's line: the first frame outside of this package and torch."""
    if not message:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("maxgain", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, MeasurementWarning, stacklevel=level)


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(repr(name or ITSELF) for name in names[:6]) + more
