"""A layer's linear part as a map between vector spaces: what an operator norm is taken of.

The map has no bias, and belongs to one input shape: a convolution's matrix depends on it. The weight is looked up at
each use, so a map stays true while its layer is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _ntuple

from .._torch import preserve_rng_and_buffers
from ..distributed import full, gathered_parameters, is_flat_shard
from ..errors import NormError, UnsupportedLayerError
from ..layers import KINDS, Layer

Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape]
"""Of one instance of a layer's input and output."""
BASIS_VECTORS_AT_ONCE = 256


def check_operator_p(p: float) -> float:
    """Return p if the operator norm for it can be computed."""
    if p not in (1, 2, math.inf):
        raise NormError(f"p must be 1, 2 or inf, not {p!r:.40}: no other operator norm of a matrix is tractable.")
    return float(p)


def _along(m: Any, *names: str) -> list[tuple[int, ...]]:
    """Each setting along each dimension; one that was changed after construction may be a plain number."""
    along = _ntuple(len(m.kernel_size), "along")  # type: ignore[no-untyped-call]
    return [along(getattr(m, name)) for name in names]


def _transposed(m: Any, x: Tensor, weight: Tensor, output: Shape) -> Tensor:
    # forward(x, output_size) can choose another size in each call.
    each = zip(x.shape[2:], output[1:], *_along(m, "stride", "padding", "dilation", "kernel_size"), strict=True)
    extra = [out - ((n - 1) * s - 2 * pad + d * (k - 1) + 1) for n, out, s, pad, d, k in each]
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(m.kernel_size) - 1]
    return function(x, weight, None, m.stride, m.padding, extra, m.groups, m.dilation)


Product = Callable[[Any, Tensor, Tensor, Shape], Tensor]
PRODUCTS: dict[type[nn.Module] | str, Product] = {
    nn.Linear: lambda m, x, weight, output: F.linear(x, weight),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), lambda m, x, weight, output: m._conv_forward(x, weight, None)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    "transformers.pytorch_utils.Conv1D": lambda m, x, weight, output: x @ weight,
    "torch_geometric.nn.dense.linear.Linear": lambda m, x, weight, output: F.linear(x, weight),
}
"""How each row of ``layers.KINDS`` that is not diagonal multiplies: (module, x, W, shape of the output) → Wx."""


def _product(layer: Layer) -> Product | None:
    """None for a layer with a forward of its own, whose matrix is known by what that does to vectors alone."""
    if layer.own_forward or layer.kind.form != "affine":
        return None
    return next((PRODUCTS[row] for row in PRODUCTS if layer.kind is KINDS[row]), None)


