"""Projecting on a GPU in two launches, however many layers there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_quirks import direct_launch, is_capturing
from .measuring import DTYPES, HAS_TRITON, compiles, power_of_two

CHUNK = 16384
"""How many entries of a weight one program divides."""
BLOCK = 2048


class FusedProjection:
    """What the two launches of a step need to know of the weights; made once, and again if a weight moves."""

    def __init__(self, weights: Sequence[Tensor], layers: Sequence[int], count: int) -> None:
        """``weights[i]`` belongs to ``layers[i]``, one of ``count``; the other layers are not divided."""
        device = weights[0].device
        self.addresses = _addresses(weights)
        divided = torch.zeros(count, dtype=torch.int8)
        divided[list(layers)] = 1
        self.divided = divided.to(device)
        self.factors = torch.ones(count, device=device)
        self._direct: dict[Any, Callable[..., None]] = {}
        self.chunks = {
            dtype: _chunks([(w, layer) for w, layer in zip(weights, layers, strict=True) if w.dtype == dtype], device)
            for dtype in {weight.dtype for weight in weights}
        }

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether the weights are still where they were."""
        return self.addresses == _addresses(weights)

    def __call__(
        self, sizes: Tensor, bounds: Tensor, kept_sizes: Tensor, scales: Tensor, found_inf: Tensor | None
    ) -> None:
        """Divide every weight by ``max(1, size / bound)``, and keep sizes and scales for the user."""
        with torch.cuda.device(sizes.device):
            inf = sizes if found_inf is None else found_inf  # not read, but there must be a pointer
            self._launch(
                "settle", (1, 1, 1), sizes, bounds, self.divided, inf, kept_sizes, scales, self.factors, len(sizes),
                found_inf is not None, power_of_two(len(sizes)),
            )  # fmt: skip
            for dtype, chunks in self.chunks.items():
                self._launch("shrink", (len(chunks), 1, 1), chunks, self.factors, _entry(dtype), CHUNK, BLOCK)

    def _launch(self, name: str, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch a kernel: compiled by the first call with such arguments, and called directly from then on."""
        from . import triton_project

        key = (name, *(argument for argument in arguments if not isinstance(argument, Tensor)))
        if key in self._direct:
            pointers = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
            self._direct[key](arguments[0].get_device(), *pointers)
        else:
            kernel = getattr(triton_project, f"{name}_kernel")
            self._direct[key] = direct_launch(kernel[grid](*arguments, num_warps=4), grid)


def _entry(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def can_fuse(weights: Sequence[Tensor], sizes: Tensor) -> bool:
    """Whether the launches can be used for these weights: in a GPU's memory, each in one piece."""
    return (
        HAS_TRITON
        and sizes.is_cuda
        and sizes.dtype == torch.float32
        and bool(weights)
        and all(type(w) in (Tensor, torch.nn.Parameter) for w in weights)
        and all(w.device == sizes.device and w.dtype in DTYPES and _in_one_piece(w) for w in weights)
        and not is_capturing(sizes.device)  # what the launches need to know cannot be copied to the GPU during capture
        and compiles(sizes.device)
    )


def _in_one_piece(weight: Tensor) -> bool:
    if weight.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return weight.dim() in formats and weight.is_contiguous(memory_format=formats[weight.dim()])


def _addresses(weights: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    """With their types: where a weight was, the same one may be again after two changes of its type, in another."""
    return [(weight.data_ptr(), weight.dtype) for weight in weights]


def _chunks(weights: Sequence[tuple[Tensor, int]], device: torch.device) -> Tensor:
    rows = [
        (weight.data_ptr() + start * weight.element_size(), min(CHUNK, weight.numel() - start), layer)
        for weight, layer in weights
        for start in range(0, weight.numel(), CHUNK)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(device)
