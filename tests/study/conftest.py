"""What tests of the study share: runs in this process, and the digits."""

import pytest

from maxgain.study.data import table as datasets
from maxgain.study.data.splits import Dataset
from one_process import in_this_process


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits", fold=0)
