"""Promise 13: replicas keep the same bits, and sharded weights match the run that is not sharded.

Two ranks start once and run every scenario; each test looks at what both of them brought back.
"""

import contextlib
import copy
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, watch
from maxgain.errors import MaxGainError, MeasurementWarning
from maxgain.weights import MaxNorm, WeightClip
from odd_layers import Cosine, Scaled

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
STEPS, GAMMA = 5, 0.2


class Net(nn.Module):
    def __init__(self, extra: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)  # the same on every rank
        self.conv, self.norm, self.dense = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.sometimes = nn.Linear(3, 3)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(torch.relu_(self.norm(self.conv(x))).flatten(1))
        return self.sometimes(x) if self.extra else x


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


def part(rank: int, step: int) -> Tensor:
    """A rank's half of a batch of eight; rank 2 has all of it."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return whole if rank == 2 else whole[4 * rank : 4 * rank + 4]


def full(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def outcome(model: nn.Module, constraint: Any, weights: bool = True) -> dict[str, Any]:
    """What a training ends with."""
    found = {"gains": list(constraint.gains.values()), "scales": list(constraint.scales.values())}
    return found | {"skipped": list(constraint.skipped), "weights": full(model) if weights else []}


def fit(
    model: Any, batches: Any, *constraints: Any, optimizer: Any = None, lr: float = 0.1, forward: Any = None
) -> Any:
    """Train the model under constraints, and yield after each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for constraint in constraints:
        constraint.attach(optimizer)
    for x in batches:
        optimizer.zero_grad()
        (forward or model)(x).square().mean().backward()
        optimizer.step()
        yield


def halves(rank: int, is_sharded: bool, steps: int = 3) -> list[Tensor]:
    """What a rank trains on, or one process alone."""
    return [part(rank if is_sharded else 2, step) for step in range(steps)]


def train(rank: int, *, only_rank_0: bool = False, wrapped: bool = False, group: Any = None) -> Any:
    """A DDP training; a second constraint measures what this rank alone sees."""
    from torch.nn.parallel import DistributedDataParallel

    model = Net(extra=rank == 0 or not only_rank_0)
    replica = DistributedDataParallel(model, find_unused_parameters=only_rank_0)
    constraint = MaxGain(replica if wrapped else model, GAMMA, process_group=group)
    local = MaxGain(model, math.inf, process_group=False)
    found: dict[str, Any] = {"gains": [], "local": [], "scales": []}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for _ in fit(replica, [batch(rank, step) for step in range(STEPS)], constraint, local):
            found["gains"].append(constraint.gains)
            found["local"].append(local.gains)
            found["scales"].append(constraint.scales)
    return {"parameters": full(model), "collectives": all_reduce.call_count, **found}


def in_a_mesh(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return train(rank, group=init_device_mesh("cpu", (2,)))


def zero(rank: int) -> Any:
    """Each rank updates its part of the weights and sends it to the other."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    trained = []
    for make in (partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD), torch.optim.SGD):
        replica = DistributedDataParallel(Net())
        batches = [batch(rank, step) for step in range(3)]
        list(fit(replica, batches, MaxGain(replica, GAMMA), optimizer=make(replica.parameters(), lr=0.1)))
        trained.append(full(replica))
    return trained


def accumulate(rank: int) -> Any:
    """Two microbatches between which DDP sends rank 0's buffers around."""
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4, bias=False))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, math.inf, include="1").attach(optimizer)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append((args[0].detach(), output.detach())))
    for microbatch in range(2):
        with replica.no_sync() if microbatch == 0 else contextlib.nullcontext():
            replica(batch(rank, microbatch)[:, 0].flatten(0, 1)).sum().backward()
    optimizer.step()
    return constraint.gains["1"], max(max((z.norm(dim=1) / x.norm(dim=1)).tolist()) for x, z in seen)


def said_of(model: nn.Module, forward: Callable[[Tensor], Tensor], **options: Any) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeasurementWarning)
        MaxGain(model, 0.5, **options).attach(optimizer)
        for step in range(4):
            forward(part(2, step)).sum().backward()
            optimizer.step()
    return [str(one.message) for one in caught if one.category is MeasurementWarning]


def different_ranks(rank: int) -> Any:
    """Ranks whose layers or weights differ, and ranks that say so themselves."""
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"stage_{rank}": nn.Linear(6, 4)})
    return (
        said_of(stage, stage[f"stage_{rank}"]),
        said_of(other := nn.Linear(6, 4), other),
        said_of(alone := nn.Linear(6, 4), alone, process_group=False),
        said_of(same := mlp(), same),
    )


