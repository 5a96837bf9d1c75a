"""Where to look for what a convolution amplifies most: it is close to a wave, and waves are cheap to compare.

Away from the borders of its input a convolution turns a wave ``c e^{iθy}`` into ``K(θ) c e^{iθy}``, with a small matrix
``K(θ) = Σ_t W_t e^{iθt}``. The frequency whose matrix has the largest norm shows where to begin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIXELS_WORTH_IT = 400
"""With fewer an iteration costs so little that any start will do."""
LARGEST_TABLE = 1 << 23
"""How many numbers the matrices of all frequencies may have together."""
GRID = 16
REFINEMENTS = 4
ITERATIONS = 20


@torch.no_grad()
def loudest_wave(weight: Tensor, taps: Tensor, size: tuple[int, ...]) -> Tensor | None:
    """An input of this size that is amplified nearly as much as any; None where looking for it does not pay.

    ``weight`` is (outputs, inputs, taps), and ``taps`` says how far from its output each tap reads, by dimension.
    """
    outputs, inputs, _ = weight.shape
    grid = min(GRID, int((LARGEST_TABLE / (outputs * inputs)) ** (1 / len(size))))
    if math.prod(size) < PIXELS_WORTH_IT or grid < 4:
        return None
    weight, taps = weight.to(torch.complex64), taps.to(weight.device, torch.float32)
    spacing = 2 * math.pi / grid
    near = _grid(*[range(grid)] * len(size)).to(taps) * spacing
    for _ in range(REFINEMENTS):
        length, directions = _amplified_most(_matrices(weight, taps, near))
        best = int(length.argmax())
        if not 0 < float(length[best]) < math.inf:
            return None
        frequency, direction = near[best], directions[best]
        spacing /= 3
        near = frequency + spacing * _grid(*[range(-2, 3)] * len(size)).to(taps)
    places = _grid(*(range(n) for n in size)).to(taps)
    ends = torch.tensor(size, device=taps.device) + 1
    fading = torch.sin(math.pi * (places + 1) / ends).prod(1)  # what a wave must do where the input ends
    wave = direction[:, None] * torch.polar(fading, places @ frequency)
    return wave.real.reshape(inputs, *size)


def _matrices(weight: Tensor, taps: Tensor, frequencies: Tensor) -> Tensor:
    """``K(θ)`` of every frequency."""
    angles = frequencies @ taps.T
    return torch.einsum("oit,nt->noi", weight, torch.polar(torch.ones_like(angles), angles))


def _amplified_most(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of every matrix and the vector that shows it, as far as a few power iterations find them."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrices.shape[2], 1, generator=generator)
    v = start.to(matrices).expand(len(matrices), -1, -1)
    for _ in range(ITERATIONS):
        v = matrices.mH @ (matrices @ v)
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.linalg.vector_norm(matrices @ v, dim=(1, 2)), v.squeeze(2)


def _grid(*ranges: range) -> Tensor:
    """Every combination of one number of each range, as rows."""
    return torch.cartesian_prod(*(torch.tensor(numbers) for numbers in ranges)).reshape(-1, len(ranges))
