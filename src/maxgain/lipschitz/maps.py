"""A layer's linear part as a map between vector spaces: what an operator norm is taken of.

The map has no bias, and belongs to one input size: a convolution's matrix depends on it. The weight is looked up at
each use, so a map stays true while its layer is trained.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..convolutions import least_extents, settings
from ..distributed import whole, whole_weights
from ..errors import NormError, UnsupportedLayerError
from ..functional import check_p
from ..layers import FoundLayer
from ..torch_quirks import undisturbed
from .absolute_sums import AbsoluteSums, sources

Shape = tuple[int, ...]
Sizes = tuple[Shape, Shape]
"""The shapes of one instance of a layer's input and output."""
BASIS_VECTORS_AT_ONCE = 256


def check_operator_p(p: float) -> float:
    """Returns p if the operator norm for it can be computed, and refuses it otherwise."""
    if check_p(p) not in (1.0, 2.0, math.inf):
        raise NormError(
            f"p must be 1, 2 or inf, not {p!r}: no other operator norm of a matrix is known to be tractable."
        )
    return float(p)


class LinearMap(ABC):
    """``x → Wx`` of a layer."""

    def __init__(self, layer: FoundLayer, sizes: Sizes, dtype: torch.dtype) -> None:
        self.layer = layer
        self.sizes = sizes
        self.input_shape, self.output_shape = sizes
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """The weight that takes effect, in the type that is computed with."""
        return whole(self.layer.weight).to(self.dtype)

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``Wx`` of a batch of instances."""

    @abstractmethod
    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        """Of the rows or the columns of the matrix."""

    @torch.no_grad()
    def exact_norm(self, p: float) -> Tensor | None:
        """The operator norm where there is a closed form for it; None where it takes an iteration."""
        return None if p == 2 else self._largest_absolute_sum(rows=math.isinf(p))

    def there_and_back(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(s, z, Wᵀz)`` of a batch of instances, by one forward and one backward; ``Wv = sz`` and z has length 1."""
        with torch.enable_grad(), torch.autocast(v.device.type, enabled=False):
            x = v.detach().requires_grad_()
            z = self.apply(x)
            length = length_of(z.detach())
            direction = z.detach() / torch.where(length > 0, length, torch.ones_like(length))
            (back,) = torch.autograd.grad(z, x, direction)
        return length, direction, back

    def rounded_to(self, dtype: torch.dtype) -> Self:
        """The same map, computed with in another type."""
        return type(self)(self.layer, self.sizes, dtype)


