"""How steep a whole network is on data: a lower bound of its Lipschitz constant, from the inputs that it is given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MaxGainError
from ..functional import check_count, check_p, gain, widened
from ..layers import check_model
from ..measure import call, evaluating, several

AT_ONCE = 64
"""How many inputs go through the model at a time."""
ROUNDINGS = 16
"""How many rounding errors an output is taken to carry, so that they are not passed off as slopes."""
TOO_NEAR = 1e-4
"""Inputs that differ by less than this fraction of their length are as good as the same, and no neighbours."""


@dataclass(frozen=True)
class SampledSlope:
    """The largest slopes ``‖f(x) - f(y)‖_p / ‖x - y‖_p`` that were found, by where they were looked for."""

    p: float
    random_pairs: float
    """Between inputs that were drawn at random."""
    neighbours: float
    """Between an input and the one nearest to it."""
    local: float
    """Of the derivative at an input, in the direction found to be steepest."""

    @property
    def value(self) -> float:
        """The largest of all: a lower bound of the network's Lipschitz constant."""
        return max(self.random_pairs, self.neighbours, self.local)


@torch.no_grad()
def sampled_slope(
    model: nn.Module,
    batches: Iterable[Any],
    p: float = 2.0,
    *,
    pairs: int = 10_000,
    neighbours: int = 1_000,
    points: int = 100,
    iterations: int = 20,
    seed: int = 0,
) -> SampledSlope:
    """A lower bound of the Lipschitz constant of the network in evaluation mode, from the inputs in ``batches``.

    Each sample is a slope of the network, so none exceeds its Lipschitz constant; how far below they stay is not
    known. Where the network has a kink at an input (a ReLU that is given 0), its derivative is what autograd takes for
    it.

    Args:
        model: returns one tensor whose first dimension is the input's; its modes, hooks and gradients are afterwards as
            they were.
        batches: tensors of inputs, or tuples or lists whose first item is one. All are kept in memory.
        p: the norm, from 1 to ``inf``.
        pairs: how many pairs of inputs, drawn at random, slopes are taken between.
        neighbours: for how many inputs the slope to the nearest other input is taken.
        points: at how many inputs the steepest direction is sought.
        iterations: how many steps of a power method (Boyd's, for any p) seek it.
        seed: of the random choices.

    Examples:
        >>> slope = sampled_slope(nn.Linear(3, 3), [torch.randn(8, 3)])
        >>> slope.value >= slope.random_pairs
        True
    """
    p = check_p(p)
    check_model(model)
    efforts = {"pairs": pairs, "neighbours": neighbours, "points": points, "iterations": iterations}
    for what, count in efforts.items():
        check_count(what, count)
    check_count("seed", seed, least=0)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    inputs = [batch[0] if isinstance(batch, tuple | list) else batch for batch in several(batches)]
    if not inputs or not all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs):
        raise MaxGainError("a slope needs batches of tensors of real numbers; integers have none to be differentiated.")
    if len({x.shape[1:] for x in inputs}) > 1:
        raise MaxGainError("a slope needs inputs of one shape, and those of these batches differ.")
    x = torch.cat(inputs).to(device)
    if len(x) < 2:
        raise MaxGainError(f"a slope needs two inputs at least, not {len(x)}.")
    generator = torch.Generator().manual_seed(seed)
    with evaluating(model):
        z = torch.cat([_output(model, part) for part in torch.split(x, AT_ONCE)])
        if not z.isfinite().all():
            raise MaxGainError("the model's outputs are not finite, so they have no slope.")
        with torch.device("cpu"):  # where the generator is, whatever the user's default may be
            first = torch.randint(len(x), (pairs,), generator=generator)
            second = (first + torch.randint(1, len(x), (pairs,), generator=generator)) % len(x)
            near, at = (torch.randperm(len(x), generator=generator)[:n].to(device) for n in (neighbours, points))
        return SampledSlope(
            p=float(p),
            random_pairs=_steepest(z, x, first.to(device), second.to(device), p),
            neighbours=_steepest(z, x, *_nearest(x, near, p), p),
            local=max(local_slope(model, x[part], p, iterations, generator) for part in torch.split(at, AT_ONCE)),
        )


