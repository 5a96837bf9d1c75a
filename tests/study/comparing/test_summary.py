"""The mean of some scores and its standard error."""

import math

import pytest

from maxgain.errors import RecordError
from maxgain.study.comparing.statistics import Summary, summary


def test_summary_is_mean_and_standard_error():
    assert summary([0.7, 0.8, 0.9]) == Summary(pytest.approx(0.8), pytest.approx(0.1 / math.sqrt(3)), 3)


def test_one_score_has_no_standard_error():
    assert summary([0.7]) == Summary(0.7, None, 1)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "at least one"),
        ([[0.1, 0.2]], "list of numbers"),
        ([0.1, math.nan], "score 2 of 2 is nan"),
        ([-math.inf], "score 1 of 1 is -inf"),
        ([0.5, None], "score 2 of 2"),
    ],
)
def test_what_is_no_score_is_refused(scores, message):
    with pytest.raises(RecordError, match=message):
        summary(scores)
