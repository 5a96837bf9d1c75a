"""What test_ranks.py runs on two ranks: ``ranks.py FRAMEWORK FOLDER`` trains and keeps what each rank ends with."""

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
framework, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
torch.manual_seed(4)
inputs = torch.randn(96, 6)
labels = inputs[:, :3].argmax(dim=1)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
written: list[int] = []
options = {"to": lambda numbers, step: written.append(step)}

if framework == "lightning":
    import lightning.pytorch as pl

    from maxgain.integrations.lightning import MaxGainCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.2)

    callback = MaxGainCallback(0.2, **options)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(inputs, labels), batch_size=8))
else:
    from transformers import Trainer, TrainingArguments

    from maxgain.integrations.transformers import MaxGainCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    callback = MaxGainCallback(0.2, **options)
    arguments = TrainingArguments(str(folder / "hf"), max_steps=6, per_device_train_batch_size=8, optim="sgd",
                                  learning_rate=0.2, use_cpu=True, report_to="none", save_strategy="no",
                                  disable_tqdm=True)  # fmt: skip
    rows = [{"x": x, "labels": label} for x, label in zip(inputs, labels, strict=True)]
    trainer = Trainer(Model(), arguments, train_dataset=rows)
    callback.add_to(trainer)
    trainer.train()

weights = [weight.detach().clone() for weight in net.parameters()]
assert callback.constraint is not None
kept = {"weights": weights, "gains": callback.constraint.gains, "divided": callback.constraint._counts[1].tolist()}
torch.save(kept | {"written": written}, folder / f"{rank}.pt")
torch.distributed.barrier()  # a rank that has ended may take the others with it
torch.distributed.destroy_process_group()
