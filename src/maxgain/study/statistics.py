"""Tests of differences between regularisers, as pure functions on accuracies.

Two analyses: a paired t-test per contrast, which assumes least, and an additive model of all rows with one pooled
variance, which detects smaller differences. What is undefined is None: a difference without spread has no p-value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
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


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard error; one value has no error, and none has neither."""
    if not len(values):
        return None, None
    n = len(values)
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else None


def paired(a: ArrayLike, b: ArrayLike, overlap: float = 0.0) -> Difference:
    """Student's t-test of the paired differences a - b.

    `overlap` is the number of test instances per training instance where training sets overlap, as in
    cross-validation. Nadeau and Bengio (Machine Learning 52, 2003) then take the variance of the mean to be
    (1/n + overlap) s² instead of s²/n.
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    differences, n = first - second, len(first)
    rounding = _rounding(np.concatenate([first, second]))
    error = None
    if n > 1 and np.ptp(differences) > rounding:
        error = float(differences.std(ddof=1)) * math.sqrt(1 / n + overlap)
    return _difference(float(differences.mean()), n, rounding, error, n - 1)


def pooled(scores: Scores, contrasts: Sequence[Pair], overlap: float = 0.0) -> list[Difference | None]:
    """The contrasts in the model accuracy ~ row + unit, fitted to all rows by least squares.

    One error variance is pooled over all rows. Runs may be missing anywhere; a contrast that no runs connect is None.
    For two rows this is the paired test, correction for overlap included.
    """
    rows = [row for row, by_unit in scores.items() if by_unit]
    units = sorted({unit for row in rows for unit in scores[row]})
    cells = [(rows.index(row), units.index(unit)) for row in rows for unit in sorted(scores[row])]
    if not cells:
        return [None] * len(contrasts)
    values = np.array([scores[rows[row]][units[unit]] for row, unit in cells])
    design = np.zeros((len(cells), len(rows) + len(units)))
    for index, (row, unit) in enumerate(cells):
        design[index, row] = design[index, len(rows) + unit] = 1
    gram = design.T @ design
    inverse = np.linalg.pinv(gram, hermitian=True) @ design.T
    residuals = values - design @ (inverse @ values)
    degrees = len(cells) - int(np.linalg.matrix_rank(gram, hermitian=True))
    rounding = _rounding(values)
    variance = float(residuals @ residuals) / degrees if degrees > 0 and np.ptp(residuals) > rounding else None

    def difference(first: str, second: str) -> Difference | None:
        if first not in rows or second not in rows:
            return None
        contrast = np.zeros(design.shape[1])
        contrast[rows.index(first)], contrast[rows.index(second)] = 1, -1
        weights = contrast @ inverse
        if not np.allclose(weights @ design, contrast, atol=1e-9):  # no chain of pairs connects the two rows
            return None
        error = None if variance is None else math.sqrt(variance * (float(weights @ weights) + 2 * overlap))
        n = len(scores[first].keys() & scores[second])
        return _difference(float(weights @ values), n, rounding, error, degrees)

    return [difference(*contrast) for contrast in contrasts]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given; an undefined one stays so and costs the others nothing."""
    known = [place for place, value in enumerate(p_values) if value is not None]
    p = np.array([p_values[place] for place in known], dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    adjusted: list[float | None] = [None] * len(p_values)
    for place, value in zip(order, steps, strict=True):
        adjusted[known[place]] = float(value)
    return adjusted


def as_family(differences: Sequence[Difference | None], rope: float | None = None) -> list[Difference | None]:
    """Correct the differences for being one family: Holm's p-values, Bonferroni's simultaneous intervals.

    With a region of practical equivalence ±rope, each also gets the p-value of lying outside it, Holm-corrected.
    """
    p_values = [None if difference is None else difference.p for difference in differences]
    size = sum(p is not None for p in p_values)
    outside = [p_outside(difference, rope) for difference in differences]
    return [
        difference
        and replace(
            difference,
            p_holm=p_holm,
            p_equivalence=p_equivalence,
            interval=difference.interval_at(ALPHA / max(size, 1)),
        )
        for difference, p_holm, p_equivalence in zip(differences, holm(p_values), holm(outside), strict=True)
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


def _difference(mean: float, n: int, rounding: float, error: float | None, degrees: int) -> Difference:
    """The difference with its p-value; without a standard error there is no test."""
    mean = mean if abs(mean) > rounding else 0.0
    if error is None:
        return Difference(mean, n)
    return Difference(mean, n, error, degrees, p=float(2 * stats.t.sf(abs(mean / error), degrees)))


def p_outside(difference: Difference | None, rope: float | None) -> float | None:
    """The larger p of two one-sided t-tests that the difference is below +rope and above -rope."""
    if rope is None or difference is None or difference.standard_error is None:
        return None
    return float(stats.t.sf((rope - abs(difference.mean)) / difference.standard_error, difference.degrees))


def _rounding(values: NDArray[np.float64]) -> float:
    """Scores that differ by less are equal: 0.8 - 0.7 and 0.7 - 0.6 differ in their last bits only."""
    return max(64 * float(np.finfo(np.float64).eps) * float(np.abs(values).max()), 1e-100)
