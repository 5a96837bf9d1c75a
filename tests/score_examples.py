"""Scores to compare, drawn or from a textbook, and the tests of them in a word."""

from hypothesis import settings
from hypothesis import strategies as st

from maxgain.study.comparing.statistics import Design, paired

FOLDS = Design("fold")

# Hours of extra sleep that two drugs gave the same ten patients: the example of Student's paper of 1908.
SLEEP_A = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
SLEEP_B = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]

quick = settings(max_examples=60, deadline=None, derandomize=True)

# Accuracies as they come: hits among 1,000 test images.
accuracies = st.integers(0, 1000).map(lambda hits: hits / 1000)


def paired_t(a, b):
    return paired(a, b, FOLDS)


def corrected_t(a, b, ratio):
    return paired(a, b, Design("fold", ratio))
