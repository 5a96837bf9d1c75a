"""A layer's linear part as a map between vector spaces: what an operator norm is taken of.

The map has no bias, and belongs to one input shape: a convolution's matrix depends on it. The weight is looked up at
each use, so a map stays true while its layer is trained.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _ntuple

from .._torch import preserve_rng_and_buffers
from ..distributed import full, gathered_parameters, is_flat_shard
from ..errors import NormError, UnsupportedLayerError
from ..layers import KINDS, Layer
from .absolute_sums import Lines, largest_absolute_sum, sources

Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape]
"""Of one instance of a layer's input and output."""
BASIS_VECTORS_AT_ONCE = 256


def check_operator_p(p: float) -> float:
    """Return p if the operator norm for it can be computed."""
    if p not in (1, 2, math.inf):
        raise NormError(f"p must be 1, 2 or inf, not {p!r:.40}: no other operator norm of a matrix is tractable.")
    return float(p)


class LinearMap:
    """``x → Wx`` of a layer. Of a normalisation layer this alone: its W is diagonal."""

    def __init__(self, layer: Layer, shapes: Shapes, dtype: torch.dtype) -> None:
        self.layer, self.shapes, self.dtype = layer, shapes, dtype
        self.input_shape, self.output_shape = shapes

    @property
    def weight(self) -> Tensor:
        """The weight in use, gathered if it is sharded, in the type that is computed with."""
        return full(self.layer.weight).to(self.dtype)

    def _apply(self, x: Tensor) -> Tensor:
        """Return ``Wx`` of a batch of instances."""
        raise NotImplementedError

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        """Return the largest absolute sum of the matrix's rows or columns."""
        raise NotImplementedError

    @torch.no_grad()
    def exact_norm(self, p: float) -> Tensor | None:
        """Return the operator norm where there is a closed form for it; None where it takes an iteration."""
        if (diagonal := self.layer.kind.diagonal) is None:
            return None if p == 2 else self._largest_absolute_sum(rows=math.isinf(p))
        with gathered_parameters(self.layer.module):
            return diagonal(self.layer.module).to(self.dtype).abs().amax()  # for every p

    def there_and_back(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(s, z, Wᵀz)`` of a batch, by one forward and one backward; ``Wv = sz`` and z has length 1."""
        with torch.enable_grad(), torch.autocast(v.device.type, enabled=False):
            x = v.detach().requires_grad_()
            z = self._apply(x)
            length = length_of(z.detach())
            direction = z.detach() / torch.where(length > 0, length, 1.0)
            (back,) = torch.autograd.grad(z, x, direction)
        return length, direction, back


class OwnForward(LinearMap):
    """A layer with a forward of its own: its matrix is known by what the forward does to vectors."""

    def _apply(self, x: Tensor) -> Tensor:
        module = self.layer.module
        x = x.to(self.layer.weight.dtype, copy=True)  # the forward may change it in place
        with preserve_rng_and_buffers(module, x.device), gathered_parameters(module):
            return self.layer.linear_part(x, module.forward(x))[1].to(self.dtype)

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        """Send every basis vector through the layer, whose matrix may be anything."""
        sums, size = [], math.prod(self.input_shape)
        for start in range(0, size, BASIS_VECTORS_AT_ONCE):
            vectors = torch.eye(min(BASIS_VECTORS_AT_ONCE, size - start), size, dtype=self.dtype).roll(start, 1)
            batch = vectors.view(-1, *self.input_shape).to(self.layer.weight.device)
            columns = self._apply(batch).flatten(1).abs()
            sums.append(columns.sum(0) if rows else columns.sum(1).amax())
        return torch.stack(sums).sum(0).amax() if rows else torch.stack(sums).amax()

    @torch.no_grad()
    def linearity_error(self) -> str | None:
        """Say why the layer has no operator norm; None if it has one."""
        first, second = (random_vector(self.input_shape, seed).to(self.layer.weight).unsqueeze(0) for seed in (0, 1))
        try:
            separate, joint = self._apply(first) + self._apply(second), self._apply(first + second)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a forward is arbitrary code
            return f"it cannot be run on its input alone ({type(error).__name__}: {error})"
        if not torch.allclose(separate, joint, rtol=1e-2, atol=1e-2 * float(separate.abs().amax())):
            return "its Wx is not linear in its input"
        return None


class Dense(LinearMap):
    """A matrix that is there to be read."""

    @property
    def weight(self) -> Tensor:
        """The matrix as (outputs, inputs)."""
        return super().weight.T if self.layer.is_transposed else super().weight

    def _apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        return self.weight.abs().sum(1 if rows else 0).amax()


class Convolution(LinearMap):
    """A convolution of inputs of one shape."""

    def __init__(self, layer: Layer, shapes: Shapes, dtype: torch.dtype) -> None:
        super().__init__(layer, shapes, dtype)
        self.module: Any = layer.module
        self._lines: dict[tuple[bool, torch.device], Lines] = {}  # by device: the model may be moved

    def _apply(self, x: Tensor) -> Tensor:
        z: Tensor = self.module._conv_forward(x, self.weight, None)
        return z

    def _largest_absolute_sum(self, *, rows: bool) -> Tensor:
        weight, rows = self.weight, rows != self.layer.is_transposed
        which = rows, weight.device
        if which not in self._lines:
            self._lines[which] = Lines.of(self._reads(), weight, rows=rows)
        return largest_absolute_sum(weight, self.module.groups, self._lines[which], rows=rows)

    def _reads(self) -> list[Tensor]:
        """Which entries each tap reads along each dimension; a transposed convolution writes to them."""
        m = self.module
        small, large = self.shapes if self.layer.is_transposed else self.shapes[::-1]
        kernel, stride, dilation = self._settings("kernel_size", "stride", "dilation")
        if m.padding_mode == "zeros" and not isinstance(m.padding, str):
            paddings = [(pad, pad) for pad in self._settings("padding")[0]]
        else:
            ends = m._reversed_padding_repeated_twice[::-1]
            paddings = list(zip(ends[1::2], ends[::2], strict=True))
        each = zip(large[1:], kernel, stride, dilation, paddings, strict=True)
        return [sources(*one, m.padding_mode)[:size] for one, size in zip(each, small[1:], strict=True)]

    def _settings(self, *names: str) -> list[tuple[int, ...]]:
        """Each setting along each dimension; one that was changed after construction may be a plain number."""
        along = _ntuple(len(self.module.kernel_size), "along")  # type: ignore[no-untyped-call]
        return [along(getattr(self.module, name)) for name in names]


class TransposedConvolution(Convolution):
    """The transpose of a convolution that takes the output's shape to the input's."""

    def _apply(self, x: Tensor) -> Tensor:
        m = self.module
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(m.kernel_size) - 1]
        # forward(x, output_size) can choose another size in each call.
        sizes = self.input_shape[1:], self.output_shape[1:]
        each = zip(*sizes, *self._settings("stride", "padding", "dilation", "kernel_size"), strict=True)
        extra = [out - ((n - 1) * s - 2 * pad + d * (k - 1) + 1) for n, out, s, pad, d, k in each]
        z: Tensor = function(x, self.weight, None, m.stride, m.padding, extra, m.groups, m.dilation)
        return z


MAPS: dict[type[nn.Module] | str, type[LinearMap]] = {
    nn.Linear: Dense,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), TransposedConvolution),
    "transformers.pytorch_utils.Conv1D": Dense,
    "torch_geometric.nn.dense.linear.Linear": Dense,
}
"""The map of each row of ``layers.KINDS`` that is not diagonal; of others, and of own forwards, ``OwnForward``."""


def linear_map(layer: Layer, shapes: Shapes | None, dtype: torch.dtype) -> LinearMap | None:
    """Return the map of a layer; None if it depends on the input's shape and that is not known."""
    shape = tuple(layer.weight.shape)
    if layer.kind.diagonal is not None:  # the scale is the weight, whatever the layer does besides
        return LinearMap(layer, (shape, shape), dtype)
    if is_flat_shard(layer.parameter):
        raise UnsupportedLayerError(
            f"layer {layer.name!r} ({type(layer.module).__name__}) has no operator norm: FullyShardedDataParallel "
            "keeps a flat piece of its weight. Use fully_shard."
        )
    kind: type[LinearMap] = OwnForward
    if layer.kind.form == "affine" and not layer.own_forward:
        kind = next((MAPS[row] for row in MAPS if layer.kind is KINDS[row]), OwnForward)
    if kind is Dense:
        shapes = (shape[:1], shape[1:]) if layer.is_transposed else (shape[1:], shape[:1])
    return None if shapes is None else kind(layer, shapes, dtype)


def instance_shapes(layer: Layer, x: Tensor, output: Any) -> Shapes:
    """Return the shapes of one instance, from a call of the layer."""
    dims = layer.instance_dims(x.dim())
    like = output if layer.kind.form == "affine" else x  # others may return anything
    return tuple(x.shape[-dims:]), tuple(like.shape[-dims:])


def length_of(v: Tensor) -> Tensor:
    """Return the 2-norm, in float64 where there is one: the squares of a small or large v are beyond float32."""
    length: Tensor = torch.linalg.vector_norm(v, dtype=None if v.device.type == "mps" else torch.float64)
    return length


def random_vector(shape: Shape, seed: int = 0) -> Tensor:
    """Return a unit vector to begin an iteration with, the same each time."""
    vector = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return vector.div_(torch.linalg.vector_norm(vector))
