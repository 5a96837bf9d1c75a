"""Two constraints on the weights alone: the size of every weight, and the norm of each unit's incoming weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .constraint import Constraint
from .distributed import full, is_sharded
from .functional import check_p, norm
from .layers import Bound, Globs, Layer, as_globs, find_layers
from .plan import StepPlan


class WeightClip(Constraint):
    """Clips every entry of a weight to [-c, c]: ``w ← w / max(1, |w| / c)`` after each optimizer step.

    Arjovsky, Chintala and Bottou, *Wasserstein GAN*, 2017, with c = 0.01, for a critic without batch norm. The bound is
    c for all layers, or a mapping of globs. ``gains`` and ``scales`` are those of each layer's largest entry.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.data = torch.tensor([[3.0, -0.25]])
        >>> WeightClip(layer, 0.5).step()
        >>> layer.weight.data
        tensor([[ 0.5000, -0.2500]])
    """

    divides = False

    def __init__(
        self, model: nn.Module, bound: Bound = 0.01, *, include: Globs | None = None, exclude: Globs = ()
    ) -> None:
        super().__init__(model, bound, include=include, exclude=exclude)

    def _sizes(self, layer: Layer, weight: Tensor) -> Tensor:
        """Return the size of each entry, or of each unit, in a shape that broadcasts against the weight."""
        return weight.abs()

    def _size(self, layer: Layer) -> Tensor:
        return self._finite_sizes(layer).amax()

    def _shrink(self, plan: StepPlan, bounds: Tensor) -> Tensor:
        users = {slot: layer for layer, slot in self._slots.items()}
        scales = torch.ones_like(bounds)
        for i, (weight, slot) in enumerate(zip(plan.weights, plan.at.tolist(), strict=True)):
            own = self._finite_sizes(users[slot])
            factors = (own / bounds[i].to(own)).clamp_min_(1.0)
            scales[i] = factors.amax().reciprocal()
            if weight.is_cuda or bool((factors > 1).any()):  # a weight within its bound is not written to
                weight.copy_(weight.to(factors.dtype).div_(_local_part(factors, users[slot].parameter)))
        return scales

    def _finite_sizes(self, layer: Layer) -> Tensor:
        weight = full(layer.weight)
        sizes = self._sizes(layer, weight.to(torch.promote_types(weight.dtype, torch.float32)))
        return torch.nan_to_num(sizes, nan=0.0, posinf=0.0)


class MaxNorm(WeightClip):
    """Bounds the norm of the weights that come into each unit: ``w ← w / max(1, ‖w‖_p / c)`` after each optimizer step.

    Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, *Dropout: A Simple Way to Prevent Neural Networks from
    Overfitting*, 2014, with c of 3 to 4. A unit's w is a row of a dense layer's W, or the kernels of an output channel.
    ``gains`` and ``scales`` are those of each layer's largest unit. Normalisation layers are left alone.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> layer.weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> MaxNorm(layer, 1.0).step()
        >>> layer.weight.data
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    def __init__(
        self, model: nn.Module, bound: Bound = 3.0, *, p: float = 2.0, include: Globs | None = None, exclude: Globs = ()
    ) -> None:
        self.p = check_p(p)
        layers = find_layers(model, include, exclude).layers
        scales = [layer.name for layer in layers if layer.kind.diagonal is not None]
        super().__init__(model, bound, include=include, exclude=(*as_globs(exclude), *scales))

    def _sizes(self, layer: Layer, weight: Tensor) -> Tensor:
        if weight.dim() == 1:
            return weight.abs()
        # Transposed convolutions keep (inputs, outputs / groups, ...), and transformers' Conv1D (inputs, outputs).
        count = getattr(layer.module, "groups", 1) if layer.is_transposed else 1
        units = weight.view(count, -1, *weight.shape[1:]).movedim(1 + layer.is_transposed, 1)
        norms = norm(units.flatten(2), self.p, 1).view(count, -1, *[1] * (weight.dim() - 1))
        norms = norms.movedim(1, 1 + layer.is_transposed)
        return norms.expand(-1, len(weight) // count, *norms.shape[2:]).flatten(0, 1)


def _local_part(factors: Tensor, weight: Tensor) -> Tensor:
    """Return the factors of the part of a weight that this rank holds."""
    if not is_sharded(weight):
        return factors
    from torch.distributed.tensor import distribute_tensor  # takes long to import

    sharded: Any = weight
    parts = distribute_tensor(factors.expand(weight.shape), sharded.device_mesh, sharded.placements, src_data_rank=None)
    return parts.to_local()  # every rank has all factors: none are sent
