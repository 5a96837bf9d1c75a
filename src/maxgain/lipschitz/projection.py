"""Lipschitz: the size of a layer is its operator norm, the largest gain that any input at all could show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _torch
from ..checks import try_forward
from ..constraint import NOT_FINITE, UNMEASURED, Constraint
from ..distributed import Group
from ..errors import MaxGainError, StateError
from ..kernels import Replayed
from ..layers import Bound, Globs, Layer, first_input
from ..plan import StepPlan
from .maps import LinearMap, Shapes, check_operator_p, fixed_shapes, instance_shapes, length_of, random_vector

FIRST_ITERATIONS = 50
"""Of the power iteration when it begins, from random vectors."""


class Lipschitz(Constraint):
    """Keeps the operator norm ``max_x ‖Wx‖_p / ‖x‖_p`` of each layer, for p = 1, 2 or inf, within a bound λ.

    Gouk, Frank, Pfahringer and Cree, *Regularisation of Neural Networks by Enforcing Lipschitz Continuity*, 2018.
    After each optimizer step ``W ← W / max(1, ‖W‖_p / λ)``; ``gains`` are the norms.

    A convolution's W belongs to the size of its input: the largest one seen, in training or evaluation. A batch-norm
    layer's W is ``diag(α / sqrt(running_var + ε))``.

    Args:
        model: The module whose layers are bounded, or several.
        bound: λ for all layers, or a mapping of globs over layer names to bounds, of which the first that matches
            decides; ``inf`` measures without a bound.
        p: 1 (the largest absolute column sum of W), 2 (its largest singular value) or ``inf`` (its largest absolute
            row sum). For 1 and ``inf`` every basis vector is sent, in every step, through a layer that has a forward
            of its own, and for 1 through one that pads by reflection: leave them out where they are large.
        iterations: Power iterations per step, for p = 2, which approach the norm from below, from where the last step
            ended. One follows weights in training to within a per cent; further calls of ``step()`` bring it closer.
        include: Globs over layer names: only these layers.
        exclude: Globs over layer names: not these layers.
        process_group: The ranks that train one model, as in ``MaxGain``.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> constraint = Lipschitz(model, 0.5, p=1).attach(optimizer)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> print(f"{model[0].weight.abs().sum(0).max():.4f}")
        0.5000
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        bound: Bound,
        *,
        p: float = 2.0,
        iterations: int = 1,
        include: Globs | None = None,
        exclude: Globs = (),
        process_group: Group = None,
    ) -> None:
        self.p, self.iterations = check_operator_p(p), iterations
        if not isinstance(iterations, int) or iterations < 1:
            raise MaxGainError(f"iterations must be a whole number from 1 on, not {iterations!r:.40}.")
        self._norms: dict[Layer, FollowedNorm] = {}
        self._replayed = Replayed[Tensor]()
        super().__init__(model, bound, include=include, exclude=exclude, process_group=process_group)

    def _make_hooks(self) -> list[Any]:
        self._norms = self._norms or {layer: FollowedNorm(layer, self) for layer in self._slots}
        hooks = [self._norms[layer] for layer in self._slots if fixed_shapes(layer) is None]
        for norm in hooks:
            norm.register(norm.layer.module)
        return hooks

    def _plan(self, optimizer: Optimizer | None) -> StepPlan:
        for layer in list(self._slots):
            if reason := self._norms[layer].prepare():
                self._skip(layer, reason)
        return super()._plan(optimizer)

    def _estimate(self, plan: StepPlan) -> Tensor:
        device, estimates = self._gains.device, partial(super()._estimate, plan)
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return estimates()
        known = [self._norms[layer].addresses(device) for layer, slot in self._slots.items() if slot in plan.slots]
        return estimates() if None in known else self._replayed(device, tuple(known), estimates)

    def _size(self, layer: Layer) -> Tensor:
        return self._norms[layer].estimate()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the vectors of the power iteration, with which a run goes on to the same bits."""
        return {key: norm.vectors.clone() for key, norm in self._keys().items() if norm.vectors is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state of a Lipschitz on the same layers; all of it, or nothing."""
        if not isinstance(state, Mapping):
            raise StateError(f"a state is what state_dict() returned, not {state!r:.40}.")
        norms = self._keys()
        for key, vectors in state.items():
            if key not in norms:
                raise StateError(f"the state belongs to another Lipschitz: it has {key!r}, which is not here.")
            if not isinstance(vectors, Tensor) or not vectors.is_floating_point() or not vectors.isfinite().all():
                raise StateError(f"the state's {key!r} must be a tensor of finite numbers.")
        for key, norm in norms.items():
            norm.load(state.get(key))

    def _keys(self) -> dict[str, FollowedNorm]:
        return {f"{layer.name}.vectors": self._norms[layer] for layer in self._slots}


@dataclass(eq=False)
class Seen:
    """The shapes that a compiled forward showed, in a chain with those before; its end has none before.

    Compiled code that compared shapes would be compiled again whenever they grow.
    """

    shapes: Shapes = ((), ())
    before: Seen | None = None


