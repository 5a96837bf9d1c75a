"""Runs of a comparison or a search in this process: others take longer to start than short runs take."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from maxgain.study.comparing import engine
from maxgain.study.reproduce import running


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """From now on runs are trained one after another, by whoever asks for them."""
    for user in (engine, running):
        patch.setattr(user, "side_by_side", _one_by_one)


def _one_by_one(work: Callable[[Any], Any], jobs: Iterable[Any], *_: object) -> Iterator[tuple[Any, Any]]:
    return ((job, work(job)) for job in jobs)