class OwnForward(LinearMap):
    """A layer with a forward that nothing is known of: what it does to vectors is all there is to go by."""

    @torch.no_grad()
    def __init__(self, layer: FoundLayer, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__(layer, sizes, dtype)
        first, second = (random_vector(self.input_shape, seed).to(layer.weight).unsqueeze(0) for seed in (0, 1))
        try:
            apart, together = self.apply(first) + self.apply(second), self.apply(first + second)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a forward is arbitrary code
            raise _no_norm(layer, f"it cannot be run on its input alone ({type(error).__name__}: {error})") from error
        if not torch.allclose(apart, together, rtol=1e-2, atol=1e-2 * float(apart.abs().amax())):
            raise _no_norm(layer, "its Wx is not linear in its input")

    def apply(self, x: Tensor) -> Tensor:
        """``Wx`` of a batch of instances."""
        module, kind = self.layer.module, self.layer.kind
        x = x.to(self.layer.weight.dtype, copy=True)  # which the forward may change in place
        with undisturbed(module, x.device):
            return kind.linear_part(module, x, module.forward(x) if kind.needs_output else None)[1].to(self.dtype)

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        """Found by sending every basis vector through the layer, whose matrix may be anything."""
        size, device = math.prod(self.input_shape), self.layer.weight.device
        sums = []
        for start in range(0, size, BASIS_VECTORS_AT_ONCE):
            count = min(BASIS_VECTORS_AT_ONCE, size - start)
            vectors = torch.zeros(count, size, dtype=self.dtype, device=device)
            vectors.diagonal(start).fill_(1)
            columns = self.apply(vectors.view(count, *self.input_shape)).flatten(1).abs()
            sums.append(columns.sum(0) if rows else columns.sum(1).amax())
        return torch.stack(sums).sum(0).amax() if rows else torch.stack(sums).amax()


def _no_norm(layer: FoundLayer, reason: str) -> UnsupportedLayerError:
    what = f"layer {layer.name!r} ({type(layer.module).__name__})"
    return UnsupportedLayerError(f"{what} has no operator norm: {reason}. Leave it out with exclude={layer.name!r}.")


class Diagonal(LinearMap):
    """The scale of a normalisation layer: the norm is the largest entry, for every p."""

    @property
    def weight(self) -> Tensor:
        """The diagonal."""
        diagonal = self.layer.kind.diagonal
        assert diagonal is not None
        with whole_weights(self.layer.module):
            return diagonal(self.layer.module, self.dtype)

    def apply(self, x: Tensor) -> Tensor:
        """``Wx`` of a batch of instances, an instance being one number per scale."""
        return x * self.weight

    @torch.no_grad()
    def exact_norm(self, p: float) -> Tensor:
        """The largest entry."""
        return self._largest_absolute_sum(rows=math.isinf(p))

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        return self.weight.abs().amax()


class Dense(LinearMap):
    """A matrix that is there to be read."""

    def apply(self, x: Tensor) -> Tensor:
        """``Wx`` of a batch of instances."""
        return F.linear(x, self.weight)

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        return self.weight.abs().sum(1 if rows else 0).amax()


class TransposedDense(Dense):
    """A dense layer that keeps its matrix as (inputs, outputs)."""

    @property
    def weight(self) -> Tensor:
        """The matrix as (outputs, inputs)."""
        return super().weight.T


class Convolution(LinearMap):
    """A convolution of inputs of one size."""

    module: Any

    def __init__(self, layer: FoundLayer, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__(layer, sizes, dtype)
        self.module = layer.module
        self._sums: dict[tuple[bool, torch.device], AbsoluteSums] = {}

    def apply(self, x: Tensor) -> Tensor:
        """``Wx`` of a batch of instances."""
        z: Tensor = self.module._conv_forward(x, self.weight, None)
        return z

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        weight = self.weight
        which = rows, weight.device  # the model may be moved
        if which not in self._sums:
            self._sums[which] = AbsoluteSums.of(self._reads(), self.module.groups, weight, rows=rows)
        return self._sums[which].largest(weight)

    def _reads(self) -> list[Tensor]:
        """What each tap reads, along each dimension."""
        m = self.module
        if m.padding_mode == "zeros" and not isinstance(m.padding, str):
            paddings = [(pad, pad) for pad in settings(m, "padding")[0]]
        else:
            ends = m._reversed_padding_repeated_twice[::-1]
            paddings = list(zip(ends[1::2], ends[::2], strict=True))
        kernel, stride, dilation = settings(m, "kernel_size", "stride", "dilation")
        sizes = zip(self.input_shape[1:], kernel, stride, dilation, paddings, strict=True)
        return [sources(*size, m.padding_mode) for size in sizes]


class TransposedConvolution(Convolution):
    """What a convolution of the output's size does to vectors from the other side."""

    def apply(self, x: Tensor) -> Tensor:
        """``Wx`` of a batch of instances."""
        m = self.module
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(m.kernel_size) - 1]
        z: Tensor = function(x, self.weight, None, m.stride, m.padding, self._extra(), m.groups, m.dilation)
        return z

    def _extra(self) -> list[int]:
        """What the call added to the output's size; ``forward(x, output_size)`` can choose another each time."""
        least = least_extents(self.module, self.input_shape[1:])
        return [out - n for out, n in zip(self.output_shape[1:], least, strict=True)]

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        return super()._largest_absolute_sum(rows=not rows)

    def _reads(self) -> list[Tensor]:
        kernel, stride, dilation, pads = settings(self.module, "kernel_size", "stride", "dilation", "padding")
        paddings = [(pad, pad) for pad in pads]
        sizes = zip(self.output_shape[1:], kernel, stride, dilation, paddings, strict=True)
        return [sources(*size, "zeros")[:n] for size, n in zip(sizes, self.input_shape[1:], strict=True)]


MAPS: dict[str, type[LinearMap]] = {
    cls.__name__: cls for cls in (Dense, TransposedDense, Convolution, TransposedConvolution, Diagonal, OwnForward)
}
"""What the rows of ``layers`` name."""


def linear_map(layer: FoundLayer, sizes: Sizes | None, dtype: torch.dtype) -> LinearMap | None:
    """The map of a layer, or None if it depends on the input's size and that is not known."""
    # A scale is the weight, whatever its layer does besides. Other settings say nothing of what a new forward does.
    own = MAPS[layer.kind.linear_map]
    if layer.own_forward and own is not Diagonal:
        own = OwnForward
    shape = tuple(layer.weight.shape)
    if own is Diagonal:
        sizes = (shape, shape)
    elif issubclass(own, Dense):
        outputs, inputs = shape if own is Dense else shape[::-1]
        sizes = (inputs,), (outputs,)
    return None if sizes is None else own(layer, sizes, dtype)


def instance_sizes(layer: FoundLayer, x: Tensor, output: Tensor) -> Sizes:
    """The shapes of one instance, from what goes into and comes out of the layer."""
    dims = layer.instance_dims(x)
    # What a registered layer returns may be anything, and nobody asks for its size.
    shaped = output if layer.kind.output_is_part else x
    return tuple(x.shape[-dims:]), tuple(shaped.shape[-dims:])


def length_of(v: Tensor) -> Tensor:
    """The 2-norm, in float64 where there is one: the squares of a small or large v are beyond float32."""
    length: Tensor = torch.linalg.vector_norm(v, dtype=None if v.device.type == "mps" else torch.float64)
    return length


def random_vector(shape: Shape, seed: int = 0) -> Tensor:
    """A unit vector to begin an iteration with, the same each time."""
    vector = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return vector.div_(torch.linalg.vector_norm(vector))
