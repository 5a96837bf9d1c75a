"""What tests of the study share."""

import pytest

from maxgain.study import data


@pytest.fixture(scope="session")
def digits():
    """The first fold of digits: 108 training, 36 validation and 36 test images."""
    return data.load("digits", fold=0)
