"""The sharded half of promise 13: every constraint on FSDP2's shards matches the run without shards."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
ROWS: dict[str, tuple[Any, float]] = {
    "MaxGain": (MaxGain, 0.1),
    "MaxGain, fresh": (partial(MaxGain, measure="fresh"), 0.1),
    "Lipschitz, p = 1": (partial(Lipschitz, p=1), 0.2),
    "Lipschitz, p = 2": (partial(Lipschitz, p=2), 0.2),
    "Lipschitz, p = inf": (partial(Lipschitz, p=math.inf), 0.2),
    "MaxNorm": (MaxNorm, 0.2),
    "WeightClip": (WeightClip, 0.05),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    # Five channels and seven units, which two ranks cannot share equally.
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 3))


def train(model: nn.Module, optimiser: torch.optim.Optimizer, constraint: Any) -> list[dict[str, float]]:
    scales = []
    for step in range(3):
        optimiser.zero_grad()
        batch = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimiser.step()
        scales.append(constraint.scales)
    return scales


def on_a_rank(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name, (make, bound) in ROWS.items():
        sharded, plain = net(), net()
        for layer in (sharded[0], sharded[3], sharded[5], sharded):
            fully_shard(layer)
        scales = []
        for model in (sharded, plain):
            optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            constraint = make(model, bound).attach(optimiser)
            scales.append(train(model, optimiser, constraint))
        pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
        apart = max(float((one.full_tensor() - other).detach().abs().max()) for one, other in pairs)
        found[name] = {"apart": apart, "scales": scales}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(on_a_rank, args=(str(folder),), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", ROWS)
def test_promise_13_a_constraint_on_shards_matches_the_run_without_shards(name: str, found: Any) -> None:
    for rank in found:
        sharded, plain = rank[name]["scales"]
        assert rank[name]["apart"] < 1e-6
        for mine, theirs in zip(sharded, plain, strict=True):
            assert mine == pytest.approx(theirs)
        assert any(scale < 1 for scales in sharded for scale in scales.values()), "or there was nothing to match"
