"""The Triton kernel of a step: it divides all weights, and its last program keeps what users see."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["every"])
def project_kernel(
    chunks, sizes, bounds, divided, kept_sizes, scales, counts, resting, counter, chunk_count, count, every,
    ENTRY: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LAYERS: tl.constexpr,
    IS_LAST: tl.constexpr,
):  # fmt: skip
    """Divide weights by ``max(1, size / bound)``, in chunks, each a row of (address, length, layer).

    Addresses and lengths are multiples of ``ALIGNED``: if that is 16, a thread reads several entries at once.

    Of the last launch of a step, the last program goes on when all others have read the sizes: it keeps sizes, scales
    and counts of all ``count`` layers for the user, and leaves the sizes unmeasured and the counter at zero. With
    ``every`` above 0 it counts down for how many steps the layers rest, and begins at ``every - 1`` again.
    """
    for chunk in range(tl.program_id(0), chunk_count, tl.num_programs(0)):
        row = chunks + 3 * chunk
        layer = tl.load(row + 2)
        factor = tl.div_rn(tl.load(sizes + layer), tl.load(bounds + layer))
        if factor > 1.0:
            data = tl.multiple_of(tl.load(row).to(tl.pointer_type(ENTRY)), ALIGNED)
            length = tl.multiple_of(tl.load(row + 1), ALIGNED)
            for start in range(0, CHUNK, BLOCK):
                place = start + tl.arange(0, BLOCK)
                entry = tl.load(data + place, mask=place < length).to(tl.float32)
                tl.store(data + place, tl.div_rn(entry, factor).to(ENTRY), mask=place < length)
    if IS_LAST:
        tl.debug_barrier()  # one thread counts, and all have read
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(counter, 0)
            layers = tl.arange(0, LAYERS)
            mask = layers < count
            size = tl.load(sizes + layers, mask=mask, other=-1.0)
            factors = tl.div_rn(size, tl.load(bounds + layers, mask=mask, other=1.0))
            is_divided = (tl.load(divided + layers, mask=mask, other=0) != 0) & (factors > 1.0)
            scale = tl.div_rn(1.0, tl.where(is_divided, factors, 1.0))
            rest = tl.load(resting + layers, mask=mask, other=0)
            tl.store(scales + layers, scale, mask=mask & (rest == 0))
            # -1: not measured; -0.5: measured, but no instance was finite.
            tl.store(kept_sizes + layers, tl.where(size >= 0, size, float("nan")), mask=mask & (size > -0.75))
            _count(counts + layers, size >= 0, mask)
            _count(counts + count + layers, scale < 1.0, mask)
            _count(counts + 2 * count + layers, scale < 0.9, mask)
            tl.store(sizes + layers, -1.0, mask=mask)
            if every > 0:
                tl.store(resting + layers, tl.where(rest > 0, rest - 1, every - 1), mask=mask)


@triton.jit
def _count(place, happened, mask):
    """Add one where something happened."""
    tl.store(place, tl.load(place, mask=mask, other=0) + happened.to(tl.int32), mask=mask)
