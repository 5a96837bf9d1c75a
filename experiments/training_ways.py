"""The ways of training of docs/models.md: each trains the same small network under MaxGain.

A way takes a network and its bounds, trains it, and returns the network that was trained. What it shows afterwards is
the same for all: the largest gain of any layer on the training batches, over the layer's bound.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from maxgain import MaxGain, measure_gains
from maxgain.errors import MaxGainError, MeasurementWarning

STEPS = 20
RATE = 0.02
Gamma = Mapping[str, float]
Way = Callable[[nn.Sequential, Gamma], nn.Module]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 4)
    )


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 3, 8, 8, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)]


def bounds() -> dict[str, float]:
    """Half of what every layer shows before training, so that every bound binds."""
    return {name: row[-1] / 2 for name, row in measure_gains(network(), batches()).quantiles().items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def learn(model: nn.Module, optimiser: torch.optim.Optimizer, around: Any = contextlib.nullcontext) -> None:
    """The usual loop."""
    for step in range(STEPS):
        optimiser.zero_grad()
        with around():
            loss = loss_of(model, batches()[step % 4])
        loss.backward()
        optimiser.step()


# On one device.


def plain(model: nn.Sequential, gamma: Gamma, **options: Any) -> nn.Module:
    optimiser = sgd(model)
    MaxGain(model, gamma, **options).attach(optimiser)
    learn(model, optimiser)
    return model


def compiled(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    optimiser = sgd(model)
    MaxGain(model, gamma).attach(optimiser)
    learn(torch.compile(model, fullgraph=True, backend="aot_eager"), optimiser)
    return model


def in_bfloat16(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    optimiser = sgd(model)
    MaxGain(model, gamma).attach(optimiser)
    learn(model, optimiser, lambda: torch.autocast("cpu", torch.bfloat16))
    return model


def with_scaler(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    optimiser, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
    MaxGain(model, gamma).attach(optimiser)
    for step in range(2 * STEPS):  # of which the first ones overflow and are skipped
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batches()[step % 4])
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
    return model


def accumulated(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    optimiser = sgd(model)
    MaxGain(model, gamma).attach(optimiser)
    for _ in range(STEPS):
        optimiser.zero_grad()
        for batch in batches():
            loss_of(model, batch).backward()
        optimiser.step()
    return model


def checkpointed(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    from torch.utils.checkpoint import checkpoint_sequential

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint_sequential(model, 2, x, use_reentrant=False)
            return out

    optimiser = sgd(model)
    MaxGain(model, gamma).attach(optimiser)
    learn(Checkpointed(), optimiser)
    return model


def with_muon(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    matrices = [one for one in model.parameters() if one.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=RATE / 10)
    rest = torch.optim.AdamW([one for one in model.parameters() if one.dim() != 2], lr=1e-3, fused=True)
    MaxGain(model, gamma).attach(muon).attach(rest)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, batches()[step % 4]).backward()
        muon.step()
        rest.step()
    return model


def with_lbfgs(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    # Its steps end with an update that no forward has seen yet, so gains are measured after it.
    optimiser = torch.optim.LBFGS(model.parameters(), lr=RATE, max_iter=4)
    MaxGain(model, gamma, measure="fresh").attach(optimiser)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimiser.zero_grad()
            loss = loss_of(model, batches()[step % 4])
            loss.backward()
            return loss

        optimiser.step(closure)
    return model


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is usually written: two forwards, and a base optimiser that steps."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self) -> None:
        for one in self.param_groups[0]["params"]:
            self.state[one]["before"] = one.clone()
            one.add_(0.05 * one.grad / (one.grad.norm() + 1e-12))

    @torch.no_grad()
    def second_step(self) -> None:
        for one in self.param_groups[0]["params"]:
            one.copy_(self.state[one]["before"])
        self.base_optimizer.step()


def with_sam(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    optimiser = SAM(model.parameters(), torch.optim.SGD, lr=RATE)
    MaxGain(model, gamma).attach(optimiser)
    for step in range(STEPS):
        for move in (optimiser.first_step, optimiser.second_step):
            optimiser.zero_grad()
            loss_of(model, batches()[step % 4]).backward()
            move()
    return model


def averaged(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    """The average itself is not projected: what is returned is the network that is averaged."""
    optimiser, average = sgd(model), torch.optim.swa_utils.AveragedModel(model)
    MaxGain(model, gamma).attach(optimiser)
    learn(model, optimiser)
    average.update_parameters(model)
    return model


def continued(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    """Halfway, everything is saved and loaded into a new network, optimiser and constraint."""
    optimiser = sgd(model)
    constraint = MaxGain(model, gamma).attach(optimiser)
    learn(model, optimiser)
    other = network()
    second = sgd(other)
    fresh = MaxGain(other, gamma).attach(second)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimiser.state_dict())
    fresh.load_state_dict(constraint.state_dict())
    learn(other, second)
    return other


def pruned(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    from torch.nn.utils import prune

    prune.l1_unstructured(model[3], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return plain(model, gamma)


def weight_normed(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model[3])
    return plain(model, gamma)


# In somebody else's loop.


def by_accelerate(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimiser = accelerator.prepare(model, sgd(model))
    MaxGain(prepared, gamma).attach(optimiser)
    for step in range(STEPS):
        optimiser.zero_grad()
        accelerator.backward(loss_of(prepared, batches()[step % 4]))
        optimiser.step()
    return model


def by_lightning(model: nn.Sequential, gamma: Gamma) -> nn.Module:
    import lightning.pytorch as pl

    from maxgain.integrations.lightning import MaxGainCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = MaxGainCallback(gamma={f"net.{name}": bound for name, bound in gamma.items()})
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_steps=STEPS, accelerator="cpu", callbacks=[callback], **quiet)
    data = torch.utils.data.DataLoader([batch for _ in range(STEPS) for batch in batches()], batch_size=None)
    trainer.fit(Module(), data)
    return model


# On two ranks, which are given other data.


def on_ranks(spread: Callable[[nn.Sequential], nn.Module], model: nn.Sequential, gamma: Gamma) -> nn.Module:
    """Train on two ranks, and take up the weights that they end with."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one_rank, args=(spread, dict(gamma), folder), nprocs=2)  # type: ignore[no-untyped-call]
        found = torch.load(f"{folder}/found.pt", weights_only=True)
    if isinstance(found, str):
        raise MaxGainError(found)
    for parameter, weight in zip(model.parameters(), found, strict=True):
        parameter.data.copy_(weight)
    return model


