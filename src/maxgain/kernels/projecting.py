"""Projecting on a GPU in one launch, however many layers there are; one for each type that weights have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .measuring import DTYPES, HAS_TRITON, Kernel, compile_error
from .planning import power_of_two

CHUNK = 16384
"""How many entries of a weight one program divides."""
BLOCK = 2048
MOST_PROGRAMS = 528
"""Four for each multiprocessor of an H200: each counts once, which is all that a step without division takes."""


class FusedProjection:
    """What the launches of a step need to know of the weights; made once, and again if a weight moves."""

    def __init__(
        self, weights: Sequence[Tensor], layers: Sequence[int], count: int, device: torch.device | None = None
    ) -> None:
        """``weights[i]`` belongs to ``layers[i]``, one of ``count``; the other layers are not divided."""
        device = device or weights[0].device
        divided = torch.zeros(count, dtype=torch.int8)
        divided[list(layers)] = 1
        self.divided = divided.to(device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.count = count
        self.aligned = 1 if any(weight.data_ptr() % 16 or weight.numel() % 16 for weight in weights) else 16
        self.chunks = {
            dtype: _chunks([(w, layer) for w, layer in zip(weights, layers, strict=True) if w.dtype == dtype], device)
            for dtype in dict.fromkeys(weight.dtype for weight in weights)
        } or {torch.float32: torch.zeros(1, 3, dtype=torch.int64, device=device)}  # the launch still keeps the sizes
        self._launches: list[tuple[Tensor, Kernel]] = []

    def __call__(
        self, sizes: Tensor, bounds: Tensor, kept_sizes: Tensor, scales: Tensor, counts: Tensor,
        resting: Tensor, every: int,
    ) -> None:  # fmt: skip
        """Divide every weight by ``max(1, size / bound)``, and keep sizes, scales and counts for the user.

        The sizes are used up: -1 afterwards, which says that nothing was measured. With ``every`` above 0 it is counted
        down for how many more steps layers rest; in every so many steps it is 0.
        """
        device = sizes.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(sizes, bounds, kept_sizes, scales, counts, resting, every)
        if not self._launches:
            self._launches = self._make_launches()
        tensors = sizes, bounds, self.divided, kept_sizes, scales, counts, resting, self.counter
        pointers = [one.data_ptr() for one in tensors]
        for chunks, launch in self._launches:
            grid, numbers = (min(len(chunks), MOST_PROGRAMS), 1, 1), (len(chunks), self.count, every)
            launch(device, grid, (chunks, *tensors), (chunks.data_ptr(), *pointers), *numbers)
        return None

    def _make_launches(self) -> list[tuple[Tensor, Kernel]]:
        """One for the weights of each type; the last of them keeps what users see."""
        from .triton_project import project_kernel

        *_, last = self.chunks
        launches = []
        for dtype, chunks in self.chunks.items():
            constants = _entry(dtype), self.aligned, CHUNK, BLOCK, power_of_two(self.count), dtype == last
            launches.append((chunks, Kernel(project_kernel, constants, warps=4)))
        return launches


def _entry(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def can_fuse(weights: Sequence[Tensor], sizes: Tensor) -> bool:
    """Whether the launches can be used for these weights: in a GPU's memory, each in one piece."""
    return (
        HAS_TRITON
        and sizes.is_cuda
        and sizes.dtype == torch.float32
        and all(type(w) in (Tensor, torch.nn.Parameter) for w in weights)
        and all(w.device == sizes.device and w.dtype in DTYPES and _in_one_piece(w) for w in weights)
        and not torch.cuda.is_current_stream_capturing()  # which copies nothing to the GPU for the launches
        and not compile_error(sizes.device)
    )


def _in_one_piece(weight: Tensor) -> bool:
    if weight.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return weight.dim() in formats and weight.is_contiguous(memory_format=formats[weight.dim()])


def _chunks(weights: Sequence[tuple[Tensor, int]], device: torch.device) -> Tensor:
    rows = [
        (weight.data_ptr() + start * weight.element_size(), min(CHUNK, weight.numel() - start), layer)
        for weight, layer in weights
        for start in range(0, max(1, weight.numel()), CHUNK)  # something is launched for a rank's empty part too
    ]
    return torch.tensor(rows, dtype=torch.int64).to(device)
