"""The Triton kernel that measures: each instance's input and output are read once, and one maximum comes out.

A program takes ``ROWS`` instances and sums the powers of their entries in float32, ``BLOCK`` entries at a time. Long
instances are cut into parts; of the programs that sum the parts of one, the last adds them up, in the same order.

Speed depends on how many loads are in flight. With many programs that is limited by the registers of a thread, so
``VEC`` neighbouring entries, which one thread loads, are added up before anything is kept; a program that has a
multiprocessor to itself has registers enough, and is faster with ``VEC`` = 1.
"""

import triton
import triton.language as tl

from . import layouts, planning

# Triton reads no globals but constants of its own.
ALONG, ACROSS = tl.constexpr(layouts.ALONG), tl.constexpr(layouts.ACROSS)
DIRECT, REPEATED, SPREAD = tl.constexpr(planning.DIRECT), tl.constexpr(planning.REPEATED), tl.constexpr(planning.SPREAD)
COLUMNS = tl.constexpr(planning.COLUMNS)


@triton.jit
def _of(entry, values):
    """Return the value that belongs to an entry."""
    value = values[0]
    for other in tl.static_range(1, len(values)):
        value = tl.where(entry == other, values[other], value)
    return value


@triton.jit
def _layout(numbers, UNIT: tl.constexpr):
    """Load how a tensor lies in memory.

    That is the size of an instance, the distances of instances in four levels from the outermost on, and of the entries
    of one, in three levels, the lengths of the last two and the distances in all.
    """
    n = numbers
    return (
        tl.load(n) * UNIT, tl.load(n + 1) * UNIT, tl.load(n + 2) * UNIT, tl.load(n + 3) * UNIT, tl.load(n + 4) * UNIT,
        tl.load(n + 5) * UNIT, tl.load(n + 6) * UNIT, tl.load(n + 7) * UNIT, tl.load(n + 8) * UNIT,
        tl.load(n + 9) * UNIT,
    )  # fmt: skip


@triton.jit
def _first(data, layout, upper, mids, highs):
    """Point at the first of the instances that follow one another at one distance."""
    _, top, high, mid, _, _, _, _, _, _ = layout
    return data + upper // mids // highs * top + upper // mids % highs * high + upper % mids * mid


@triton.jit
def _tile(data, layout, row, position, usable, LEVELS: tl.constexpr, KIND: tl.constexpr):
    """Load a tile of instances in float32, 0 beyond their ends; and return which entries it has."""
    size, _, _, _, low, a, b, s0, s1, s2 = layout
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
def _bias(bias, channel, mask, data):
    """Load the biases of positions, rounded as the layer rounded them when it added them."""
    return tl.load(bias + channel, mask=mask, other=0.0).to(data.dtype.element_ty).to(tl.float32)


