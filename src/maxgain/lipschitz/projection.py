"""Lipschitz: the size of a layer is its operator norm, the largest gain that any input at all could show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch_quirks
from ..constraint import Constraint
from ..coverage import Bound, Share
from ..distributed import Group, Sharing, check_group
from ..errors import StateError
from ..functional import check_count, finite
from ..kernels import Replayed
from ..layers import FoundLayer, Instance
from ..observe import UNMEASURED
from .maps import (
    LinearMap,
    OwnForward,
    Shape,
    Sizes,
    check_operator_p,
    instance_sizes,
    length_of,
    linear_map,
    random_vector,
)

FIRST_ITERATIONS = 50
"""Of the power iteration when it begins, with vectors that know nothing yet."""


class Lipschitz(Constraint):
    """Constrains the operator norm ``max_x ‖Wx‖_p / ‖x‖_p`` of each layer, for p = 1, 2 or inf, to a bound.

    Gouk, Frank, Pfahringer and Cree, *Regularisation of Neural Networks by Enforcing Lipschitz Continuity*, 2018.
    After each optimiser step ``W ← W / max(1, ‖W‖_p / λ)``.

    A convolution's W belongs to the size of its input, which is taken from the forwards: the largest one seen, in
    training or evaluation. A batch-norm layer's W is ``diag(α / sqrt(running_var + ε))``.

    Args:
        model: whose layers are constrained.
        bound: a bound for all layers, or a mapping of globs over dotted names to bounds, of which the first that
            matches decides; ``inf`` measures without constraining.
        p: 1 (the largest absolute column sum of W), 2 (its largest singular value) or ``inf`` (its largest absolute row
            sum).
        iterations: how many power iterations per step approach the norm from below, for p = 2, with the layer's own
            forward and transpose, begun where the last step's ended. Weights move little from step to step, so one is
            enough to follow them, as a rule to within a per cent; ``operator_norms`` shows how close it is, and further
            calls of ``step()`` bring it closer.
        include: globs over dotted names: only these layers.
        exclude: globs over dotted names: not these layers.
        process_group: whose ranks share their norms; None is the default group, where one is initialised, and False
            means: do not share.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> constraint = Lipschitz(model, 0.5, p=1).attach(optimizer)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> print(f"{model[0].weight.abs().sum(0).max():.4f}")
        0.5000
    """

    option_names = ("p", "iterations", "process_group")
    why_unknown = "A convolution's norm depends on its input size, so take no step before a forward."

    def __init__(
        self,
        model: nn.Module,
        bound: Bound,
        *,
        p: float = 2.0,
        iterations: int = 1,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        process_group: Group = None,
    ) -> None:
        self.p = check_operator_p(p)
        self.iterations = check_count("iterations", iterations)
        self.process_group = None if process_group is None else check_group(process_group)
        self._sharing = Sharing()
        self._replayed = Replayed[tuple[Tensor, list[Tensor | None]]]()
        super().__init__(model, bound, include=include, exclude=exclude)

    def _make_observers(self) -> list[FollowedNorm]:
        self._norms = [FollowedNorm(layer, self.p, self.iterations) for layer in self._layers]
        return self._norms

    def _estimate(self, share: Share) -> Tensor:
        norms, device = [self._norms[i] for i in share.positions], self._device

        def estimates() -> tuple[Tensor, list[Tensor | None]]:
            sizes = [norm.estimate().to(device, self._dtype) for norm in norms]
            return torch.stack(sizes), [norm.newest for norm in norms]

        known = [norm.addresses(device) for norm in norms] if device.type == "cuda" else [None]
        if None in known or torch_quirks.is_capturing(device):
            sizes, _ = estimates()
        else:
            sizes, newest = self._replayed(device, tuple(known), estimates)
            for norm, vectors in zip(norms, newest, strict=True):
                norm.newest = vectors
        return self._sharing.largest(sizes, self.process_group, self._names)

    def _project(self, share: Share, found_inf: Tensor | None) -> None:
        super()._project(share, found_inf)
        keep_newest([self._norms[i] for i in share.positions], found_inf)

    def _state(self) -> dict[str, Tensor]:
        norms = zip(self._names, self._norms, strict=True)
        parts = {f"{name}.{key}": tensor for name, norm in norms for key, tensor in norm.state().items()}
        return super()._state() | parts

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state of a constraint of the same kind on the same layers; all of it, or nothing."""
        before = [(norm.vectors, norm.sizes) for norm in self._norms]
        try:
            for name, norm in zip(self._names, self._norms, strict=True):
                norm.load(name, state)
            super().load_state_dict(state)
        except StateError:
            for norm, (vectors, sizes) in zip(self._norms, before, strict=True):
                norm.vectors, norm.sizes = vectors, sizes
            raise
        for norm, (vectors, _) in zip(self._norms, before, strict=True):
            norm.stay_in(vectors)


