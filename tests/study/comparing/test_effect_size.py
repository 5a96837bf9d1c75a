"""How large a difference is beside its spread, and how surely that is known."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from maxgain.study.comparing import statistics
from score_examples import SLEEP_A, SLEEP_B, corrected_t, paired_t


def noncentral_cdf(t, degrees, d):
    """P(T <= t) from the definition T = (Z + d) / S, by integrating over S."""

    def integrand(s):
        return special.ndtr(t * s - d) * 2 * s * degrees * stats.chi2.pdf(degrees * s**2, degrees)

    ends = np.sqrt(stats.chi2.ppf([1e-14, 1 - 1e-14], degrees) / degrees)
    step = [(d + z) / t for z in (-9, 0, 9)]  # where the normal part rises from 0 to 1
    places = np.unique(np.clip([*ends, *step], *ends))
    return sum(integrate.quad(integrand, *ends, limit=200)[0] for ends in itertools.pairwise(places))


@pytest.mark.parametrize("ratio", [0, 1 / 9])
def test_effect_interval_holds_the_effects_that_t_does_not_contradict(ratio):
    test = corrected_t(SLEEP_A, SLEEP_B, ratio) if ratio else paired_t(SLEEP_A, SLEEP_B)
    low, high = np.array(test.effect_interval) / math.sqrt(1 / 10 + ratio)
    assert noncentral_cdf(test.t, 9, low) == pytest.approx(0.975, abs=1e-9)
    assert noncentral_cdf(test.t, 9, high) == pytest.approx(0.025, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 10, 100])
@pytest.mark.parametrize("t", [0.01, 3.0, 40.0, 900.0, 1100.0, 1e6])
def test_effect_interval_is_right_for_any_t(n, t):
    # Differences with mean t / sqrt(n) and standard deviation 1.
    shape = np.linspace(-1, 1, n)
    differences = shape / shape.std(ddof=1) + t / math.sqrt(n)
    test = paired_t(differences, np.zeros(n))
    low, high = np.array(test.effect_interval) * math.sqrt(n)
    assert noncentral_cdf(test.t, n - 1, low) == pytest.approx(0.975, abs=1e-4)
    assert noncentral_cdf(test.t, n - 1, high) == pytest.approx(0.025, abs=1e-4)
    assert test.effect_interval[0] < test.effect_size < test.effect_interval[1]


def test_effect_size_is_right_on_average_and_its_interval_19_times_in_20():
    random = np.random.default_rng(1)
    true_effect = 0.8
    tests = [paired_t(random.normal(true_effect, 1, 5), np.zeros(5)) for _ in range(600)]
    # The standard error of this average is 0.03; without the correction it would be 1.0.
    assert np.mean([test.effect_size for test in tests]) == pytest.approx(true_effect, abs=0.06)
    covered = [test.effect_interval[0] <= true_effect <= test.effect_interval[1] for test in tests]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)


@pytest.mark.parametrize("degrees", [2, 3, 9, 200])
def test_hedges_correction_undoes_the_bias_of_the_noncentral_t(degrees):
    # The expectation of 1/S, where S² is a chi-square over its degrees of freedom, is what inflates d_z.
    def integrand(s):
        return 2 * degrees * stats.chi2.pdf(degrees * s**2, degrees)

    bias = integrate.quad(integrand, 0, 1)[0] + integrate.quad(integrand, 1, np.inf)[0]
    assert statistics._hedges(degrees) == pytest.approx(1 / bias, rel=1e-6)
