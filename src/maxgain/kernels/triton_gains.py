"""The Triton kernels that measure: each instance's input and output are read once, and one maximum comes out.

A program takes ``ROWS`` instances and sums the powers of their entries in float32. A batch may have too few long
instances to keep a GPU busy: then other programs have summed the parts of each before, or, where several layers share a
launch, do so in the same one.

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
def _tile(data, start, size, position, usable):
    """Load a tile of the instances that start there, in float32, 0 beyond their end; and return where it is in them."""
    mask = usable[:, None] & (position < size)[None, :]
    return tl.load(data + start[:, None] + position[None, :], mask=mask, other=0.0).to(tl.float32), mask


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
def _sums(x, z, x_at, z_at, begin, end, x_size, z_size, usable, given, vector, variance, eps, inner, channels,
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
        x_entry, mask = _tile(x, x_at, x_size, position, usable)
        z_entry = x_entry
        if FORM != NORMALISED:
            z_entry, mask = _tile(z, z_at, z_size, position, usable)
        if FORM != PLAIN and WHERE != REPEATED:
            value = _per_channel(z, position, given, vector, variance, eps, inner, channels, FORM, WHERE)
        if FORM == BIASED:
            z_entry = tl.where(mask, z_entry - value[None, :], 0.0)
        if FORM == NORMALISED:
            z_entry = x_entry * value[None, :]
        x_total, x_spoiled = _add(x_total, x_spoiled, x_entry, P)
        z_total, z_spoiled = _add(z_total, z_spoiled, z_entry, P)
    if P == 0:
        x_sum, z_sum = tl.max(x_total, 1) + tl.sum(x_spoiled, 1), tl.max(z_total, 1) + tl.sum(z_spoiled, 1)
    else:
        x_sum, z_sum = tl.sum(x_total, 1), tl.sum(z_total, 1)
    return x_sum, z_sum


@triton.jit
def _add_parts(sums, row, usable, parts, P: tl.constexpr, WIDE: tl.constexpr):
    """Add up the sums of the parts of each instance."""
    part = tl.arange(0, WIDE)
    mask = usable[:, None] & (part < parts)[None, :]
    # Not from a cache of the multiprocessor's own: another one may have written there a moment ago.
    found = tl.load(sums + row[:, None] * parts + part[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    total = tl.sum(found, 1)
    if P == 0:
        total = tl.max(found, 1) + tl.sum(found * 0.0, 1)
    return total


@triton.jit
def _raise_maximum(x_sum, z_sum, usable, maxima, dropped, index, known, P: tl.constexpr):
    """Raise ``maxima[index]``, which was ``known``, to the largest gain of the instances that have these sums."""
    if P == 2:
        x_sum, z_sum = tl.sqrt(x_sum), tl.sqrt(z_sum)
    ratio = tl.where(x_sum == 0.0, 0.0, z_sum / x_sum)
    finite = (tl.abs(ratio) < float("inf")) & (x_sum < float("inf"))
    largest = tl.max(tl.where(usable & finite, ratio, -0.5), 0)  # -0.5: measured, but no instance was finite
    if largest > known:  # atomics on one address are serialized, and most programs have nothing new to report
        tl.atomic_max(maxima + index, largest, sem="relaxed")
    lost = tl.sum((usable & ~finite).to(tl.int64), 0)
    if lost > 0:
        tl.atomic_add(dropped + index, lost, sem="relaxed")


@triton.jit(do_not_specialize=["index"])
def sums_kernel(
    x, z, vector, variance, sums, resting, eps, index, x_size, z_size, x_step, z_step, parts,
    P: tl.constexpr, FORM: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, VEC: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sum one part of one instance, of x and of Wx; ``gains_kernel`` adds them up, always in the same order."""
    if tl.load(resting + index) != 0:
        return
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    begin = tl.program_id(1) * PART
    end = tl.minimum(begin + PART, tl.maximum(x_size, z_size))
    x_sum, z_sum = _sums(x, z, row * x_step, row * z_step, begin, end, x_size, z_size, row >= 0, z_size, vector,
                         variance, eps, INNER, CHANNELS, FORM, WHERE, P, 1, BLOCK, VEC)  # fmt: skip
    own = sums + row * parts + tl.program_id(1)
    tl.store(own, x_sum)
    tl.store(own + tl.num_programs(0) * parts, z_sum)


