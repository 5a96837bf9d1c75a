"""What tests of many runs share."""

from collections.abc import Iterator

import pytest

from maxgain.study.comparing import engine


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(work, jobs, count, device) -> Iterator[tuple]:
        for job in jobs:
            yield job, work(job)

    monkeypatch.setattr(engine, "side_by_side", one_by_one)
