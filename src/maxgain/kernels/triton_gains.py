"""The Triton kernels that measure: each instance's input and output are read once, and one maximum comes out.

A program takes ``ROWS`` instances and sums the powers of their entries in float32, ``BLOCK`` entries at a time. Long
instances are cut into parts; of the programs that sum the parts of one, the last adds them up, in the same order.

Speed depends on how many loads are in flight. With many programs that is limited by the registers of a thread, so
``VEC`` neighbouring entries, which one thread loads, are added up before anything is kept; a program that has a
multiprocessor to itself has registers enough, and is faster with ``VEC`` = 1.
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
    data, position, given, vector, variance, eps, inner, channels, FORM: tl.constexpr, WHERE: tl.constexpr
):
    """Load the bias or the scale of each position in an instance, of which the first ``given`` have one."""
    channel, mask = position, position < given
    if WHERE != DIRECT:
        channel = (position // inner) % channels
    value = tl.load(vector + channel, mask=mask, other=0.0).to(tl.float32)
    if FORM == BIASED:
        value = value.to(data.dtype.element_ty).to(tl.float32)
    else:  # torch.compile passes ε in float64
        spread = tl.load(variance + channel, mask=mask, other=1.0).to(tl.float32) + eps
        value /= tl.sqrt(spread.to(tl.float32))
    return value


@triton.jit
def _tile(data, row, position, usable, size, low, a, b, s0, s1, s2, LEVELS: tl.constexpr, KIND: tl.constexpr):
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
def _sums(x, z, row, usable, begin, end,
          x_size, x_low, x_a, x_b, x_s0, x_s1, x_s2, z_size, z_low, z_a, z_b, z_s0, z_s1, z_s2,
          given, vector, variance, eps, inner, channels,
          X_LEVELS: tl.constexpr, X_KIND: tl.constexpr, Z_LEVELS: tl.constexpr, Z_KIND: tl.constexpr,
          FORM: tl.constexpr, WHERE: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
          VEC: tl.constexpr):  # fmt: skip
    """Sum the powers of x and of Wx of each instance (the largest entries for P = 0, nan if one is not finite).

    Positions run from ``begin`` to ``end``, multiples of ``BLOCK`` or the end of all. Both are read in one loop, so
    that their loads are in flight at the same time.
    """
    SUMS: tl.constexpr = BLOCK // VEC
    column = tl.arange(0, BLOCK)
    x_total = tl.zeros([ROWS, SUMS], tl.float32)
    z_total = tl.zeros([ROWS, SUMS], tl.float32)
    x_spoiled = tl.zeros([ROWS, SUMS], tl.float32)
    z_spoiled = tl.zeros([ROWS, SUMS], tl.float32)
    value = tl.zeros([BLOCK], tl.float32)
    if FORM != PLAIN and WHERE == REPEATED:
        value = _per_channel(z, column, given, vector, variance, eps, inner, channels, FORM, WHERE)
    for start in range(begin, end, BLOCK):
        position = start + column
        x_entry, mask = _tile(x, row, position, usable, x_size, x_low, x_a, x_b, x_s0, x_s1, x_s2, X_LEVELS, X_KIND)
        z_entry = x_entry
        if FORM != NORMALISED:
            z_entry, mask = _tile(z, row, position, usable, z_size, z_low, z_a, z_b, z_s0, z_s1, z_s2, Z_LEVELS, Z_KIND)
        if FORM != PLAIN and WHERE != REPEATED:
            value = _per_channel(z, position, given, vector, variance, eps, inner, channels, FORM, WHERE)
        if FORM == BIASED:
            z_entry = tl.where(mask, z_entry - value[None, :], 0.0)
        if FORM == NORMALISED:
            z_entry = x_entry * value[None, :]
        x_total, x_spoiled = _add(x_total, x_spoiled, x_entry, P)
        z_total, z_spoiled = _add(z_total, z_spoiled, z_entry, P)
    return _total(x_total, x_spoiled, P), _total(z_total, z_spoiled, P)


@triton.jit
def _keep(sums, instance, part, parts, value):
    """Keep the sum of a part."""
    tl.store(sums + instance * parts + part + tl.arange(0, 1), value)


@triton.jit
def _add_parts(sums, instance, parts, P: tl.constexpr, WIDE: tl.constexpr):
    """Add up the sums of the parts of an instance."""
    part = tl.arange(0, WIDE)[None, :]
    # Not from a cache of the multiprocessor's own: another one may have written there a moment ago.
    found = tl.load(sums + instance * parts + part, mask=part < parts, other=0.0, cache_modifier=".cg")
    return _total(found, found * 0.0, P)


@triton.jit
def _whole(x_sum, z_sum, x_sums, z_sums, counters, instance, part, parts, P: tl.constexpr, WIDE: tl.constexpr):
    """Keep the sums of a part; the last program of an instance gets those of the whole, and is told so."""
    _keep(x_sums, instance, part, parts, x_sum)
    _keep(z_sums, instance, part, parts, z_sum)
    is_last = tl.atomic_add(counters + instance, 1.0, sem="acq_rel") == parts - 1
    if is_last:
        x_sum, z_sum = _add_parts(x_sums, instance, parts, P, WIDE), _add_parts(z_sums, instance, parts, P, WIDE)
    return x_sum, z_sum, is_last


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


# --- One layer, however it lies in memory -----------------------------------------------------------------------------

NUMBERS = [
    "index", "lows", "mids", "highs", "tiles", "steps", "parts",
    *[f"{data}_{name}" for data in "xz" for name in ("size", "top", "high", "mid", "low", "a", "b", "s0", "s1", "s2")],
]  # fmt: skip


@triton.jit
def _first(data, upper, mids, highs, top, high, mid):
    """Point at the first of the instances that follow one another at one distance."""
    return data + upper // mids // highs * top + upper // mids % highs * high + upper % mids * mid


@triton.jit(do_not_specialize=NUMBERS)  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    x, z, vector, variance, workspace, maxima, dropped, resting, eps, index, lows, mids, highs, tiles, steps, parts,
    x_size, x_top, x_high, x_mid, x_low, x_a, x_b, x_s0, x_s1, x_s2,
    z_size, z_top, z_high, z_mid, z_low, z_a, z_b, z_s0, z_s1, z_s2,
    UNIT: tl.constexpr, X_LEVELS: tl.constexpr, X_KIND: tl.constexpr, Z_LEVELS: tl.constexpr, Z_KIND: tl.constexpr,
    P: tl.constexpr, FORM: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima[index]`` to the largest gain of the instances, and count those that are not finite.

    Does nothing while ``resting[index]`` is not zero. Instances are numbered (top, high, mid, low), of which ``lows``
    follow one another at the distance ``x_low``, and so on. Positions in an instance are numbered in ``X_LEVELS``
    levels, of which the last are ``x_a`` and ``x_b`` long, with strides ``x_s0`` to ``x_s2``; so of z. Sizes and
    distances come in units of ``UNIT`` entries. ``P`` is 1, 2 or 0 for the infinity norm. A program does ``steps`` of
    all ``tiles``. ``WIDE`` is 0 if instances are whole; else a power of two that is not below the number of their
    ``parts``, and the workspace has the sums of x, those of Wx, and a counter for each instance, which begins at zero.
    """
    if tl.load(resting + index) != 0:
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
    begin, end = 0, tl.maximum(x_size, z_size)
    if WIDE > 0:
        begin = tl.program_id(1) * PART
        end = tl.minimum(begin + PART, end)
    in_row = (lows + ROWS - 1) // ROWS
    for step in range(steps):
        tile = tl.program_id(0) * steps + step
        upper = (tile // in_row).to(tl.int64)
        row = (tile % in_row) * ROWS + tl.arange(0, ROWS)
        usable = (row < lows) & (tile < tiles)
        x_sum, z_sum = _sums(
            _first(x, upper, mids, highs, x_top, x_high, x_mid), _first(z, upper, mids, highs, z_top, z_high, z_mid),
            row, usable, begin, end, x_size, x_low, x_a, x_b, x_s0, x_s1, x_s2,
            z_size, z_low, z_a, z_b, z_s0, z_s1, z_s2, z_size, vector, variance, eps, INNER, CHANNELS,
            X_LEVELS, X_KIND, Z_LEVELS, Z_KIND, FORM, WHERE, P, ROWS, BLOCK, VEC)  # fmt: skip
        goes_on = True
        if WIDE > 0:
            part, z_sums = tl.program_id(1), workspace + tiles * parts
            counters = z_sums + tiles * parts
            x_sum, z_sum, goes_on = _whole(x_sum, z_sum, workspace, z_sums, counters, tile, part, parts, P, WIDE)
        if goes_on:
            known = _raise_maximum(x_sum, z_sum, usable, maxima + index, dropped + index, known, P)


# --- Several layers in one launch -------------------------------------------------------------------------------------
#
# An entry of the tuples is a layer, or a convolution with the batch norm that reads its output: that is read once for
# both. Its programs follow those of the entry before, from ``begins`` on; every program looks for its entry first.
#
# Triton compiles another kernel where a number is 1 or a multiple of 16, and in tuples ``do_not_specialize`` does not
# keep it from that. So numbers that differ from launch to launch come as 2 n + 3, which is neither.


@triton.jit
def _entry(program, begins):
    """Find the entry of a program."""
    entry = 0
    for other in tl.static_range(1, len(begins)):
        entry += (program >= (begins[other] >> 1) - 1).to(tl.int32)
    return entry


@triton.jit
def _of(entry, values):
    """Return the value that belongs to an entry."""
    value = values[0]
    for other in tl.static_range(1, len(values)):
        value = tl.where(entry == other, values[other], value)
    return value


@triton.jit
def _number_of(entry, values):
    """As ``_of``, of numbers that come as 2 n + 3."""
    return (_of(entry, values) >> 1) - 1


@triton.jit
def _dense_sums(x, z, row, usable, begin, end, x_size, z_size, bias, given, scale, variance, eps, channels,
                HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, WHERE: tl.constexpr, P: tl.constexpr,
                ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """As ``_sums`` of x and of z less its bias; with ``HAS_NORM`` also of z, and of z times the scale.

    Where all tiles have the same channels, the scale is applied to the powers of all tiles at once.
    """
    SUMS: tl.constexpr = BLOCK // VEC
    KEPT: tl.constexpr = BLOCK if HAS_NORM and WHERE == REPEATED else SUMS
    column = tl.arange(0, BLOCK)
    x_total = tl.zeros([ROWS, SUMS], tl.float32)
    z_total, normed_total = x_total, x_total
    x_spoiled, z_spoiled, normed_spoiled = x_total, x_total, x_total
    input_total = tl.zeros([ROWS, KEPT], tl.float32)
    input_spoiled = input_total
    added = tl.zeros([BLOCK], tl.float32)
    remainder = column % channels
    if HAS_BIAS and WHERE == REPEATED:
        added = _per_channel(z, column, given, bias, bias, 0.0, 1, channels, BIASED, WHERE)
    for start in range(begin, end, BLOCK):
        position = start + column
        channel = position
        if WHERE == SPREAD:
            channel = start % channels + remainder
            channel = tl.where(channel < channels, channel, channel - channels)
        x_entry, mask = _tile(x, row, position, usable, x_size, x_size, 0, 0, 0, 0, 0, 1, ALONG)
        z_entry, mask = _tile(z, row, position, usable, z_size, z_size, 0, 0, 0, 0, 0, 1, ALONG)
        x_total, x_spoiled = _add(x_total, x_spoiled, x_entry, P)
        if HAS_NORM:
            input_total, input_spoiled = _add(input_total, input_spoiled, z_entry, P)
            if WHERE != REPEATED:
                factor = _per_channel(z, channel, z_size, scale, variance, eps, 1, channels, NORMALISED, DIRECT)
                normed_total, normed_spoiled = _add(normed_total, normed_spoiled, z_entry * factor[None, :], P)
        if HAS_BIAS:
            if WHERE != REPEATED:
                added = _per_channel(z, channel, given, bias, bias, 0.0, 1, channels, BIASED, DIRECT)
            z_entry = tl.where(mask, z_entry - added[None, :], 0.0)
        if HAS_BIAS or not HAS_NORM:
            z_total, z_spoiled = _add(z_total, z_spoiled, z_entry, P)
    x_sum, z_sum = _total(x_total, x_spoiled, P), _total(z_total, z_spoiled, P)
    input_sum, normed_sum = z_sum, z_sum
    if HAS_NORM:
        input_sum, normed_sum = _total(input_total, input_spoiled, P), _total(normed_total, normed_spoiled, P)
        if WHERE == REPEATED:
            factor = tl.abs(_per_channel(z, column, z_size, scale, variance, eps, 1, channels, NORMALISED, WHERE))
            if P == 2:
                factor = factor * factor
            normed_sum = _total(input_total * factor[None, :], input_spoiled, P)
        if not HAS_BIAS:
            z_sum = input_sum
    return x_sum, z_sum, input_sum, normed_sum


@triton.jit(do_not_specialize=["first"])
def gains_of_layers_kernel(
    xs, zs, biases, scales, variances, workspace, maxima, dropped, resting, eps, first, slots, norms, begins, rows,
    x_sizes, z_sizes, channels,
    P: tl.constexpr, WHERE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
    PART: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr, BIASES: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """As ``gains_kernel``, of layers whose instances and entries follow one another without gaps.

    ``slots`` has 2 (slot + 1) of a layer, and one more if it has a bias; 0 of a batch norm that is alone, whose x is
    empty. ``norms`` has slot + 1 of the batch norm that reads z, or 0, as all have without ``NORMS``. From ``first`` on
    the workspace holds four sums for each program, and its counters, which begin at zero.
    """
    program = tl.program_id(0)
    entry = _entry(program, begins)
    begin = _number_of(entry, begins)
    program -= begin
    slot = _number_of(entry, slots)
    has_bias, is_measured, is_normed = slot % 2, slot > 0, False
    slot = tl.maximum(slot // 2 - 1, 0)
    is_measured = is_measured & (tl.load(resting + slot) == 0)
    if NORMS:
        norm = _number_of(entry, norms)
        is_normed = norm > 0
        norm = tl.maximum(norm - 1, 0)
        is_normed = is_normed & (tl.load(resting + norm) == 0)
    if not (is_measured | is_normed):
        return
    known = tl.load(maxima + slot, cache_modifier=".cg")
    if NORMS:
        norm_known = tl.load(maxima + norm, cache_modifier=".cg")
    all_rows, repeat = _number_of(entry, rows), _of(entry, channels)
    x, x_size, z, z_size = _of(entry, xs), _of(entry, x_sizes), _of(entry, zs), _of(entry, z_sizes)
    bias, scale, variance = _of(entry, biases), _of(entry, scales), _of(entry, variances)
    given = z_size * has_bias
    size, start, count = tl.maximum(x_size, z_size), 0, 1
    end = size
    if WIDE > 0:
        count = (size + PART - 1) // PART
        start = (program % count) * PART
        end = tl.minimum(size, start + PART)
    for step in range(STEPS):
        row = ((program // count).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        usable = row < all_rows
        if is_normed:  # never without NORMS
            x_sum, z_sum, input_sum, normed_sum = _dense_sums(
                x, z, row, usable, start, end, x_size, z_size, bias, given, scale, variance, eps, repeat,
                BIASES, True, WHERE, P, ROWS, BLOCK, VEC)  # fmt: skip
        else:
            x_sum, z_sum, input_sum, normed_sum = _dense_sums(
                x, z, row, usable, start, end, x_size, z_size, bias, given, bias, bias, eps, repeat,
                BIASES, False, WHERE, P, ROWS, BLOCK, VEC)  # fmt: skip
        goes_on = True
        if WIDE > 0 and count > 1:
            instance, far = program // count, tl.num_programs(0)
            sums = workspace + first + begin
            _keep(sums, instance, program % count, count, x_sum)
            _keep(sums + far, instance, program % count, count, z_sum)
            if NORMS:
                _keep(sums + 2 * far, instance, program % count, count, input_sum)
                _keep(sums + 3 * far, instance, program % count, count, normed_sum)
            goes_on = tl.atomic_add(sums + 4 * far + instance, 1.0, sem="acq_rel") == count - 1
            if goes_on:
                x_sum = _add_parts(sums, instance, count, P, WIDE)
                z_sum = _add_parts(sums + far, instance, count, P, WIDE)
                if NORMS:
                    input_sum = _add_parts(sums + 2 * far, instance, count, P, WIDE)
                    normed_sum = _add_parts(sums + 3 * far, instance, count, P, WIDE)
        if goes_on:
            if is_measured:
                known = _raise_maximum(x_sum, z_sum, usable, maxima + slot, dropped + slot, known, P)
            if NORMS:  # noqa: SIM102  -- one of them is known when it is compiled
                if is_normed:
                    norm_known = _raise_maximum(
                        input_sum, normed_sum, usable, maxima + norm, dropped + norm, norm_known, P)  # fmt: skip
