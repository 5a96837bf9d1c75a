"""Whatever JSON can hold, for tests that write it and read it again."""

import json
from typing import Any

import pytest
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")).filter(lambda text: text not in ("inf", "-inf")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def strictly(text: str) -> Any:
    """What any reader of JSON makes of it: Python alone writes NaN and Infinity."""
    return json.loads(text, parse_constant=pytest.fail)