@triton.jit(do_not_specialize=["index"])  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    x, z, vector, variance, sums, maxima, dropped, resting, eps, index, rows, x_size, z_size, x_step, z_step, parts,
    P: tl.constexpr, FORM: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima[index]`` to the largest gain of the instances, and count those that are not finite.

    Does nothing while ``resting[index]`` is not zero. Instances are ``x_step`` and ``z_step`` entries apart. ``P`` is
    1, 2 or 0 for the infinity norm. ``WIDE`` is 0 if every instance is whole; else the sums of its parts are known, and
    it is a power of two that is not below their number.
    """
    if tl.load(resting + index) != 0:
        return
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    usable = row < rows
    known = tl.load(maxima + index, cache_modifier=".cg")  # before the instances, so that nothing waits for it
    if WIDE > 0:
        x_sum = _add_parts(sums, row, usable, parts, P, WIDE)
        z_sum = _add_parts(sums + rows * parts, row, usable, parts, P, WIDE)
    else:
        x_sum, z_sum = _sums(x, z, row * x_step, row * z_step, 0, tl.maximum(x_size, z_size), x_size, z_size, usable,
                             z_size, vector, variance, eps, INNER, CHANNELS, FORM, WHERE, P, ROWS, BLOCK,
                             VEC)  # fmt: skip
    _raise_maximum(x_sum, z_sum, usable, maxima, dropped, index, known, P)


# --- Several layers in one launch -------------------------------------------------------------------------------------
#
# Each layer is one entry of the tuples, and its programs follow those of the layer before, from ``begins`` on. Every
# program looks for its layer first, which is why there are few tuples: ``forms`` has 4 index + form.
#
# Triton compiles a kernel of its own where a number is 1 or a multiple of 16, and in tuples ``do_not_specialize`` does
# not keep it from that. So numbers that differ from launch to launch come as 2 n + 3, which is neither.


@triton.jit
def _layer(program, begins):
    """Find the layer of a program."""
    layer = 0
    for other in tl.static_range(1, len(begins)):
        layer += (program >= (begins[other] >> 1) - 1).to(tl.int32)
    return layer


@triton.jit
def _of(layer, values):
    """Return the value that belongs to a layer."""
    value = values[0]
    for other in tl.static_range(1, len(values)):
        value = tl.where(layer == other, values[other], value)
    return value


@triton.jit
def _number_of(layer, values):
    """As ``_of``, of numbers that come as 2 n + 3."""
    return (_of(layer, values) >> 1) - 1


@triton.jit
def _is_last(count, counter):
    """Whether all others that count here have done so; what they wrote before can be read then."""
    return tl.atomic_add(counter, 1.0, sem="acq_rel") == count - 1


@triton.jit(do_not_specialize=["first"])
def gains_of_layers_kernel(
    xs, zs, vectors, variances, workspace, maxima, dropped, resting, eps, first, forms, begins, rows, x_sizes, z_sizes,
    channels,
    P: tl.constexpr, WHERE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
    PART: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """As ``sums_kernel`` and ``gains_kernel`` in one: of the programs that sum parts of an instance, the last goes on.

    If ``WIDE`` is 0, every instance is whole. The workspace holds, from ``first`` on, the sums of x in the order of the
    programs, those of Wx, and counters. A program does ``STEPS`` tiles.
    """
    program = tl.program_id(0)
    layer = _layer(program, begins)
    begin = _number_of(layer, begins)
    program -= begin
    form = _number_of(layer, forms)
    index, form = form // 4, form % 4
    if tl.load(resting + index) != 0:
        return
    known = tl.load(maxima + index, cache_modifier=".cg")
    all_rows = _number_of(layer, rows)
    x, x_size, z, z_size = _of(layer, xs), _of(layer, x_sizes), _of(layer, zs), _of(layer, z_sizes)
    vector, variance, repeat = _of(layer, vectors), _of(layer, variances), _of(layer, channels)
    given = tl.where(form == PLAIN, 0, z_size)
    size, start, count = tl.maximum(x_size, z_size), 0, 1
    end = size
    if WIDE > 0:
        count = (size + PART - 1) // PART
        start = (program % count) * PART
        end = tl.minimum(size, start + PART)
    for step in range(STEPS):
        row = ((program // count).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        usable = row < all_rows
        if form == NORMALISED:
            x_sum, z_sum = _sums(x, z, row * x_size, row * z_size, start, end, x_size, z_size, usable, given, vector,
                                 variance, eps, 1, repeat, NORMALISED, WHERE, P, ROWS, BLOCK, VEC)  # fmt: skip
        else:
            x_sum, z_sum = _sums(x, z, row * x_size, row * z_size, start, end, x_size, z_size, usable, given, vector,
                                 vector, 0.0, 1, repeat, BIASED, WHERE, P, ROWS, BLOCK, VEC)  # fmt: skip
        goes_on = True
        if WIDE > 0 and count > 1:
            x_sums = workspace + first + begin
            z_sums = x_sums + tl.num_programs(0)
            tl.store(x_sums + program + tl.arange(0, 1), x_sum)
            tl.store(z_sums + program + tl.arange(0, 1), z_sum)
            goes_on = _is_last(count, z_sums + tl.num_programs(0) + program // count)
            if goes_on:
                x_sum = _add_parts(x_sums, row, usable, count, P, WIDE)
                z_sum = _add_parts(z_sums, row, usable, count, P, WIDE)
        if goes_on:
            _raise_maximum(x_sum, z_sum, usable, maxima, dropped, index, known, P)