class FollowedNorm(_torch.ForwardHook):
    """The operator norm of one layer, followed from step to step; as a hook it remembers the largest input's shape."""

    def __init__(self, layer: Layer, constraint: Lipschitz) -> None:
        self.layer, self.constraint = layer, constraint
        self.dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        self.untried = layer.own_forward
        self.weight_shape: Any = None
        self.look_up()

    def look_up(self) -> None:
        """Begin with nothing known; and anew if the weight has another shape, because units were added or pruned."""
        if self.weight_shape != self.layer.weight.shape:
            self.weight_shape, self.largest = self.layer.weight.shape, fixed_shapes(self.layer)
            self.map: LinearMap | None = None
            self.seen = Seen()
            self.vectors: Tensor | None = None
            """The two directions that the layer amplifies most, as far as is known."""

    @_torch.skip_standalone_compile
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Torch calls this after the layer's forward."""
        x = first_input(args, kwargs)
        if self.constraint._paused or not isinstance(x, Tensor):
            return
        if torch.compiler.is_compiling():
            if _torch.is_compiling_no_training() or not (isinstance(output, Tensor) or self.layer.kind.form == "other"):
                return
            if module.training and torch.is_grad_enabled():  # a step follows, which reads the chain
                self.seen = Seen(instance_shapes(self.layer, x, output), before=self.seen)
                return
        elif _torch.is_simulated(x):
            return
        try:
            if self.untried and not torch.compiler.is_compiling() and not try_forward(self, args, kwargs):
                return
            self.look_up()
            self.see(instance_shapes(self.layer, x, output))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a layer is given and returns is up to its model
            said = str(error).strip().partition("\n")[0]
            self.constraint._skip(self.layer, f"its call cannot be measured ({type(error).__name__}: {said})")

    def see(self, shapes: Shapes) -> None:
        """Remember the largest size along each dimension."""
        known = self.largest or shapes
        self.largest = tuple(map(max, known[0], shapes[0])), tuple(map(max, known[1], shapes[1]))

    def prepare(self) -> str | None:
        """Make the map of the weight and the largest input as they are now; say why it has no norm, if so."""
        self.look_up()
        while self.seen.before is not None:
            self.see(self.seen.shapes)
            self.seen = self.seen.before
        if self.largest is None or (self.map is not None and self.map.shapes == self.largest):
            return None
        self.map = LinearMap(self.layer, self.largest, self.dtype)
        return self.map.linearity_error()

    def estimate(self) -> Tensor:
        """Return the norm of the weight as it is now; ``UNMEASURED`` if it needs a shape that is not known."""
        if self.map is None:
            return torch.full((), UNMEASURED, dtype=self.dtype, device=self.layer.weight.device)
        exact = self.map.exact_norm(self.constraint.p)
        size = self._iterate(self.map) if exact is None else exact
        return torch.where(torch.isfinite(size), size, NOT_FINITE)

    def _iterate(self, linear: LinearMap) -> Tensor:
        """Iterate on two vectors at once: when another one becomes the largest, it is known already."""
        count, device = self.constraint.iterations, self.layer.weight.device
        if self.vectors is None or self.vectors.shape[1:] != linear.input_shape:
            count, self.vectors = FIRST_ITERATIONS, torch.stack([random_vector(linear.input_shape, i) for i in (0, 1)])
        self.vectors = v = self.vectors.to(device, self.dtype)
        for _ in range(count):
            v, size = power_iteration(linear, v)
        self.vectors.copy_(v)  # in place, so that a captured step's replays go on from one another
        return size

    def load(self, vectors: Tensor | None) -> None:
        """Go on from other vectors; in the same tensor if they fit, whose address a captured step knows."""
        if vectors is not None and self.vectors is not None and vectors.shape == self.vectors.shape:
            self.vectors.copy_(vectors)
        else:
            self.vectors = None if vectors is None else vectors.to(self.layer.weight.device, self.dtype, copy=True)

    def addresses(self, device: torch.device) -> tuple[object, ...] | None:
        """Return the addresses of all that an estimate reads; None if it does more than compute on this GPU."""
        weight, is_own_forward = self.layer.weight, self.map is not None and self.map.is_own_forward
        if type(weight) is not nn.Parameter or weight.device != device or is_own_forward:
            return None
        tensors = [weight, self.vectors, *self.layer.module._buffers.values()]
        places = [None if one is None else (one.data_ptr(), one.dtype, one.stride()) for one in tensors]
        return self.map, *places


def power_iteration(linear: LinearMap, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the successors of two vectors, and the largest singular value as far as they show it.

    The two are turned within the plane that they span, so that the first is what W amplifies most of it.
    """
    _, z, back = linear.there_and_back(v)
    (a, b), (c, d) = z.flatten(1), back
    turn = 0.5 * torch.atan2(2 * torch.sum(a * b), torch.sum(a * a) - torch.sum(b * b))
    cos, sin = turn.cos(), turn.sin()
    first, second = cos * c + sin * d, cos * d - sin * c
    length = length_of(first)
    first = first / length
    second = second - torch.sum(first * second) * first
    rest = length_of(second)
    usable = torch.stack([torch.isfinite(length) & (length > 0), torch.isfinite(rest) & (rest > 0)])
    following = torch.stack([first, second / rest])
    size: Tensor = length / length_of(cos * a + sin * b).clamp_min(torch.finfo(length.dtype).tiny)
    return torch.where(usable.view(2, *[1] * (v.dim() - 1)), following, v), size
