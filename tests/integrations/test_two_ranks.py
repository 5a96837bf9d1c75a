"""Every framework on two ranks, which are started once for all that it can do there, against one rank in a loop."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.common import expect_as_alone
from torchrun import torchrun

NEEDED = {"lightning": ("lightning",), "transformers": ("transformers", "accelerate")}
WAYS = [(framework, way) for framework in NEEDED for way in ("ddp", "fsdp")]
RESUMED = [(framework, f"{way}, resumed") for framework, way in WAYS]
Ended = Callable[[str], list[dict[str, Any]]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """What each rank of a framework had in the end, by the way in which it trained."""

    @cache
    def ranks(framework: str) -> list[dict[str, Any]]:
        for package in NEEDED[framework]:
            pytest.importorskip(package)
        folder = tmp_path_factory.mktemp("ranks")
        done = torchrun(2, Path(__file__).with_name(f"ranks_{framework}.py"), folder)
        assert done.returncode == 0, done.stderr
        return [torch.load(folder / f"rank{rank}") for rank in range(2)]

    return ranks


@pytest.mark.parametrize(("framework", "how"), [*WAYS, *RESUMED, ("transformers", "accelerate")])
def test_two_ranks_end_where_one_does(ended: Ended, framework: str, how: str) -> None:
    one, other = (rank[how] for rank in ended(framework))
    assert one["sharded"] == how.startswith("fsdp")
    expect_as_alone(one, other)


@pytest.mark.parametrize(("framework", "how"), WAYS)
def test_two_ranks_that_go_on_from_a_checkpoint_end_in_the_same_bits(ended: Ended, framework: str, how: str) -> None:
    for rank in ended(framework):
        assert all(map(torch.equal, rank[how]["weights"], rank[f"{how}, resumed"]["weights"]))
