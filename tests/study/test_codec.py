"""One rule for numbers that JSON does not know: infinity is a text, and what is not a number is null."""

import json
import math

import pytest
from hypothesis import given, settings

from json_values import VALUES, strictly
from maxgain.study.files import decode, encode


@settings(max_examples=100, deadline=None, derandomize=True)
@given(VALUES)
def test_what_is_written_is_read(value):
    assert decode(encode(value)) == value
    assert decode(encode(value).encode()) == value


def test_the_name_of_a_file_that_is_no_text_is_made_one():
    assert decode(encode({"command": "train \udcff"})) == {"command": "train \\udcff"}


def test_any_reader_can_read_it():
    text = encode({"gamma": math.inf, "lowest": -math.inf, "loss": math.nan, "rates": (0.2, 0.5), "γ": 2})
    assert strictly(text) == {
        "gamma": "inf",
        "lowest": "-inf",
        "loss": None,
        "rates": [0.2, 0.5],
        "γ": 2,
    }
    assert "\n" not in text


def test_for_people_it_is_indented_and_keeps_its_letters():
    assert encode({"γ": [1]}, indent=2) == '{\n  "γ": [\n    1\n  ]\n}'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"out": json}, "out is of the type module, which JSON cannot hold"),
        ({"gains": {3: 1.0}}, "gains has a field called 3, but names must be texts"),
        ([{"x": [1j]}], "x is of the type complex"),
    ],
)
def test_what_json_cannot_hold_is_named(value, said):
    with pytest.raises(ValueError, match=said):
        encode(value)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "{", ""])
def test_what_is_not_strict_json_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own words
        decode(text)