def _output(model: nn.Module, x: Tensor) -> Tensor:
    z = call(model, x, x.device)
    if not isinstance(z, Tensor):
        raise MaxGainError(f"a slope needs a model that returns a tensor, not {type(z).__name__}: wrap it in one.")
    if z.shape[:1] != x.shape[:1]:
        raise MaxGainError(f"a slope needs an output for each input, not {tuple(z.shape)} for {len(x)} of them.")
    return z


def _steepest(z: Tensor, x: Tensor, first: Tensor, second: Tensor, p: float) -> float:
    """The largest slope between the inputs of these pairs, less what the rounding of outputs may have added to it."""
    rounding = ROUNDINGS * torch.finfo(z.dtype).eps
    slopes = []
    for i, j in zip(torch.split(first, AT_ONCE), torch.split(second, AT_ONCE), strict=True):
        (x_i, x_j), (z_i, z_j) = ([widened(v[at]).flatten(1) for at in (i, j)] for v in (x, z))
        slope = gain(z_i - z_j, x_i - x_j, p)
        slopes.append(slope - rounding * gain(z_i.abs() + z_j.abs(), x_i - x_j, p))
    return torch.cat(slopes).amax().clamp_min(0).item()


def _nearest(x: Tensor, some: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Some inputs and, for each, the nearest that is not too near; by index."""
    flat = widened(x.flatten(1))
    lengths = torch.linalg.vector_norm(flat, p, dim=1, keepdim=True)
    nearest = []
    for part in torch.split(some, AT_ONCE):
        distances = torch.cdist(flat[part], flat, p=p, compute_mode="donot_use_mm_for_euclid_dist")
        nearest.append(distances.masked_fill(distances <= TOO_NEAR * lengths[part], math.inf).argmin(1))
    return some, torch.cat(nearest)


def local_slope(model: nn.Module, x: Tensor, p: float, iterations: int, generator: torch.Generator) -> float:
    """The largest ``‖Jv‖_p`` found with ``‖v‖_p = 1``, where J is the derivative at any of the inputs.

    Boyd's power method: from v to the w of unit dual norm with the largest ``w·Jv``, and on to the v with the largest
    ``v·Jᵀw``. No step makes ``‖Jv‖_p`` smaller; for p = 2 it is the usual power iteration.
    """
    vjp: Any = torch.func.vjp
    z, back = vjp(getattr(model, "_orig_mod", model), x)
    # w → Jᵀw is linear, so what takes a vector back through it is v → Jv, whatever it is taken at.
    _, forth = vjp(lambda w: back(w)[0], torch.zeros_like(z))
    dual = math.inf if p == 1 else p / (p - 1) if math.isfinite(p) else 1.0
    v = unit_vector_along(torch.randn(x.shape, generator=generator, device="cpu").to(x), p)
    largest = torch.zeros((), dtype=z.dtype, device=z.device)
    for _ in range(iterations):
        (onwards,) = forth(v)
        largest = torch.maximum(largest, gain(onwards.flatten(1), v.flatten(1), p).amax())
        (backwards,) = back(unit_vector_along(onwards, dual))
        v = unit_vector_along(backwards, p)
    return largest.item()


def unit_vector_along(y: Tensor, p: float) -> Tensor:
    """For each instance the v with ``‖v‖_p = 1`` and the largest ``v·y``; 0 where y is."""
    flat = y.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    if p == 1:
        at = flat.abs().argmax(1, keepdim=True)
        v = torch.zeros_like(flat).scatter(1, at, flat.gather(1, at).sign())
    elif math.isinf(p):
        v = flat.sign()
    else:
        v = flat.sign() * flat.abs() ** (1 / (p - 1))
        v = v / torch.linalg.vector_norm(v, p, dim=1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    return v.view_as(y)
