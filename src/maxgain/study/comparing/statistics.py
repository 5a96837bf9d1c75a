"""Whether one regulariser is better than another, or only luckier: tests of differences, as pure functions on arrays.

Two regularisers are compared on the same folds (or seeds). Two analyses of that are here: a paired test per contrast,
which assumes least, and an additive model of all rows with one pooled error, which sees smaller differences. Scores
are accuracies as fractions, and more is better. What cannot be known is None: a difference without any spread, or from
one pair alone, has no p-value, and certainly not 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from maxgain.errors import RecordError

ALPHA = 0.05
"""A difference is called established if chance alone shows one as large less often than this."""

DISJOINT_FOLDS = "paired t-test on disjoint folds"
ONE_SPLIT = "paired t-test over seeds on one split (says nothing about other data)"
OVERLAPPING = "Nadeau–Bengio corrected t-test (training sets overlap)"
WELCH = "Welch's t-test, unpaired"

Interval = tuple[float, float]
Pair = tuple[str, str]
"""Two rows, of which the first is expected to be the better one."""
Scores = Mapping[str, Mapping[int, float]]
"""Accuracies by row, and then by fold or seed."""
Verdict = Literal["established", "reversed", "equivalent", "inconclusive"]


@dataclass(frozen=True)
class Summary:
    """Scores in brief; one score alone has no standard error."""

    mean: float
    standard_error: float | None
    n: int


@dataclass(frozen=True)
class Design:
    """What the runs of a comparison have in common, which decides how their differences are tested."""

    over: Literal["fold", "seed"]
    overlap: float = 0.0
    """Test instances per training instance where the runs' training sets overlap, as in cross-validation; else 0."""

    @classmethod
    def of(cls, over: Literal["fold", "seed"], cross_validation: int | None, train_on: str) -> "Design":
        """The design of runs on folds (of cross-validation, where there is a number of them) or with several seeds.

        In cross-validation a run is tested on one fold; one more is held out if the run was not trained on it too.
        """
        if over == "seed" or cross_validation is None:
            return cls(over)
        return cls(over, 1 / (cross_validation - (1 if train_on == "train+validation" else 2)))

    @property
    def paired_method(self) -> str:
        """The name of the paired test."""
        return ONE_SPLIT if self.over == "seed" else OVERLAPPING if self.overlap else DISJOINT_FOLDS

    @property
    def pooled_method(self) -> str:
        """The name of the additive model."""
        corrected = ", Nadeau–Bengio corrected (training sets overlap)" if self.overlap else ""
        return f"accuracy ~ row + {self.over}, pooled error{corrected}"


@dataclass(frozen=True)
class Difference:
    """How much better one row is than another, and how sure that is; None for what is undefined.

    `effect_size` is the mean difference in units of the differences' standard deviation (Cohen's d_z) with Hedges'
    exact correction, without which ten folds overstate it by 9 %; for two pairs no correction exists and none is made.
    `effect_interval` holds the true effect size with 95 % confidence; it comes from the noncentral t distribution and
    needs no correction. Paired tests alone have them.
    """

    mean: float
    n: int
    """The number of pairs."""
    method: str
    """The test's name in words."""
    standard_error: float | None = None
    degrees: float | None = None
    t: float | None = None
    p_value: float | None = None
    interval: Interval | None = None
    """Holds the true mean difference with 95 % confidence, taken alone."""
    interval_90: Interval | None = None
    """The same with 90 %: inside a region of equivalence, it rules out at 5 % that the difference is outside."""
    effect_size: float | None = None
    effect_interval: Interval | None = None
    adjusted_p: float | None = None
    """After Holm's correction over the family of contrasts."""
    simultaneous_interval: Interval | None = None
    """Bonferroni's: all intervals of the family hold their true differences at once with 95 % confidence."""

    @property
    def decisive_p(self) -> float | None:
        """What a verdict follows: the p-value of the family where there is one, else that of the difference alone."""
        return self.p_value if self.adjusted_p is None else self.adjusted_p


