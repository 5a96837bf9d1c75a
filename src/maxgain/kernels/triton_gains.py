"""The Triton kernel that measures: each instance's input and output are read once, and one maximum comes out.

A program takes ``ROWS`` instances. It sums the powers of their entries in float32. Where such a sum may have over- or
underflowed, the program reads its instances again, scaled by their largest entries; nearly all programs never do. A
batch may have too few long instances to keep a GPU busy: other programs have then summed the parts of each before.

What limits it is how many loads are under way. With many programs that is a matter of the registers a thread needs, so
``TOGETHER`` neighbouring entries, which one thread loads, are added up before anything is kept; a program that has a
multiprocessor to itself has registers enough, and is faster if it keeps them apart.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""The entries as they are."""
BIASED = tl.constexpr(1)
"""The entries less a bias per channel, rounded as the layer rounded it when it added it."""
NORMALISED = tl.constexpr(2)
"""The entries times ``α / sqrt(variance + ε)`` per channel."""

SMALLEST_TRUSTED = tl.constexpr(1e-24)
"""Below this sum, powers that were flushed to zero may matter: tiny / eps · 1e7 of float32."""
LARGEST_TRUSTED = tl.constexpr(4e31)
"""Above it, powers may have overflowed: max · eps of float32."""
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _per_channel(data, position, size, vector, variance, eps,
                 FORM: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """The bias or the scale that belongs to each position in an instance; ``CHANNELS`` = 0: one per position."""
    if CHANNELS == 0:
        channel, mask = position, position < size
    else:
        channel, mask = (position // INNER) % CHANNELS, position >= 0
    value = tl.load(vector + channel, mask=mask, other=0.0).to(tl.float32)
    if FORM == BIASED:
        value = value.to(data.dtype.element_ty).to(tl.float32)
    else:  # torch.compile passes ε in float64
        spread = tl.load(variance + channel, mask=mask, other=1.0).to(tl.float32) + eps
        value /= tl.sqrt(spread.to(tl.float32))
    return value


@triton.jit
def _tile(data, row, size, position, usable):
    """A tile of the instances' entries in float32, 0 beyond their end; and where it is within them."""
    mask = usable[:, None] & (position < size)[None, :]
    return tl.load(data + row[:, None] * size + position[None, :], mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _added(total, spoiled, entry, scale, P: tl.constexpr, SCALED: tl.constexpr):
    """The totals with the powers of a tile's entries, divided by ``scale`` first if ``SCALED``."""
    if SCALED:
        entry = entry / scale[:, None]
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
def _norms(x, z, row, begin, end, x_size, z_size, x_scale, z_scale, usable, vector, variance, eps,
           FORM: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
           P: tl.constexpr, SCALED: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """The sums of powers of x and of Wx for each instance (the largest entries for P = 0, nan if one is not finite).

    Of the positions from ``begin`` to ``end``, which are multiples of ``BLOCK`` or the end of all. Both are read in one
    loop, so that their loads wait for memory together.
    """
    # In channels_last every tile begins with channel 0, so what belongs to its positions is the same for all tiles.
    SAME: tl.constexpr = INNER == 1 and CHANNELS > 0 and BLOCK % max(CHANNELS, 1) == 0
    SUMS: tl.constexpr = BLOCK // TOGETHER
    column = tl.arange(0, BLOCK)
    x_total = tl.zeros([ROWS, SUMS], tl.float32)
    z_total = tl.zeros([ROWS, SUMS], tl.float32)
    x_spoiled = tl.zeros([ROWS, SUMS], tl.float32)
    z_spoiled = tl.zeros([ROWS, SUMS], tl.float32)
    value = tl.zeros([BLOCK], tl.float32)
    if FORM != PLAIN and SAME:
        value = _per_channel(z, column, z_size, vector, variance, eps, FORM, INNER, CHANNELS)
    for start in range(begin, end, BLOCK):
        position = start + column
        x_entry, mask = _tile(x, row, x_size, position, usable)
        z_entry = x_entry
        if FORM != NORMALISED:
            z_entry, mask = _tile(z, row, z_size, position, usable)
        if FORM != PLAIN and not SAME:
            value = _per_channel(z, position, z_size, vector, variance, eps, FORM, INNER, CHANNELS)
        if FORM == BIASED:
            z_entry = tl.where(mask, z_entry - value[None, :], 0.0)
        if FORM == NORMALISED:
            z_entry = x_entry * value[None, :]
        x_total, x_spoiled = _added(x_total, x_spoiled, x_entry, x_scale, P, SCALED)
        z_total, z_spoiled = _added(z_total, z_spoiled, z_entry, z_scale, P, SCALED)
    if P == 0:
        x_norm, z_norm = tl.max(x_total, 1) + tl.sum(x_spoiled, 1), tl.max(z_total, 1) + tl.sum(z_spoiled, 1)
    else:
        x_norm, z_norm = tl.sum(x_total, 1), tl.sum(z_total, 1)
    return x_norm, z_norm


@triton.jit
def sums_kernel(
    x, z, vector, variance, sums, eps, x_size, z_size, parts,
    P: tl.constexpr, FORM: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sum one part of one instance, of x and of Wx; ``gains_kernel`` adds them up, always in the same order."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    one = tl.full([1], 1.0, tl.float32)
    begin = tl.program_id(1) * PART
    end = tl.minimum(begin + PART, tl.maximum(x_size, z_size))
    x_sum, z_sum = _norms(x, z, row, begin, end, x_size, z_size, one, one, row >= 0, vector, variance, eps,
                          FORM, INNER, CHANNELS, P, False, 1, BLOCK, TOGETHER)  # fmt: skip
    place = sums + 2 * (row * parts + tl.program_id(1))
    tl.store(place, x_sum)
    tl.store(place + 1, z_sum)


@triton.jit
def _together(sums, row, usable, parts, which, P: tl.constexpr, WIDE: tl.constexpr):
    """What ``sums_kernel`` found for each instance, added up."""
    part = tl.arange(0, WIDE)
    mask = usable[:, None] & (part < parts)[None, :]
    found = tl.load(sums + 2 * (row[:, None] * parts + part[None, :]) + which, mask=mask, other=0.0)
    total = tl.sum(found, 1)
    if P == 0:
        total = tl.max(found, 1) + tl.sum(found * 0.0, 1)
    return total


@triton.jit(do_not_specialize=["index"])  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    x, z, vector, variance, sums, maxima, dropped, eps, index, rows, x_size, z_size, parts,
    P: tl.constexpr, FORM: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima[index]`` to the largest gain of the instances, and count those that are not finite.

    ``P`` is 1, 2 or 0 for the infinity norm. ``WIDE`` is 0 if every instance is whole; else the sums of its parts are
    known, and it is a power of two that is not below their number.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    usable = row < rows
    known = tl.load(maxima + index, cache_modifier=".cg")  # asked for before the instances, so nobody waits for it
    one = tl.full([ROWS], 1.0, tl.float32)
    size = tl.maximum(x_size, z_size)
    if WIDE > 0:
        x_norm = _together(sums, row, usable, parts, 0, P, WIDE)
        z_norm = _together(sums, row, usable, parts, 1, P, WIDE)
    else:
        x_norm, z_norm = _norms(x, z, row, 0, size, x_size, z_size, one, one, usable, vector, variance, eps,
                                FORM, INNER, CHANNELS, P, False, ROWS, BLOCK, TOGETHER)  # fmt: skip
    scale_ratio = one
    if P != 0:
        trusted = (x_norm > SMALLEST_TRUSTED) & (x_norm < LARGEST_TRUSTED)
        trusted &= (z_norm > SMALLEST_TRUSTED) & (z_norm < LARGEST_TRUSTED)
        if tl.min((trusted | ~usable).to(tl.int32), 0) == 0:
            x_scale, z_scale = _norms(x, z, row, 0, size, x_size, z_size, one, one, usable, vector, variance, eps,
                                      FORM, INNER, CHANNELS, 0, False, ROWS, BLOCK, TOGETHER)  # fmt: skip
            # A comparison and not a maximum, which would lose a nan.
            x_scale = tl.where(x_scale < TINY, TINY, x_scale)
            z_scale = tl.where(z_scale < TINY, TINY, z_scale)
            scale_ratio = z_scale / x_scale
            x_norm, z_norm = _norms(x, z, row, 0, size, x_size, z_size, x_scale, z_scale, usable, vector, variance, eps,
                                    FORM, INNER, CHANNELS, P, True, ROWS, BLOCK, TOGETHER)  # fmt: skip
    if P == 2:
        x_norm, z_norm = tl.sqrt(x_norm), tl.sqrt(z_norm)
    ratio = scale_ratio * (z_norm / x_norm)
    ratio = tl.where(x_norm == 0.0, 0.0, ratio)
    finite = tl.abs(ratio) < float("inf")
    largest = tl.max(tl.where(usable & finite, ratio, 0.0), 0)
    if largest > known:  # atomics on one address stand in line, and most programs have nothing new to tell
        tl.atomic_max(maxima + index, largest, sem="relaxed")
    lost = tl.sum((usable & ~finite).to(tl.int64), 0)
    if lost > 0:
        tl.atomic_add(dropped + index, lost, sem="relaxed")
