"""The Triton kernel that measures: each instance's input and output are read once, and one maximum comes out.

A program takes ``ROWS`` instances. It sums the powers of their entries in float32. Where such a sum may have over- or
underflowed, the program reads its instances again, scaled by their largest entries; nearly all programs never do.
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
def _entries(data, row, size, start, column, usable, vector, variance, eps, FORM, INNER, CHANNELS):
    """A tile of the instances' entries in float32, 0 beyond their end."""
    position = start + column
    mask = usable[:, None] & (position < size)[None, :]
    entry = tl.load(data + row[:, None] * size + position[None, :], mask=mask, other=0.0)
    if FORM == PLAIN:
        return entry.to(tl.float32)
    channel = (position // INNER) % CHANNELS
    if FORM == BIASED:
        bias = tl.load(vector + channel).to(entry.dtype).to(tl.float32)
        return tl.where(mask, entry.to(tl.float32) - bias[None, :], 0.0)
    scale = tl.load(vector + channel).to(tl.float32)
    scale = scale / tl.sqrt(tl.load(variance + channel).to(tl.float32) + eps)
    return entry.to(tl.float32) * scale[None, :]


@triton.jit
def _largest(data, row, size, usable, vector, variance, eps, FORM, INNER, CHANNELS,
             ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The largest absolute entry of each instance; nan if an entry is not finite."""
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    spoiled = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        entry = _entries(data, row, size, start, column, usable, vector, variance, eps, FORM, INNER, CHANNELS)
        largest = tl.maximum(largest, tl.abs(entry))
        spoiled += entry * 0.0
    return tl.max(largest, 1) + tl.sum(spoiled, 1)


@triton.jit
def _power_sum(data, row, size, scale, usable, vector, variance, eps, FORM, INNER, CHANNELS,
               P: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The sum of the powers of each instance's entries, each entry divided by ``scale`` if ``SCALED``."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        entry = _entries(data, row, size, start, column, usable, vector, variance, eps, FORM, INNER, CHANNELS)
        if SCALED:
            entry = entry / scale[:, None]
        total += entry * entry if P == 2 else tl.abs(entry)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["index"])  # one compiled kernel serves layers that differ in nothing else
def gains_kernel(
    x, z, vector, variance, eps, maxima, dropped, index, rows, x_size, z_size,
    P: tl.constexpr, FORM: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima[index]`` to the largest gain of the instances, and count those that are not finite.

    ``P`` is 1, 2 or 0 for the infinity norm.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    usable = row < rows
    if P == 0:
        x_norm = _largest(x, row, x_size, usable, vector, variance, eps, PLAIN, 1, 1, ROWS, BLOCK)
        z_norm = _largest(z, row, z_size, usable, vector, variance, eps, FORM, INNER, CHANNELS, ROWS, BLOCK)
        ratio = z_norm / x_norm
    else:
        one = tl.full([ROWS], 1.0, tl.float32)
        x_sum = _power_sum(x, row, x_size, one, usable, vector, variance, eps, PLAIN, 1, 1, P, False, ROWS, BLOCK)
        z_sum = _power_sum(
            z, row, z_size, one, usable, vector, variance, eps, FORM, INNER, CHANNELS, P, False, ROWS, BLOCK
        )
        trusted = (x_sum > SMALLEST_TRUSTED) & (x_sum < LARGEST_TRUSTED)
        trusted &= (z_sum > SMALLEST_TRUSTED) & (z_sum < LARGEST_TRUSTED)
        scale_ratio = one
        if tl.min((trusted | ~usable).to(tl.int32), 0) == 0:
            x_scale = _largest(x, row, x_size, usable, vector, variance, eps, PLAIN, 1, 1, ROWS, BLOCK)
            z_scale = _largest(z, row, z_size, usable, vector, variance, eps, FORM, INNER, CHANNELS, ROWS, BLOCK)
            # A comparison and not a maximum, which would lose a nan.
            x_scale = tl.where(x_scale < TINY, TINY, x_scale)
            z_scale = tl.where(z_scale < TINY, TINY, z_scale)
            scale_ratio = z_scale / x_scale
            x_sum = _power_sum(
                x, row, x_size, x_scale, usable, vector, variance, eps, PLAIN, 1, 1, P, True, ROWS, BLOCK
            )
            z_sum = _power_sum(
                z, row, z_size, z_scale, usable, vector, variance, eps, FORM, INNER, CHANNELS, P, True, ROWS, BLOCK
            )
        x_norm, z_norm = x_sum, z_sum
        if P == 2:
            x_norm, z_norm = tl.sqrt(x_sum), tl.sqrt(z_sum)
        ratio = scale_ratio * (z_norm / x_norm)
    ratio = tl.where(x_norm == 0.0, 0.0, ratio)
    finite = tl.abs(ratio) < float("inf")
    tl.atomic_max(maxima + index, tl.max(tl.where(usable & finite, ratio, 0.0), 0), sem="relaxed")
    lost = tl.sum((usable & ~finite).to(tl.int64), 0)
    if lost > 0:
        tl.atomic_add(dropped + index, lost, sem="relaxed")