def summary(values: ArrayLike) -> Summary:
    """The mean of some scores and how far it may be off: the standard error, from the n - 1 standard deviation."""
    array = _scores(values)
    n = len(array)
    error = float(array.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return Summary(float(array.mean()), error, n)


def paired(a: ArrayLike, b: ArrayLike, design: Design) -> Difference:
    """Student's t-test of whether the paired differences a - b are zero on average.

    Training sets that overlap make pairs alike, so that their spread understates how far their mean may be off. Nadeau
    and Bengio (Machine Learning 52, 2003) take the variance of the mean to be (1/n + overlap) s² instead of s²/n.
    """
    first, second = _scores(a), _scores(b)
    n = len(first)
    if len(second) != n:
        raise RecordError(f"only runs on the same folds or seeds can be paired, but there are {n} and {len(second)}.")
    differences = first - second
    rounding, method = _rounding(first, second), design.paired_method
    mean = _unless_rounding(float(differences.mean()), rounding)
    if n < 2 or np.ptp(differences) <= rounding:
        return Difference(mean, n, method)
    to_effect = math.sqrt(1 / n + design.overlap)
    error = float(differences.std(ddof=1)) * to_effect
    low, high = _noncentrality_interval(mean / error, n - 1)
    return replace(
        _tested(mean, error, n - 1, n, method),
        effect_size=_hedges(n - 1) * mean / error * to_effect,
        effect_interval=(low * to_effect, high * to_effect),
    )


def pooled(scores: Scores, contrasts: Sequence[Pair], design: Design) -> list[Difference | None]:
    """The contrasts in the model accuracy ~ row + fold (or seed), fitted to all rows by least squares.

    The error variance is pooled over all rows, which gives it many degrees of freedom, and supposes that it is the
    same in all of them. Runs may be missing anywhere. A contrast is None where no runs tell anything about it. Where
    training sets overlap, a contrast's variance grows as in Nadeau and Bengio's test, to which this comes for two rows.
    """
    rows = [row for row, by_unit in scores.items() if by_unit]
    units = sorted({unit for row in rows for unit in scores[row]})
    cells = [(rows.index(row), units.index(unit)) for row in rows for unit in sorted(scores[row])]
    values = _scores([scores[rows[row]][units[unit]] for row, unit in cells]) if cells else np.empty(0)
    matrix = np.zeros((len(cells), len(rows) + len(units)))
    for index, (row, unit) in enumerate(cells):
        matrix[index, row] = matrix[index, len(rows) + unit] = 1
    # By the normal equations: their matrix has a row per row and unit, and is small however many runs there are.
    gram = matrix.T @ matrix
    inverse = np.linalg.pinv(gram, hermitian=True) @ matrix.T
    coefficients = inverse @ values
    residuals = values - matrix @ coefficients
    degrees = len(cells) - int(np.linalg.matrix_rank(gram, hermitian=True)) if cells else 0
    spread = degrees > 0 and np.ptp(residuals) > _rounding(values)
    variance = float(residuals @ residuals) / degrees if spread else None

    def difference(first: str, second: str) -> Difference | None:
        if first not in rows or second not in rows:
            return None
        weights = np.zeros(matrix.shape[1])
        weights[rows.index(first)], weights[rows.index(second)] = 1, -1
        of_runs = weights @ inverse
        if not np.allclose(of_runs @ matrix, weights, atol=1e-9):  # no chain of pairs leads from one to the other
            return None
        n = len(set(scores[first]) & set(scores[second]))
        mean = _unless_rounding(float(of_runs @ values), _rounding(values))
        if variance is None:
            return Difference(mean, n, design.pooled_method)
        error = math.sqrt(variance * (float(of_runs @ of_runs) + 2 * design.overlap))
        return _tested(mean, error, degrees, n, design.pooled_method)

    return [difference(*contrast) for contrast in contrasts]


def welch(a: ArrayLike, b: ArrayLike) -> Difference:
    """Welch's t-test, which neither pairs the scores nor supposes that both spread alike."""
    first, second = _scores(a), _scores(b)
    mean, n = float(first.mean() - second.mean()), min(len(first), len(second))
    if n < 2 or max(np.ptp(first), np.ptp(second)) <= _rounding(first, second):
        return Difference(mean, n, WELCH)
    # By hand, because scipy's warns where one of the two has no spread, which is no reason to worry here.
    parts = [(float(values.var(ddof=1)) / len(values), len(values) - 1) for values in (first, second)]
    variance = sum(part for part, _ in parts)
    degrees = variance**2 / sum(part**2 / free for part, free in parts)
    return _tested(mean, math.sqrt(variance), degrees, n, WELCH)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given. An undefined one stays so, and costs the others nothing.

    Calling those below alpha significant keeps the chance of even one false alarm among them below alpha, however
    the tests depend on each other.
    """
    known = [place for place, value in enumerate(p_values) if value is not None]
    p = np.array([p_values[place] for place in known], dtype=np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise RecordError(f"p-values must be numbers from 0 to 1, or None, not {p_values!r}.")
    adjusted: list[float | None] = [None] * len(p_values)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    for place, value in zip(order, steps, strict=True):
        adjusted[known[place]] = float(value)
    return adjusted


def as_family(differences: Sequence[Difference | None]) -> list[Difference | None]:
    """The differences with what they are worth together: Holm's p-values and Bonferroni's simultaneous intervals."""
    p_values = [None if difference is None else difference.p_value for difference in differences]
    size = sum(value is not None for value in p_values)
    return [
        difference
        if difference is None or adjusted is None
        else replace(difference, adjusted_p=adjusted, simultaneous_interval=_interval(difference, ALPHA / size))
        for difference, adjusted in zip(differences, holm(p_values), strict=True)
    ]


def equivalent(difference: Difference, rope: float | None) -> bool:
    """Whether the difference lies within ±rope at 5 % (two one-sided tests): its 90 % interval is inside."""
    if rope is None or difference.interval_90 is None:
        return False
    low, high = difference.interval_90
    return -rope < low and high < rope


def verdict(difference: Difference | None, rope: float | None) -> Verdict:
    """What a difference shows, in one word. 'Inconclusive' is no proof of equality: only 'equivalent' is."""
    if difference is None or (p := difference.decisive_p) is None:
        return "inconclusive"
    if p < ALPHA:
        return "established" if difference.mean > 0 else "reversed"
    return "equivalent" if equivalent(difference, rope) else "inconclusive"


def _tested(mean: float, error: float, degrees: float, n: int, method: str) -> Difference:
    t = mean / error
    tested = Difference(
        mean=mean,
        n=n,
        method=method,
        standard_error=error,
        degrees=degrees,
        t=t,
        p_value=float(2 * stats.t.sf(abs(t), degrees)),
    )
    return replace(tested, interval=_interval(tested, ALPHA), interval_90=_interval(tested, 2 * ALPHA))


def _interval(difference: Difference, risk: float) -> Interval:
    """Holds the true mean difference but for this risk."""
    assert difference.standard_error is not None
    half_width = float(stats.t.isf(risk / 2, difference.degrees)) * difference.standard_error
    return difference.mean - half_width, difference.mean + half_width


def _hedges(degrees: int) -> float:
    """What makes the expected d_z the true effect size; with one degree of freedom that expectation does not exist."""
    if degrees == 1:
        return 1.0
    return math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees - 1) / 2)) / math.sqrt(degrees / 2)


def _noncentrality_interval(t: float, degrees: int) -> Interval:
    """The noncentralities d for which an observed t is neither in the upper nor in the lower 2.5 % of its distribution.

    They are the quantiles of t·S - Z, with S² a chi-square over its degrees of freedom and Z standard normal.
    """
    if t < 0:
        low, high = _noncentrality_interval(-t, degrees)
        return -high, -low

    def spread(probability: float) -> float:
        return math.sqrt(float(stats.chi2.ppf(probability, degrees)) / degrees)

    if t > 1000:  # Z no longer shows, and scipy's distribution function has no such values
        return t * spread(0.025), t * spread(0.975)
    # Half the risk given to S and half to Z bounds both quantiles, so the roots lie between.
    bound = float(stats.norm.ppf(0.9875))
    bracket = t * spread(0.0125) - bound, t * spread(0.9875) + bound
    low, high = (
        float(optimize.brentq(lambda d, p=p: float(stats.nct.cdf(t, degrees, d)) - p, *bracket)) for p in (0.975, 0.025)
    )
    return low, high


def _rounding(*scores: NDArray[np.float64]) -> float:
    """Scores that differ by less are equal: 0.8 - 0.7 and 0.7 - 0.6 differ in their last bits only.

    So do scores whose squares are too small to be numbers, which no test set has room for.
    """
    largest = max((float(np.abs(values).max()) for values in scores if len(values)), default=0.0)
    return max(64 * float(np.finfo(np.float64).eps) * largest, 1e-100)


def _unless_rounding(mean: float, rounding: float) -> float:
    return mean if abs(mean) > rounding else 0.0


def _scores(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise RecordError(f"scores must be a list of numbers, at least one, not {values!r}.")
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise RecordError(f"score {place + 1} of {array.size} is {array[place]}: a failed run has no score to test.")
    return array
