"""The mathematics of the method, pure: what a gain is, and what exceeding a bound does to a weight.

The problem that training solves under MaxGain is ``min f(W_1, ..., W_l)`` subject to
``max_x ‖W_i x‖_p / ‖x‖_p ≤ γ`` for every layer i, where x runs over the layer's inputs.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .errors import BoundError, MaxGainError, NormError

MOST = 10**9
"""No count that could ever be reached is larger."""
LEAST_BOUND = torch.finfo(torch.float32).tiny
"""Less would be 0 in float32, and a layer that shows no gain would become 0 / 0."""
LARGEST_POWER = 6
"""For p ≤ 6 the sum of 1e30 float32 powers fits in float64, so nothing has to be scaled."""


def gain(z: Tensor, x: Tensor, p: float = 2.0, *, instance_dims: int | None = None) -> Tensor:
    """The gain ``‖z‖_p / ‖x‖_p`` of every instance, where ``z = Wx`` is a layer's linear part; 0 where ``x`` is 0.

    The result is in float32 at least, and not finite where z or x is not.

    Args:
        z: the layer's output without its bias.
        x: the layer's input.
        p: the norm, from 1 to ``inf``.
        instance_dims: how many of the last dimensions make up one instance; those before them count instances. By
            default the first dimension counts.

    Examples:
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> gain(2 * x, x)
        tensor([2., 0.])
    """
    check_p(p)
    _check_real("z", z)
    _check_real("x", x)
    if instance_dims is None:
        instance_dims = x.dim() - 1
    elif not isinstance(instance_dims, int) or not 0 <= instance_dims <= x.dim():
        raise MaxGainError(f"instance_dims must be a whole number from 0 to {x.dim()}, not {instance_dims!r:.40}.")
    _check_pair(z, x, instance_dims)
    if not (z.numel() and x.numel()):  # the largest of no entries is not defined, and no entries amplify nothing
        return widened(x.new_zeros(x.shape[: x.dim() - instance_dims]))
    return instance_gains(z.detach(), x.detach(), p, instance_dims)


def instance_gains(z: Tensor, x: Tensor, p: float, instance_dims: int) -> Tensor:
    """As ``gain``, of tensors that are known to fit: what a forward hook calls."""
    if instance_dims == 0:
        z, x, instance_dims = z.unsqueeze(-1), x.unsqueeze(-1), 1
    dims = tuple(range(-instance_dims, 0))
    wide = torch.promote_types(torch.promote_types(z.dtype, x.dtype), torch.float32)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # Looking at a result is free here: take plain norms, and others only where these cannot be trusted.
        plain = gain_of_plain_norms(z, x, p, dims)
        if plain is not None:
            return plain
    if p == math.inf or (wide == torch.float32 and p <= LARGEST_POWER and x.device.type != "mps"):
        return _gain_with_room(z, x, p, dims, wide)
    return _gain_of_scaled_norms(z, x, p, dims, wide)


def channelwise_gains(x: Tensor, scales: Tensor, p: float) -> Tensor | None:
    """As ``instance_gains`` where W scales the channels of x, from the norms of these: x is read once, and not copied.

    None where such norms cannot be trusted, and on anything but a CPU.
    """
    if x.device.type != "cpu" or x.dim() < 3 or torch.compiler.is_compiling():
        return None
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, ord=p, dim=tuple(range(2, x.dim())), dtype=wide)
    # By scales of at most 1, so that what was too small to count in a channel's norm is too small to count in Wx.
    largest = scales.abs().amax()
    ratio = gain_of_plain_norms(norms * (scales / largest), norms, p, (-1,))
    return None if ratio is None else ratio * largest


def gain_of_plain_norms(z: Tensor, x: Tensor, p: float, dims: tuple[int, ...], least_z: float = 0.0) -> Tensor | None:
    """One pass over each tensor; None where that cannot be trusted.

    Some power may have overflowed, one that matters underflowed, or some norm of z is not above ``least_z``.
    """
    wide = torch.promote_types(torch.promote_types(z.dtype, x.dtype), torch.float32)
    limits, low, high = torch.finfo(wide), 0.0, math.inf
    if p != math.inf:
        # An entry whose power was flushed to zero is then below the rounding of a sum of as many as 1e7 entries.
        low, high = (limits.tiny / limits.eps * 1e7) ** (1 / p), (limits.max * limits.eps) ** (1 / p)
    z_norm, x_norm = (torch.linalg.vector_norm(v, ord=p, dim=dims, dtype=wide) for v in (z, x))
    for norm, above in ((z_norm, max(low, least_z)), (x_norm, low)) if z_norm.numel() else ():
        least, largest = (value.item() for value in norm.aminmax())
        if not above < least <= largest < high:  # nor where one is nan
            return None
    ratio: Tensor = z_norm / x_norm
    return ratio


def _gain_with_room(z: Tensor, x: Tensor, p: float, dims: tuple[int, ...], wide: torch.dtype) -> Tensor:
    """Powers of float32 in float64, which has room for them: few launches and no scaling."""
    room = wide if p == math.inf else torch.float64
    z_norm, x_norm = (torch.linalg.vector_norm(v, ord=p, dim=dims, dtype=room) for v in (z, x))
    ratio = torch.add(z_norm / x_norm, x_norm, alpha=0)  # not finite where x is not
    return ratio.masked_fill_(x_norm == 0, 0.0).to(wide)


def _gain_of_scaled_norms(z: Tensor, x: Tensor, p: float, dims: tuple[int, ...], wide: torch.dtype) -> Tensor:
    """Entries divided by the largest one first, so that no power over- or underflows whatever p and dtype are."""
    z_scale, z_norm = _scaled_norm(z, p, dims)
    x_scale, x_norm = _scaled_norm(x, p, dims)
    ratio = (z_scale / x_scale) * (z_norm / x_norm)
    return ratio.masked_fill_(x_norm == 0, 0.0).to(wide)


def _scaled_norm(v: Tensor, p: float, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``(s, n)`` with ``‖v‖_p = s·n`` and s the largest entry, so that no power over- or underflows in n."""
    wide = torch.promote_types(v.dtype, torch.float32)
    largest = torch.linalg.vector_norm(v, ord=math.inf, dim=dims, keepdim=True, dtype=wide)
    scale = largest.clamp_min_(torch.finfo(wide).tiny)  # where all entries are 0, so is n
    return scale.squeeze(dims), torch.linalg.vector_norm(v / scale, ord=p, dim=dims)