def sharded(rank: int, make: Any, bound: float, net: Any = mlp, steps: int = STEPS, how: str = "") -> Any:
    """FSDP2, against the same training in one process, which both ranks do for themselves."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for is_sharded in (True, False):
        model = net()
        constraint = make(model, bound) if is_sharded and how == "early" else None
        if is_sharded:
            for layer in model:
                if list(layer.parameters()):
                    fully_shard(layer)
            fully_shard(model)
        if constraint is None:
            takes_group = getattr(make, "func", make) in (MaxGain, Lipschitz)
            constraint = make(model, bound, **({"process_group": False} if takes_group and not is_sharded else {}))
        forward = torch.compile(model, backend="aot_eager") if is_sharded and how == "compiled" else model
        list(fit(model, halves(rank, is_sharded, steps), constraint, forward=forward))
        found.append(outcome(model, constraint))
    return found


def own_forwards() -> nn.Sequential:
    """One of two layers with forwards of their own cannot be bounded."""
    torch.manual_seed(7)
    return nn.Sequential(Scaled(6, 8), nn.Tanh(), Cosine(8, 4), nn.Linear(4, 2))


def transposed() -> nn.Sequential:
    """A layer whose weight has its outputs in the second dimension; it is sharded along the first."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Unflatten(1, (6, 1)), nn.ConvTranspose1d(6, 9, 1), nn.Flatten(), nn.Linear(9, 2))


def one_rank_alone(rank: int) -> Any:
    """A layer that cannot be bounded, which one rank alone is given at first."""
    torch.manual_seed(7)
    body, odd = nn.Linear(6, 4), Cosine(6, 4)
    model = nn.ModuleDict({"body": body, "odd": odd})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, 0.1).attach(optimizer)
    before = odd.weight.detach().clone()
    for step in range(3):
        x = part(rank, step)
        (body(x).sum() + (odd(x).sum() if rank == 0 or step else 0.0)).backward()
        optimizer.step()
    return full(model), torch.equal(odd.weight, before), list(constraint.gains)


class Tupled(nn.Linear):
    """From some call on it returns a tuple, on one rank."""

    calls_left = 3

    def forward(self, x: Tensor) -> Any:
        self.calls_left -= 1
        return super().forward(x) if self.calls_left > 0 else (super().forward(x),)


def one_rank_leaves_out(rank: int) -> Any:
    """A layer that one rank cannot measure any more, and the other can."""
    torch.manual_seed(7)
    model = nn.ModuleDict({"body": nn.Linear(6, 4), "odd": Tupled(6, 4)})
    model["odd"].calls_left += 99 * (rank == 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model, 0.1).attach(optimizer)
    for step in range(6):
        for layer in model.values():
            layer(part(rank, step))
            layer.weight.grad = torch.ones_like(layer.weight)  # the same on both ranks
        optimizer.step()
    return full(model), list(constraint.gains)


def flat_shards(rank: int) -> Any:
    """FullyShardedDataParallel, the older one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = []
    for is_sharded in (True, False):
        model: Any = mlp()
        if is_sharded:
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        constraint = MaxGain(model, 0.3, process_group=None if is_sharded else False)
        list(fit(model, halves(rank, is_sharded), constraint))
        found.append(outcome(model, constraint, weights=False))
    return found


def tensor_parallel(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = []
    for one in (model, plain):
        constraint = MaxGain(one, 0.2, include=["0", "2"])
        list(fit(one, [part(2, 0)], constraint))
        found.append(outcome(one, constraint))
    return found


def watched(rank: int) -> Any:
    """What a watch writes and hears where one rank's batch is not finite."""
    model = mlp()
    written: list[Any] = []
    watching = watch(model, every=2, to=lambda *given: written.append(given), on_alarm=lambda one: written.append(one))
    for step in range(6):
        x = part(rank, step)
        if step == 2 and rank == 1:
            x[3] = math.nan
        model(x).sum().backward()
        watching.log(step)
    return [str(one) for one in written]


PARTS = partial(MaxGain, parts={"1": [*"abc"]})
SHARDED = {
    "MaxGain": partial(sharded, make=MaxGain, bound=0.3),
    "MaxGain, made before": partial(sharded, make=MaxGain, bound=0.3, how="early"),
    "MaxGain, own forwards": partial(sharded, make=MaxGain, bound=0.1, net=own_forwards, steps=3),
    "MaxGain, parts": partial(
        sharded, make=partial(MaxGain, parts={"0": [*"abcdefg"], "4": [*"abc"]}), bound=0.2, steps=3
    ),
    "MaxGain, parts along another dimension": partial(sharded, make=PARTS, bound=0.2, net=transposed),
    "MaxGain, parts, compiled": partial(sharded, make=PARTS, bound=0.2, net=transposed, how="compiled"),
    "Lipschitz, p = 2": partial(sharded, make=Lipschitz, bound=0.3),
    "Lipschitz, p = 1": partial(sharded, make=partial(Lipschitz, p=1), bound=0.3),
    "MaxNorm": partial(sharded, make=MaxNorm, bound=0.2),
    "WeightClip": partial(sharded, make=WeightClip, bound=0.05),
    "flat shards": flat_shards,
    "tensor parallel": tensor_parallel,
}
SCENARIOS: dict[str, Callable[[int], Any]] = {
    "ddp": train,
    "ddp, wrapped": partial(train, wrapped=True),
    "ddp, mesh": in_a_mesh,
    "one rank only": partial(train, only_rank_0=True),
    "zero": zero,
    "accumulate": accumulate,
    "different": different_ranks,
    "one rank alone": one_rank_alone,
    "one rank leaves out": one_rank_leaves_out,
    "watched": watched,
    **SHARDED,
}


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for name, scenario in SCENARIOS.items():
        try:
            found = scenario(rank)
        except Exception as error:  # which the test of this scenario then shows
            found = error
        torch.save(found, f"{folder}/{name}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])


Ranks = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env={**os.environ, **paths})
        for rank in range(2)
    ]
    for process in started:
        process.wait(timeout=240)  # what counts is what they found: ending, torch's threads may terminate the process

    def found(scenario: str) -> list[Any]:
        results = [torch.load(folder / f"{scenario}.{rank}", weights_only=False) for rank in range(2)]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    return found


