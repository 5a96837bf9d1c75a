"""The data-parallel half of promise 13: replicas that see different data keep the same bits.

Two processes start once and run every scenario; each test looks at what both of them brought back.
"""

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxgain import Lipschitz, MaxGain
from maxgain.errors import MaxGainError, MeasurementWarning, StateError

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
STEPS, GAMMA = 10, 0.3


class Net(nn.Module):
    def __init__(self, extra: bool) -> None:
        super().__init__()
        torch.manual_seed(7)  # the same on every rank
        self.conv, self.norm, self.dense = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.sometimes = nn.Linear(3, 3)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(torch.relu_(self.norm(self.conv(x))).flatten(1))
        return self.sometimes(x) if self.extra else x


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(
    rank: int, alone: dist.ProcessGroup, *, only_rank_0: bool = False, wrapped: bool = False, measure: Any = "stale"
) -> Any:
    """A DDP training; each rank also measures what it alone sees, which is what a naive version would use."""
    model = Net(extra=rank == 0 or not only_rank_0)
    replica = DistributedDataParallel(model, find_unused_parameters=only_rank_0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    constraint = MaxGain(replica if wrapped else model, gamma=GAMMA, measure=measure).attach(optimiser)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasurementWarning)  # alone, a rank does not see what the other one runs
        local = MaxGain(model, gamma=math.inf, measure=measure, process_group=alone).attach(optimiser)
        gains, local_gains, scales = [], [], []
        for step in range(STEPS):
            optimiser.zero_grad()
            replica(batch(rank, step)).square().mean().backward()
            optimiser.step()
            gains.append(constraint.gains)
            local_gains.append(local.gains)
            scales.append(constraint.scales)
    return {"parameters": parameters(model), "gains": gains, "local": local_gains, "scales": scales}


def shard_the_optimiser(rank: int, alone: dist.ProcessGroup) -> Any:
    """Each rank updates its part of the weights and sends it to the other; one rank has all that is constrained."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which takes seconds

    trained = []
    for make in (partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD), torch.optim.SGD):
        replica = DistributedDataParallel(Net(extra=True))
        optimiser = make(replica.parameters(), lr=0.1)
        MaxGain(replica, gamma=GAMMA, include="module.dense").attach(optimiser)
        for step in range(3):
            optimiser.zero_grad()
            replica(batch(rank, step)).square().mean().backward()
            optimiser.step()
        trained.append(parameters(replica))
    return trained


def a_layer_on_one_rank_only(rank: int, alone: dist.ProcessGroup) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was measured by the first step, though not here
        model = Net(extra=rank == 0)
        replica = DistributedDataParallel(model, find_unused_parameters=True)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        constraint = MaxGain(model, gamma=GAMMA).attach(optimiser)
        replica(batch(rank, 0)).square().mean().backward()
        optimiser.step()
    return constraint.gains


def count_collectives(rank: int, alone: dist.ProcessGroup) -> int:
    all_reduce, calls = dist.all_reduce, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    try:
        train(rank, alone)
    finally:
        dist.all_reduce = all_reduce
    return calls


def accumulate(rank: int, alone: dist.ProcessGroup) -> Any:
    """Two microbatches between which DDP sends rank 0's buffers around."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.arange(24.0).view(4, 6))
    replica = DistributedDataParallel(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, gamma=math.inf, include="1").attach(optimiser)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append((args[0].detach(), output.detach())))
    for microbatch in range(2):
        with replica.no_sync() if microbatch == 0 else contextlib.nullcontext():
            replica(batch(rank, microbatch)[:, 0, :, :].flatten(0, 1)).sum().backward()
    optimiser.step()
    return constraint.gains["1"], [max((z.norm(dim=1) / x.norm(dim=1)).tolist()) for x, z in seen]


