"""Ranks that share every batch end where one process ends that has it alone, whatever the regulariser.

The ranks of a number start once and train with every regulariser; each test looks at what all of them brought back.
"""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from maxgain.errors import MaxGainError, RecipeError
from maxgain.study.data import table as datasets
from maxgain.study.ranks import ALONE, Ranks
from maxgain.study.recipes import RECIPES
from maxgain.study.regularisers import REGULARISERS
from maxgain.study.training import Training

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
COMBINED = ["maxgain=1+batchnorm+dropout", "batchnorm+gaussiandropout"]
NAMES = [*REGULARISERS, *COMBINED]
STEPS, BATCH = 3, 14  # a batch that four ranks cannot share evenly


def trained(regulariser: str, ranks: Ranks) -> dict[str, Tensor]:
    """All that there is after a few steps. SGD, as Adam makes steps of gradients that are zero but for rounding."""
    recipe = replace(
        RECIPES["digits"], fold=0, regulariser=regulariser, augment=True, batch_size=BATCH,
        optimiser="sgd", learning_rate=0.02, measure="fresh" if "+" in regulariser else "stale",
    )  # fmt: skip
    training = Training(recipe, datasets.load("digits", fold=0), torch.device("cpu"), ranks)
    training.begin_epoch()
    for _ in range(STEPS):
        training.step()
    return {name: tensor.detach().clone() for name, tensor in training.state().items()}


def refused_by_one(ranks: Ranks) -> str:
    def prepare() -> None:
        if ranks.rank == 1:
            raise MaxGainError("there is no folder here.")

    with pytest.raises(MaxGainError) as caught:
        ranks.ready(prepare)
    return str(caught.value)


def run(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    ranks = Ranks(rank, count)
    found: dict[str, Any] = {name: trained(name, ranks) for name in NAMES}
    found["told"] = ranks.first_says(lambda: {"rank": rank})
    found["refused"] = refused_by_one(ranks)  # the other ranks wait until the first has ended
    torch.save(found, f"{folder}/{rank}")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    mp.spawn(run, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / str(rank)) for rank in range(request.param)]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_end_where_one_process_ends_but_for_rounding(found: list[dict[str, Any]], name: str) -> None:
    alone = trained(name, ALONE)
    ours = found[0][name]
    assert ours.keys() == alone.keys()
    for field, expected in alone.items():
        if field.endswith(".dropped") or not expected.is_floating_point():
            assert torch.equal(ours[field], expected), field
        else:
            torch.testing.assert_close(
                ours[field], expected, rtol=2e-4, atol=2e-5, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}"
            )


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_have_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    for other in found[1:]:
        for field, tensor in found[0][name].items():
            assert torch.equal(tensor.nan_to_num(), other[name][field].nan_to_num()), field


def test_what_one_rank_refuses_is_refused_by_all_in_its_words(found: list[dict[str, Any]]) -> None:
    assert {rank["refused"] for rank in found} == {"rank 1 cannot begin: there is no folder here."}


def test_every_rank_is_told_what_the_first_one_has(found: list[dict[str, Any]]) -> None:
    assert [rank["told"] for rank in found] == [{"rank": 0}] * len(found)


@pytest.mark.parametrize(("count", "batch_size"), [(1, 1), (2, 14), (4, 14), (3, 3), (5, 16)])
def test_the_shares_of_a_batch_are_disjoint_complete_and_alike(count: int, batch_size: int) -> None:
    shares = [range(batch_size)[Ranks(rank, count).share_of(batch_size)] for rank in range(count)]
    assert [image for share in shares for image in share] == list(range(batch_size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_images_in_a_batch_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"4 ranks cannot share a batch of 3: start fewer, or use a larger --batch"):
        Ranks(0, 4).share_of(3)
