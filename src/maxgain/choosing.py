"""Choose γ from short runs: the smallest that still learns the training data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from .errors import ChoiceError


def choose_gamma(losses: Mapping[float, float], tolerance: float = 0.1) -> float:
    """Return the smallest γ with ``loss ≤ (1 + tolerance) · lowest``: the tightest that still learns the data.

    The losses are those of short runs, one for each γ, read at the same step: about a seventh of the full length, at
    least three epochs. **A first look, not a substitute for validation data:** the rule fits the 133 runs it was picked
    on and failed its test, with label smoothing and with wrong labels (docs/choosing-gamma.md).

    Args:
        losses: The training loss of each γ; ``inf`` may be among the γ. A loss that is not finite is a failed run, and
            its γ is not chosen.
        tolerance: By which fraction the loss may exceed the lowest.

    Raises:
        ChoiceError: There is nothing to choose from: fewer than two γ, one that is not positive, losses that are
            negative, all equal or all not finite. Or the smallest γ would be chosen, and a smaller one may do as well.

    Examples:
        >>> choose_gamma({1.25: 1.71, 1.5: 0.83, 2: 0.41, 3: 0.40, 4: 0.39})
        2
    """
    if not isinstance(losses, Mapping):
        raise ChoiceError(f"losses must map gammas to losses, such as {{1.5: 0.83, 2: 0.41}}, not {losses!r:.40}.")
    if not (isinstance(tolerance, Real) and 0 <= tolerance < math.inf):
        raise ChoiceError(f"tolerance must be a number from 0 on, not {tolerance!r:.40}.")
    if wrong := [gamma for gamma in losses if not (isinstance(gamma, Real) and gamma > 0)]:
        raise ChoiceError(f"every gamma must be a positive number, not {wrong[0]!r:.40}.")
    if len(losses) < 2:
        raise ChoiceError(f"a choice takes the losses of two gammas at least, not of {len(losses)}.")
    learned = {gamma: loss for gamma, loss in losses.items() if math.isfinite(loss)}
    if not learned:
        raise ChoiceError("no run has a finite loss, so none of these gammas can be chosen: lower the learning rate.")
    lowest = min(learned.values())
    if lowest < 0:
        raise ChoiceError(f"the rule compares losses by their ratio, so they cannot be negative, as {lowest:g} is.")
    if len(learned) == len(losses) and lowest == max(learned.values()):
        raise ChoiceError(
            f"all losses are {lowest:g}: no gamma acts (try smaller ones), or no run learned (train longer)."
        )
    chosen = min(gamma for gamma, loss in learned.items() if loss <= (1 + tolerance) * lowest)
    if chosen == min(losses):
        raise ChoiceError(f"the smallest gamma, {chosen:g}, trains as well as any: try smaller ones.")
    return chosen
