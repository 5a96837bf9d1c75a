"""Two constraints on the weights alone: the size of a unit's incoming weights, and the size of every single weight."""

from __future__ import annotations

import glob
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .constraint import Constraint
from .coverage import Bound, Share
from .distributed import whole
from .errors import UnsupportedLayerError
from .functional import check_p, finite, widened
from .layers import FoundLayer, check_globs, find_layers


class MaxNorm(Constraint):
    """Constrains the norm of the weights that come into each unit.

    Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, *Dropout: A Simple Way to Prevent Neural Networks from
    Overfitting*, 2014. After each optimiser step ``w ← w / max(1, ‖w‖_p / c)`` for every unit's w: a row of a dense
    layer's W, the kernels that make up one output channel of a convolution.

    ``gains`` and ``scales`` are those of the largest unit of each layer. Normalisation layers have one scale per
    channel and no incoming weights: they are left alone, and refused if they are included by name.

    Args:
        model: whose layers are constrained.
        bound: c for all layers, or a mapping of globs over dotted names to bounds, of which the first that matches
            decides. The paper finds 3 to 4 to work well.
        p: the norm, from 1 to ``inf``; the paper's is 2.
        include: globs over dotted names: only these layers.
        exclude: globs over dotted names: not these layers.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> layer.weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> MaxNorm(layer, 1.0).step()
        >>> layer.weight.data
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    option_names = ("p",)

    def __init__(
        self,
        model: nn.Module,
        bound: Bound = 3.0,
        *,
        p: float = 2.0,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
    ) -> None:
        self.p = check_p(p)
        scales = [layer for layer in find_layers(model, include, exclude) if layer.kind.units is None]
        if scales and include is not None:
            raise UnsupportedLayerError(
                f"layer {scales[0].name!r} ({type(scales[0].module).__name__}) has no units with incoming weights, but "
                f"one scale per channel. Leave it out with exclude={scales[0].name!r}."
            )
        left_out = check_globs(exclude) + tuple(glob.escape(layer.name) for layer in scales)
        super().__init__(model, bound, include=include, exclude=left_out)

    def _estimate(self, share: Share) -> list[Tensor]:
        return [unit_norms(layer, self.p) for layer in share.layers]


class WeightClip(Constraint):
    """Constrains the absolute value of every single weight.

    Arjovsky, Chintala and Bottou, *Wasserstein GAN*, 2017. After each optimiser step ``w ← w / max(1, |w| / c)`` for
    every entry w of a constrained weight, which is clipping to [-c, c]. Biases are left alone.

    ``gains`` and ``scales`` are those of the largest weight of each layer.

    Args:
        model: whose layers are constrained.
        bound: c for all layers, or a mapping of globs over dotted names to bounds, of which the first that matches
            decides. The paper's is 0.01, for a critic without batch normalisation; classifiers need more.
        include: globs over dotted names: only these layers.
        exclude: globs over dotted names: not these layers.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.data = torch.tensor([[3.0, -0.25]])
        >>> WeightClip(layer, 0.5).step()
        >>> layer.weight.data
        tensor([[ 0.5000, -0.2500]])
    """

    def __init__(
        self,
        model: nn.Module,
        bound: Bound = 0.01,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
    ) -> None:
        super().__init__(model, bound, include=include, exclude=exclude)

    def _estimate(self, share: Share) -> list[Tensor]:
        return [finite(widened(whole(layer.weight)).abs()) for layer in share.layers]


def unit_norms(layer: FoundLayer, p: float) -> Tensor:
    """The norm of the weights that come into each unit of a layer, in a shape that broadcasts against its weight."""
    weight, units = widened(whole(layer.weight)), layer.kind.units
    assert units is not None
    if weight.dim() == 1:
        return finite(weight.abs())
    # Units along the second dimension (a transposed convolution's) are fed by the inputs of their own group alone.
    groups = weight.view(getattr(layer.module, "groups", 1) if units else 1, -1, *weight.shape[1:])
    others = [dim for dim in range(1, groups.dim()) if dim != 1 + units]
    # Of entries up to 1, whose powers do not overflow: a norm that is not finite would bound nothing.
    largest = groups.abs().amax(others, keepdim=True).clamp_min(torch.finfo(groups.dtype).tiny)
    norms = largest * torch.linalg.vector_norm(groups / largest, ord=p, dim=others, keepdim=True)
    return finite(norms.expand(-1, groups.shape[1], *norms.shape[2:]).flatten(0, 1))
