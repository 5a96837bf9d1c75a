"""Whether one regulariser is better than another, or only luckier: the paper's protocol as pure functions on arrays.

Two regularisers are compared on the same folds (or seeds), so the differences of their scores are tested, pair by
pair, against zero; several comparisons with one baseline share their risk of a false alarm by Holm's correction.
Scores are accuracies as fractions, and more is better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from maxgain.errors import RecordError

ALPHA = 0.05
"""A difference is called significant if chance alone shows one as large less often than this."""

DISJOINT_FOLDS = "paired t-test on disjoint folds"
ONE_SPLIT = "paired t-test over seeds on one split (says nothing about other data)"
OVERLAPPING = "Nadeau–Bengio corrected t-test (training sets overlap)"


@dataclass(frozen=True)
class Summary:
    """Scores in brief; one score alone has no standard error."""

    mean: float
    standard_error: float | None
    n: int


@dataclass(frozen=True)
class PairedTest:
    """What the paired differences a - b say about a population in which they are zero on average.

    `effect_size` is the mean difference in units of the differences' standard deviation (Cohen's d_z) with Hedges'
    exact correction, without which ten folds overstate it by 9 %; for two pairs no correction exists and none is made.
    `effect_interval` holds the true effect size with 95 % confidence; it comes from the noncentral t distribution and
    needs no correction. Differences that are all equal, but not zero, give an infinite `t` and effect size of their
    sign and p = 0: there is no spread to judge them by. If all are zero, t = 0 and p = 1.
    """

    mean_difference: float
    standard_error: float
    t: float
    degrees: int
    p_value: float
    interval: tuple[float, float]
    """Holds the true mean difference with 95 % confidence."""
    effect_size: float
    effect_interval: tuple[float, float]
    method: str
    """The test's name in words."""


@dataclass(frozen=True)
class Overlap:
    """What the runs behind the scores have in common, where they are not runs on disjoint folds.

    `test_fraction_ratio` is the number of test instances per training instance of a run where each run has drawn its
    own training set from the same data (1 / (k - 1) in k-fold cross-validation). It is None where all runs have one
    and the same split and differ in their seed only.
    """

    test_fraction_ratio: float | None = None


def overlap(over: str, config: Mapping[str, Any]) -> Overlap | None:
    """What runs of this configuration have in common that are paired over their 'fold' or their 'seed'.

    In cross-validation a run is tested on one fold; one more is held out if the run was not trained on it too.
    """
    if over == "seed":
        return Overlap()
    folds = config.get("cross_validation")
    if folds is None:
        return None
    return Overlap(1 / (folds - (1 if config["train_on"] == "train+validation" else 2)))


@dataclass(frozen=True)
class Row:
    """One line of a comparison. The baseline's own row has no test, nor has any where each has one run only."""

    regulariser: str
    baseline: str
    summary: Summary
    test: PairedTest | None
    adjusted_p: float | None
    """The p-value after Holm's correction over all `comparisons` with the baseline."""
    significant: bool
    comparisons: int