@triton.jit
def _scale(scale, variance, channel, mask, eps):
    """Load ``α / sqrt(variance + ε)`` of positions, by which a batch norm multiplies them."""
    spread = tl.load(variance + channel, mask=mask, other=1.0).to(tl.float32) + eps
    return tl.load(scale + channel, mask=mask, other=0.0).to(tl.float32) / tl.sqrt(spread)


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
def _sums(x, x_layout, z, z_layout, row, usable, begin, end, bias, is_biased, scale, variance, has_norm, eps, channels,
          X_LEVELS: tl.constexpr, X_KIND: tl.constexpr, Z_LEVELS: tl.constexpr, Z_KIND: tl.constexpr,
          WHERE: tl.constexpr, INNER: tl.constexpr, BIASES: tl.constexpr, NORMS: tl.constexpr,
          P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Sum the powers of x, and of z less its bias; with ``NORMS`` also of z, and of z times the scale.

    For P = 0 these are the largest entries, nan if one is not finite. Positions run from ``begin`` to ``end``. All is
    read in one loop, so that the loads are in flight at the same time. Where all tiles have the same channels, the
    scale is applied to the powers of all tiles at once.
    """
    SUMS: tl.constexpr = BLOCK // VEC
    KEPT: tl.constexpr = BLOCK if NORMS and WHERE == REPEATED else SUMS
    column, z_size = tl.arange(0, BLOCK), z_layout[0]
    x_total = tl.zeros([ROWS, SUMS], tl.float32)
    z_total, normed_total = x_total, x_total
    x_spoiled, z_spoiled, normed_spoiled = x_total, x_total, x_total
    input_total = tl.zeros([ROWS, KEPT], tl.float32)
    input_spoiled = input_total
    given, normed = z_size * is_biased, z_size * has_norm
    remainder = column
    if WHERE != DIRECT and INNER == 1:
        remainder = column % channels
    added = tl.zeros([BLOCK], tl.float32)
    if BIASES and WHERE == REPEATED:
        added = _bias(bias, remainder, column < given, z)
    for start in range(begin, end, BLOCK):
        position = start + column
        channel = position
        if WHERE == SPREAD and INNER == 1:
            channel = start % channels + remainder
            channel = tl.where(channel < channels, channel, channel - channels)
        if INNER > 1:
            channel = position // INNER
        x_entry, mask = _tile(x, x_layout, row, position, usable, X_LEVELS, X_KIND)
        z_entry, mask = _tile(z, z_layout, row, position, usable, Z_LEVELS, Z_KIND)
        x_total, x_spoiled = _add(x_total, x_spoiled, x_entry, P)
        if NORMS:
            input_total, input_spoiled = _add(input_total, input_spoiled, z_entry, P)
            if WHERE != REPEATED:
                normed_entry = z_entry * _scale(scale, variance, channel, position < normed, eps)[None, :]
                normed_total, normed_spoiled = _add(normed_total, normed_spoiled, normed_entry, P)
        if BIASES:
            if WHERE != REPEATED:
                added = _bias(bias, channel, position < given, z)
            z_entry = tl.where(mask, z_entry - added[None, :], 0.0)
        if BIASES or not NORMS:
            z_total, z_spoiled = _add(z_total, z_spoiled, z_entry, P)
    x_sum, z_sum = _total(x_total, x_spoiled, P), _total(z_total, z_spoiled, P)
    input_sum, normed_sum = z_sum, z_sum
    if NORMS:
        input_sum, normed_sum = _total(input_total, input_spoiled, P), _total(normed_total, normed_spoiled, P)
        if WHERE == REPEATED:
            factor = tl.abs(_scale(scale, variance, remainder, column < normed, eps))
            if P == 2:
                factor = factor * factor
            normed_sum = _total(input_total * factor[None, :], input_spoiled, P)
        if not BIASES:
            z_sum = input_sum
    return x_sum, z_sum, input_sum, normed_sum


@triton.jit
def _add_parts(sums, count, P: tl.constexpr, WIDE: tl.constexpr):
    """Add up the sums of the parts of an instance."""
    part = tl.arange(0, WIDE)[None, :]
    # Not from a cache of the multiprocessor's own: another one may have written there a moment ago.
    found = tl.load(sums + part, mask=part < count, other=0.0, cache_modifier=".cg")
    return _total(found, found * 0.0, P)


@triton.jit
def _whole(x_sum, z_sum, input_sum, normed_sum, workspace, part, count,
           NORMS: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Keep the sums of a part; the last program of an instance gets those of the whole, and is told so."""
    sums, far = workspace + tl.program_id(0) - part, tl.num_programs(0)
    own = sums + part + tl.arange(0, 1)
    tl.store(own, x_sum)
    tl.store(own + far, z_sum)
    if NORMS:
        tl.store(own + 2 * far, input_sum)
        tl.store(own + 3 * far, normed_sum)
    is_last = tl.atomic_add(sums + 4 * far, 1.0, sem="acq_rel") == count - 1
    if is_last:
        x_sum, z_sum = _add_parts(sums, count, P, WIDE), _add_parts(sums + far, count, P, WIDE)
        if NORMS:
            input_sum = _add_parts(sums + 2 * far, count, P, WIDE)
            normed_sum = _add_parts(sums + 3 * far, count, P, WIDE)
    return x_sum, z_sum, input_sum, normed_sum, is_last


@triton.jit
def _raise_maximum(x_sum, z_sum, usable, maximum, dropped, known, P: tl.constexpr):
    """Raise the maximum, which is ``known``, to the largest gain of the instances that have these sums; return it."""
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
    return tl.maximum(known, largest)


@triton.jit(do_not_specialize=["slot"])  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    xs, zs, biases, scales, variances, table, workspace, maxima, dropped, resting, slot,
    ENTRIES: tl.constexpr, UNIT: tl.constexpr, X_LEVELS: tl.constexpr, X_KIND: tl.constexpr,
    Z_LEVELS: tl.constexpr, Z_KIND: tl.constexpr, P: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr,
    BIASES: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
    PART: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise the maximum of each entry to the largest gain of its instances, and count those that are not finite.

    An entry is a layer, a batch norm, or a layer with the batch norm that reads its output: that is read once for both.
    The programs of an entry follow those of the one before. Its row of the table has the number of its first program;
    the slots of the layer and of the batch norm, counted from ``slot`` on, -1 for what is missing; whether there is a
    bias; how many parts an instance has; how many tiles a program does, of how many. Instances are numbered (top, high,
    mid, low): there follow the numbers of the last three levels, that of the channels, and ``_layout`` of x and of z,
    the last in units of ``UNIT`` entries; and the bits of ε. ``P`` is 1, 2 or 0 for the infinity norm. What rests is
    not measured.

    If instances are cut into parts of ``PART`` entries, ``WIDE`` is a power of two that is not below their number; the
    workspace has four sums for each program, and a counter for each, which begins at zero.
    """
    program, entry = tl.program_id(0), 0
    if ENTRIES > 1:
        begins = tl.load(table + COLUMNS * tl.arange(0, ENTRIES))
        entry = tl.sum((program >= begins).to(tl.int32), 0) - 1
    numbers = table + COLUMNS * entry
    program -= tl.load(numbers)
    layer, norm, is_biased = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    count, steps, tiles = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    lows, mids, highs = tl.load(numbers + 7), tl.load(numbers + 8), tl.load(numbers + 9)
    channels = tl.load(numbers + 10) * UNIT
    x_layout, z_layout = _layout(numbers + 11, UNIT), _layout(numbers + 21, UNIT)
    eps = tl.load(numbers + 31).to(tl.float32, bitcast=True)

    has_norm = (norm >= 0).to(tl.int32)
    is_measured, is_normed = layer >= 0, norm >= 0
    layer, norm = slot + tl.maximum(layer, 0), slot + tl.maximum(norm, 0)
    is_measured = is_measured & (tl.load(resting + layer) == 0)
    is_normed = is_normed & (tl.load(resting + norm) == 0)
    if not (is_measured | is_normed):
        return
    # Before the instances, so that nothing waits for it.
    known, norm_known = tl.load(maxima + layer, cache_modifier=".cg"), tl.load(maxima + norm, cache_modifier=".cg")

    x, z, bias, scale, variance = (
        _of(entry, xs), _of(entry, zs), _of(entry, biases), _of(entry, scales), _of(entry, variances))  # fmt: skip
    if X_KIND == ACROSS or Z_KIND == ACROSS:
        lows = (lows // UNIT) * UNIT
    begin, end = 0, tl.maximum(x_layout[0], z_layout[0])
    part = program % count
    if WIDE > 0:
        begin = part * PART
        end = tl.where(count > 1, tl.minimum(begin + PART, end), end)
    in_row = (lows + ROWS - 1) // ROWS
    if ROWS == 1:
        steps = 1
    for step in range(steps):
        tile = program // count * steps + step
        upper = (tile // in_row).to(tl.int64)
        row = (tile % in_row) * ROWS + tl.arange(0, ROWS)
        usable = (row < lows) & (tile < tiles)
        x_sum, z_sum, input_sum, normed_sum = _sums(
            _first(x, x_layout, upper, mids, highs), x_layout, _first(z, z_layout, upper, mids, highs), z_layout,
            row, usable, begin, end, bias, is_biased, scale, variance, has_norm, eps, channels,
            X_LEVELS, X_KIND, Z_LEVELS, Z_KIND, WHERE, INNER, BIASES, NORMS, P, ROWS, BLOCK, VEC)  # fmt: skip
        goes_on = True
        if WIDE > 0:  # noqa: SIM102 - it is known when the kernel is compiled
            if count > 1:  # then a program has one instance
                x_sum, z_sum, input_sum, normed_sum, goes_on = _whole(
                    x_sum, z_sum, input_sum, normed_sum, workspace, part, count, NORMS, P, WIDE)  # fmt: skip
        if goes_on:
            if is_measured:
                known = _raise_maximum(x_sum, z_sum, usable, maxima + layer, dropped + layer, known, P)
            if NORMS:  # noqa: SIM102 - so is this
                if is_normed:
                    norm_known = _raise_maximum(
                        input_sum, normed_sum, usable, maxima + norm, dropped + norm, norm_known, P)  # fmt: skip