@pytest.mark.parametrize("scenario", ["ddp", "ddp, wrapped", "ddp, mesh", "one rank only"])
def test_promise_13_replicas_that_see_different_data_keep_the_same_bits(ranks: Ranks, scenario: str) -> None:
    one, other = ranks(scenario)
    assert all(map(torch.equal, one["parameters"], other["parameters"]))
    assert one["gains"] == other["gains"]
    assert all(map(torch.equal, one["parameters"], ranks("ddp")[0]["parameters"])) or scenario == "one rank only"


def test_promise_13_the_gain_is_the_largest_over_the_ranks(ranks: Ranks) -> None:
    one, other = ranks("ddp")
    assert one["local"] != other["local"], "else this test could not fail"
    for gains, mine, theirs in zip(one["gains"], one["local"], other["local"], strict=True):
        assert gains == {name: max(mine[name], theirs[name]) for name in gains}
    assert any(scale < 1 for scales in one["scales"] for scale in scales.values())


def test_promise_13_a_layer_that_runs_on_one_rank_only_is_bounded_on_both(ranks: Ranks) -> None:
    one, other = ranks("one rank only")
    assert all(math.isnan(gains["sometimes"]) for gains in other["local"])
    assert [gains["sometimes"] for gains in other["gains"]] == [gains["sometimes"] for gains in one["local"]]
    assert min(scales["sometimes"] for scales in other["scales"]) < 1


def test_promise_13_an_optimizer_whose_state_is_sharded_trains_as_a_whole_one_does(ranks: Ranks) -> None:
    for parts, whole in ranks("zero"):
        assert all(map(torch.equal, parts, whole))


def test_promise_13_one_packed_collective_per_step(ranks: Ranks) -> None:
    assert [found["collectives"] for found in ranks("ddp")] == [STEPS, STEPS]


def test_promise_13_broadcast_buffers_do_not_overwrite_measurements(ranks: Ranks) -> None:
    (one, mine), (other, theirs) = ranks("accumulate")
    assert one == other == pytest.approx(max(mine, theirs), rel=1e-6)


def test_promise_13_ranks_that_differ_say_so_once(ranks: Ranks) -> None:
    for layers, weights, alone, same in ranks("different"):
        assert len(layers) == len(weights) == 1
        assert "different layers" in layers[0]
        assert "process_group=False" in layers[0]
        assert "different weights" in weights[0]
        assert alone == same == []


@pytest.mark.parametrize("scenario", SHARDED)
def test_promise_13_sharded_weights_match_the_run_that_is_not_sharded(ranks: Ranks, scenario: str) -> None:
    for found, alone in ranks(scenario):
        assert found["gains"] == pytest.approx(alone["gains"], rel=1e-4)
        assert found["scales"] == pytest.approx(alone["scales"], rel=1e-4)
        assert found["skipped"] == alone["skipped"] == (["2"] if "own forwards" in scenario else [])
        assert min(found["scales"]) < 1 or "Lipschitz" in scenario
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-6)


def test_promise_13_ranks_log_the_same_and_hear_the_same_alarm(ranks: Ranks) -> None:
    one, other = ranks("watched")
    assert one == other
    assert any("step 2: layer '0' has inputs or outputs that are not finite" in said for said in one)


def test_promise_13_a_layer_that_one_rank_leaves_out_holds_up_no_other(ranks: Ranks) -> None:
    (weights, is_kept, names), (others, is_kept_there, names_there) = ranks("one rank alone")
    assert all(map(torch.equal, weights, others))
    assert is_kept
    assert is_kept_there
    assert names == names_there == ["body"]


def test_promise_13_a_layer_that_one_rank_leaves_out_later_is_divided_on_none(ranks: Ranks) -> None:
    (weights, names), (others, names_there) = ranks("one rank leaves out")
    assert (names, names_there) == (["body", "odd"], ["body"])
    assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize("group", [True, 0, "world"])
@pytest.mark.parametrize("make", [MaxGain, Lipschitz])
def test_what_is_no_process_group_is_refused_at_once(make: Any, group: Any) -> None:
    with pytest.raises(MaxGainError, match=r"^process_group must be a ProcessGroup, a DeviceMesh, None or False"):
        make(nn.Linear(2, 2), 1.0, process_group=group)
