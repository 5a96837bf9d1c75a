"""What test_two_ranks.py runs on them: DDP and FSDP2, each as Lightning does it."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from integrations.common import BATCH, GAMMA, ROWS, STEPS, Net, data, ended, sgd
from maxgain.integrations.lightning import MaxGainCallback

EPOCHS = STEPS * BATCH // ROWS


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


class Sharded(Module):
    def configure_model(self) -> None:
        for layer in [*self.net, self.net]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def fit(module: Module, folder: Path, epochs: int, checkpoint: Path | None = None) -> tuple[Any, MaxGainCallback]:
    ddp = {"strategy": DDPStrategy(process_group_backend="gloo")}
    fsdp = {"strategy": ModelParallelStrategy(2, 1, process_group_backend="gloo")}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callback = MaxGainCallback(gamma=GAMMA)
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=[callback], accelerator="cpu", devices=2, default_root_dir=folder, logger=False,
        use_distributed_sampler=False, **quiet, **(fsdp if isinstance(module, Sharded) else ddp),
    )  # fmt: skip
    rows = TensorDataset(*data())
    sampler = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
    trainer.fit(module, DataLoader(rows, BATCH // 2, sampler=sampler), ckpt_path=checkpoint)
    return trainer, callback


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, kind in {"ddp": Module, "fsdp": Sharded}.items():
        module = kind()
        _, callback = fit(module, folder, EPOCHS)
        found[name] = ended(module.net, callback.constraint)
        trainer, _ = fit(kind(), folder, EPOCHS // 2)
        trainer.save_checkpoint(folder / name)
        module = kind()
        _, callback = fit(module, folder, EPOCHS, folder / name)
        found[f"{name}, resumed"] = ended(module.net, callback.constraint)
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}")
    os._exit(0)  # threads of a process group may outlive it, and abort a process that ends in the ordinary way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