def _one_rank(rank: int, spread: Callable[[nn.Sequential], nn.Module], gamma: dict[str, float], folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = spread(network())
    found: Any
    try:
        optimiser = sgd(model)
        MaxGain(model, {f"*{name}": bound for name, bound in gamma.items()}).attach(optimiser)
        tensor_parallel = spread is parallel  # whose ranks must be given the same data
        for step in range(STEPS):
            optimiser.zero_grad()
            loss_of(model, batches()[(step + (0 if tensor_parallel else 2 * rank)) % 4]).backward()
            optimiser.step()
        whole = contextlib.nullcontext
        if isinstance(model, FullyShardedDataParallel):
            whole = partial(FullyShardedDataParallel.summon_full_params, model)
        with whole():
            found = [
                (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
                for one in model.parameters()
            ]
    except MaxGainError as error:
        found = str(error)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def replicated(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[3], model[5], model[6], model):
        fully_shard(layer, **options)
    return model


def sharded_in_bfloat16(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def offloaded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def parallel(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"3": ColwiseParallel(), "5": RowwiseParallel()})


def flat(model: nn.Sequential, *, originals: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=originals, device_id=torch.device("cpu"))


WAYS: dict[str, Way] = {
    "a loop of your own": plain,
    "`measure='fresh'`": partial(plain, measure="fresh"),
    "`torch.compile(fullgraph=True)`": compiled,
    "autocast in bfloat16": in_bfloat16,
    "autocast in float16, `GradScaler`": with_scaler,
    "gradient accumulation": accumulated,
    "activation checkpointing": checkpointed,
    "Muon, and a fused AdamW for the rest": with_muon,
    "LBFGS, `measure='fresh'`": with_lbfgs,
    "SAM": with_sam,
    "`AveragedModel` beside it": averaged,
    "saved, loaded and continued": continued,
    "a pruned layer": pruned,
    "a weight-normed layer": weight_normed,
    "Accelerate": by_accelerate,
    "Lightning": by_lightning,
    "DDP, two ranks": partial(on_ranks, replicated),
    "FSDP2, two ranks": partial(on_ranks, sharded),
    "FSDP2 with a bfloat16 policy": partial(on_ranks, sharded_in_bfloat16),
    "FSDP2 with CPU offload": partial(on_ranks, offloaded),
    "tensor parallel, two ranks": partial(on_ranks, parallel),
    "FSDP1, `use_orig_params=True`": partial(on_ranks, partial(flat, originals=True)),
    "FSDP1, `use_orig_params=False`": partial(on_ranks, partial(flat, originals=False)),
}


def tried(way: Way) -> float | str:
    """The largest gain over its bound afterwards, over all training batches; or the sentence that refuses the way."""
    gamma = bounds()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MeasurementWarning)
        try:
            model = way(network(), gamma)
        except MaxGainError as error:
            return str(error)
    gains = measure_gains(model, batches()).quantiles()
    return max(gains[name][-1] / bound for name, bound in gamma.items())
