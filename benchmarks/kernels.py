"""How fast the kernel that measures reads layers by itself, on a GPU, in TB/s of inputs and outputs.

python -m benchmarks.kernels                                    # with the constants of maxgain.kernels.planning
python -m benchmarks.kernels ROWS=4,256,8 PART=32768            # and with others in turn
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import maxgain.gain  # noqa: F401  -- which defines the operator
from maxgain.kernels import measuring, planning

Shape = tuple[int, ...]
DENSE: list[tuple[Shape, Shape]] = [
    ((8192, one), (8192, other)) for one, other in ((768, 2304), (768, 768), (768, 3072), (3072, 768)) * 4
]
CONVOLUTIONS: list[tuple[Shape, Shape]] = [
    ((64, one, side, side), (64, other, side, side))
    for one, side, other in ((64, 56, 256), (256, 56, 64), (128, 28, 512), (512, 28, 128)) * 2
]
CASES = {"dense": (DENSE, False), "convolutions": (CONVOLUTIONS, False), "with batch norms": (CONVOLUTIONS, True)}
REPEATS = 20


def measure(shapes: list[tuple[Shape, Shape]], *, with_norms: bool) -> tuple[float, float]:
    """Milliseconds of one operator that measures all, and the bytes that it has to read."""
    maxima = torch.full((2 * len(shapes),), -1.0, device="cuda")
    dropped, resting = (torch.zeros_like(maxima, dtype=kind) for kind in (torch.int64, torch.int32))
    activations: list[Tensor] = []
    vectors: list[Tensor] = []
    numbers: list[int] = []
    for index, pair in enumerate(shapes):
        x, z = (torch.randn(shape, device="cuda").bfloat16() for shape in pair)
        dims = x.dim() - 1
        layout = torch.channels_last if dims > 1 else torch.contiguous_format
        activations += [x.contiguous(memory_format=layout), z.contiguous(memory_format=layout)]
        numbers += [2 * index, 2 * index, 2 * index + 1, -1, -1, dims, dims]
        if with_norms:
            vectors += [torch.rand(z.shape[1], device="cuda") + 0.1 for _ in range(2)]
            numbers += [2 * index + 1, 2 * index + 1, -1, 2 * index, 2 * index + 1, dims, dims]
    eps = [1e-5] * (len(numbers) // planning.NUMBERS)

    def call() -> None:
        torch.ops.maxgain.record(maxima, dropped, resting, activations, vectors, numbers, eps, 2.0)

    for _ in range(3):
        call()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS, float(sum(one.nbytes for one in activations))


def main(changes: list[str]) -> None:
    """Measure with each of the changed constants alone."""
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels: there is no GPU here.")
    if unknown := [change for change in changes if not hasattr(planning, change.partition("=")[0])]:
        sys.exit(f"benchmarks.kernels: maxgain.kernels.planning has no constant {unknown[0]!r}; write ROWS=4,256,8.")
    for change in ["", *changes]:
        name, _, value = change.partition("=")
        before: Any = getattr(planning, name, None)
        if name:
            numbers = tuple(int(number) for number in value.split(","))
            setattr(planning, name, numbers if isinstance(before, tuple) else numbers[0])
        measuring._plans.clear()
        print(f"{change or 'as it is':24}", end="")
        for case, (shapes, with_norms) in CASES.items():
            milliseconds, read = measure(shapes, with_norms=with_norms)
            print(f"{case}: {1000 * milliseconds:6.1f} µs, {read / milliseconds / 1e9:.2f} TB/s  ", end="", flush=True)
        print()
        if name:
            setattr(planning, name, before)


if __name__ == "__main__":
    main(sys.argv[1:])