def widened(v: Tensor) -> Tensor:
    """In float32 at least: products and differences in a half precision would round, and overflow at 65504."""
    return v.to(torch.promote_types(v.dtype, torch.float32))


def without_bias(output: Tensor, bias: Tensor | None, channel_dims: int) -> Tensor:
    """``Wx`` of a layer that computes ``Wx + b``; channels are the dimension ``channel_dims`` from the end."""
    if bias is None:
        return output
    # As it was added: autocast rounds the bias, and what it rounds off would be a gain for inputs near zero.
    rounded = bias.to(output.dtype).to(torch.promote_types(output.dtype, torch.float32))
    return output - rounded.view(-1, *[1] * (channel_dims - 1))


def lost_beside(bias: Tensor, entries: int, p: float, dtype: torch.dtype) -> float:
    """The norm up to which a ``Wx`` of this many entries may be off by more than 3 % after it was added to a bias."""
    largest: float = torch.linalg.vector_norm(bias, ord=math.inf).item() if bias.numel() else 0.0
    if not 0 < largest < math.inf:
        return 0.0
    # Of entries up to 1, whose powers do not overflow; and of the bias at all positions that it is added at.
    wide = torch.promote_types(bias.dtype, torch.float32)
    norm: float = largest * torch.linalg.vector_norm(bias / largest, ord=p, dtype=wide).item()
    return 16 * torch.finfo(dtype).eps * norm * math.pow(entries / bias.numel(), 1 / p)


def along_channels(v: Tensor, channel_dims: int) -> Tensor:
    """One entry per channel, shaped to meet tensors whose channels are the dimension ``channel_dims`` from the end."""
    return v.view(-1, *[1] * (channel_dims - 1))


def normalised(x: Tensor, scale: Tensor, variance: Tensor, eps: float) -> Tensor:
    """``Wx`` of batch norm."""
    diagonal = batch_norm_diagonal(widened(scale), widened(variance), eps)
    return x * along_channels(diagonal, x.dim() - 1)


def batch_norm_diagonal(scale: Tensor, variance: Tensor, eps: float) -> Tensor:
    """The diagonal of batch norm's W, which acts on the raw activations: ``α / sqrt(variance + ε)``."""
    return scale * torch.rsqrt(variance + eps)


def project_(weight: Tensor, gain: Tensor | float, gamma: float) -> Tensor:
    """``W ← W / max(1, gain / γ)``, in place: the nearest multiple of W whose gain is at most γ.

    A weight under its bound keeps its bits, and a gain that is not finite says nothing and changes nothing.

    Args:
        weight: W, which is changed.
        gain: the largest gain that it showed; a tensor of several must broadcast against the weight.
        gamma: the bound.

    Examples:
        >>> project_(torch.tensor([[6.0]]), gain=3.0, gamma=2.0)
        tensor([[4.]])
    """
    gamma = check_bound(gamma)
    _check_real("weight", weight)
    if not isinstance(gain, Tensor):
        # Not in the type of a half-precision weight, in which 70000 is infinite and 2.005 may be 2.
        wide = torch.promote_types(weight.dtype, torch.float32)
        gain = torch.tensor(check_number("gain", gain), dtype=wide, device=weight.device)
    _check_real("gain", gain)
    if gain.is_meta:
        raise MaxGainError("a gain on the meta device has no value to divide by.")
    size = finite(widened(gain.to(weight.device)))
    try:
        size.expand_as(weight)
    except RuntimeError as error:
        shapes = f"{tuple(gain.shape)} and {tuple(weight.shape)}"
        raise MaxGainError(f"a gain and a weight of these shapes do not fit together: {shapes}.") from error
    shrink_all_([weight], [(size / gamma).clamp_min_(1.0)])
    return weight


