"""Lightning's own Trainer, driven with a small network on the CPU, against a loop written out."""

import csv

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from maxgain import MaxGain
from nets import StopError, stop

pl = pytest.importorskip("lightning.pytorch")
from maxgain.integrations.lightning import MaxGainCallback  # noqa: E402

GAMMA, STEPS, BATCH = 0.4, 12, 16


def data():
    torch.manual_seed(4)
    x = torch.randn(STEPS * BATCH, 6)
    return x, x[:, :3].argmax(dim=1)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def fit(callback, module=None, resume=None, **options):
    module = module or Module()
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"max_epochs": 1, "logger": False, "callbacks": [callback], "enable_checkpointing": False}
    trainer = pl.Trainer(**quiet, **(plain | options))
    trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size=BATCH), ckpt_path=resume)
    return module


def looped(gamma, accumulate=1):
    module = Module()
    optimizer = module.configure_optimizers()
    constraint = MaxGain(module, gamma).attach(optimizer)
    x, labels = data()
    for i in range(STEPS):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        (module.training_step((x[rows], labels[rows]), i) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return module, constraint


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_as_a_loop_does_and_leaves_a_plain_module(accumulate):
    callback = MaxGainCallback(GAMMA)
    module = fit(callback, accumulate_grad_batches=accumulate)
    expected, constraint = looped(GAMMA, accumulate)
    assert min(constraint.scales.values()) < 1, "else nothing was bounded"
    assert all(map(torch.equal, module.parameters(), expected.parameters()))
    assert callback.constraint.gains == constraint.gains
    assert not any(part._forward_hooks for part in module.modules())


def test_the_loggers_get_the_worst_gain_where_lightning_logs_and_a_writer_every_kth_step(tmp_path):
    written = []
    callback = MaxGainCallback(float("inf"), every=2, to=lambda numbers, step: written.append(step))
    logger = pl.loggers.CSVLogger(tmp_path)
    fit(callback, logger=logger, log_every_n_steps=4)
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gain/worst"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11]
    assert {"gain/median", "gain/net.0"} <= rows[0].keys()
    assert written == [0, 2, 4, 6, 8, 10]


@pytest.mark.filterwarnings("ignore:.*that are not finite")
def test_an_alarm_stops_the_run():
    class Spoilt(Module):
        def training_step(self, batch, number):
            return super().training_step((batch[0] * (float("nan") if number == 5 else 1), batch[1]), number)

    module = Spoilt()
    with pytest.raises(StopError, match=r"step 5: layer 'net\.0' has inputs or outputs that are not finite"):
        fit(MaxGainCallback(every=1, on_alarm=stop), module)
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_training_ends_in_the_same_bits(tmp_path):
    whole = fit(MaxGainCallback(GAMMA), max_epochs=2)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="one")
    options = {"callbacks": [MaxGainCallback(GAMMA), saving], "enable_checkpointing": True}
    fit(None, **options)
    resumed = fit(None, resume=tmp_path / "one.ckpt", max_epochs=2, **options)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_a_misspelt_argument_is_refused_at_once():
    with pytest.raises(TypeError, match="'gama'"):
        MaxGainCallback(2.0, gama=3)