@dataclass(eq=False)
class Seen:
    """The sizes that a compiled forward showed, and what was seen before; the chain's end, before which nothing is.

    What compiled code adds to a chain it does not look at. If it compared sizes, it would be compiled again whenever
    they grow, and so after the very first forward.
    """

    sizes: Sizes = ((), ())
    before: Seen | None = None


class FollowedNorm:
    """The operator norm of one layer, followed from step to step; as a hook it remembers the largest input's size."""

    instance: Instance = "auto"

    def __init__(self, layer: FoundLayer, p: float, iterations: int) -> None:
        self.layer = layer
        self.p = p
        self.iterations = iterations
        self.paused = False
        self.dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        self.map = linear_map(layer, None, self.dtype)
        self.needs_forwards = self.map is None
        self._weight_shape = layer.weight.shape
        self._sizes: Sizes | None = None
        self._seen = Seen()
        self.vectors: Tensor | None = None
        """The two directions that the layer amplifies most, as far as is known."""
        self.newest: Tensor | None = None
        """The vectors of a step that may yet turn out to have been skipped."""

    def see(self, layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        """Takes the size of what goes through the layer into account."""
        if self.paused:
            return
        sizes = instance_sizes(layer, x, output)
        # A step comes after a forward for gradients, and looks; an evaluation may never end.
        if torch.compiler.is_compiling() and layer.module.training and torch.is_grad_enabled():
            self._seen = Seen(sizes, before=self._seen)
        else:
            self._look_at_weight()
            self._sizes = _largest(self._sizes, sizes)

    def _look_at_weight(self) -> None:
        """Begin anew if it has another shape, because units were added or pruned."""
        if self._weight_shape != self.layer.weight.shape:
            self._weight_shape, self.sizes, self.vectors = self.layer.weight.shape, None, None
            self.map = linear_map(self.layer, None, self.dtype)

    @property
    def sizes(self) -> Sizes | None:
        """The largest ones seen."""
        while self._seen.before is not None:
            self._sizes, self._seen = _largest(self._sizes, self._seen.sizes), self._seen.before
        return self._sizes

    @sizes.setter
    def sizes(self, sizes: Sizes | None) -> None:
        self._sizes, self._seen = sizes, Seen()

    def estimate(self) -> Tensor:
        """The norm under the weights as they are now; ``UNMEASURED`` if it needs a size that is not known."""
        self._look_at_weight()
        if self.needs_forwards and (self.map is None or self.map.sizes != self.sizes):
            self.map = linear_map(self.layer, self.sizes, self.dtype)
        if self.map is None:
            return self.layer.scalar(UNMEASURED)
        exact = self.map.exact_norm(self.p)
        return finite(self._iterate(self.map) if exact is None else exact)

    def _iterate(self, linear: LinearMap) -> Tensor:
        """Power iteration on two vectors at once: when another one becomes the largest, it is known already."""
        shape = linear.input_shape
        begun = self.vectors is not None and self.vectors.shape[1:] == shape
        v = self._vectors_of(shape)
        for _ in range(self.iterations if begun else FIRST_ITERATIONS):
            v, size = power_iteration(linear, v)
        self.newest = v
        return size

    def _vectors_of(self, shape: Shape) -> Tensor:
        """Start vectors; if the input grew, the old ones zero-padded, plus 10 % noise."""
        if self.vectors is None or self.vectors.shape[1:] != shape:
            begin = torch.stack([random_vector(shape, seed) for seed in (0, 1)])
            begin = begin.to(self.layer.weight.device, self.dtype)
            if self.vectors is not None:
                missing = [n for new, old in zip(shape, self.vectors.shape[1:], strict=True) for n in (new - old, 0)]
                begin = F.pad(self.vectors.to(begin), missing[::-1]) + 0.1 * begin
            self.vectors = begin
        self.vectors = self.vectors.to(self.layer.weight.device)
        return self.vectors

    def addresses(self, device: torch.device) -> tuple[object, ...] | None:
        """The addresses of all that an estimate reads; None if it does more than compute with tensors on this GPU."""
        weight = self.layer.weight
        if type(weight) is not nn.Parameter or weight.device != device or isinstance(self.map, OwnForward):
            return None
        tensors = [weight, self.vectors, *self.layer.module._buffers.values()]
        places = [None if one is None else (one.data_ptr(), one.dtype, one.stride()) for one in tensors]
        return self.sizes, id(self.map), *places

    def state(self) -> dict[str, Tensor]:
        """What an estimate depends on besides the weights."""
        known = {} if self.vectors is None else {"vectors": self.vectors}
        return known if self.sizes is None else known | {"input_and_output": torch.tensor(self.sizes, device="cpu")}

    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Take up what ``state`` gave."""
        self._look_at_weight()
        vectors, sizes = state.get(f"{name}.vectors"), state.get(f"{name}.input_and_output")
        iterates = self.p == 2 and (self.needs_forwards or (self.map is not None and self.map.exact_norm(2) is None))
        size = state.get(f"{name}.size")
        if vectors is None and iterates and isinstance(size, Tensor) and bool(torch.isfinite(size).all()):
            raise StateError(f"the state lacks {f'{name}.vectors'!r}, which the norm's next estimate starts from.")
        self.sizes = None if sizes is None else self._checked_sizes(name, sizes)
        if vectors is not None:
            belongs = self.map.input_shape if not self.needs_forwards and self.map else self.sizes and self.sizes[0]
            shape = tuple(vectors.shape) if isinstance(vectors, Tensor) else None
            if belongs is None or shape != (2, *belongs) or not vectors.is_floating_point():
                expected = f"floating-point numbers of shape {(2, *belongs)} belong" if belongs else "none belong"
                found = f"shape {shape}" if shape is not None else type(vectors).__name__
                raise StateError(f"the state's {f'{name}.vectors'!r} has {found}, where {expected}.")
            vectors = vectors.to(self.layer.weight.device, self.dtype, copy=True)
        self.vectors = vectors

    def stay_in(self, place: Tensor | None) -> None:
        """Keep the vectors in the tensor that they were in, if they fit: a captured step's replays know its address."""
        new = self.vectors
        if place is not None and new is not None and (place.shape, place.device) == (new.shape, new.device):
            self.vectors = place.copy_(new)

    def _checked_sizes(self, name: str, found: Any) -> Sizes:
        """The sizes of an input and an output that can be those of this layer."""
        fits = isinstance(found, Tensor) and found.dtype == torch.int64 and found.dim() == 2 and len(found) == 2
        like = self.layer.kind.input_shape(self.layer.module)[1:]
        if fits and like:
            fits = found.shape[1] == len(like) and int(found[0, 0]) == like[0]
        if not fits or not bool((found > 0).all()):
            raise StateError(f"the state's {f'{name}.input_and_output'!r} is not the size of an input of this layer.")
        into, out = found.tolist()
        return tuple(into), tuple(out)


def keep_newest(norms: Sequence[FollowedNorm], found_inf: Tensor | None) -> None:
    """End a step: in place, so that a captured step's replays go on from one another."""
    pairs = [(norm.vectors, norm.newest) for norm in norms if norm.vectors is not None and norm.newest is not None]
    if not pairs:
        return
    kept, newest = [old for old, _ in pairs], [new for _, new in pairs]
    if found_inf is not None:
        newest = [torch.where(found_inf.to(old.device) > 0, old, new) for old, new in pairs]
    torch._foreach_copy_(kept, newest)
    for norm in norms:
        norm.newest = None


def _largest(known: Sizes | None, sizes: Sizes) -> Sizes:
    if known is None:
        return sizes
    return tuple(map(max, known[0], sizes[0])), tuple(map(max, known[1], sizes[1]))


def power_iteration(linear: LinearMap, v: Tensor) -> tuple[Tensor, Tensor]:
    """One iteration on two vectors: their successors, and the largest singular value as far as they show it.

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
    size: Tensor = length / length_of(cos * a + sin * b)
    return torch.where(usable.view(2, *[1] * (v.dim() - 1)), following, v), size