class LinearMap:
    """``x → Wx`` of a layer, for inputs of one shape."""

    def __init__(self, layer: Layer, shapes: Shapes, dtype: torch.dtype) -> None:
        self.layer, self.shapes, self.dtype = layer, shapes, dtype
        self.input_shape, self.output_shape = shapes
        self.product = _product(layer)
        self.is_own_forward = self.product is None and layer.kind.diagonal is None

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``Wx`` of a batch of instances."""
        module = self.layer.module
        if self.product is not None:
            return self.product(module, x, full(self.layer.weight).to(self.dtype), self.output_shape)
        x = x.to(self.layer.weight.dtype, copy=True)  # the forward may change it in place
        with preserve_rng_and_buffers(module, x.device), gathered_parameters(module):
            return self.layer.linear_part(x, module.forward(x))[1].to(self.dtype)

    def there_and_back(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(s, z, Wᵀz)`` of a batch, by one forward and one backward; ``Wv = sz`` and z has length 1."""
        with torch.enable_grad(), torch.autocast(v.device.type, enabled=False):
            x = v.detach().requires_grad_()
            z = self(x)
            length = length_of(z.detach())
            direction = z.detach() / torch.where(length > 0, length, 1.0)
            (back,) = torch.autograd.grad(z, x, direction)
        return length, direction, back

    @torch.no_grad()
    def exact_norm(self, p: float) -> Tensor | None:
        """Return the operator norm where there is a closed form for it; None where it takes an iteration."""
        if (diagonal := self.layer.kind.diagonal) is not None:
            with gathered_parameters(self.layer.module):
                return diagonal(self.layer.module).to(self.dtype).abs().amax()  # for every p
        if p == 2:
            return None
        rows, device = math.isinf(p), self.layer.weight.device  # the largest absolute sum of W's rows, or columns
        with torch.autocast(device.type, enabled=False):
            if self.product is None or not self._adds_nothing_up(rows):
                return self._sum_by_basis(rows)
            wide = torch.float32 if device.type == "mps" else torch.float64  # which no product rounds, as TF32 does
            ones = torch.ones(1, *self.input_shape, dtype=wide, device=device, requires_grad=True)
            with torch.enable_grad():  # |W| times ones, or ones times |W|
                weight = full(self.layer.weight).abs().to(wide)
                sums = self.product(self.layer.module, ones, weight, self.output_shape)
                return (sums if rows else torch.autograd.grad(sums.sum(), ones)[0]).detach().amax().to(self.dtype)

    def _adds_nothing_up(self, rows: bool) -> bool:
        """Whether the largest sum has one entry of the weight in each of its entries of the matrix.

        Where padding repeats the input, several may be added up before absolute values are taken: none in the rows of
        outputs that see no padding, which have the largest sums, and none in the columns of a circular convolution.
        """
        m: Any = self.layer.module
        if getattr(m, "padding_mode", "zeros") == "zeros":
            return True
        each = zip(self.input_shape[1:], *_along(m, "kernel_size", "stride", "dilation"), strict=True)
        return (rows or m.padding_mode == "circular") and all(n >= d * (k - 1) + s for n, k, s, d in each)

    def _sum_by_basis(self, rows: bool) -> Tensor:
        """Send every basis vector through the layer, whose matrix may be anything."""
        sums, size = [], math.prod(self.input_shape)
        for start in range(0, size, BASIS_VECTORS_AT_ONCE):
            count = min(BASIS_VECTORS_AT_ONCE, size - start)
            vectors = torch.eye(count, size, dtype=self.dtype, device=self.layer.weight.device).roll(start, 1)
            columns = self(vectors.view(-1, *self.input_shape)).flatten(1).abs()
            sums.append(columns.sum(0) if rows else columns.sum(1).amax())
        return torch.stack(sums).sum(0).amax() if rows else torch.stack(sums).amax()

    @torch.no_grad()
    def linearity_error(self) -> str | None:
        """Say why a forward of its own has no operator norm; None if it has one."""
        if not self.is_own_forward:
            return None
        first, second = (random_vector(self.input_shape, seed).to(self.layer.weight).unsqueeze(0) for seed in (0, 1))
        try:
            separate, joint = self(first) + self(second), self(first + second)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a forward is arbitrary code
            return f"it cannot be run on its input alone ({type(error).__name__}: {error})"
        if not torch.allclose(separate, joint, rtol=1e-2, atol=1e-2 * float(separate.abs().amax())):
            return "its Wx is not linear in its input"
        return None


def fixed_shapes(layer: Layer) -> Shapes | None:
    """Return the shapes of a layer whose map is the same for inputs of every shape; None for others."""
    shape = tuple(layer.weight.shape)
    if layer.kind.diagonal is not None:  # the scale is the weight, whatever the layer does besides
        return shape, shape
    if is_flat_shard(layer.parameter):
        raise no_norm(layer, "FullyShardedDataParallel keeps a flat piece of its weight. Use fully_shard.")
    if layer.kind.dims == 1 and _product(layer) is not None:
        return (shape[:1], shape[1:]) if layer.is_transposed else (shape[1:], shape[:1])
    return None


def instance_shapes(layer: Layer, x: Tensor, output: Any) -> Shapes:
    """Return the shapes of one instance, from a call of the layer."""
    dims = layer.instance_dims(x.dim())
    like = output if layer.kind.form == "affine" else x  # others may return anything
    if not isinstance(like, Tensor):
        raise no_norm(layer, f"it returns a {type(like).__name__}. Pass exclude={layer.name!r}.")
    return tuple(x.shape[-dims:]), tuple(like.shape[-dims:])


def no_norm(layer: Layer, why: str) -> UnsupportedLayerError:
    """Return the error of a layer without an operator norm."""
    return UnsupportedLayerError(f"layer {layer.name!r} ({type(layer.module).__name__}) has no operator norm: {why}")


def length_of(v: Tensor) -> Tensor:
    """Return the 2-norm, in float64 where there is one: the squares of a small or large v are beyond float32."""
    length: Tensor = torch.linalg.vector_norm(v, dtype=None if v.device.type == "mps" else torch.float64)
    return length


def random_vector(shape: Shape, seed: int = 0) -> Tensor:
    """Return a unit vector to begin an iteration with, the same each time."""
    vector = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return vector.div_(torch.linalg.vector_norm(vector))
