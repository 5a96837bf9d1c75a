"""The sharded half of promise 13, and promise 16 on ranks: every constraint on weights that lie in pieces.

All of it is done by two ranks that are started once; each test looks at a part of what they found.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip
from maxgain.distributed import own_part
from maxgain.errors import UnsupportedLayerError
from odd_layers import Scaled, Squared

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
    # Five channels and seven units, which two ranks cannot share equally.
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 3))


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 3))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def own_forwards(odd: type[nn.Linear]) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 7), odd(7, 3))


def replicated(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in [layer for layer in model if isinstance(layer, nn.Linear | nn.Conv2d)]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def in_bfloat16(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def offloaded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel(), "3": RowwiseParallel()})


def flat(model: nn.Sequential, *, originals: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=originals, device_id=torch.device("cpu"))


@dataclass(frozen=True)
class Way:
    """How a model is spread over ranks, and how far its run may be from the one on a single device."""

    make: Callable[[], nn.Sequential]
    spread: Callable[[nn.Sequential], nn.Module]
    tolerance: float = 1e-6


WAYS = {
    "FSDP2": Way(net, sharded),
    "FSDP2 with batch norm": Way(normed, sharded),
    "FSDP2 in bfloat16": Way(net, in_bfloat16, 5e-3),
    "FSDP2, offloaded": Way(net, offloaded),
    "tensor parallel": Way(dense, tensor_parallel),
    "DDP": Way(net, replicated),
    "FSDP1": Way(net, partial(flat, originals=True)),
    "FSDP1, flat": Way(net, partial(flat, originals=False)),
}
REFUSED = {("FSDP1", name): "keeps its weight in flat shards" for name in ROWS if name != "MaxGain"}
REFUSED |= {("FSDP1, flat", name): "use fully_shard, or use_orig_params=True" for name in ROWS}


def train(model: nn.Module, make: Any, bound: float, rank: int) -> list[dict[str, float]]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = make(model, bound).attach(optimiser)
    scales = []
    for step in range(3):
        optimiser.zero_grad()
        batch = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(step + rank))
        model(batch).float().square().mean().backward()
        optimiser.step()
        scales.append({name.removeprefix("module."): scale for name, scale in constraint.scales.items()})
    return scales


def weights(model: nn.Module) -> list[Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [one.detach().clone() for one in model.parameters()]
    return [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]


def compared(way: Way, make: Any, bound: float) -> dict[str, Any]:
    """How far the run on two ranks is from the one without them; or the sentence that refuses it."""
    models = []
    for spread in (way.spread, lambda model: model):
        torch.manual_seed(1)
        models.append(spread(way.make()))
    try:
        scales = [[list(step.values()) for step in train(model, make, bound, 0)] for model in models]
    except UnsupportedLayerError as error:
        return {"refused": str(error)}
    pairs = zip(*map(weights, models), strict=True)
    return {"apart": max(float((one - other).abs().max()) for one, other in pairs), "scales": scales}


def tried(spread: Callable[[nn.Sequential], nn.Module], odd: type[nn.Linear], rank: int) -> dict[str, Any]:
    """What becomes of a layer with a forward of its own, if every rank has other data."""
    torch.manual_seed(1)
    model = spread(own_forwards(odd))
    random = torch.get_rng_state()
    try:
        scales = train(model, MaxGain, 0.05, rank)
    except UnsupportedLayerError as error:
        return {"refused": str(error)}
    return {"scales": scales, "weights": weights(model), "random": torch.equal(random, torch.get_rng_state())}


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    runs = {(way, name): compared(WAYS[way], *ROWS[name]) for way in WAYS for name in ROWS}
    trials = {
        (way, odd.__name__): tried(WAYS[way].spread, odd, rank)
        for way in ("DDP", "FSDP2", "FSDP2 in bfloat16", "FSDP2, offloaded", "FSDP1")
        for odd in (Scaled, Squared)
    }
    torch.save({"runs": runs, "trials": trials}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(on_a_rank, args=(str(folder),), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("way", WAYS)
def test_promise_13_a_constraint_on_pieces_matches_the_run_without_or_is_refused(
    way: str, name: str, found: Any
) -> None:
    for rank in found:
        run = rank["runs"][way, name]
        if (way, name) in REFUSED:
            assert REFUSED[way, name] in run["refused"]
            assert "'_fsdp_wrapped_module.0' (Conv2d)" in run["refused"]
            continue
        pieces, plain = run["scales"]
        assert run["apart"] < WAYS[way].tolerance
        for mine, theirs in zip(pieces, plain, strict=True):
            assert mine == pytest.approx(theirs, rel=WAYS[way].tolerance)
        assert any(scale < 1 for scales in pieces for scale in scales), "or there was nothing to match"


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "FSDP2 in bfloat16", "FSDP2, offloaded"])
def test_promise_16_a_forward_of_its_own_is_tried_on_every_rank_alike(way: str, found: Any) -> None:
    fine, other = (rank["trials"][way, "Scaled"] for rank in found)
    assert fine["scales"] == other["scales"]
    assert all(map(torch.equal, fine["weights"], other["weights"]))
    assert any(scales["2"] < 1 for scales in fine["scales"])
    assert fine["random"]
    assert other["random"]
    for rank in found:
        refused = rank["trials"][way, "Squared"]
        assert "Squared) cannot be constrained: halving its weight does not halve its Wx" in refused["refused"]


def test_promise_16_what_cannot_be_tried_because_its_weight_is_in_flat_shards_is_refused(found: Any) -> None:
    for rank in found:
        for odd in ("Scaled", "Squared"):
            assert f"({odd}) cannot be constrained: FullyShardedData" in rank["trials"]["FSDP1", odd]["refused"]


@pytest.mark.parametrize(("shard_rank", "tensor_rank", "rows"), [(0, 0, 0), (1, 0, 2), (0, 1, 4), (1, 1, 6)])
def test_promise_13_fsdp2_cuts_what_tensor_parallelism_has_left(shard_rank: int, tensor_rank: int, rows: int) -> None:
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    class Mesh:
        def size(self, axis: int) -> int:
            return 2

        def get_local_rank(self, axis: int) -> int:
            return (shard_rank, tensor_rank)[axis]

    class Piece:  # four ranks would take long to start
        placements = _StridedShard(0, split_factor=2), Shard(0)
        device_mesh = Mesh()

        def full_tensor(self) -> Tensor:
            raise NotImplementedError

    values = torch.arange(8.0).unsqueeze(1)
    weight: Any = Piece()
    assert own_part(values, weight).flatten().tolist() == [rows, rows + 1]
