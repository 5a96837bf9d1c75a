"""The Triton kernels of a step: one settles what every layer is divided by, one divides all weights."""

import triton
import triton.language as tl


@triton.jit
def settle_kernel(
    sizes, bounds, divided, found_inf, kept_sizes, scales, factors, count,
    HAS_FOUND_INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``factors = max(1, sizes / bounds)`` where a layer is divided and the step took place; keep what users see."""
    layer = tl.arange(0, BLOCK)
    mask = layer < count
    size = tl.load(sizes + layer, mask=mask, other=-1.0)
    factor = tl.div_rn(size, tl.load(bounds + layer, mask=mask, other=1.0))
    counts = tl.load(divided + layer, mask=mask, other=0) != 0
    known = mask & (size >= 0)
    if HAS_FOUND_INF:
        happened = tl.load(found_inf) <= 0
        counts &= happened
        known &= happened
    factor = tl.where(counts & (factor > 1.0), factor, 1.0)
    tl.store(factors + layer, factor, mask=mask)
    tl.store(scales + layer, tl.div_rn(1.0, factor), mask=mask)
    tl.store(kept_sizes + layer, size, mask=known)


@triton.jit
def shrink_kernel(chunks, factors, ENTRY: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Divide a chunk of a weight by its layer's factor. A chunk is a row of (address, length, layer)."""
    row = chunks + 3 * tl.program_id(0)
    factor = tl.load(factors + tl.load(row + 2))
    if factor > 1.0:
        data = tl.load(row).to(tl.pointer_type(ENTRY))
        length = tl.load(row + 1)
        for start in range(0, CHUNK, BLOCK):
            place = start + tl.arange(0, BLOCK)
            entry = tl.load(data + place, mask=place < length).to(tl.float32)
            tl.store(data + place, tl.div_rn(entry, factor).to(ENTRY), mask=place < length)
