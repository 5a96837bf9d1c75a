"""Numbers in words: nothing rounds across the line that decides."""

import math

import pytest

from maxgain.study.sentences import counted, listed, p_value, percent, points, reach


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (None, "–"),
        (0.0, "< 0.001"),
        (0.0009999, "< 0.001"),
        (0.001, "0.001"),
        (0.0499, "0.0499"),
        (0.04999, "0.04999"),
        (0.05, "0.050"),
        (math.nextafter(0.05, 0), repr(math.nextafter(0.05, 0))),
        (1.0, "1.000"),
    ],
)
def test_p_value(p, text):
    assert p_value(p) == text


def test_other_numbers():
    assert [points(value) for value in (0.01254, -0.01256, -0.00001, 0)] == ["+1.25", "−1.26", "0.00", "0.00"]
    assert [percent(0.9075), percent(0.9075, 0.0011), percent(None)] == ["90.75", "90.75 ± 0.11", "–"]
    assert reach((-0.028, 0.017)) == "−2.80 to +1.70"
    assert [counted(1, "run"), counted(1797, "image")] == ["1 run", "1,797 images"]
    assert [listed(["a"]), listed(["a", "b", "c"])] == ["a", "a, b and c"]