def overflow_on_one_rank(rank: int, alone: dist.ProcessGroup, fused: bool) -> Any:
    model = Net(extra=True)
    replica = DistributedDataParallel(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    constraint = MaxGain(model, gamma=GAMMA).attach(optimiser)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    history = []
    for step in range(4):
        optimiser.zero_grad()
        factor = math.inf if (rank, step) == (1, 1) else 1.0
        scaler.scale(replica(batch(rank, step)).square().mean() * factor).backward()
        scaler.step(optimiser)
        scaler.update()
        history.append(constraint.gains)
    return {"parameters": parameters(model), "gains": history, "scale": scaler.get_scale()}


def in_a_group_of_its_own(rank: int, alone: dist.ProcessGroup) -> Any:
    """Ranks that train different models: no rank waits for another."""
    model = nn.Linear(6, 4, bias=False)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint = MaxGain(model, gamma=0.01, process_group=alone).attach(optimiser)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    expected = max((model(x).norm(dim=1) / x.norm(dim=1)).tolist())
    for _ in range(1 + rank):  # would hang if it were a collective of both
        model(x).sum().backward()
        optimiser.step()
    return constraint.gains[""], expected * (1 if rank == 0 else 0.01 / expected)


def for_itself(rank: int, alone: dist.ProcessGroup) -> Any:
    """With a process group there, a step on one rank alone, as for a model that only this rank has."""
    if rank == 1:
        return None  # and does not answer
    model = nn.Linear(6, 4, bias=False)
    norms = []
    for make in (partial(MaxGain, process_group=False), partial(Lipschitz, process_group=False)):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
        make(model, 0.01).attach(optimiser)
        model(torch.eye(6)).sum().backward()
        optimiser.step()
        norms.append(float(model.weight.detach().norm(dim=0).max()))
    return norms


def other_layers(rank: int, alone: dist.ProcessGroup) -> Any:
    """As stages of a pipeline are: as many layers on each rank, but not the same ones."""
    said = []
    for make in (MaxGain, Lipschitz):
        model = nn.ModuleDict({f"stage_{rank}": nn.Linear(6, 4)})
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        make(model, 1.0).attach(optimiser)
        model[f"stage_{rank}"](batch(rank, 0)).sum().backward()
        with pytest.raises(MaxGainError) as error:
            optimiser.step()
        said.append(str(error.value))
    return said


def copy_with_a_group(rank: int, alone: dist.ProcessGroup) -> Any:
    """A copy in this process has the same group; a file cannot."""
    constraint = MaxGain(nn.Linear(6, 4), process_group=alone)
    with pytest.raises(StateError) as error:
        pickle.dumps(constraint)
    copies = copy.deepcopy(constraint), copy.copy(constraint)
    return [one.process_group is alone for one in copies], str(error.value)


SCENARIOS: dict[str, Callable[[int, dist.ProcessGroup], Any]] = {
    "ddp": train,
    "ddp, wrapped": partial(train, wrapped=True),
    "ddp, fresh": partial(train, measure="fresh"),
    "sharded optimiser": shard_the_optimiser,
    "one rank only": partial(train, only_rank_0=True),
    "one rank only, first step": a_layer_on_one_rank_only,
    "collectives": count_collectives,
    "accumulate": accumulate,
    "overflow": partial(overflow_on_one_rank, fused=False),
    "overflow, fused": partial(overflow_on_one_rank, fused=True),
    "own group": in_a_group_of_its_own,
    "for itself": for_itself,
    "other layers": other_layers,
    "a copy": copy_with_a_group,
}


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    groups = [dist.new_group([member]) for member in range(2)]
    found = {name: scenario(rank, groups[rank]) for name, scenario in SCENARIOS.items()}
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    mp.spawn(run, args=(str(folder),), nprocs=2)
    return [torch.load(folder / str(rank)) for rank in range(2)]


Ranks = list[dict[str, Any]]


@pytest.mark.parametrize(
    "scenario", ["ddp", "ddp, wrapped", "ddp, fresh", "one rank only", "overflow", "overflow, fused"]
)
def test_promise_13_replicas_that_see_different_data_keep_the_same_bits(ranks: Ranks, scenario: str) -> None:
    one, other = (rank[scenario] for rank in ranks)
    assert all(map(torch.equal, one["parameters"], other["parameters"]))
    assert one["gains"] == other["gains"]


def test_promise_13_the_gain_is_the_largest_over_the_ranks(ranks: Ranks) -> None:
    one, other = (rank["ddp"] for rank in ranks)
    assert one["local"] != other["local"], "else this test could not fail"
    for gains, mine, theirs in zip(one["gains"], one["local"], other["local"], strict=True):
        assert gains == {name: max(mine[name], theirs[name]) for name in gains}
    assert any(scale < 1 for scales in one["scales"] for scale in scales.values())


def test_promise_13_a_wrapped_model_trains_as_its_module_does(ranks: Ranks) -> None:
    inside, wrapped = ranks[0]["ddp"], ranks[0]["ddp, wrapped"]
    assert all(map(torch.equal, inside["parameters"], wrapped["parameters"]))
    assert list(wrapped["gains"][0]) == [f"module.{name}" for name in inside["gains"][0]]


def test_promise_13_an_optimiser_whose_state_is_sharded_trains_as_a_whole_one_does(ranks: Ranks) -> None:
    for sharded, whole in (rank["sharded optimiser"] for rank in ranks):
        assert all(map(torch.equal, sharded, whole))


def test_promise_13_a_layer_that_runs_on_one_rank_only_is_constrained_on_both(ranks: Ranks) -> None:
    one, other = (rank["one rank only"] for rank in ranks)
    assert all(math.isnan(gains["sometimes"]) for gains in other["local"])
    assert [gains["sometimes"] for gains in other["gains"]] == [gains["sometimes"] for gains in one["local"]]
    assert min(scales["sometimes"] for scales in other["scales"]) < 1
    first = [rank["one rank only, first step"] for rank in ranks]
    assert first[0] == first[1]


def test_promise_13_one_packed_collective_per_step(ranks: Ranks) -> None:
    assert [rank["collectives"] for rank in ranks] == [STEPS, STEPS]


def test_promise_13_broadcast_buffers_do_not_overwrite_measurements(ranks: Ranks) -> None:
    largest = max(gain for rank in ranks for gain in rank["accumulate"][1])
    for rank in ranks:
        assert rank["accumulate"][0] == pytest.approx(largest, rel=1e-6)


def test_promise_13_fresh_gains_hold_the_bound_on_both_ranks_batches(ranks: Ranks) -> None:
    one, other = (rank["ddp, fresh"] for rank in ranks)  # what is measured locally is measured after the projection
    for scales, mine, theirs in zip(one["scales"], one["local"], other["local"], strict=True):
        for name, scale in scales.items():
            largest = max(mine[name], theirs[name])
            assert largest <= GAMMA * (1 + 1e-5)
            if scale < 1:
                assert largest == pytest.approx(GAMMA, rel=1e-5)


@pytest.mark.parametrize("scenario", ["overflow", "overflow, fused"])
def test_promise_13_a_step_that_one_rank_must_skip_is_skipped_by_all(ranks: Ranks, scenario: str) -> None:
    for rank in ranks:
        assert rank[scenario]["scale"] == 4.0
        gains = rank[scenario]["gains"]
        assert gains[1] == gains[0]
        assert gains[2] != gains[1]


def test_promise_13_a_process_group_says_who_shares_maxima(ranks: Ranks) -> None:
    for rank in ranks:
        gain, expected = rank["own group"]
        assert gain == pytest.approx(expected, rel=1e-5)


def test_promise_13_without_a_process_group_a_rank_steps_for_itself(ranks: Ranks) -> None:
    norms = ranks[0]["for itself"]
    assert norms[0] == pytest.approx(0.01)
    assert norms[1] <= 0.01


def test_promise_13_ranks_with_other_layers_are_refused_before_their_maxima_are_mixed(ranks: Ranks) -> None:
    for rank, other in ((0, 1), (1, 0)):
        for said in ranks[rank]["other layers"]:
            assert said.startswith(
                f"rank {other} of the process group constrains other layers (1 of them) than rank {rank}"
            )
            assert f"'stage_{rank}'" in said
            assert "process_group=False" in said


def test_a_copy_in_the_same_process_keeps_its_process_group_and_a_file_is_refused_in_words(ranks: Ranks) -> None:
    for rank in ranks:
        kept, said = rank["a copy"]
        assert kept == [True, True]
        assert said.startswith("a constraint with a process group of its own cannot be pickled")


@pytest.mark.parametrize("group", [True, 0, "world"])
@pytest.mark.parametrize("make", [MaxGain, Lipschitz])
def test_what_is_no_process_group_is_refused_at_once(make: Any, group: Any) -> None:
    with pytest.raises(MaxGainError, match=r"^process_group must be a torch.distributed.ProcessGroup, None or False"):
        make(nn.Linear(2, 2), 1.0, process_group=group)