def summary(values: ArrayLike) -> Summary:
    """The mean of some scores and how far it may be off: the standard error, from the n - 1 standard deviation."""
    array = _scores(values)
    n = len(array)
    error = float(array.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return Summary(float(array.mean()), error, n)


def paired_t(a: ArrayLike, b: ArrayLike) -> PairedTest:
    """Student's t-test of whether the paired differences a - b are zero on average, if the pairs are independent."""
    return _paired_test(a, b, 0.0, "paired t-test")


def corrected_t(a: ArrayLike, b: ArrayLike, test_fraction_ratio: float) -> PairedTest:
    """Nadeau and Bengio's corrected resampled t-test (Machine Learning 52, 2003), for training sets that overlap.

    Overlap makes the pairs alike, so that their spread understates how far their mean may be off. The variance of
    the mean is taken to be (1/n + test_fraction_ratio) s² instead of s²/n, where the ratio is that of test to
    training instances.
    """
    if not 0 < test_fraction_ratio < math.inf:
        raise RecordError(
            f"the ratio of test to training instances must be a positive number, not {test_fraction_ratio}."
        )
    return _paired_test(a, b, test_fraction_ratio, OVERLAPPING)


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's adjusted p-values, in the order given.

    Calling those below alpha significant keeps the chance of even one false alarm among them below alpha, however
    the tests depend on each other.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not np.all((p >= 0) & (p <= 1)):
        raise RecordError(f"p-values must be a list of numbers from 0 to 1, not {p_values!r}.")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return adjusted


def compare(scores: Mapping[str, Sequence[float]], baseline: str, overlap: Overlap | None) -> list[Row]:
    """Every regulariser against the baseline, by the test that suits how the data were split.

    `scores` holds each regulariser's scores, all in the same order of folds or seeds. `overlap` is None for runs on
    disjoint folds.
    """
    if baseline not in scores:
        raise RecordError(f"the baseline {baseline!r} is not among the regularisers with scores: {', '.join(scores)}.")
    summaries = {name: summary(values) for name, values in scores.items()}
    for name, brief in summaries.items():
        if brief.n != summaries[baseline].n:
            raise RecordError(
                f"{name!r} has {brief.n} scores and the baseline {baseline!r} has {summaries[baseline].n}: "
                "only runs on the same folds or seeds can be paired."
            )
    testable = summaries[baseline].n > 1
    tests = {
        name: _suitable_test(values, scores[baseline], overlap)
        for name, values in scores.items()
        if testable and name != baseline
    }
    adjusted = dict(zip(tests, holm([test.p_value for test in tests.values()]).tolist(), strict=True))
    return [
        Row(
            regulariser=name,
            baseline=baseline,
            summary=summaries[name],
            test=tests.get(name),
            adjusted_p=adjusted.get(name),
            significant=name in adjusted and adjusted[name] < ALPHA,
            comparisons=len(tests),
        )
        for name in scores
    ]


def compare_pairs(
    scores: Mapping[str, Mapping[int, float]], baseline: str, overlap: Overlap | None
) -> tuple[tuple[int, ...], list[Row]]:
    """`compare` for scores by fold or seed: on those alone where every regulariser has one, which are returned too.

    Where there is none, or no score of the baseline, there are no rows.
    """
    pairs = tuple(sorted(set.intersection(*map(set, scores.values())))) if scores else ()
    paired = {regulariser: [by_number[pair] for pair in pairs] for regulariser, by_number in scores.items()}
    return pairs, compare(paired, baseline, overlap) if pairs and baseline in paired else []


def verdict(row: Row) -> str:
    """What a row shows, in one sentence that claims no more than the test does."""
    if row.regulariser == row.baseline:
        return "the baseline"
    if row.test is None or row.adjusted_p is None:
        return "not tested: one run each cannot tell a difference from chance"
    difference = row.test.mean_difference
    evidence = _evidence(row.adjusted_p, row.comparisons)
    if not row.significant:
        seen = f"the difference of {_points(difference)} points may be chance"
        if not difference:
            seen = "no difference" if row.test.standard_error == 0 else "no difference on average"
        return f"not significant: {seen} ({evidence})"
    if row.test.standard_error == 0:
        return (
            f"significant only formally: all {row.summary.n} pairs differ by the same {_points(difference)} points, "
            f"so there is no spread to judge them by ({evidence})"
        )
    better, size = ("better" if difference > 0 else "worse"), _points(abs(difference)).removeprefix("+")
    caveat = "; it says nothing about other data" if row.test.method == ONE_SPLIT else ""
    return f"significant: {better} than {row.baseline} by {size} points ({evidence}){caveat}"


def p_value(value: float) -> str:
    """Three decimals, or as many as it takes not to round across the threshold, and no zero that is none."""
    if value < 0.001:
        return "< 0.001"
    texts = (f"{value:.{decimals}f}" for decimals in range(3, 18))
    return next(text for text in texts if (float(text) < ALPHA) == (value < ALPHA))


def _suitable_test(a: ArrayLike, b: ArrayLike, overlap: Overlap | None) -> PairedTest:
    if overlap is None:
        return replace(paired_t(a, b), method=DISJOINT_FOLDS)
    if overlap.test_fraction_ratio is None:
        return replace(paired_t(a, b), method=ONE_SPLIT)
    return corrected_t(a, b, overlap.test_fraction_ratio)


def _paired_test(a: ArrayLike, b: ArrayLike, ratio: float, method: str) -> PairedTest:
    first, second = _scores(a), _scores(b)
    n = len(first)
    if len(second) != n:
        raise RecordError(f"only runs on the same folds or seeds can be paired, but there are {n} and {len(second)}.")
    if n < 2:
        raise RecordError("a test needs at least two pairs of scores, but there is one: run more folds or seeds.")
    differences = first - second
    mean = float(differences.mean())
    # scipy's t is mean / (s / sqrt(n)); the ratio only widens the standard error.
    inflation = math.sqrt(1 + n * ratio)
    # 0.8 - 0.7 and 0.7 - 0.6 differ in their last bits only, and no score is measured that finely.
    rounding = 64 * np.finfo(np.float64).eps * max(np.abs(first).max(), np.abs(second).max())
    if np.ptp(differences) <= rounding:
        mean = mean if abs(mean) > rounding else 0.0
        error, t = 0.0, math.copysign(math.inf, mean) if mean else 0.0
    else:
        error = float(differences.std(ddof=1)) / math.sqrt(n) * inflation
        t = float(stats.ttest_rel(first, second).statistic) / inflation
    half_width = float(stats.t.ppf(0.975, n - 1)) * error
    to_effect = math.sqrt(1 / n + ratio)
    low, high = _noncentrality_interval(t, n - 1)
    return PairedTest(
        mean_difference=mean,
        standard_error=error,
        t=t,
        degrees=n - 1,
        p_value=float(2 * stats.t.sf(abs(t), n - 1)),
        interval=(mean - half_width, mean + half_width),
        effect_size=_hedges(n - 1) * t * to_effect,
        effect_interval=(low * to_effect, high * to_effect),
        method=method,
    )


def _hedges(degrees: int) -> float:
    """What makes the expected d_z the true effect size; with one degree of freedom that expectation does not exist."""
    if degrees == 1:
        return 1.0
    return math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees - 1) / 2)) / math.sqrt(degrees / 2)


def _noncentrality_interval(t: float, degrees: int) -> tuple[float, float]:
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


def _scores(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise RecordError(f"scores must be a list of numbers, at least one, not {values!r}.")
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise RecordError(f"score {place + 1} of {array.size} is {array[place]}: a failed run has no score to test.")
    return array


def _points(difference: float) -> str:
    """A difference of accuracies in percentage points, to the first decimal that shows it, but at most three."""
    texts = [f"{100 * difference:+.{decimals}f}" for decimals in (1, 2, 3)]
    return next((text for text in texts if float(text)), texts[-1])


def _evidence(p: float, comparisons: int) -> str:
    corrected = f", Holm-corrected over {comparisons} comparisons" if comparisons > 1 else ""
    if p < 0.001:
        return f"p < 0.001{corrected}"
    # Two digits, or as many as it takes not to round across the threshold.
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return f"p = {next(text for text in texts if (float(text) < ALPHA) == (p < ALPHA))}{corrected}"
