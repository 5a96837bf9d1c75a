"""What tests of the study share: runs in this process, and the digits."""

from typing import Any

import pytest

from maxgain.study.comparing import engine
from maxgain.study.data import table as datasets
from maxgain.study.data.splits import Dataset
from maxgain.study.reproduce import running


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own take longer to start than short runs take."""

    def one_by_one(work: Any, jobs: Any, *how: Any) -> Any:
        return ((job, work(job)) for job in jobs)

    monkeypatch.setattr(engine, "side_by_side", one_by_one)
    monkeypatch.setattr(running, "side_by_side", one_by_one)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits", fold=0)
