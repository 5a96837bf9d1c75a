"""Tests of differences between regularisers, as pure functions on accuracies.

Two analyses: a paired t-test per contrast, which assumes least, and an additive model of all rows with one pooled
variance, which detects smaller differences. Fitted to two rows alone, the model is the paired test.
What is undefined is None: a difference without spread has no p-value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

ALPHA = 0.05
"""Significance level of every verdict, for the family of contrasts as a whole."""

Interval = tuple[float, float]
Pair = tuple[str, str]
"""Two rows; the first is expected to be the better one."""
Scores = Mapping[str, Mapping[int, float]]
"""Accuracies by row and by unit (fold or seed)."""
Verdict = Literal["established", "reversed", "equivalent", "inconclusive"]


@dataclass(frozen=True)
class Difference:
    """A mean difference between two rows, and its test."""

    mean: float
    n: int
    """Number of pairs."""
    standard_error: float | None = None
    degrees: int | None = None
    """Degrees of freedom."""
    p: float | None = None
    """Two-sided, of this contrast alone."""
    p_holm: float | None = None
    """Holm-corrected over the family; decides 'established' and 'reversed'."""
    p_equivalence: float | None = None
    """Of two one-sided tests against the region of equivalence, Holm-corrected; decides 'equivalent'."""
    interval: Interval | None = None
    """Simultaneous 95 % confidence interval (Bonferroni over the family)."""

    def interval_at(self, alpha: float) -> Interval | None:
        """Confidence interval of level 1 - alpha, of this contrast alone."""
        if self.standard_error is None:
            return None
        half_width = float(stats.t.isf(alpha / 2, self.degrees)) * self.standard_error
        return self.mean - half_width, self.mean + half_width


def paired(scores: Scores, contrasts: Sequence[Pair], overlap: float = 0.0) -> list[Difference | None]:
    """Student's paired t-test of each contrast: `pooled` of its two rows alone."""
    return [test for pair in contrasts for test in pooled({row: scores[row] for row in pair}, [pair], overlap)]


def pooled(scores: Scores, contrasts: Sequence[Pair], overlap: float = 0.0) -> list[Difference | None]:
    """The contrasts in the model accuracy ~ row + unit, fitted to all rows by least squares.

    One error variance is pooled over all rows. Runs may be missing anywhere; a contrast that no runs connect is None.

    `overlap` is the number of test instances per training instance where training sets overlap, as in
    cross-validation. Nadeau and Bengio (Machine Learning 52, 2003) then take the variance of the mean of n
    differences to be (1/n + overlap) s² instead of s²/n.
    """
    cells = [(row, unit) for row, by_unit in scores.items() for unit in by_unit]
    if not cells:
        return [None] * len(contrasts)
    values = np.array([scores[row][unit] for row, unit in cells])
    columns: list[str | int] = [*scores, *{unit: None for _, unit in cells}]
    design = np.array([[column in cell for column in columns] for cell in cells], float)
    inverse = np.linalg.pinv(design)
    residuals = values - design @ (inverse @ values)
    degrees = len(cells) - int(np.linalg.matrix_rank(design))
    # Scores that differ by less are equal: 0.8 - 0.7 and 0.7 - 0.6 differ in their last bits only.
    rounding = max(64 * float(np.finfo(np.float64).eps) * float(np.abs(values).max()), 1e-100)
    variance = float(residuals @ residuals) / degrees if degrees > 0 and np.ptp(residuals) > rounding else None
    differences: list[Difference | None] = []
    for first, second in contrasts:
        contrast = np.array([(column == first) - (column == second) for column in columns], float)
        weights = contrast @ inverse
        if not np.allclose(weights @ design, contrast, atol=1e-9):  # no chain of pairs connects the two rows
            differences.append(None)
            continue
        mean, n = float(weights @ values), len(scores[first].keys() & scores[second])
        difference = Difference(mean if abs(mean) > rounding else 0.0, n)
        if variance is not None:
            error = math.sqrt(variance * (float(weights @ weights) + 2 * overlap))
            p = float(2 * stats.t.sf(abs(difference.mean / error), degrees))
            difference = replace(difference, standard_error=error, degrees=degrees, p=p)
        differences.append(difference)
    return differences


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given; an undefined one stays so and costs the others nothing."""
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = adjusted[place] = max(largest, min(1.0, (len(known) - rank) * p))
    return adjusted


def as_family(differences: Sequence[Difference | None], rope: float | None = None) -> list[Difference | None]:
    """Correct the differences for being one family: Holm's p-values, Bonferroni's simultaneous intervals.

    With a region of practical equivalence ±rope, each also gets the p-value of lying outside it, Holm-corrected.
    """
    p_values = [one.p if one else None for one in differences]
    alpha = ALPHA / max(1, sum(p is not None for p in p_values))
    corrected = zip(differences, holm(p_values), holm([p_outside(one, rope) for one in differences]), strict=True)
    return [
        one and replace(one, p_holm=p_holm, p_equivalence=p_equivalence, interval=one.interval_at(alpha))
        for one, p_holm, p_equivalence in corrected
    ]


def verdict(difference: Difference | None) -> Verdict:
    """What a difference of a family shows; 'inconclusive' is no evidence of equality, only 'equivalent' is."""
    if difference is None or difference.p_holm is None:
        return "inconclusive"
    if difference.p_holm < ALPHA:
        return "established" if difference.mean > 0 else "reversed"
    return "equivalent" if is_equivalent(difference) else "inconclusive"


def is_equivalent(difference: Difference) -> bool:
    """Whether the difference lies within the region of equivalence, established or not."""
    return difference.p_equivalence is not None and difference.p_equivalence < ALPHA


def sampling_error(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    """Standard error of a difference of accuracies from the sampling of test images alone.

    Each array has a row per run and a column per test image, True where the run classified it right. Runs are taken
    as given: the error is that of the mean over images of the per-image differences.
    """
    per_image = first.mean(axis=0) - second.mean(axis=0)
    return float(per_image.std() / math.sqrt(per_image.size))


def p_outside(difference: Difference | None, rope: float | None) -> float | None:
    """The larger p of two one-sided t-tests that the difference is below +rope and above -rope."""
    if rope is None or difference is None or difference.standard_error is None:
        return None
    return float(stats.t.sf((rope - abs(difference.mean)) / difference.standard_error, difference.degrees))