def finite(size: Tensor) -> Tensor:
    """The size, or 0 where it is not a finite number: ``inf`` would zero a weight and ``nan`` would poison it."""
    return torch.nan_to_num(size, nan=0.0, posinf=0.0, neginf=0.0)


def record(maxima: Tensor, dropped: Tensor, index: int, gains: Tensor) -> None:
    """Take the gains of a forward into the maximum of one layer, in place and without waiting for the device."""
    gains = gains.to(maxima.dtype)  # in which they must be finite: a model may have become float64 since
    if gains.device.type == "cpu" and math.isfinite((largest := gains.amax()).item()):  # then all of them are
        maxima[index].clamp_(min=largest)
        return
    usable = finite(gains)
    maxima[index].clamp_(min=usable.amax())
    dropped[index].add_((usable != gains).sum())


@torch.no_grad()
def shrink_all_(weights: Sequence[Tensor], divisors: Sequence[Tensor]) -> None:
    """Divide each weight by its divisor, in place; dividing by exactly 1 changes no bit."""
    # On a CPU looking is free, and 1 is left out: autograd refuses weights that were written to since their forward.
    pairs = [
        (weight, divisor)
        for weight, divisor in zip(weights, divisors, strict=True)
        if divisor.device.type != "cpu" or bool((divisor != 1).any())
    ]
    same = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
    if same:
        torch._foreach_div_([weight for weight, _ in same], [divisor for _, divisor in same])
    for weight, divisor in pairs:
        if weight.dtype != divisor.dtype:
            # A divisor rounded to bfloat16 would miss the bound by up to 0.4 %, so round the quotient instead.
            weight.copy_(weight.to(torch.promote_types(weight.dtype, divisor.dtype)).div_(divisor))


# --- What arguments must be like, and the sentences for those that are not --------------------------------------------


def check_p(p: float) -> float:
    """Return p if it names a norm (1 ≤ p ≤ inf), and refuse it otherwise."""
    number = as_float(p)
    if not number >= 1:
        raise NormError(f"p must be a number from 1 to inf, not {p!r:.40}: below 1 it does not define a norm.")
    return number


def check_bound(bound: float, what: str = "gamma") -> float:
    """Return the bound as a float if it can be divided by; ``inf`` measures without constraining."""
    number = as_float(bound)
    if not number >= LEAST_BOUND:
        least = f" of at least {LEAST_BOUND:.2g}" if number > 0 else ""
        raise BoundError(
            f"{what} must be a positive number{least} (inf measures without constraining), not {bound!r:.40}."
        )
    return number


def check_count(what: str, value: Any, least: int = 1) -> int:
    """Return the value if it is a whole number that can be counted to."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= MOST:
        raise MaxGainError(f"{what} must be a whole number from {least} to {MOST:,}, not {value!r:.40}.")
    return int(value)


def as_float(value: Any) -> float:
    """The real number that the value is, and nan if it is none (True is none), or one that no float can hold."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def check_number(what: str, value: Any) -> float:
    """Return the value as a float if it is a real number; whether it is finite is not asked."""
    if not isinstance(value, Real) or (math.isnan(as_float(value)) and not isinstance(value, float)):
        raise MaxGainError(f"{what} must be a real number, not {value!r:.40}.")
    return as_float(value)


def check_positive(what: str, value: Any, above: float = 0) -> float:
    """Return the value as a float if it is a larger number than ``above``."""
    if not as_float(value) > above:
        raise MaxGainError(f"{what} must be a number greater than {above:g}, not {value!r:.40}.")
    return float(value)


def check_choice(what: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Return the value if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise MaxGainError(f"{what} must be {' or '.join(map(repr, choices))}, not {value!r:.60}.")
    return value


def check_is(what: str, value: Any, kind: type | tuple[type, ...], described: str) -> Any:
    """Return the value if it is of that kind."""
    if not isinstance(value, kind):
        raise MaxGainError(f"{what} must be {described}, not {value!r:.60}.")
    return value


def check_callable(what: str, value: Any) -> Callable[..., Any]:
    """Return the value if it can be called."""
    if not callable(value):
        raise MaxGainError(f"{what} must be a function, not {value!r:.60}.")
    return value  # type: ignore[no-any-return]


def _check_pair(z: Tensor, x: Tensor, instance_dims: int) -> None:
    """Refuse tensors on different devices, or with different instances."""
    if z.device != x.device:
        raise MaxGainError(f"z lies on {z.device} and x on {x.device}: bring them together.")
    if z.shape[: max(0, z.dim() - instance_dims)] != x.shape[: x.dim() - instance_dims]:
        raise MaxGainError(f"z of shape {tuple(z.shape)} and x of {tuple(x.shape)} count different instances.")


def _check_real(what: str, v: Tensor) -> None:
    if not isinstance(v, Tensor) or not v.is_floating_point():
        found = v.dtype if isinstance(v, Tensor) else type(v).__name__
        raise MaxGainError(f"{what} must be a tensor of real numbers, not {found}.")
