"""What test_two_ranks.py runs on them: DDP and FSDP2 under Hugging Face's Trainer, DDP under Accelerate."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from integrations.common import BATCH, GAMMA, STEPS, Net, data, ended, sgd
from maxgain.integrations.callback import ConstrainingCallback
from maxgain.integrations.transformers import MaxGainCallback


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def rows() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": label} for x, label in zip(*data(), strict=True)]


def train(folder: Path, resume: Path | None = None) -> dict[str, Any]:
    model, callback = Model(), MaxGainCallback(gamma=GAMMA)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=STEPS // 2, per_device_train_batch_size=BATCH // 2,
        learning_rate=0.2, lr_scheduler_type="constant", optim="sgd", optim_args="momentum=0.9", max_grad_norm=0.0,
        use_cpu=True, ddp_backend="gloo", report_to="none", disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return ended(model.net, callback.constraint)


def accelerated() -> dict[str, Any]:
    """A loop of one's own; every second batch is only accumulated."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    replica, optimizer, loader = accelerator.prepare(
        model, sgd(model.parameters()), DataLoader(rows(), batch_size=BATCH // 4)
    )
    constraint = ConstrainingCallback(gamma=GAMMA).begin(model, [optimizer])
    for batch in [*loader, *loader]:
        with accelerator.accumulate(replica):
            accelerator.backward(replica(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return ended(model.net, constraint)


def let_accelerate_shard_on_the_cpu() -> None:
    """It does so on GPUs alone, though torch can on the CPU too."""
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
    make = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}

    AcceleratorState.__init__ = init


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {"accelerate": accelerated()}
    for name in ("ddp", "fsdp"):
        if name == "fsdp":
            let_accelerate_shard_on_the_cpu()
        found[name] = train(folder / name)
        found[f"{name}, resumed"] = train(folder / f"{name}-resumed", folder / name / f"checkpoint-{STEPS // 2}")
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
