"""The Triton kernel that measures a layer: it reads each instance's input and output once and keeps the largest gain.

A program takes ``ROWS`` instances and sums the powers of their entries in float32, ``BLOCK`` entries at a time. Long
instances are cut into parts; the program that finishes last adds the parts up, always in the same order.

Speed depends on how many loads are in flight, and that on the registers of a thread: so ``VEC`` neighbouring entries,
which one thread loads, are added up before anything is kept.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""Wx is z as it is."""
BIASED = tl.constexpr(1)
"""Wx is z less a bias per channel, rounded as the layer rounded it when it added it."""
NORMALISED = tl.constexpr(2)
"""Wx is x times ``α / sqrt(variance + ε)`` per channel."""

ALONG = tl.constexpr(0)
"""Neighbouring entries of an instance lie side by side in memory,"""
ACROSS = tl.constexpr(1)
"""or neighbouring instances do,"""
APART = tl.constexpr(2)
"""or neither."""

DIRECT = tl.constexpr(0)
"""The channel of a position in an instance is the position,"""
REPEATED = tl.constexpr(1)
"""or its remainder by the number of channels, which is the same in every tile,"""
SPREAD = tl.constexpr(2)
"""or the remainder of ``position // inner``."""


@triton.jit
def _per_channel(
    data, position, size, vector, variance, eps, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    FORM: tl.constexpr, WHERE: tl.constexpr,
):  # fmt: skip
    """Load the bias or the scale of each position in an instance."""
    channel, mask = position, position < size
    if WHERE != DIRECT:
        channel = (position // INNER) % CHANNELS
    value = tl.load(vector + channel, mask=mask, other=0.0).to(tl.float32)
    if FORM == BIASED:
        value = value.to(data.dtype.element_ty).to(tl.float32)
    else:  # torch.compile passes ε in float64
        spread = tl.load(variance + channel, mask=mask, other=1.0).to(tl.float32) + eps
        value /= tl.sqrt(spread.to(tl.float32))
    return value


@triton.jit
def _first(data, upper, mids, highs, top, high, mid):
    """Point at the first of the instances that follow one another at one distance."""
    return data + upper // mids // highs * top + upper // mids % highs * high + upper % mids * mid


@triton.jit
def _tile(
    data, row, position, size, usable, low, a, b, s0, s1, s2, LEVELS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load a tile of instances in float32, 0 beyond their ends; and return which entries it has."""
    mask = usable[:, None] & (position < size)[None, :]
    across, along = row.to(tl.int64), position
    if KIND != ACROSS:
        across = across * low
    if LEVELS == 1:
        if KIND != ALONG:
            along = position * s2
    else:
        last, rest = position % b, position // b
        if KIND != ALONG:
            last = last * s2
        along = rest * s1 + last if LEVELS == 2 else (rest // a) * s0 + (rest % a) * s1 + last
    return tl.load(data + across[:, None] + along[None, :], mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _add(total, spoiled, entry, P: tl.constexpr):
    """Add the powers of a tile's entries to the totals."""
    entry = tl.reshape(entry, [total.shape[0], total.shape[1], entry.shape[1] // total.shape[1]])
    if P == 2:
        total += tl.sum(entry * entry, 2)
    if P == 1:
        total += tl.sum(tl.abs(entry), 2)
    if P == 0:  # the largest; a maximum alone would hide an entry that is not finite
        total = tl.maximum(total, tl.max(tl.abs(entry), 2))
        spoiled += tl.sum(entry * 0.0, 2)
    return total, spoiled


@triton.jit
def _total(total, spoiled, P: tl.constexpr):
    """Add up the columns: the largest for the infinity norm, nan if an entry is not finite."""
    result = tl.sum(total, 1)
    if P == 0:
        result = tl.max(total, 1) + tl.sum(spoiled, 1)
    return result


@triton.jit
def _sum_of_parts(sums, row, usable, parts, P: tl.constexpr, WIDE: tl.constexpr):
    part = tl.arange(0, WIDE)
    mask = usable[:, None] & (part < parts)[None, :]
    # Not from a cache of the multiprocessor's own: another one may have written there a moment ago.
    found = tl.load(sums + row[:, None] * parts + part[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return _total(found, found * 0.0, P)


@triton.jit
def _raise_maximum(x_sum, z_sum, usable, maximum, dropped, known, P: tl.constexpr):
    """Raise the maximum, which was ``known``, to the largest gain of the instances that have these sums."""
    if P == 2:
        x_sum, z_sum = tl.sqrt(x_sum), tl.sqrt(z_sum)
    ratio = tl.where(x_sum == 0.0, 0.0, z_sum / x_sum)
    finite = (tl.abs(ratio) < float("inf")) & (x_sum < float("inf"))
    largest = tl.max(tl.where(usable & finite, ratio, -0.5), 0)  # -0.5: measured, but no instance was finite
    if largest > known:  # atomics on one address are serialized, and most programs have nothing new to report
        tl.atomic_max(maximum, largest, sem="relaxed")
    lost = tl.sum((usable & ~finite).to(tl.int64), 0)
    if lost > 0:
        tl.atomic_add(dropped, lost, sem="relaxed")


NUMBERS = [
    "index", "lows", "mids", "highs", "parts",
    *[f"{data}_{name}" for data in "xz" for name in ("size", "top", "high", "mid", "low", "a", "b", "s0", "s1", "s2")],
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    x, z, vector, variance, sums, maxima, counts, resting, eps, index, lows, mids, highs, parts,
    x_size, x_top, x_high, x_mid, x_low, x_a, x_b, x_s0, x_s1, x_s2,
    z_size, z_top, z_high, z_mid, z_low, z_a, z_b, z_s0, z_s1, z_s2,
    UNIT: tl.constexpr, X_LEVELS: tl.constexpr, X_KIND: tl.constexpr, Z_LEVELS: tl.constexpr, Z_KIND: tl.constexpr,
    P: tl.constexpr, FORM: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima[index]`` to the largest gain of the instances, and count those that are not finite.

    Does nothing while ``resting[index]`` is not zero. Instances are numbered (top, high, mid, low), of which ``lows``
    follow one another at the distance ``x_low``, and so on. Positions in an instance are
    numbered in ``X_LEVELS`` levels, of which the last are ``x_a`` and ``x_b`` long, with strides ``x_s0`` to ``x_s2``;
    so of z. Sizes and distances come in units of ``UNIT`` entries. ``P`` is 1, 2 or 0 for the infinity norm. ``counts``
    has two numbers per layer: instances that were not finite, and programs that are done, which is 0 between launches.
    ``WIDE`` is 0 if instances are whole; else a power of two that is not below the number of their ``parts``.
    """
    rests = tl.load(resting + index)
    if EARLY:  # launched before the kernel in front has ended
        tl.extra.cuda.gdc_wait()
    if rests != 0:
        return
    known = tl.load(maxima + index, cache_modifier=".cg")  # before the instances, so that nothing waits for it
    x_size, x_a, x_b, x_s0, x_s1, x_s2 = (
        x_size * UNIT, x_a * UNIT, x_b * UNIT, x_s0 * UNIT, x_s1 * UNIT, x_s2 * UNIT)  # fmt: skip
    x_top, x_high, x_mid, x_low = x_top * UNIT, x_high * UNIT, x_mid * UNIT, x_low * UNIT
    z_size, z_a, z_b, z_s0, z_s1, z_s2 = (
        z_size * UNIT, z_a * UNIT, z_b * UNIT, z_s0 * UNIT, z_s1 * UNIT, z_s2 * UNIT)  # fmt: skip
    z_top, z_high, z_mid, z_low = z_top * UNIT, z_high * UNIT, z_mid * UNIT, z_low * UNIT
    if X_KIND == ACROSS or Z_KIND == ACROSS:
        lows = (lows // UNIT) * UNIT
    tiles = (lows + ROWS - 1) // ROWS
    upper = (tl.program_id(0) // tiles).to(tl.int64)
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    usable = row < lows
    x, z = _first(x, upper, mids, highs, x_top, x_high, x_mid), _first(z, upper, mids, highs, z_top, z_high, z_mid)
    begin, end = 0, tl.maximum(x_size, z_size)
    if WIDE > 0:
        begin = tl.program_id(1) * PART
        end = tl.minimum(begin + PART, end)

    SUMS: tl.constexpr = BLOCK // VEC
    column = tl.arange(0, BLOCK)
    x_total = tl.zeros([ROWS, SUMS], tl.float32)
    z_total = tl.zeros([ROWS, SUMS], tl.float32)
    x_spoiled = tl.zeros([ROWS, SUMS], tl.float32)
    z_spoiled = tl.zeros([ROWS, SUMS], tl.float32)
    value = tl.zeros([BLOCK], tl.float32)
    if FORM != PLAIN and WHERE == REPEATED:
        value = _per_channel(z, column, z_size, vector, variance, eps, INNER, CHANNELS, FORM, WHERE)
    for start in range(begin, end, BLOCK):  # both are read in one loop, so that their loads are in flight together
        position = start + column
        x_entry, mask = _tile(x, row, position, x_size, usable, x_low, x_a, x_b, x_s0, x_s1, x_s2, X_LEVELS, X_KIND)
        z_entry = x_entry
        if FORM != NORMALISED:
            z_entry, mask = _tile(z, row, position, z_size, usable, z_low, z_a, z_b, z_s0, z_s1, z_s2, Z_LEVELS, Z_KIND)
        if FORM != PLAIN and WHERE != REPEATED:
            value = _per_channel(z, position, z_size, vector, variance, eps, INNER, CHANNELS, FORM, WHERE)
        if FORM == BIASED:
            z_entry = tl.where(mask, z_entry - value[None, :], 0.0)
        if FORM == NORMALISED:
            z_entry = x_entry * value[None, :]
        x_total, x_spoiled = _add(x_total, x_spoiled, x_entry, P)
        z_total, z_spoiled = _add(z_total, z_spoiled, z_entry, P)
    x_sum, z_sum = _total(x_total, x_spoiled, P), _total(z_total, z_spoiled, P)

    maximum, dropped = maxima + index, counts + 2 * index
    if WIDE == 0:
        _raise_maximum(x_sum, z_sum, usable, maximum, dropped, known, P)
    else:
        rows = tl.num_programs(0)
        own = sums + tl.program_id(0) * parts + tl.program_id(1) + tl.arange(0, 1)
        z_sums = sums + rows * parts
        tl.store(own, x_sum)
        tl.store(own + rows * parts, z_sum)
        tl.debug_barrier()  # one thread counts, and all have written
        if tl.atomic_add(dropped + 1, 1, sem="acq_rel") == rows * parts - 1:
            tl.store(dropped + 1, 0)
            AT_ONCE: tl.constexpr = BLOCK // WIDE if WIDE < BLOCK else 1
            for first in range(0, rows, AT_ONCE):
                instance = first + tl.arange(0, AT_ONCE)
                x_whole = _sum_of_parts(sums, instance, instance < rows, parts, P, WIDE)
                z_whole = _sum_of_parts(z_sums, instance, instance < rows, parts, P, WIDE)
                _raise_maximum(x_whole, z_whole, instance < rows, maximum, dropped, known, P)
