"""The Triton kernel that measures: each instance's input and output are read once, and one maximum comes out.

A program takes ``ROWS`` instances. It sums the powers of their entries in float32. Where such a sum may have over- or
underflowed, the program reads its instances again, scaled by their largest entries; nearly all programs never do. A
batch may have too few long instances to keep a GPU busy: other programs have then summed the parts of each before.
Where several layers share a launch, they do so in the same one.

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

DIRECT = tl.constexpr(0)
"""How a position in an instance finds its channel: it is one."""
REPEATED = tl.constexpr(1)
"""As the remainder by the number of channels, which is the same in every tile."""
SPREAD = tl.constexpr(2)
"""As the remainder of ``position // inner``."""

SMALLEST_TRUSTED = tl.constexpr(1e-24)
"""Below this sum, powers that were flushed to zero may matter: tiny / eps · 1e7 of float32."""
LARGEST_TRUSTED = tl.constexpr(4e31)
"""Above it, powers may have overflowed: max · eps of float32."""
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _per_channel(
    data, position, given, vector, variance, eps, inner, channels, FORM: tl.constexpr, WHERE: tl.constexpr
):
    """The bias or the scale that belongs to each position in an instance, of which the first ``given`` have one."""
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
    """A tile of the entries of instances that start there, in float32, 0 beyond their end; and where it is in them."""
    mask = usable[:, None] & (position < size)[None, :]
    return tl.load(data + start[:, None] + position[None, :], mask=mask, other=0.0).to(tl.float32), mask


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
def _norms(x, z, x_at, z_at, begin, end, x_size, z_size, x_scale, z_scale, usable, given, vector, variance, eps,
           inner, channels, FORM: tl.constexpr, WHERE: tl.constexpr, P: tl.constexpr, SCALED: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """The sums of powers of x and of Wx for each instance (the largest entries for P = 0, nan if one is not finite).

    Of the positions from ``begin`` to ``end``, which are multiples of ``BLOCK`` or the end of all. Both are read in one
    loop, so that their loads wait for memory together.
    """
    SUMS: tl.constexpr = BLOCK // TOGETHER
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
        x_total, x_spoiled = _added(x_total, x_spoiled, x_entry, x_scale, P, SCALED)
        z_total, z_spoiled = _added(z_total, z_spoiled, z_entry, z_scale, P, SCALED)
    if P == 0:
        x_norm, z_norm = tl.max(x_total, 1) + tl.sum(x_spoiled, 1), tl.max(z_total, 1) + tl.sum(z_spoiled, 1)
    else:
        x_norm, z_norm = tl.sum(x_total, 1), tl.sum(z_total, 1)
    return x_norm, z_norm


@triton.jit
def _raise_maximum(x, z, x_at, z_at, x_size, z_size, usable, given, vector, variance, eps, inner, channels, x_norm,
                   z_norm, maxima, dropped, index, known, FORM: tl.constexpr, WHERE: tl.constexpr, P: tl.constexpr,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Raise ``maxima[index]``, which was ``known``, to the largest gain of the instances that have these sums."""
    one = tl.full([ROWS], 1.0, tl.float32)
    scale_ratio = one
    if P != 0:
        trusted = (x_norm > SMALLEST_TRUSTED) & (x_norm < LARGEST_TRUSTED)
        trusted &= (z_norm > SMALLEST_TRUSTED) & (z_norm < LARGEST_TRUSTED)
        if tl.min((trusted | ~usable).to(tl.int32), 0) == 0:
            size = tl.maximum(x_size, z_size)
            x_scale, z_scale = _norms(x, z, x_at, z_at, 0, size, x_size, z_size, one, one, usable, given, vector,
                                      variance, eps, inner, channels, FORM, WHERE, 0, False, ROWS, BLOCK,
                                      TOGETHER)  # fmt: skip
            # A comparison and not a maximum, which would lose a nan.
            x_scale = tl.where(x_scale < TINY, TINY, x_scale)
            z_scale = tl.where(z_scale < TINY, TINY, z_scale)
            scale_ratio = z_scale / x_scale
            x_norm, z_norm = _norms(x, z, x_at, z_at, 0, size, x_size, z_size, x_scale, z_scale, usable, given, vector,
                                    variance, eps, inner, channels, FORM, WHERE, P, True, ROWS, BLOCK,
                                    TOGETHER)  # fmt: skip
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


@triton.jit
def sums_kernel(
    x, z, vector, variance, sums, eps, x_size, z_size, x_step, z_step, parts,
    P: tl.constexpr, FORM: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sum one part of one instance, of x and of Wx; ``gains_kernel`` adds them up, always in the same order."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    one = tl.full([1], 1.0, tl.float32)
    begin = tl.program_id(1) * PART
    end = tl.minimum(begin + PART, tl.maximum(x_size, z_size))
    x_at, z_at = row * x_step, row * z_step
    x_sum, z_sum = _norms(x, z, x_at, z_at, begin, end, x_size, z_size, one, one, row >= 0, z_size, vector, variance,
                          eps, INNER, CHANNELS, FORM, WHERE, P, False, 1, BLOCK, TOGETHER)  # fmt: skip
    place = sums + row * parts + tl.program_id(1)
    tl.store(place, x_sum)
    tl.store(place + tl.num_programs(0) * parts, z_sum)


@triton.jit
def _together(sums, row, usable, parts, P: tl.constexpr, WIDE: tl.constexpr):
    """What was found for the parts of each instance, added up."""
    part = tl.arange(0, WIDE)
    mask = usable[:, None] & (part < parts)[None, :]
    # Not from a cache of the multiprocessor's own: another one may have written there a moment ago.
    found = tl.load(sums + row[:, None] * parts + part[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    total = tl.sum(found, 1)
    if P == 0:
        total = tl.max(found, 1) + tl.sum(found * 0.0, 1)
    return total


@triton.jit(do_not_specialize=["index"])  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    x, z, vector, variance, sums, maxima, dropped, eps, index, rows, x_size, z_size, x_step, z_step, parts,
    P: tl.constexpr, FORM: tl.constexpr, WHERE: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima[index]`` to the largest gain of the instances, and count those that are not finite.

    From one instance to the next there are ``x_step`` and ``z_step`` entries. ``P`` is 1, 2 or 0 for the infinity norm.
    ``WIDE`` is 0 if every instance is whole; else the sums of its parts are known, and it is a power of two that is not
    below their number.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_at, z_at = row * x_step, row * z_step
    usable = row < rows
    known = tl.load(maxima + index, cache_modifier=".cg")  # asked for before the instances, so nobody waits for it
    if WIDE > 0:
        x_norm = _together(sums, row, usable, parts, P, WIDE)
        z_norm = _together(sums + rows * parts, row, usable, parts, P, WIDE)
    else:
        one = tl.full([ROWS], 1.0, tl.float32)
        x_norm, z_norm = _norms(x, z, x_at, z_at, 0, tl.maximum(x_size, z_size), x_size, z_size, one, one, usable,
                                z_size, vector, variance, eps, INNER, CHANNELS, FORM, WHERE, P, False, ROWS, BLOCK,
                                TOGETHER)  # fmt: skip
    _raise_maximum(x, z, x_at, z_at, x_size, z_size, usable, z_size, vector, variance, eps, INNER, CHANNELS, x_norm,
                   z_norm, maxima, dropped, index, known, FORM, WHERE, P, ROWS, BLOCK, TOGETHER)  # fmt: skip


# --- Several layers in one launch -------------------------------------------------------------------------------------
#
# Each layer is one place in the tuples, and its programs follow those of the layer before, from ``begins`` on. Every
# program looks for its layer first, which is why there are few tuples: ``forms`` has 4 index + form.
#
# Triton compiles a kernel of its own where a number is 1 or a multiple of 16, and in tuples ``do_not_specialize`` does
# not keep it from that. So numbers that differ from launch to launch come as 2 n + 3, which is neither.


@triton.jit
def _layer(program, begins):
    """Whose program this is."""
    layer = 0
    for other in tl.static_range(1, len(begins)):
        layer += (program >= (begins[other] >> 1) - 1).to(tl.int32)
    return layer


@triton.jit
def _of(layer, values):
    """The value that belongs to a layer."""
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
    xs, zs, vectors, variances, room, maxima, dropped, eps, first, forms, begins, rows, x_sizes, z_sizes, channels,
    P: tl.constexpr, WHERE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    PART: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """As ``sums_kernel`` and ``gains_kernel`` in one: of the programs that sum parts of an instance, the last goes on.

    If ``WIDE`` is 0, every instance is whole. In the room are, from ``first`` on, the sums of x in the order of the
    programs, those of Wx, and counters. A program does ``STEPS`` tiles.
    """
    program = tl.program_id(0)
    layer = _layer(program, begins)
    begin = _number_of(layer, begins)
    program -= begin
    form = _number_of(layer, forms)
    index, form = form // 4, form % 4
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
    one = tl.full([ROWS], 1.0, tl.float32)
    for step in range(STEPS):
        row = ((program // count).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        x_at, z_at = row * x_size, row * z_size
        usable = row < all_rows
        if form == NORMALISED:
            x_norm, z_norm = _norms(x, z, x_at, z_at, start, end, x_size, z_size, one, one, usable, given, vector,
                                    variance, eps, 1, repeat, NORMALISED, WHERE, P, False, ROWS, BLOCK,
                                    TOGETHER)  # fmt: skip
        else:
            x_norm, z_norm = _norms(x, z, x_at, z_at, start, end, x_size, z_size, one, one, usable, given, vector,
                                    vector, 0.0, 1, repeat, BIASED, WHERE, P, False, ROWS, BLOCK, TOGETHER)  # fmt: skip
        goes_on = True
        if WIDE > 0 and count > 1:
            x_sums = room + first + begin
            z_sums = x_sums + tl.num_programs(0)
            tl.store(x_sums + program + tl.arange(0, 1), x_norm)
            tl.store(z_sums + program + tl.arange(0, 1), z_norm)
            goes_on = _is_last(count, z_sums + tl.num_programs(0) + program // count)
            if goes_on:
                x_norm = _together(x_sums, row, usable, count, P, WIDE)
                z_norm = _together(z_sums, row, usable, count, P, WIDE)
        if goes_on:
            if form == NORMALISED:
                _raise_maximum(x, z, x_at, z_at, x_size, z_size, usable, given, vector, variance, eps, 1, repeat,
                               x_norm, z_norm, maxima, dropped, index, known, NORMALISED, WHERE, P, ROWS, BLOCK,
                               TOGETHER)  # fmt: skip
            else:
                _raise_maximum(x, z, x_at, z_at, x_size, z_size, usable, given, vector, vector, 0.0, 1, repeat,
                               x_norm, z_norm, maxima, dropped, index, known, BIASED, WHERE, P, ROWS, BLOCK,
                               TOGETHER)  # fmt: skip
